"""How this room calls pip, and what pip's words mean: requirements, names of packages, wheels that fit an image."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.base import GLIBC, PYTHON
from containers.engine import ContainersError

PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
HERE = platform.machine()
PIP_FIX = "check network, proxy and mirror (`pip config list`), then run it again"


@dataclass(frozen=True)
class Target:
    """What a wheel must fit."""

    python: str  # such as 3.11
    glibc: tuple[int, int]
    machine: str = HERE

    @property
    def words(self) -> list[str]:
        """pip's arguments for choosing such wheels."""
        platforms = [f"manylinux_{self.glibc[0]}_{minor}_{self.machine}" for minor in range(self.glibc[1], 4, -1)]
        platforms += [f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
        flags = ["--only-binary=:all:", f"--python-version={self.python}", "--implementation=cp"]
        return [*flags, *(f"--platform={name}" for name in platforms)]


def pip_folder() -> Path:
    """Folder of this interpreter's package `pip`. It is pure Python, so the image's Python can run it.

    Raises ContainersError if this interpreter has no pip.
    """
    spec = importlib.util.find_spec("pip")
    if spec is None or spec.origin is None:
        raise ContainersError("this Python has no pip", sys.executable, "use .venv/bin/python, which `make` sets up")
    return Path(spec.origin).parent


def cross_arguments(python: tuple[int, int], libc: tuple[str, str], machine: str) -> list[str]:
    """pip's arguments for choosing wheels that fit the image; empty if the wheels for this Python fit it, too.

    python: version of the interpreter that runs pip. libc: what `platform.libc_ver()` returns. machine: what
    `platform.machine()` returns; the image has the same.
    """
    name, version = libc
    newest = tuple(map(int, version.split(".")[:2])) if name == "glibc" else None
    if ".".join(map(str, python)) == PYTHON and newest is not None and newest <= GLIBC:
        return []
    return Target(PYTHON, GLIBC, machine).words


def own_cross(machine: str = HERE) -> list[str]:
    """cross_arguments of this interpreter on this machine, for images of `machine`."""
    if machine != HERE:
        return Target(PYTHON, GLIBC, machine).words
    return cross_arguments(sys.version_info[:2], platform.libc_ver(), machine)


def group_requirements(groups: Mapping[str, Any], name: str) -> list[str]:
    """Requirements of a dependency group and of the groups that it includes."""
    result: list[str] = []
    for entry in groups[name]:
        result += [entry] if isinstance(entry, str) else group_requirements(groups, entry["include-group"])
    return result


def pinned(wheels: Iterable[str]) -> dict[str, str]:
    """Normalized name -> exact version, from the file names of wheels."""
    parts = (wheel.split("-")[:2] for wheel in wheels)
    return {normal(name): version for name, version in sorted(parts)}


def normal(name: str) -> str:
    """A distribution's name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()
