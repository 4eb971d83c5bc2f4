"""What an image holds, as a CycloneDX document (SBOM): its Python packages and Debian's. Standard library alone.

    python3 sbom.py NAME WHEELS

runs inside the image while it is built, and writes the document to PLACE. A package whose wheel lies in the folder
WHEELS has its SHA-256, and so has one that had it in the document of the image below. No time and no random number is
in it: the same packages give the same document. Specification: https://cyclonedx.org/docs/1.6/json/.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

PLACE = Path("/usr/share/muster/sbom.json")  # in the image


def document(name: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    """The SBOM of the image `name`."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name}},
        "components": sorted(components, key=lambda component: component["purl"]),
    }


def component(name: str, version: str, purl: str, sha256: str | None = None) -> dict[str, Any]:
    """One package. purl: https://github.com/package-url/purl-spec"""
    hashes = {"hashes": [{"alg": "SHA-256", "content": sha256}]} if sha256 else {}
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **hashes}


def python_packages(hashes: dict[str, str]) -> list[dict[str, Any]]:
    """The packages that this Python finds. hashes: purl -> SHA-256 of the wheel."""
    found: dict[str, dict[str, Any]] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        purl = python_purl(name, version)
        found.setdefault(purl, component(name, version, purl, hashes.get(purl)))
    return list(found.values())


def python_purl(name: str, version: str) -> str:
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{quote(version, safe='')}"


def debian_packages(listed: str, system: dict[str, str]) -> list[dict[str, Any]]:
    """listed: lines `name version architecture`, as dpkg-query prints them; system: of /etc/os-release."""
    vendor, release = system.get("ID", "debian"), system.get("VERSION_ID", "")
    found = []
    for line in listed.splitlines():
        name, version, architecture = line.split()
        of = f"arch={architecture}" + (f"&distro={vendor}-{release}" if release else "")
        purl = f"pkg:deb/{vendor}/{quote(name, safe='')}@{quote(version, safe='')}?{of}"
        found.append(component(name, version, purl))
    return found


def wheel_hashes(folder: Path) -> dict[str, str]:
    """purl -> SHA-256, of the wheels in a folder."""
    return {
        python_purl(*path.name.split("-")[:2]): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.whl")
    }


def known_hashes(text: str) -> dict[str, str]:
    """purl -> SHA-256, from the document of the image below."""
    listed = json.loads(text)["components"]
    return {entry["purl"]: entry["hashes"][0]["content"] for entry in listed if "hashes" in entry}


def main(name: str, wheels: str) -> None:
    hashes = known_hashes(PLACE.read_text()) if PLACE.exists() else {}
    components = python_packages(hashes | wheel_hashes(Path(wheels)))
    if shutil.which("dpkg-query"):
        words = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
        listed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        components += debian_packages(listed, platform.freedesktop_os_release())
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    PLACE.write_text(json.dumps(document(name, components), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
