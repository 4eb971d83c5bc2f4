"""The training image, how an image is built, and the OCI layout from which hosts pull. Workloads: workload_image.py.

Only what has changed is built and exported again: the same sources give the same image id, and a change under train/
makes one new layer of a few hundred kilobytes. Not for distributing: the playbooks do that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers.base import ensure_base
from containers.engine import (
    BUILD,
    REPOSITORY,
    CommandFailed,
    ContainersError,
    Progress,
    as_root,
    build_image,
    fix_of,
    follow,
    inspect_image,
    output,
    podman,
    root_command,
)
from containers.files import locked, scratch, write_whole
from containers.horovod_wheel import horovod_wheels, refuse_other_platform, wheels_beyond
from containers.own_base import CONFINED, USER, own_base, where_of
from containers.pip import HERE, pinned, pip_folder
from containers.sbom import PLACE
from containers.wheels import added_wheels, content_hash, training_wheels

TRAIN_REFERENCE = "localhost/muster/train:latest"
HOROVOD_REFERENCE = "localhost/muster/train-horovod:latest"
OWN_REPOSITORY = "localhost/muster/train-on-"  # and a hash of the inventory's base_image
WORKLOAD_REPOSITORY = "localhost/muster/workload-"
KEPT_WORKLOADS = 5  # images of workloads that this machine keeps, the latest exported ones; the README says so
ROOM = Path(__file__).parent
SBOM = ROOM / "sbom.py"
CODE = (REPOSITORY / "train", REPOSITORY / "keeper")  # what of ours is in the training image
IMAGES = BUILD / "images"
POOL = IMAGES / "oci"
BLOBS = POOL / "blobs" / "sha256"
LARGE_BLOB = 2**20  # bytes; smaller blobs are written again and replaced, because Podman writes manifests in place
# Another process may be sending an export to hosts: a blob that no image needs any more is kept for this long.
IN_TRANSIT_SECONDS = 3600
REF_NAME = "org.opencontainers.image.ref.name"
STEP = re.compile(r"^STEP (\d+)/(\d+): (?:RUN|COPY)")  # other steps take no time


@dataclass(frozen=True)
class Image:
    """An image in this machine's Podman storage."""

    ref: str
    id: str  # SHA-256 of its config, 64 hexadecimal digits: every host must have the image with this id
    layers_bytes: int  # total size of its layers


@dataclass(frozen=True)
class OciExport:
    """An image as files: a host can pull it from the pool's blobs/ and oci-layout with `index` as the index.json."""

    path: Path  # the pool; its own index.json names all current images
    index: str  # text of an index.json that names this image alone
    blobs: dict[str, int]  # hexadecimal digest -> size in bytes of its manifest, config and layers


def build_training_image(
    progress: Progress, horovod: bool = False, base_image: str = "", compiled: Path | None = None
) -> Image:
    """Build the training image unless it is built: base, wheels and train/, and on request a layer with Horovod.

    base_image: what the inventory gives as base in place of Muster's own. compiled: folder of horovod_wheels(), where
    it was made elsewhere. engine.abort() ends a build that another thread has under way.

    Raises ContainersError if this user is not root, a tool is missing, Muster does not run on the base image, or a step
    of the build failed.
    """
    as_root()
    if base_image:
        return _on_own_base(base_image, progress, horovod)
    base = _in_background(lambda: ensure_base(progress))
    folder = training_wheels(progress)
    image = _train_on(base.result(), folder, TRAIN_REFERENCE, progress)
    return _with_horovod(image, progress, compiled) if horovod else image


def _train_on(base: str, wheels: Path, reference: str, progress: Progress) -> Image:
    return build(
        reference, ROOM / "train", ROOM / "train" / "Containerfile", progress,
        where="the control machine, while building the training image (containers/train/Containerfile)",
        arguments={"BASE": base, "WHEELS": content_hash(wheels), "CODE": code_hash(*CODE)},
        mounts={wheels: "/wheels"} | {source: f"/src/{source.name}" for source in CODE},
    )  # fmt: skip


def _on_own_base(base_image: str, progress: Progress, horovod: bool) -> Image:
    """The training image on a base of the user's own: what it lacks of our packages, and train/."""
    if horovod:
        refuse_horovod_on(base_image)
    where = where_of(base_image)
    base = own_base(base_image, progress)
    wheels = added_wheels(base.packages, base.target, where, progress)
    reference = own_reference(base_image)
    before = inspect_image(reference, "{{.Id}}")
    image = _train_on(base.id, wheels, reference, progress)
    if image.id != before:
        try:
            podman(*CONFINED, image.id, "python3", "-P", "-c", "import keeper.__main__, train.run")
        except CommandFailed as failure:
            podman("untag", image.id, reference)
            what = f"the trainer does not run on it as user {USER}, read-only. The last lines:\n{failure.tail}"
            raise ContainersError(what, where, "fix in the base image what they name") from failure
    return image


def refuse_horovod_on(base_image: str) -> None:
    """Raises ContainersError."""
    what = "Horovod is compiled for the torch in .venv, not for the base image's"
    raise ContainersError(what, where_of(base_image), "deploy without HOROVOD=1, or without base_image")


def own_reference(base_image: str) -> str:
    """The reference of the training image on a base of the user's own."""
    return f"{OWN_REPOSITORY}{hashlib.sha256(base_image.encode()).hexdigest()[:12]}:latest"


def build(
    reference: str, context: Path, containerfile: Path, progress: Progress, *, where: str,
    arguments: Mapping[str, str], mounts: Mapping[Path, str], options: Iterable[str] = (),
) -> Image:  # fmt: skip
    """Build an image unless it is built: what `where` says is at fault when a step fails. Raises ContainersError.

    context: the folder that COPY means; mounts: folder -> where RUN finds it, beside a pip on /pip/pip and the program
    that writes the SBOM on /sbom.py (whose hash is SBOM); options: more words for Podman.
    """
    arguments = {**arguments, "SBOM": hashlib.sha256(SBOM.read_bytes()).hexdigest()}
    mounts = {**mounts, pip_folder(): "/pip/pip", SBOM: "/sbom.py"}
    IMAGES.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def on_line(line: str) -> None:
        if match := STEP.match(line):
            progress(f"{reference}: step {match.group(1)} of {match.group(2)}")

    with locked(IMAGES / "build.lock"), scratch(IMAGES, "build-") as folder:
        before = inspect_image(reference, "{{.Id}}")
        build_image(
            reference, containerfile, context, "--network=none", f"--iidfile={folder / 'id'}", *options,
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *(f"--volume={path}:{target}:ro" for path, target in mounts.items()),
            where=where, on_line=on_line,
        )  # fmt: skip
        identity = (folder / "id").read_text().strip().removeprefix("sha256:")
        if before is not None and before != identity:
            _remove(before)
    size = int(podman("image", "inspect", "--format={{.Size}}", identity))
    image = Image(reference, identity, size)
    progress(f"{_short(image)}: {size / 2**30:.2f} GiB, ready after {time.monotonic() - started:.1f} s")
    return image


def _in_background(work: Callable[[], str]) -> Future[str]:
    """Do `work` in a thread that does not keep the process from ending, as ThreadPoolExecutor's threads would."""
    future = Future[str]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def compiled_horovod(wheels: Path, progress: Progress, machine: str = HERE) -> Path:
    """Folder of Horovod's wheels for the training image of these wheels, compiled here. Raises ContainersError."""
    refuse_other_platform(pinned(path.name for path in wheels.glob("*.whl"))["torch"], machine)
    return horovod_wheels(progress)


def _with_horovod(train: Image, progress: Progress, compiled: Path | None) -> Image:
    """The training image with one more layer: Horovod, and what it depends on that the training image lacks."""
    wheels = training_wheels(lambda line: None)
    present = pinned(path.name for path in wheels.glob("*.whl"))
    folder = compiled or compiled_horovod(wheels, progress)
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=IMAGES) as name:
        for path in wheels_beyond(folder, present):
            shutil.copy2(path, name)
        return build(
            HOROVOD_REFERENCE, ROOM / "horovod", ROOM / "horovod" / "Containerfile", progress,
            where="the control machine, while adding Horovod to the training image (containers/horovod/Containerfile)",
            arguments={"TRAIN": train.id, "HOROVOD": code_hash(Path(name))},
            mounts={Path(name): "/wheels"},
        )  # fmt: skip


def export_oci(image: Image, progress: Progress) -> OciExport:
    """Write to the pool what it lacks of `image`, and its SBOM beside it; remove what no current image needs.

    An image is current if an earlier export wrote it and its reference still names it. Two processes may export at
    once; what a killed process leaves is not used by a later one.

    Raises ContainersError if the export failed, most likely because the disk is full.
    """
    with locked(IMAGES / "oci.lock"):
        BLOBS.mkdir(parents=True, exist_ok=True)
        named = (entry for entry in _entries() if entry["annotations"][REF_NAME] == image.ref)
        entry = next((entry for entry in named if _config_id(entry) == image.id), None)
        if entry is None:
            progress(f"{_short(image)}: exporting")
            started = time.monotonic()
            try:
                entry, added = _export(image)
                if torn := _torn(entry):  # something else has cut them short; Podman does not write a blob that exists
                    for path in torn:
                        path.unlink()
                    entry, added = _export(image)
                read = podman("run", "--rm", "--network=none", "--entrypoint=cat", image.id, str(PLACE))
                write_whole(sbom_path(image.ref), read)
            except CommandFailed as failure:
                what = f"the image could not be exported. The last lines of Podman:\n{failure.tail}"
                raise ContainersError(what, str(POOL), fix_of(failure)) from failure
            progress(f"{_short(image)}: exported {added / 2**20:.1f} MiB in {time.monotonic() - started:.1f} s")
        others = [other for other in _entries() if other["annotations"][REF_NAME] != image.ref and _is_current(other)]
        entries = _without_old_workloads([entry, *others])
        write_whole(POOL / "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
        write_whole(POOL / "index.json", _index(entries))
        needed = {digest for other in entries for digest in blob_sizes(other)}
        for blob in BLOBS.iterdir():
            if blob.name not in needed and time.time() - blob.stat().st_mtime > IN_TRANSIT_SECONDS:
                blob.unlink()
        return OciExport(POOL, _index([entry]), blob_sizes(entry))


def code_hash(*folders: Path) -> str:
    """SHA-256 over the names and contents of the folders' files, without Python's caches."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def blob_sizes(entry: Mapping[str, Any]) -> dict[str, int]:
    """Hexadecimal digest -> size in bytes of each blob of an index entry: its manifest, config and layers."""
    manifest = _manifest(entry)
    blobs = [entry, manifest["config"], *manifest["layers"]]
    return {_hex(blob["digest"]): int(blob["size"]) for blob in blobs}


def sbom_path(reference: str) -> Path:
    """Where the SBOM of an exported image is: build/images/sbom-train.json and the like."""
    return IMAGES / f"sbom-{reference.rpartition('/')[2].partition(':')[0]}.json"


def _remove(identity: str) -> None:
    """Remove an image, by its id or name, unless a container or a workload's image still uses it."""
    with contextlib.suppress(CommandFailed):
        podman("rmi", identity)


def remove_workloads() -> None:
    """Remove the images of all workloads from this machine. Raises ContainersError without Podman or root."""
    named = ("--filter", f"reference={WORKLOAD_REPOSITORY}*", "--format", "{{.Repository}}")
    for reference in podman("images", *named).split():
        _remove(reference)
        sbom_path(f"{reference}:latest").unlink(missing_ok=True)


def _export(image: Image) -> tuple[dict[str, Any], int]:
    """Save an image into a layout that holds hard links to the pool's large blobs: Podman writes only the others.

    Returns the image's entry of an index, and the number of bytes that are new in the pool.
    """
    with scratch(IMAGES, "export-") as draft:
        fresh = draft / "blobs" / "sha256"
        fresh.mkdir(parents=True)
        before = set(os.listdir(BLOBS))
        linked = {name for name in before if (BLOBS / name).stat().st_size >= LARGE_BLOB}
        for name in linked:
            os.link(BLOBS / name, fresh / name)
        (draft / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (draft / "index.json").write_text(_index([]))
        options = ("--quiet", "--format=oci-dir", "--uncompressed", f"--output={draft}")
        follow(root_command("podman", "save", *options, image.id))
        if prefix := as_root():
            output([*prefix, "chown", "-R", f"{os.getuid()}:{os.getgid()}", str(draft)])
        entry: dict[str, Any] = json.loads((draft / "index.json").read_text())["manifests"][0]
        entry["annotations"] = {REF_NAME: image.ref}
        added = 0
        for path in fresh.iterdir():
            if path.name not in linked:
                added += path.stat().st_size if path.name not in before else 0
                _verify(path)
                os.replace(path, BLOBS / path.name)
        return entry, added


def _verify(path: Path) -> None:
    """Check a new blob's content against its name, and bring it to the disk before anything refers to it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if digest != path.name:
        raise ContainersError("an exported layer does not match its digest", str(path), "run it again; check the disk")


def _entries() -> Iterator[dict[str, Any]]:
    """Entries of the pool's index whose blobs are all there in full size."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        for entry in json.loads((POOL / "index.json").read_text())["manifests"]:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if not _torn(entry):
                    yield entry


def _torn(entry: Mapping[str, Any]) -> list[Path]:
    """Blobs of an entry that do not have the size that it states."""
    sizes = {BLOBS / name: size for name, size in blob_sizes(entry).items()}
    return [path for path, size in sizes.items() if path.stat().st_size != size]


def _is_current(entry: Mapping[str, Any]) -> bool:
    return inspect_image(entry["annotations"][REF_NAME], "{{.Id}}") == _config_id(entry)


def _without_old_workloads(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries, latest first, without those of all but KEPT_WORKLOADS workloads, whose images are removed here."""
    references = [entry["annotations"][REF_NAME] for entry in entries]
    old = [reference for reference in references if reference.startswith(WORKLOAD_REPOSITORY)][KEPT_WORKLOADS:]
    for reference in old:
        _remove(reference)
        sbom_path(reference).unlink(missing_ok=True)
    return [entry for entry, reference in zip(entries, references, strict=True) if reference not in old]


def _config_id(entry: Mapping[str, Any]) -> str:
    return _hex(_manifest(entry)["config"]["digest"])


def _manifest(entry: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads((BLOBS / _hex(entry["digest"])).read_bytes())


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _index(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"schemaVersion": 2, "manifests": entries}, indent=1, sort_keys=True) + "\n"


def _short(image: Image) -> str:
    return f"{image.ref} ({image.id[:12]})"
