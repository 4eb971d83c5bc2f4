"""Wheels for the images, fetched on the control machine, where pip's settings (mirrors, folders, certificates) hold.

The builds install from these folders offline, so one path serves a mirror, a proxy and an air gap. Not for installing:
see train/Containerfile and workload/Containerfile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from containers.base import GLIBC, PYTHON
from containers.engine import BUILD, REPOSITORY, CommandFailed, ContainersError, Progress, follow, locked

GROUP = "train"
FIXED = ("torch", "torchvision")  # what a workload cannot replace
DOWNLOAD = re.compile(r"^\s*Downloading \S*?([^/\s]+)\.whl \((\S+ [MG]B)\)")


class WheelsError(ContainersError):
    """Wheels could not be fetched."""


def training_wheels(progress: Progress) -> Path:
    """Folder with the wheels of pyproject's group `train` and all that they need.

    Fetched once per content of the group: after a change of pip's own settings (another index, CUDA instead of CPU),
    remove build/wheels-*.

    Raises:
        WheelsError: pip cannot get or build one of them.
    """
    project = REPOSITORY / "pyproject.toml"
    requirements = group_requirements(tomllib.loads(project.read_text())["dependency-groups"], GROUP)
    folder = BUILD / f"wheels-{_key(*requirements)}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the training image: fetching")
            try:
                _fetch(folder, [f"--group={project}:{GROUP}"], progress)
            except CommandFailed as failure:
                raise WheelsError(
                    f"pip could not fetch the wheels of the training image. Its last lines:\n{failure.tail}",
                    f"the control machine, pyproject.toml, group `{GROUP}`",
                    "check network, proxy and mirror (`pip config list`; pip 25.1 or newer), then run it again",
                ) from failure
    progress(f"wheels of the training image: {_summary(folder)}")
    return folder


def workload_wheels(workload: Path, train: Path, progress: Progress) -> Path | None:
    """Folder with the wheels that `workload`'s requirements.txt asks for and the training image lacks.

    None without that file. What the image has is kept where the requirements allow it; else they win, apart from torch
    and torchvision.

    Args:
        train: folder of the training image's wheels.

    Raises:
        WheelsError: pip cannot get or build one of them, or they need another torch.
    """
    requirements = workload / "requirements.txt"
    if not requirements.is_file():
        return None
    there = {path.name for path in train.glob("*.whl")}
    pins = pinned(there)
    folder = BUILD / f"wheels-{_key(*_requirements_texts(requirements), *sorted(there))}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the workload's requirements.txt: fetching")
            arguments = [f"--requirement={requirements}", f"--find-links={train}"]
            try:
                try:
                    _fetch(folder, arguments, progress, pins, there)
                except CommandFailed:
                    fixed = {name: version for name, version in pins.items() if name in FIXED}
                    _fetch(folder, arguments, progress, fixed, there)
            except CommandFailed as failure:
                versions = ", ".join(f"{name} {pins[name]}" for name in FIXED if name in pins)
                raise WheelsError(
                    f"pip could not fetch what the workload asks for. Its last lines:\n{failure.tail}",
                    str(requirements),
                    f"mend the line that pip names; the training image has {versions}, which a workload cannot replace",
                ) from failure
    progress(f"wheels of the workload: {_summary(folder)}")
    return folder


def group_requirements(groups: Mapping[str, Any], name: str) -> list[str]:
    """Requirements of a dependency group, included groups resolved."""
    result: list[str] = []
    for entry in groups[name]:
        result += [entry] if isinstance(entry, str) else group_requirements(groups, entry["include-group"])
    return result


def pinned(wheels: Iterable[str]) -> dict[str, str]:
    """Normalized name -> exact version, from file names of wheels."""
    parts = (wheel.split("-")[:2] for wheel in wheels)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in sorted(parts)}


def content_hash(folder: Path | None) -> str:
    """Names what is in a folder of wheels, by file names (which hold the versions) and sizes."""
    entries = sorted((path.name, path.stat().st_size) for path in folder.glob("*.whl")) if folder else []
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def pip_folder() -> Path:
    """This interpreter's package `pip`: pure Python, so the image's Python can run it.

    Raises:
        WheelsError: this interpreter has none.
    """
    spec = importlib.util.find_spec("pip")
    if spec is None or spec.origin is None:
        raise WheelsError("this Python has no pip", sys.executable, "run it by .venv/bin/python, which `make` sets up")
    return Path(spec.origin).parent


def cross_arguments(python: tuple[int, int], libc: tuple[str, str], machine: str) -> list[str]:
    """Arguments that make pip choose for the image where this Python would choose for itself; none if that is the same.

    Args:
        python: version of the interpreter that runs pip.
        libc: as `platform.libc_ver()` gives it.
        machine: as `platform.machine()` gives it; the image's is the same.
    """
    name, version = libc
    newest = tuple(map(int, version.split(".")[:2])) if name == "glibc" else None
    if ".".join(map(str, python)) == PYTHON and newest is not None and newest <= GLIBC:
        return []
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC[1], 4, -1)]
    platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    flags = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    return [*flags, *(f"--platform={name}" for name in platforms)]


def _fetch(
    folder: Path, arguments: list[str], progress: Progress, pins: Mapping[str, str] | None = None,
    leave_out: Iterable[str] = (),
) -> None:  # fmt: skip
    """Fill `folder` by pip, at once or not at all; what an interrupted call left is cleared away first."""
    for leftover in BUILD.glob(".wheels-*"):
        shutil.rmtree(leftover)
    draft = folder.with_name(f".{folder.name}")
    draft.mkdir(parents=True)
    if pins is not None:
        constraints = draft / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        arguments = [*arguments, f"--constraint={constraints}"]
    libc = platform.libc_ver()
    cross = cross_arguments(sys.version_info[:2], libc, platform.machine())
    command = ["download", *cross, "--dest"] if cross else ["wheel", "--wheel-dir"]

    def on_line(line: str) -> None:
        if match := DOWNLOAD.match(line):
            progress(f"wheels: {match.group(1).split('-')[0]} ({match.group(2)})")

    try:
        follow(
            [
                sys.executable,
                "-m",
                "pip",
                "--no-input",
                "--disable-pip-version-check",
                *command,
                str(draft),
                *arguments,
            ],
            on_line,
        )
        for name in leave_out:
            (draft / name).unlink(missing_ok=True)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _key(*parts: str) -> str:
    text = "\0".join([PYTHON, platform.machine(), *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _requirements_texts(path: Path) -> list[str]:
    """What decides the outcome of a requirements file: its text, the files that it names, local projects in it."""
    texts = [path.read_text()]
    for line in texts[0].splitlines():
        line = line.strip()
        if match := re.match(r"(?:-r|--requirement|-c|--constraint)[ =]\s*(\S+)", line):
            other = path.parent / match.group(1)
            if other.is_file() and other != path:
                texts += _requirements_texts(other)
        elif re.match(r"(-e\b|--editable\b|\.)", line):
            root = path.parent
            texts += [f"{file.relative_to(root)} {file.stat().st_mtime_ns}" for file in sorted(root.rglob("*.*"))]
    return texts


def _summary(folder: Path) -> str:
    wheels = list(folder.glob("*.whl"))
    return f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 1e6:.0f} MB"
