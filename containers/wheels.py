"""Wheels for the images, fetched on the control machine, where pip's settings (mirrors, folders, certificates) hold.

The builds install from these folders without network access, so the same way works with a mirror, with a proxy and
without Internet access. Not for installing: see train/Containerfile and workload/Containerfile.
What the training image gets is locked (lock.py); what a user's own folder asks for is not, but by its own lines.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from containers.base import PYTHON
from containers.engine import BUILD, CommandFailed, ContainersError, Progress, follow
from containers.files import drafted, locked
from containers.lock import ENTRY, LOCK_NAME, LOCKS, lock_of, pins_of, torch_build, training_requirements
from containers.pip import HERE, PIP, PIP_FIX, Target, own_cross, pinned

FIXED = ("torch", "torchvision")  # what a workload cannot replace
DOWNLOAD = re.compile(r"^\s*Downloading \S*?([^/\s]+)\.whl \((\S+ [MG]B)\)")
CUDA = ("cuda-", "nvidia-", "triton")  # what comes with torch alone
VERSION = re.compile(r"\d[\w.!]*(?:\+[\w.]+)?")
NOT_LOCKED = re.compile(r"\s+(?P<package>\S+==\S+) from (?P<file>[^\s#]+)|\s+Got\s+(?P<hash>[0-9a-f]{64})$")


def training_wheels(progress: Progress, machine: str = HERE) -> Path:
    """Folder with the wheels of pyproject.toml's group `train` and of everything that they depend on, and their lock.

    machine: the architecture of the image, as `platform.machine()` names it there.

    They are fetched once for each content of the locks. After a change of pip's own settings (CUDA instead of CPU),
    remove build/wheels-*.

    Raises ContainersError if pip cannot fetch one of them, there is no lock for them, or one is not what is locked.
    """
    requirements = training_requirements()
    folder = (
        BUILD / f"wheels-{_key(machine, *requirements, *(path.read_text() for path in sorted(LOCKS.glob('*.lock'))))}"
    )
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the training image: downloading")
            lock = lock_of(requirements, torch_build(requirements, machine))
            _fetch_locked(folder, lock, lock.read_text(), own_cross(machine), progress)
    progress(f"wheels of the training image: {_summary(folder)}")
    return folder


def added_wheels(packages: Mapping[str, str], target: Target, where: str, progress: Progress) -> Path:
    """Folder with the locked wheels that a base image of the user's own lacks for training, which has torch.

    packages: normalized name -> version, of what it has. where: the base image, for a message.
    Raises ContainersError as training_wheels does, and where torchvision is lacking and the locked one needs another
    torch.
    """
    requirements = training_requirements()
    lock = lock_of(requirements, "")
    pins = pins_of([lock.read_text()])
    if "torchvision" not in packages and packages["torch"].partition("+")[0] != pins["torch"]:
        what = f"it has torch {packages['torch']}, but no torchvision, and Muster's own is for torch {pins['torch']}"
        raise ContainersError(what, where, "install the torchvision that fits this torch in the base image")
    lacking = [
        entry
        for entry in ENTRY.findall(lock.read_text())
        for name in pins_of([entry])
        if name not in packages and not name.startswith(CUDA)
    ]
    folder = BUILD / f"wheels-{_key(target.machine, target.python, str(target.glibc), *lacking)}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress(f"wheels that the base image lacks: downloading {len(lacking)}")
            _fetch_locked(folder, lock, "".join(f"{entry}\n" for entry in lacking), target.words, progress)
    progress(f"wheels that the base image lacks: {_summary(folder)}")
    return folder


def stand_ins(packages: Mapping[str, str], target: Target) -> Path:
    """Folder with empty wheels of what an image has, so that pip counts it as there, wherever it came from.

    Each has the tag that pip prefers to all others, so that it fetches nothing in its place.
    """
    python = "cp" + target.python.replace(".", "")
    tag = f"{python}-{python}-manylinux_{target.glibc[0]}_{target.glibc[1]}_{target.machine}"
    folder = BUILD / f"wheels-{_key(target.machine, 'stand-ins', tag, json.dumps(sorted(packages.items())))}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            with drafted(folder) as draft:
                for name, version in packages.items():
                    if VERSION.fullmatch(version):
                        _write_empty(draft, name.replace("-", "_"), version, tag)
    return folder


def _write_empty(folder: Path, name: str, version: str, tag: str) -> None:
    described = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{described}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{described}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        wheel.writestr(f"{described}/RECORD", "")


def workload_wheels(
    workload: Path, train: Path, progress: Progress, target: Target | None = None, machine: str = HERE
) -> Path | None:
    """Folder with the wheels that `workload`'s requirements.txt asks for and the training image lacks.

    None if there is no such file. Versions that the image has are kept if the requirements allow it. If they do not,
    the requirements decide, except for torch and torchvision. train: folder of the training image's wheels, or of what
    stands for them. target: what the wheels must fit; None: Muster's own base image, of `machine`.

    Raises ContainersError if pip cannot download or build one of them, or they need another torch.
    """
    requirements = workload / "requirements.txt"
    if not requirements.is_file():
        return None
    there = {path.name for path in train.glob("*.whl")}
    pins = pinned(there)
    cross = target.words if target else own_cross(machine)
    folder = BUILD / f"wheels-{_key(machine, *requirements_texts(requirements), *sorted(there))}"
    with locked(BUILD / "wheels.lock"):
        if not folder.exists():
            progress("wheels of the workload's requirements.txt: downloading")
            arguments = [f"--requirement={requirements}", f"--find-links={train}"]
            try:
                try:
                    _fetch(folder, arguments, cross, progress, pins, there)
                except CommandFailed:
                    fixed = {name: version for name, version in pins.items() if name in FIXED}
                    _fetch(folder, arguments, cross, progress, fixed, there)
            except CommandFailed as failure:
                versions = ", ".join(f"{name} {pins[name]}" for name in FIXED if name in pins)
                raise ContainersError(
                    f"pip could not fetch what the workload asks for. Its last lines:\n{failure.tail}",
                    str(requirements),
                    f"fix the line that pip names; the training image has {versions}, which a workload cannot replace",
                ) from failure
    progress(f"wheels of the workload: {_summary(folder)}")
    return folder


def content_hash(folder: Path | None) -> str:
    """SHA-256 over the file names (which hold the versions) and sizes of a folder's wheels, and over their lock, if
    they have one; None: of no wheels."""
    entries = sorted((path.name, path.stat().st_size) for path in folder.glob("*.whl")) if folder else []
    lock = [path.read_text() for path in folder.glob(LOCK_NAME)] if folder else []
    return hashlib.sha256(json.dumps([entries, lock]).encode()).hexdigest()


def _fetch_locked(folder: Path, lock: Path, text: str, cross: list[str], progress: Progress) -> None:
    """Fill `folder` with the wheels of `text`, a lock or a part of it, each checked, and write it there."""
    refused: list[str] = []

    def on_line(line: str) -> None:
        _say_downloads(line, progress)
        if match := NOT_LOCKED.match(line):
            refused.append(f"{match['package']} ({match['file']})" if match["package"] else f"has {match['hash']}")

    words = ["--no-deps", "--require-hashes", *cross, *([] if cross else ["--only-binary=:all:"])]
    try:
        with drafted(folder) as draft:
            (draft / LOCK_NAME).write_text(text)
            if text:
                follow([*PIP, "download", f"--dest={draft}", *words, f"--requirement={draft / LOCK_NAME}"], on_line)
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
    folder: Path, arguments: list[str], cross: list[str], progress: Progress,
    pins: Mapping[str, str], leave_out: Iterable[str],
) -> None:  # fmt: skip
    """Fill `folder` with the wheels that pip's `arguments` ask for, apart from those to leave out."""
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


def _key(machine: str, *parts: str) -> str:
    text = "\0".join([PYTHON, machine, *parts])
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
