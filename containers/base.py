"""The base image: Debian with its own Python, made without any container registry.

mmdebstrap assembles the tree from Debian's packages, `podman build` turns it into an image. The same packages give
the same image id. Not for Muster's own images: see image.py (training image), lab_host.py (lab hosts) and ubuntu.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from containers.engine import (
    BUILD,
    CommandFailed,
    ContainersError,
    Progress,
    build_image,
    follow,
    image_label,
    podman,
    root_command,
    tool,
)
from containers.files import locked, scratch

SUITE = "bookworm"
PYTHON = "3.11"  # the version of python3 in that suite
GLIBC = (2, 36)  # likewise
REFERENCE = f"localhost/muster/base:{SUITE}"
PACKAGES = ("python3", "ca-certificates", "ibverbs-providers")  # the last one: NCCL loads it where there is RDMA
# Documentation and translations are left out, also of packages that are installed later.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "force-unsafe-io",  # no fsync: an image or a lab host that loses power is made again anyway
)
APT_OPTIONS = ('Acquire::Languages "none"',)
# Any fixed time will do: with it set, Debian's maintainer scripts write .pyc files that are checked by hash, which stay
# valid when `podman build --timestamp 0` sets every file's time to 0.
SOURCE_DATE_EPOCH = "1700000000"
CONTAINERFILE = Path(__file__).parent / "base" / "Containerfile"
RECIPE_LABEL = "muster.recipe"


def ensure_base(progress: Progress) -> str:
    """Build the base image unless there is one of this recipe; return its id.

    Raises ContainersError if this user is not root, a tool is missing, or the packages cannot be fetched.
    """
    sources = own_sources()
    recipe = recipe_hash(sources)
    with locked(BUILD / "images" / "base.lock"):
        if image_label(REFERENCE, RECIPE_LABEL) != recipe:
            progress(f"base image: assembling Debian {SUITE} from packages (only once; about half a minute)")
            fix = "check that `apt-get update` works here (network, proxy, /etc/apt/sources.list.d), then run it again"
            with scratch(BUILD / "images", "base-") as folder:
                assemble(folder, f"Debian {SUITE}", SUITE, PACKAGES, sources, fix)
                where = "the control machine, while building the base image"
                build_image(REFERENCE, CONTAINERFILE, folder, f"--label={RECIPE_LABEL}={recipe}", where=where)
        return podman("image", "inspect", "--format={{.Id}}", REFERENCE).strip()


def recipe_hash(sources: Mapping[str, str]) -> str:
    """SHA-256 over everything that the base image is made from, apart from the packages' versions."""
    parts = [SUITE, *PACKAGES, *DPKG_OPTIONS, *APT_OPTIONS, SOURCE_DATE_EPOCH, CONTAINERFILE.read_text()]
    for name in sorted(sources):
        parts += [name, sources[name]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def bookworm_sources(files: Mapping[str, str]) -> dict[str, str]:
    """The entries of a machine's apt source files (name -> text) that are the suite's own.

    Repositories of third parties are left out: they have other suites or other keys. Returns at most one file in
    one-line format (`muster.list`) and one in deb822 format (`muster.sources`). If it returns none, mmdebstrap uses its
    default source.
    """
    lines, stanzas = list[str](), list[str]()
    for name in sorted(files):
        if name.endswith(".sources"):
            stanzas += filter(_is_ours, _stanzas(files[name]))
        else:
            entries = (line.strip() for line in files[name].splitlines())
            lines += [line for line in entries if line.startswith("deb ") and _is_ours(line)]
    result = {"muster.list": "\n".join(lines), "muster.sources": "\n\n".join(stanzas)}
    return {name: f"{text}\n" for name, text in result.items() if text}


def own_sources() -> dict[str, str]:
    """The control machine's own apt sources if it runs the same suite, else none."""
    release = Path("/etc/os-release")
    if not release.exists() or f"VERSION_CODENAME={SUITE}" not in release.read_text():
        return {}
    folder = Path("/etc/apt/sources.list.d")
    paths = [Path("/etc/apt/sources.list"), *folder.glob("*.list"), *folder.glob("*.sources")]
    return bookworm_sources({path.name: path.read_text() for path in paths if path.is_file()})


def apt_proxies() -> dict[str, str]:
    """Proxies from apt's own settings, as environment variables; the environment's own variables take precedence."""
    found: dict[str, str] = {}
    proxy = re.compile(r'^Acquire::(https?)::Proxy "(.+)";$', re.MULTILINE | re.IGNORECASE)
    for scheme, value in proxy.findall(apt_settings()):
        found[f"{scheme.lower()}_proxy"] = "" if value == "DIRECT" else value
    names = ("http_proxy", "https_proxy", "no_proxy")
    given = {name: os.environ[name] for name in (*names, *map(str.upper, names)) if name in os.environ}
    return {**found, **given}


def opener_proxies() -> dict[str, str]:
    """The same by scheme, as urllib.request.ProxyHandler takes them."""
    schemes = {name.lower().removesuffix("_proxy"): url for name, url in apt_proxies().items()}
    return {scheme: url for scheme, url in schemes.items() if url and scheme != "no"}


def apt_settings() -> str:
    """What `apt-config dump` prints; empty on a machine without apt."""
    try:
        return subprocess.run([tool("apt-config"), "dump"], capture_output=True, text=True).stdout
    except ContainersError:
        return ""


def assemble(
    folder: Path, title: str, suite: str, packages: Sequence[str], sources: Mapping[str, str], fix: str, *options: str
) -> None:
    """Make `folder`/rootfs.tar, a root file system of a suite's packages, with mmdebstrap.

    title: the system, for messages. sources: apt source files (name -> text). fix: what to do when it fails.

    Raises ContainersError.
    """
    for name, text in sources.items():
        (folder / name).write_text(text)
    command = root_command(
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(packages)}",
        *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
        *(f"--aptopt={option}" for option in APT_OPTIONS),
        *options,
        suite, str(folder / "rootfs.tar"), *(str(folder / name) for name in sources),
        env={"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, **apt_proxies()},
    )  # fmt: skip
    try:
        follow(command)
    except CommandFailed as failure:
        raise ContainersError(
            f"{title} could not be assembled from packages. The last lines of mmdebstrap:\n{failure.tail}",
            f"the control machine, while assembling {title}",
            fix,
        ) from failure


def _stanzas(text: str) -> list[str]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [stanza.strip() for stanza in re.split(r"\n\s*\n", lines) if stanza.strip()]


def _is_ours(entry: str) -> bool:
    """Whether a line or a stanza is of the suite alone, enabled, and under no key but Debian's."""
    if entry.startswith("deb "):
        suites = re.sub(r"\[.*?\]", "", entry).split()[2:3]
    else:
        field = re.search(r"^Suites:(.*(?:\n[ \t].*)*)", entry, re.MULTILINE | re.IGNORECASE)
        suites = field.group(1).split() if field else []
    key = re.search(r"signed-by[:=]\s*(\S+?)(?:\]|\s|$)", entry, re.IGNORECASE)
    known_key = key is None or "debian-archive" in key.group(1)
    disabled = re.search(r"^Enabled:\s*no\b", entry, re.MULTILINE | re.IGNORECASE)
    ours = {SUITE, *(f"{SUITE}-{part}" for part in ("updates", "security", "backports"))}
    return bool(suites) and set(suites) <= ours and known_key and not disabled
