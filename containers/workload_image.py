"""The image of a workload: the one that was built before where nothing has changed since, else a new one.

A workload is a folder of the user's own: of a script (WORKLOAD), or of parts for our trainer (PROJECT). The image of a
folder is the same for both.

That nothing has changed is seen without reading a file and without asking Podman to build, which takes most of a second
even where each step is in its cache: from names, sizes and times of all that the image is made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from containers import image as images
from containers.base import REFERENCE as BASE_REFERENCE
from containers.base import own_sources, recipe_hash
from containers.engine import BUILD, REPOSITORY, ContainersError, Progress, podman
from containers.files import locked, write_whole
from containers.image import IMAGES, Image
from containers.own_base import archive_state, own_base, where_of
from containers.pip import Target, pinned
from containers.wheels import (
    added_wheels,
    content_hash,
    requirements_texts,
    stand_ins,
    training_wheels,
    workload_wheels,
)

BUILT = (
    IMAGES / "workloads.json"
)  # {reference: {"state": of what the image was built from, "ids": {reference: id}}}, and of
# images that a host has built {"reference on host": {"state", "image": Image}}
IGNORED = images.ROOM / "workload" / "ignore"


def build(
    workload: Path, horovod: bool, progress: Progress, base_image: str = "", compiled: Path | None = None
) -> Image:
    """Build the image of a user's project, and the training image below it, as far as they are not built yet.

    horovod: on the training image with Horovod. base_image: as in the inventory. compiled: as build_training_image.
    Raises ContainersError as build_training_image and build_on do.
    """
    state = state_before(workload, horovod, base_image)
    training = images.build_training_image(progress, horovod, base_image, compiled)
    built = build_on(training, workload, progress, base_image)
    found = _inspected([*([] if base_image else [BASE_REFERENCE]), training.ref, built.ref])
    _write_note(built.ref, {"state": state, "ids": {reference: identity for reference, (identity, _) in found.items()}})
    return built


def state_before(workload: Path, horovod: bool, base_image: str = "") -> str:
    """The state to be noted of an image that is to be built: what changes meanwhile is seen next time."""
    return state_of(workload, horovod, base_image) if workload.is_dir() else ""


def as_built(workload: Path, horovod: bool, base_image: str = "") -> Image | None:
    """What `build` would return, if that is known without building; None if it is not. Starts nothing, says nothing."""
    reference = reference_of(workload)
    with contextlib.suppress(ContainersError, OSError, ValueError):
        note = _notes().get(reference)
        if note and note["state"] == state_of(workload, horovod, base_image):
            found = _inspected(list(note["ids"]))
            if {name: identity for name, (identity, _) in found.items()} == note["ids"]:
                return Image(reference, *found[reference])
    return None


def built_elsewhere(workload: Path, horovod: bool, base_image: str, host: str) -> Image | None:
    """The image that `note_elsewhere` has noted of this state of a folder; None where there is none."""
    with contextlib.suppress(ContainersError, OSError, ValueError):
        note = _notes().get(f"{reference_of(workload)} on {host}")
        if note and note["state"] == state_of(workload, horovod, base_image):
            return Image(**note["image"])
    return None


def note_elsewhere(workload: Path, state: str, image: Image, host: str) -> None:
    """Note what a host has built of a folder (inventory: `build_on`), in the state that it had before."""
    _write_note(f"{image.ref} on {host}", {"state": state, "image": asdict(image)})


def build_on(train: Image, workload: Path, progress: Progress, base_image: str = "") -> Image:
    """Build a user's project on top of the training image: its requirements.txt, if any, and its files in /workload.

    base_image: that of the training image.
    Raises ContainersError if there is no such folder, its requirements cannot be fetched, or the build failed.
    """
    if not workload.is_dir():
        fix = "give the folder of your own code: of a script with WORKLOAD, of parts for our trainer with PROJECT"
        raise ContainersError("the workload is not a folder", str(workload), fix)
    workload = workload.resolve()
    wheels = _wheels(workload, base_image, progress)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="workload-", dir=IMAGES) as name:
        ignore = Path(name) / "ignore"
        own = [workload / name for name in (".containerignore", ".dockerignore") if (workload / name).is_file()]
        ignore.write_text("".join(path.read_text() for path in (IGNORED, *own[:1])))
        empty = Path(name) / "wheels"
        empty.mkdir()
        return images.build(
            reference_of(workload), workload, images.ROOM / "workload" / "Containerfile", progress,
            where=f"the control machine, while building the image of the workload {workload}",
            arguments={"TRAIN": train.id, "WHEELS": content_hash(wheels)},
            mounts={wheels or empty: "/wheels"},
            options=[f"--ignorefile={ignore}"],
        )  # fmt: skip


def _wheels(workload: Path, base_image: str, progress: Progress) -> Path | None:
    if not base_image:
        return workload_wheels(workload, training_wheels(quiet), progress)
    base = own_base(base_image, quiet)
    added = added_wheels(base.packages, base.target, where_of(base_image), quiet)
    return wheels_on(base.packages, base.target, added, workload, progress)


def wheels_on(packages: dict[str, str], target: Target, added: Path, workload: Path, progress: Progress) -> Path | None:
    """Folder with the wheels that a workload asks for and an image lacks that has `packages` and the wheels of `added`;
    None if it asks for none. Raises ContainersError as workload_wheels does."""
    there = packages | pinned(path.name for path in added.glob("*.whl"))
    return workload_wheels(workload, stand_ins(there, target), progress, target)


def quiet(line: str) -> None:
    """Progress that nobody sees."""


def reference_of(workload: Path) -> str:
    """The reference of a workload's image."""
    return f"{images.WORKLOAD_REPOSITORY}{image_name(workload.resolve().name)}:latest"


def image_name(folder: str) -> str:
    """A folder's name as part of an image reference: lower-case letters, digits, single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "workload"


def _write_note(name: str, note: dict[str, Any]) -> None:
    with locked(IMAGES / "workloads.lock"):
        write_whole(BUILT, json.dumps({**_notes(), name: note}))


def _notes() -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        found: dict[str, Any] = json.loads(BUILT.read_text())
        return found
    return {}


def _inspected(references: list[str]) -> dict[str, tuple[str, int]]:
    """Reference -> id, size in bytes. Raises CommandFailed where one of them is not there."""
    lines = podman("image", "inspect", "--format", "{{.Id}} {{.Size}}", *references).splitlines()
    words = (line.split() for line in lines)
    return {reference: (identity, int(size)) for reference, (identity, size) in zip(references, words, strict=True)}


def state_of(workload: Path, horovod: bool, base_image: str = "") -> str:
    """What changes when something does of which the image is made: the folder, what its requirements.txt names, our
    code, the base image's recipe and sources, or its archive, and the wheels, which are fetched anew where they were
    removed."""
    requirements = workload / "requirements.txt"
    parts = [
        horovod,
        [base_image, *archive_state(base_image)],
        (REPOSITORY / "pyproject.toml").read_text(),
        recipe_hash(own_sources()),
        requirements_texts(requirements) if requirements.is_file() else [],
        sorted(path.name for path in [*BUILD.glob("wheels-*"), *BUILD.glob("horovod-*")]),
        [folder_state(folder) for folder in (workload.resolve(), images.ROOM, *images.CODE)],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def folder_state(folder: Path) -> str:
    """What changes when a file of a folder does, without reading any: a hash of names, kinds, modes, sizes and times.

    The time of the last change of a file, or of its permissions, is the kernel's and cannot be set. What is never in
    an image (containers/workload/ignore: lines `**/name`) does not count.
    """
    lines = IGNORED.read_text().splitlines()
    left_out = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    total = hashlib.sha256()

    def note(path: str, is_file: bool) -> None:
        found = os.lstat(path)
        link = os.readlink(path) if os.path.islink(path) else ""
        times = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino) if is_file else ()
        total.update(f"{os.path.relpath(path, folder)}\0{found.st_mode}\0{times}\0{link}\n".encode("utf-8", "replace"))

    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not any(fnmatch(name, one) for one in left_out))
        for name in folders:
            note(os.path.join(here, name), is_file=False)
        for name in sorted(name for name in files if not any(fnmatch(name, one) for one in left_out)):
            note(os.path.join(here, name), is_file=True)
    return total.hexdigest()
