"""Wheels for the images, fetched on the control machine, where pip's settings (mirrors, folders, certificates) hold.

The builds install from these folders without network access, so the same way works with a mirror, with a proxy and
without Internet access. Not for installing: see train/Containerfile and workload/Containerfile.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from containers.base import GLIBC, PYTHON
from containers.engine import BUILD, REPOSITORY, CommandFailed, ContainersError, Progress, follow
from containers.files import drafted, locked

GROUP = "train"
FIXED = ("torch", "torchvision")  # what a workload cannot replace
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
DOWNLOAD = re.compile(r"^\s*Downloading \S*?([^/\s]+)\.whl \((\S+ [MG]B)\)")


def training_wheels(progress: Progress) -> Path:
    """Folder with the wheels of pyproject.toml's group `train` and of everything that they depend on.

    They are fetched once for each content of the group. After a change of pip's own settings (another index, CUDA
    instead of CPU), remove build/wheels-*.

    Raises ContainersError if pip cannot download or build one of them.
    """
    project = REPOSITORY / "pyproject.toml"
    requirements = group_requirements(tomllib.loads(project.read_text())["dependency-groups"], GROUP)
    folder = BUILD / f"wheels-{_key(*requirements)}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the training image: downloading")
            try:
                _fetch(folder, [f"--group={project}:{GROUP}"], progress)
            except CommandFailed as failure:
                raise ContainersError(
                    f"pip could not fetch the wheels of the training image. Its last lines:\n{failure.tail}",
                    f"the control machine, pyproject.toml, group `{GROUP}`",
                    "check network, proxy, mirror (`pip config list`) and that pip is 25.1 or newer; then run it again",
                ) from failure
    progress(f"wheels of the training image: {_summary(folder)}")
    return folder


def workload_wheels(workload: Path, train: Path, progress: Progress) -> Path | None:
    """Folder with the wheels that `workload`'s requirements.txt asks for and the training image lacks.

    None if there is no such file. Versions that the image has are kept if the requirements allow it. If they do not,
    the requirements decide, except for torch and torchvision. train: folder of the training image's wheels.

    Raises ContainersError if pip cannot download or build one of them, or they need another torch.
    """
    requirements = workload / "requirements.txt"
    if not requirements.is_file():
        return None
    there = {path.name for path in train.glob("*.whl")}
    pins = pinned(there)
    folder = BUILD / f"wheels-{_key(*requirements_texts(requirements), *sorted(there))}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the workload's requirements.txt: downloading")
            arguments = [f"--requirement={requirements}", f"--find-links={train}"]
            try:
                try:
                    _fetch(folder, arguments, progress, pins, there)
                except CommandFailed:
                    fixed = {name: version for name, version in pins.items() if name in FIXED}
                    _fetch(folder, arguments, progress, fixed, there)
            except CommandFailed as failure:
                versions = ", ".join(f"{name} {pins[name]}" for name in FIXED if name in pins)
                raise ContainersError(
                    f"pip could not fetch what the workload asks for. Its last lines:\n{failure.tail}",
                    str(requirements),
                    f"fix the line that pip names; the training image has {versions}, which a workload cannot replace",
                ) from failure
    progress(f"wheels of the workload: {_summary(folder)}")
    return folder


def group_requirements(groups: Mapping[str, Any], name: str) -> list[str]:
    """Requirements of a dependency group and of the groups that it includes."""
    result: list[str] = []
    for entry in groups[name]:
        result += [entry] if isinstance(entry, str) else group_requirements(groups, entry["include-group"])
    return result


def pinned(wheels: Iterable[str]) -> dict[str, str]:
    """Normalized name -> exact version, from the file names of wheels."""
    parts = (wheel.split("-")[:2] for wheel in wheels)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in sorted(parts)}


def content_hash(folder: Path | None) -> str:
    """SHA-256 over the file names (which hold the versions) and sizes of a folder's wheels; None: of no wheels."""
    entries = sorted((path.name, path.stat().st_size) for path in folder.glob("*.whl")) if folder else []
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


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
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC[1], 4, -1)]
    platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    flags = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
    return [*flags, *(f"--platform={name}" for name in platforms)]


def _fetch(
    folder: Path, arguments: list[str], progress: Progress, pins: Mapping[str, str] | None = None,
    leave_out: Iterable[str] = (),
) -> None:  # fmt: skip
    """Fill `folder` with the wheels that pip's `arguments` ask for, apart from those to leave out."""
    cross = cross_arguments(sys.version_info[:2], platform.libc_ver(), platform.machine())
    command = ["download", *cross, "--dest"] if cross else ["wheel", "--wheel-dir"]

    def on_line(line: str) -> None:
        if match := DOWNLOAD.match(line):
            progress(f"wheels: {match.group(1).split('-')[0]} ({match.group(2)})")

    with drafted(folder) as draft:
        if pins is not None:
            constraints = draft / "constraints.txt"
            constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
            arguments = [*arguments, f"--constraint={constraints}"]
        follow([*PIP, *command, str(draft), *arguments], on_line)
        for name in leave_out:
            (draft / name).unlink(missing_ok=True)


def _key(*parts: str) -> str:
    text = "\0".join([PYTHON, platform.machine(), *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def requirements_texts(path: Path) -> list[str]:
    """What the result of a requirements file depends on: its text, the files that it includes, local projects in it.

    Raises ContainersError where one of them cannot be read.
    """
    try:
        texts = [path.read_text("utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        fix = "make it readable" if isinstance(error, OSError) else "save it as text in UTF-8"
        raise ContainersError(f"the file of requirements cannot be read: {what}", str(path), fix) from None
    for line in texts[0].splitlines():
        line = line.strip()
        if match := re.match(r"(?:-r|--requirement|-c|--constraint)[ =]\s*(\S+)", line):
            other = path.parent / match.group(1)
            if other.is_file() and other != path:
                texts += requirements_texts(other)
        elif re.match(r"(-e\b|--editable\b|\.)", line):
            root = path.parent
            texts += [f"{file.relative_to(root)} {file.stat().st_mtime_ns}" for file in sorted(root.rglob("*.*"))]
    return texts


def _summary(folder: Path) -> str:
    wheels = list(folder.glob("*.whl"))
    return f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 2**20:.0f} MiB"
