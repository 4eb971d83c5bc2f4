"""Ubuntu for lab hosts: a root file system of Ubuntu's packages, as base.py makes one of Debian's.

Debian has no package with the keys of Ubuntu's archive. They come from Ubuntu's own package `ubuntu-keyring`, which is
checked against a SHA-256 that stands here; every package list is then checked against these keys. Needs the archive, or
a mirror of it (UBUNTU_MIRROR=url, with the suites' -updates and -security beside them), only when an image is built.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from containers import base
from containers.engine import BUILD, ContainersError, Progress, build_image, image_label, tool
from containers.files import locked, scratch

ARCHIVE = "http://archive.ubuntu.com/ubuntu"
PACKAGES = ("apt", "python3", "ca-certificates")
COMPONENTS = "main universe"  # Podman is in universe
# Of noble's package list. What signs that is in the package: F6ECB3762474EDA9D21B7022871920D1991BC93C, the fingerprint
# that others, too, print for Ubuntu's archive.
KEYRING = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
KEYRING_FILE = "./usr/share/keyrings/ubuntu-archive-keyring.gpg"
FETCH_SECONDS = 30.0
NO_ARCHIVE_FIX = (
    "check the network and the proxy of this machine, or name a mirror of Ubuntu's archive (UBUNTU_MIRROR=url); hosts "
    "with Debian (OS=debian) need none of it"
)


@dataclass(frozen=True)
class Release:
    """One release of Ubuntu."""

    version: str
    suite: str

    @property
    def title(self) -> str:
        return f"Ubuntu {self.version}"

    @property
    def reference(self) -> str:
        return f"localhost/muster/lab-base:{self.suite}"


RELEASES = {f"ubuntu{one.version}": one for one in (Release("24.04", "noble"), Release("22.04", "jammy"))}


def ensure_base(release: Release, progress: Progress) -> str:
    """Build the image of a release's root file system unless there is one of this recipe; return its reference.

    Raises ContainersError if this user is not root, a tool is missing, or the packages cannot be fetched or verified.
    """
    sources = sources_of(release)
    recipe = recipe_hash(release, sources)
    with locked(BUILD / "images" / "ubuntu.lock"):
        if image_label(release.reference, base.RECIPE_LABEL) != recipe:
            progress(f"image of {release.title}: assembling it from packages (only once; about half a minute)")
            with scratch(BUILD / "images", "ubuntu-") as folder:
                folder.chmod(0o755)  # apt reads the keys as a user of its own
                keys = f"--keyring={fetch_keys(mirror(), folder)}"
                files = {"ubuntu.list": sources}
                base.assemble(folder, release.title, release.suite, PACKAGES, files, NO_ARCHIVE_FIX, keys)
                label = f"--label={base.RECIPE_LABEL}={recipe}"
                where = f"the control machine, while building the image of {release.title}"
                build_image(release.reference, base.CONTAINERFILE, folder, label, where=where)
    return release.reference


def mirror() -> str:
    """Where Ubuntu's archive is reached: UBUNTU_MIRROR, else the archive itself."""
    return (os.environ.get("UBUNTU_MIRROR") or ARCHIVE).rstrip("/")


def sources_of(release: Release) -> str:
    """A release's apt sources in one-line format; the hosts of the lab keep them."""
    suites = (release.suite, f"{release.suite}-updates", f"{release.suite}-security")
    return "".join(f"deb {mirror()} {suite} {COMPONENTS}\n" for suite in suites)


def recipe_hash(release: Release, sources: str) -> str:
    """SHA-256 over everything that a release's image is made from, apart from the packages' versions."""
    options = (*PACKAGES, *base.DPKG_OPTIONS, *base.APT_OPTIONS, base.SOURCE_DATE_EPOCH, KEYRING_SHA256)
    parts = (release.suite, *options, base.CONTAINERFILE.read_text(), sources)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def fetch_keys(archive: str, folder: Path) -> Path:
    """Put the keys of Ubuntu's archive into `folder`, as a file for apt; raises ContainersError."""
    url = f"{archive}/{KEYRING}"
    package = fetch(url)
    if (found := hashlib.sha256(package).hexdigest()) != KEYRING_SHA256:
        what = (
            f"this is not the package with the keys of Ubuntu's archive: its SHA-256 is {found}, not {KEYRING_SHA256}"
        )
        raise ContainersError(what, url, "use Ubuntu's own archive, or another mirror of it (UBUNTU_MIRROR=url)")
    deb, keys = folder / "keys.deb", folder / "keys.gpg"
    deb.write_bytes(package)
    tree = subprocess.run([tool("dpkg-deb"), "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tree)) as files:
        content = files.extractfile(KEYRING_FILE)
        assert content is not None  # the package is known by its SHA-256
        keys.write_bytes(content.read())
    return keys


def fetch(url: str) -> bytes:
    """A small file of the archive, by the proxies that apt has; raises ContainersError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(base.opener_proxies()))
    try:
        with opener.open(url, timeout=FETCH_SECONDS) as answer:
            content: bytes = answer.read()
            return content
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no URL
        what = f"Ubuntu's archive cannot be reached: {error}"
        raise ContainersError(what, f"{url} (from the control machine)", NO_ARCHIVE_FIX) from error
