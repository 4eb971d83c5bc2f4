"""Wheels for the images, fetched on the control machine, where pip's settings (mirrors, folders, certificates) hold.

The builds install from these folders without network access, so the same way works with a mirror, with a proxy and
without Internet access. Not for installing: see train/Containerfile and workload/Containerfile.

What the training image gets is locked: its packages, exactly, with the SHA-256 of every file that each may be. There is
a lock for each build of torch, because pip takes the one that it finds here: `requirements.lock` for the registry's
own (with CUDA), `requirements-cpu.lock` for torch ...+cpu. lock.py makes them (`make lock`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from containers.base import GLIBC, PYTHON
from containers.engine import BUILD, REPOSITORY, CommandFailed, ContainersError, Progress, follow, output
from containers.files import drafted, locked

GROUP = "train"
FIXED = ("torch", "torchvision")  # what a workload cannot replace
LOCKS = Path(__file__).parent / "train"
LOCK_NAME = "requirements.lock"  # in LOCKS of the registry's torch; in a folder of wheels the one that they fit
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
DOWNLOAD = re.compile(r"^\s*Downloading \S*?([^/\s]+)\.whl \((\S+ [MG]B)\)")
PIP_FIX = "check network, proxy and mirror (`pip config list`), then run it again"
PIN = re.compile(r"^([\w.-]+)==([\w.+!]+)", re.MULTILINE)
NOT_LOCKED = re.compile(r"\s+(?P<package>\S+==\S+) from (?P<file>[^\s#]+)|\s+Got\s+(?P<hash>[0-9a-f]{64})$")
VERSIONS = re.compile(r"^Available versions: (.*)$", re.MULTILINE)


def training_wheels(progress: Progress) -> Path:
    """Folder with the wheels of pyproject.toml's group `train` and of everything that they depend on, and their lock.

    They are fetched once for each content of the locks. After a change of pip's own settings (CUDA instead of CPU),
    remove build/wheels-*.

    Raises ContainersError if pip cannot fetch one of them, there is no lock for them, or one is not what is locked.
    """
    requirements = training_requirements()
    folder = BUILD / f"wheels-{_key(*requirements, *(path.read_text() for path in sorted(LOCKS.glob('*.lock'))))}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the training image: downloading")
            _fetch_locked(folder, lock_of(requirements, torch_build(requirements)), progress)
    progress(f"wheels of the training image: {_summary(folder)}")
    return folder


def training_requirements() -> list[str]:
    """What pyproject.toml's group `train` asks for."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return group_requirements(project["dependency-groups"], GROUP)


def torch_build(requirements: Iterable[str]) -> str:
    """The build of torch that pip takes here: "" is the registry's own, "cpu" that of torch ...+cpu.

    Raises ContainersError if pip finds no torch of the version that is required.
    """
    version = pins_of(requirements).get("torch")
    if version is None:
        return ""
    try:
        said = output([*PIP, "index", "versions", "torch", *_cross()])
    except CommandFailed as failure:
        what = f"pip finds no torch for the training image. Its last lines:\n{failure.tail}"
        raise ContainersError(what, "the control machine", PIP_FIX) from failure
    found = [version for line in VERSIONS.findall(said) for version in line.split(", ")]
    builds = [one.partition("+")[2] for one in found if one.partition("+")[0] == version]
    if not builds:
        what = f"pip finds no torch {version} for the training image, only {', '.join(found[:5])}"
        raise ContainersError(what, "the control machine", PIP_FIX)
    return builds[0]  # the newest, which pip prefers


def lock_of(requirements: Iterable[str], build: str) -> Path:
    """The lock for a build of torch. Raises ContainersError if there is none, or it is not of these requirements."""
    path, fix = lock_path(build), "run `make lock`, look at what it changes, then run this again"
    if not path.is_file():
        raise ContainersError(f"pip takes torch ...+{build} here, and no wheels are locked for it", str(path), fix)
    pins = pins_of([path.read_text()])
    for name, version in pins_of(requirements).items():
        if pins.get(name, "").partition("+")[0] != version:
            what = f"pyproject.toml asks for {name} {version}, but {name} {pins.get(name, 'at no version')} is locked"
            raise ContainersError(what, str(path), fix)
    return path


def lock_path(build: str) -> Path:
    """Where the lock for a build of torch is, or would be."""
    return LOCKS / (f"requirements-{build}.lock" if build else LOCK_NAME)


def pins_of(requirements: Iterable[str]) -> dict[str, str]:
    """Normalized name -> exact version, of the requirements that have one."""
    return {_normal(name): version for text in requirements for name, version in PIN.findall(text)}


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
    return {_normal(name): version for name, version in sorted(parts)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def content_hash(folder: Path | None) -> str:
    """SHA-256 over the file names (which hold the versions) and sizes of a folder's wheels, and over their lock, if
    they have one; None: of no wheels."""
    entries = sorted((path.name, path.stat().st_size) for path in folder.glob("*.whl")) if folder else []
    lock = [path.read_text() for path in folder.glob(LOCK_NAME)] if folder else []
    return hashlib.sha256(json.dumps([entries, lock]).encode()).hexdigest()


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


def _fetch_locked(folder: Path, lock: Path, progress: Progress) -> None:
    """Fill `folder` with the wheels of a lock, each checked, and with the lock itself."""
    refused: list[str] = []

    def on_line(line: str) -> None:
        _say_downloads(line, progress)
        if match := NOT_LOCKED.match(line):
            refused.append(f"{match['package']} ({match['file']})" if match["package"] else f"has {match['hash']}")

    words = ["--no-deps", "--require-hashes", "--only-binary=:all:", f"--requirement={lock}"]
    try:
        with drafted(folder) as draft:
            follow([*PIP, "download", *_cross(), f"--dest={draft}", *words], on_line)
            shutil.copyfile(lock, draft / LOCK_NAME)
    except CommandFailed as failure:
        if refused:
            what = f"a wheel has a SHA-256 that is not locked: {', '.join(refused)}"
            fix = (
                "somebody may have changed the file, or the index: take another one (`pip config list`); if this file "
                "is the one that you want, run `make lock` and look at what it changes"
            )
            raise ContainersError(what, str(lock), fix) from failure
        what = f"pip could not fetch the wheels of the training image. Its last lines:\n{failure.tail}"
        raise ContainersError(what, str(lock), PIP_FIX) from failure


def _fetch(
    folder: Path, arguments: list[str], progress: Progress, pins: Mapping[str, str], leave_out: Iterable[str]
) -> None:
    """Fill `folder` with the wheels that pip's `arguments` ask for, apart from those to leave out."""
    cross = _cross()
    command = ["download", *cross, "--dest"] if cross else ["wheel", "--wheel-dir"]
    with drafted(folder) as draft:
        constraints = draft / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        words = [*command, str(draft), *arguments, f"--constraint={constraints}"]
        follow([*PIP, *words], lambda line: _say_downloads(line, progress))
        for name in leave_out:
            (draft / name).unlink(missing_ok=True)


def _say_downloads(line: str, progress: Progress) -> None:
    if match := DOWNLOAD.match(line):
        progress(f"wheels: {match.group(1).split('-')[0]} ({match.group(2)})")


def _cross() -> list[str]:
    return cross_arguments(sys.version_info[:2], platform.libc_ver(), platform.machine())


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
