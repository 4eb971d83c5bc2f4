"""The training image, workload images on top of it, and their OCI layout from which hosts pull.

Only what changed is built and exported again: the same sources give the same image id, and a change under train/ makes
one new layer of a few hundred kilobytes. Not for distributing: the playbooks do that.

    python -m containers.image build [--horovod]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    follow,
    locked,
    output,
    podman,
    root_command,
)
from containers.horovod_wheel import horovod_wheels, refuse_other_platform, wheels_beyond
from containers.wheels import WheelsError, content_hash, pinned, pip_folder, training_wheels, workload_wheels

TRAIN_REFERENCE = "localhost/muster/train:latest"
HOROVOD_REFERENCE = "localhost/muster/train-horovod:latest"
WORKLOAD_REPOSITORY = "localhost/muster/workload-"
ROOM = Path(__file__).parent
IMAGES = BUILD / "images"
POOL = IMAGES / "oci"
LARGE_BLOB = 2**20  # bytes; smaller ones are written anew and swapped in, as Podman writes manifests in place
REF_NAME = "org.opencontainers.image.ref.name"
STEP = re.compile(r"^STEP (\d+)/(\d+): (?:RUN|COPY)")  # the others take no time


#: An export of another process may be on its way to hosts: what nobody needs any more stays this long.
IN_TRANSIT_SECONDS = 3600


class ImageError(ContainersError):
    """An image could not be built or exported."""


@dataclass(frozen=True)
class Image:
    """An image in this machine's Podman storage."""

    ref: str
    id: str  # SHA-256 of its config, 64 hexadecimal digits: what every host must have
    layers: int  # total size of its layers, bytes


@dataclass(frozen=True)
class OciExport:
    """An image as files: with `index` as the index.json beside the pool's blobs/ and oci-layout, a host can pull it."""

    path: Path  # the pool; its own index.json names all current images
    index: str  # text of an index.json that names this image alone
    bytes: int  # of all blobs of this image


def build_training_image(progress: Progress, horovod: bool = False) -> Image:
    """Build the training image, or find it built: base, wheels and train/; on request a layer with Horovod on top.

    Raises:
        ImageError: a step of the build failed; ContainersError: a tool or root is missing.
    """
    image = _build_plain_image(progress)
    return _with_horovod(image, progress) if horovod else image


def _build_plain_image(progress: Progress) -> Image:
    as_root()
    with ThreadPoolExecutor(2) as both:
        base = both.submit(ensure_base, progress)
        wheels = both.submit(_as_image_error, lambda: training_wheels(progress))
    folder, source = wheels.result(), REPOSITORY / "train"
    return _build(
        TRAIN_REFERENCE, ROOM / "train", ROOM / "train" / "Containerfile", progress,
        where="the control machine, while building the training image (containers/train/Containerfile)",
        mend="mend what the last lines name, then run it again",
        arguments={"BASE": base.result(), "WHEELS": content_hash(folder), "CODE": code_hash(source)},
        mounts={folder: "/wheels", pip_folder(): "/pip/pip", source: "/src"},
    )  # fmt: skip


def _with_horovod(train: Image, progress: Progress) -> Image:
    """The training image and, as one layer of its own, Horovod with what it needs and the image lacks.

    The layer stays the same when train/ changes.
    """
    present = pinned(path.name for path in training_wheels(lambda line: None).glob("*.whl"))
    refuse_other_platform(present["torch"])
    folder = horovod_wheels(progress)
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=IMAGES) as scratch:
        for path in wheels_beyond(folder, present):
            shutil.copy2(path, scratch)
        return _build(
            HOROVOD_REFERENCE, ROOM / "horovod", ROOM / "horovod" / "Containerfile", progress,
            where="the control machine, while adding Horovod to the training image (containers/horovod/Containerfile)",
            mend="mend what the last lines name, then run it again",
            arguments={"TRAIN": train.id, "HOROVOD": code_hash(Path(scratch))},
            mounts={Path(scratch): "/wheels", pip_folder(): "/pip/pip"},
        )  # fmt: skip


def build_workload_image(train: Image, workload: Path, progress: Progress) -> Image:
    """Build a user's project on top of the training image: its requirements.txt, if any, and its files in /workload.

    Raises:
        ImageError: no such folder, its requirements cannot be had, or the build failed.
    """
    if not workload.is_dir():
        raise ImageError(
            "the workload is not a folder", str(workload), "give WORKLOAD=path/to/project, a folder that holds SCRIPT"
        )
    workload = workload.resolve()
    wheels = _as_image_error(lambda: workload_wheels(workload, training_wheels(lambda line: None), progress))
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="workload-", dir=IMAGES) as scratch:
        ignore = Path(scratch) / "ignore"
        ignore.write_text(_ignore_text(workload))
        empty = Path(scratch) / "wheels"
        empty.mkdir()
        return _build(
            workload_reference(workload), workload, ROOM / "workload" / "Containerfile",
            progress,
            where=f"the control machine, while building the image of the workload {workload}",
            mend="mend what the last lines name, then run it again",
            arguments={"TRAIN": train.id, "WHEELS": content_hash(wheels)},
            mounts={wheels or empty: "/wheels", pip_folder(): "/pip/pip"},
            options=[f"--ignorefile={ignore}"],
        )  # fmt: skip


def workload_reference(workload: Path) -> str:
    """The name of a workload's image."""
    return f"{WORKLOAD_REPOSITORY}{image_name(workload.resolve().name)}:latest"


def export_oci(image: Image, progress: Progress) -> OciExport:
    """Write what the pool lacks of `image`, drop what no current image needs.

    Current are the images that an earlier export put there and whose reference still names them. Two processes may
    export at once; a process killed in the middle leaves nothing that a later one trusts.

    Raises:
        ImageError: the export failed, mostly because the disk is full.
    """
    with locked(IMAGES / "oci.lock"):
        for leftover in IMAGES.glob("export-*"):
            shutil.rmtree(leftover)
        blobs = POOL / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        entry = _pool_entry(image)
        if entry is None:
            progress(f"{_short(image)}: exporting")
            started = time.monotonic()
            try:
                entry, added = _export(image, blobs)
                if torn := _torn(entry):  # cut short by other hands; what Podman finds there it does not write again
                    for path in torn:
                        path.unlink()
                    entry, added = _export(image, blobs)
            except CommandFailed as failure:
                raise ImageError(
                    f"the image could not be exported. Podman's last lines:\n{failure.tail}",
                    str(POOL),
                    _mend(failure, ""),
                ) from failure
            progress(f"{_short(image)}: exported {added / 1e6:.1f} MB in {time.monotonic() - started:.1f} s")
        entries = [entry, *(other for other in _current_entries() if other["annotations"][REF_NAME] != image.ref)]
        _write_atomically(POOL / "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
        _write_atomically(POOL / "index.json", _index(entries))
        needed = {digest for other in entries for digest in blob_sizes(other, _read_blob)}
        for blob in blobs.iterdir():
            if blob.name not in needed and time.time() - blob.stat().st_mtime > IN_TRANSIT_SECONDS:
                blob.unlink()
        return OciExport(POOL, _index([entry]), sum(blob_sizes(entry, _read_blob).values()))


def code_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of a folder's files, caches left out."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def image_name(folder: str) -> str:
    """A folder's name as part of an image reference: lower case, digits, single separators."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "workload"


def blob_sizes(entry: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, int]:
    """Hexadecimal digest -> bytes of all blobs of an index entry: its manifest, config and layers.

    Args:
        read: content of the blob of a digest.
    """
    manifest = json.loads(read(_hex(entry["digest"])))
    blobs = [entry, manifest["config"], *manifest["layers"]]
    return {_hex(blob["digest"]): int(blob["size"]) for blob in blobs}


def _build(
    reference: str, context: Path, containerfile: Path, progress: Progress, *, where: str, mend: str,
    arguments: Mapping[str, str], mounts: Mapping[Path, str], options: Iterable[str] = (),
) -> Image:  # fmt: skip
    IMAGES.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def on_line(line: str) -> None:
        if match := STEP.match(line):
            progress(f"{reference}: step {match.group(1)} of {match.group(2)}")

    with locked(IMAGES / "build.lock"), tempfile.TemporaryDirectory(prefix="build-", dir=IMAGES) as scratch:
        before = _image_id(reference)
        command = root_command(
            "podman", "build", "--network=none", "--timestamp=0", f"--tag={reference}", f"--file={containerfile}",
            f"--iidfile={scratch}/id", *options,
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *(f"--volume={path}:{target}:ro" for path, target in mounts.items()),
            str(context),
        )  # fmt: skip
        try:
            follow(command, on_line)
        except CommandFailed as failure:
            what = f"the image {reference} could not be built. The last lines of the build:\n{failure.tail}"
            raise ImageError(what, where, _mend(failure, mend)) from failure
        identity = Path(scratch, "id").read_text().strip().removeprefix("sha256:")
        if before not in (None, identity):
            _remove(str(before))
    size = int(podman("image", "inspect", "--format={{.Size}}", identity))
    image = Image(reference, identity, size)
    progress(f"{_short(image)}: {size / 1e9:.2f} GB, ready after {time.monotonic() - started:.1f} s")
    return image


def _as_image_error(fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except WheelsError as error:
        raise ImageError(error.what, error.where, error.mend) from error


def _mend(failure: CommandFailed, mend: str) -> str:
    if "no space left on device" in failure.tail.lower():
        return "the disk is full: free some gigabytes (`df -h`, `podman system df`), then run it again"
    return mend or "mend what the last lines name, then run it again"


def _image_id(reference: str) -> str | None:
    try:
        return podman("image", "inspect", "--format={{.Id}}", reference).strip()
    except CommandFailed:
        return None


def _remove(identity: str) -> None:
    """Drop an image that lost its name. One that a container or a workload's image still uses stays until that goes."""
    try:
        podman("rmi", identity)
    except CommandFailed:
        return


def _ignore_text(workload: Path) -> str:
    own = next((workload / name for name in (".containerignore", ".dockerignore") if (workload / name).is_file()), None)
    return (ROOM / "workload" / "ignore").read_text() + (own.read_text() if own else "")


def _export(image: Image, blobs: Path) -> tuple[dict[str, Any], int]:
    """Save into a layout that has the pool's large blobs by hard link: Podman writes what is missing there.

    Returns the image's entry of an index and how many bytes the pool did not have.
    """
    draft = Path(tempfile.mkdtemp(prefix="export-", dir=IMAGES))
    try:
        fresh = draft / "blobs" / "sha256"
        fresh.mkdir(parents=True)
        before = set(os.listdir(blobs))
        linked = {name for name in before if (blobs / name).stat().st_size >= LARGE_BLOB}
        for name in linked:
            os.link(blobs / name, fresh / name)
        (draft / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (draft / "index.json").write_text(_index([]))
        podman("save", "--quiet", "--format=oci-dir", "--uncompressed", f"--output={draft}", image.id)
        if prefix := as_root():
            output([*prefix, "chown", "-R", f"{os.getuid()}:{os.getgid()}", str(draft)])
        entry: dict[str, Any] = json.loads((draft / "index.json").read_text())["manifests"][0]
        entry["annotations"] = {REF_NAME: image.ref}
        added = 0
        for path in fresh.iterdir():
            if path.name not in linked:
                added += path.stat().st_size if path.name not in before else 0
                _verify(path)
                os.replace(path, blobs / path.name)
        return entry, added
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _verify(path: Path) -> None:
    """That a new blob's content is what its name says, and that it is on the disk before anything refers to it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if digest != path.name:
        raise ImageError("an exported layer does not match its digest", str(path), "run it again; check the disk")


def _pool_entry(image: Image) -> dict[str, Any] | None:
    """The pool's entry for exactly this image, if all of its blobs are there in full size."""
    for entry in _entries():
        if entry["annotations"][REF_NAME] == image.ref and _config_id(entry) == image.id:
            return entry
    return None


def _entries() -> list[dict[str, Any]]:
    """Entries of the pool's index whose blobs are all there in full size."""
    try:
        entries = json.loads((POOL / "index.json").read_text())["manifests"]
    except (FileNotFoundError, ValueError):
        return []
    return [entry for entry in entries if _is_whole(entry)]


def _is_whole(entry: Mapping[str, Any]) -> bool:
    try:
        return not _torn(entry)
    except (FileNotFoundError, ValueError):
        return False


def _torn(entry: Mapping[str, Any]) -> list[Path]:
    """Blobs of an entry that do not have the size that it states."""
    sizes = {POOL / "blobs" / "sha256" / name: size for name, size in blob_sizes(entry, _read_blob).items()}
    return [path for path, size in sizes.items() if path.stat().st_size != size]


def _current_entries() -> list[dict[str, Any]]:
    return [entry for entry in _entries() if _image_id(entry["annotations"][REF_NAME]) == _config_id(entry)]


def _config_id(entry: Mapping[str, Any]) -> str:
    return _hex(json.loads(_read_blob(_hex(entry["digest"])))["config"]["digest"])


def _read_blob(digest: str) -> bytes:
    return (POOL / "blobs" / "sha256" / digest).read_bytes()


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _index(entries: list[dict[str, Any]]) -> str:
    return json.dumps({"schemaVersion": 2, "manifests": entries}, indent=1, sort_keys=True) + "\n"


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text)
    os.replace(draft, path)


def _short(image: Image) -> str:
    return f"{image.ref} ({image.id[:12]})"


def main(arguments: list[str]) -> int:
    """`python -m containers.image build`: build and export the training image; print its reference and id."""
    parser = argparse.ArgumentParser(prog="python -m containers.image", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["build"])
    parser.add_argument("--horovod", action="store_true", help="with Horovod, for --parallel horovod")
    options = parser.parse_args(arguments)
    try:
        image = build_training_image(lambda line: print(line, file=sys.stderr, flush=True), options.horovod)
        export_oci(image, lambda line: print(line, file=sys.stderr, flush=True))
    except ContainersError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{image.ref} {image.id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
