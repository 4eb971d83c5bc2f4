"""The base image: Debian with its own Python, made without any container registry.

mmdebstrap assembles the tree from Debian's packages, `podman build` turns it into an image. The same packages give
the same image id. Not for anything of ours: see image.py (training image) and lab.py (lab hosts).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from containers.engine import (
    BUILD,
    CommandFailed,
    ContainersError,
    Progress,
    follow,
    image_label,
    locked,
    podman,
    root_command,
    tool,
)

SUITE = "bookworm"
PYTHON = "3.11"  # what python3 is in that suite
GLIBC = (2, 36)
REFERENCE = f"localhost/muster/base:{SUITE}"
PACKAGES = ("python3", "ca-certificates")
# Documentation and translations are left out, also of packages that are installed later.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "force-unsafe-io",  # an image or a lab host that loses power is made anew
)
APT_OPTIONS = ('Acquire::Languages "none"',)
# Any fixed time will do: with it set, Debian's maintainer scripts write .pyc files that are checked by hash, which stay
# valid when `podman build --timestamp 0` sets every file's time to 0.
SOURCE_DATE_EPOCH = "1700000000"
CONTAINERFILE = Path(__file__).parent / "base" / "Containerfile"
RECIPE_LABEL = "muster.recipe"


def ensure_base(progress: Progress) -> str:
    """Build the base image unless this recipe's is there; return its reference.

    Raises:
        ContainersError: no root, a tool is missing, or the packages cannot be had.
    """
    sources = own_sources()
    recipe = recipe_hash(sources)
    with locked(BUILD / "images" / "base.lock"):
        if image_label(REFERENCE, RECIPE_LABEL) == recipe:
            return REFERENCE
        progress(f"base image: Debian {SUITE} from packages (once; about half a minute)")
        _build(sources, recipe)
    return REFERENCE


def recipe_hash(sources: Mapping[str, str]) -> str:
    """Names everything that the base image is made of, apart from the packages' versions."""
    parts = [SUITE, *PACKAGES, *DPKG_OPTIONS, *APT_OPTIONS, SOURCE_DATE_EPOCH, CONTAINERFILE.read_text()]
    for name in sorted(sources):
        parts += [name, sources[name]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def bookworm_sources(files: Mapping[str, str]) -> dict[str, str]:
    """Of a machine's apt source files (name -> text), those entries that are the suite's own.

    Third parties' repositories are left out (other suites, other keys). Returns at most one file in one-line format
    (`muster.list`) and one in deb822 format (`muster.sources`); empty if there is none, and mmdebstrap's default holds.
    """
    lines: list[str] = []
    stanzas: list[str] = []
    for name in sorted(files):
        if name.endswith(".sources"):
            stanzas += [stanza for stanza in _stanzas(files[name]) if _is_ours(_field(stanza, "Suites"), stanza)]
        else:
            lines += [line for line in _one_line_entries(files[name]) if _is_ours(_suite_of(line), line)]
    result: dict[str, str] = {}
    if lines:
        result["muster.list"] = "\n".join(lines) + "\n"
    if stanzas:
        result["muster.sources"] = "\n\n".join(stanzas) + "\n"
    return result


def own_sources() -> dict[str, str]:
    """The control machine's own apt sources if it is of the same suite, else none."""
    release = Path("/etc/os-release")
    if not release.exists() or f"VERSION_CODENAME={SUITE}" not in release.read_text():
        return {}
    folder = Path("/etc/apt/sources.list.d")
    paths = [Path("/etc/apt/sources.list"), *folder.glob("*.list"), *folder.glob("*.sources")]
    return bookworm_sources({path.name: path.read_text() for path in paths if path.is_file()})


def apt_proxies() -> dict[str, str]:
    """Proxies from apt's own settings, as environment variables; those already in the environment win."""
    found: dict[str, str] = {}
    for scheme, value in re.findall(
        r'^Acquire::(https?)::Proxy "(.+)";$', apt_settings(), re.MULTILINE | re.IGNORECASE
    ):
        found[f"{scheme.lower()}_proxy"] = "" if value == "DIRECT" else value
    names = ("http_proxy", "https_proxy", "no_proxy")
    given = {name: os.environ[name] for name in (*names, *map(str.upper, names)) if name in os.environ}
    return {**found, **given}


def apt_settings() -> str:
    """`apt-config dump`, or nothing on a machine without apt."""
    try:
        return subprocess.run([tool("apt-config"), "dump"], capture_output=True, text=True).stdout
    except ContainersError:
        return ""


def _build(sources: Mapping[str, str], recipe: str) -> None:
    with tempfile.TemporaryDirectory(prefix="base-", dir=BUILD / "images") as name:
        folder = Path(name)
        try:
            follow(_mmdebstrap(folder, sources))
        except CommandFailed as failure:
            raise ContainersError(
                f"Debian {SUITE} could not be assembled from packages. mmdebstrap's last lines:\n{failure.tail}",
                "the control machine, while building the base image",
                "check that `apt-get update` works here (network, proxy, /etc/apt/sources.list.d), then run it again",
            ) from failure
        try:
            podman(
                "build", "--quiet", "--timestamp", "0", "--label", f"{RECIPE_LABEL}={recipe}",
                "--tag", REFERENCE, "--file", str(CONTAINERFILE), name,
            )  # fmt: skip
        except CommandFailed as failure:
            raise ContainersError(
                f"Podman could not make the base image. Its last lines:\n{failure.tail}",
                "the control machine, while building the base image",
                "check that `podman run` works here and that the disk is not full (`podman system df`, `df -h`)",
            ) from failure


def _mmdebstrap(folder: Path, sources: Mapping[str, str]) -> list[str]:
    for name, text in sources.items():
        (folder / name).write_text(text)
    return root_command(
        "mmdebstrap", "--mode=root", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
        *(f"--aptopt={option}" for option in APT_OPTIONS),
        SUITE, str(folder / "rootfs.tar"), *(str(folder / name) for name in sources),
        env={"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH, **apt_proxies()},
    )  # fmt: skip


def _stanzas(text: str) -> list[str]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [stanza.strip() for stanza in re.split(r"\n\s*\n", lines) if stanza.strip()]


def _field(stanza: str, name: str) -> list[str]:
    match = re.search(rf"^{name}:((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE | re.IGNORECASE)
    return match.group(1).split() if match else []


def _one_line_entries(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("deb ")]


def _suite_of(line: str) -> list[str]:
    words = re.sub(r"\[.*?\]", "", line).split()
    return words[2:3]


def _is_ours(suites: list[str], entry: str) -> bool:
    key = re.search(r"signed-by[:=]\s*(\S+?)(?:\]|\s|$)", entry, re.IGNORECASE)
    known_key = key is None or "debian-archive" in key.group(1)
    disabled = re.search(r"^Enabled:\s*no\b", entry, re.MULTILINE | re.IGNORECASE)
    ours = {SUITE, *(f"{SUITE}-{part}" for part in ("updates", "security", "backports"))}
    return bool(suites) and set(suites) <= ours and known_key and not disabled
