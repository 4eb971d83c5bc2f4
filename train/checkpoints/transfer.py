"""A checkpoint's bytes from one host to those that lack it, over torch.distributed (gloo). Collective."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from train.checkpoints import files
from train.checkpoints.files import CheckpointError, Manifest
from train.start.group import Place, from_all_ranks
from train.start.muster_run import tell
from train.whole_files import Draft

BROADCAST_BYTES = 16 << 20
BROADCAST_TIMEOUT = timedelta(seconds=300)


def raise_together(complaint: str, place: Place) -> None:
    """Raises CheckpointError on all ranks where any has a complaint; a barrier otherwise."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(from_all_ranks(complaint, place)) if text]
    if found:
        raise CheckpointError("; ".join(found))


def hand_out(source: Path, folder: Path, manifest: Manifest, giver: int, takers: list[int], place: Place) -> None:
    """Rank `giver` sends its file in `source`; each of `takers` writes file and manifest into `folder`.

    Raises CheckpointError on all ranks where one could not write it, or got other bytes than the manifest says.
    """
    tell("fetching")
    group = dist.new_group(sorted([giver, *takers]), timeout=BROADCAST_TIMEOUT, backend="gloo")
    complaint = ""
    try:
        if place.rank == giver:
            complaint = send(files.path_of(source, manifest["step"]), manifest["bytes"], group)
        elif place.rank in takers:
            complaint = receive(files.path_of(folder, manifest["step"]), manifest, giver, group)
        raise_together(complaint, place)
    finally:
        if place.rank in (giver, *takers):
            dist.destroy_process_group(group)


def send(path: Path, size: int, group: dist.ProcessGroup) -> str:
    """Sends `size` bytes whatever happens, so that no rank waits for them. Returns the complaint."""
    complaint = ""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as error:
            file, complaint = None, f"cannot read {path}: {error}"
        for count in sizes(size):
            piece = bytearray(count)
            try:
                if file:
                    file.readinto(piece)
            except OSError as error:
                file, complaint = None, f"cannot read {path}: {error}"
            dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), dist.get_rank(), group=group)
    return complaint


def receive(path: Path, manifest: Manifest, giver: int, group: dist.ProcessGroup) -> str:
    """Receives all pieces even where they cannot be written. Returns the complaint."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Draft(path)
    except OSError as error:
        for _ in pieces(manifest["bytes"], giver, group):
            pass
        return str(files.cannot_write(path, error))
    with draft:
        for piece in pieces(manifest["bytes"], giver, group):
            draft.write(memoryview(piece))
        if draft.hash.hexdigest() != manifest["sha256"] and draft.error is None:
            return f"{path} arrived altered from rank {giver}; try again"
        try:
            files.manifest_of(path).unlink(missing_ok=True)
            draft.commit()
            found = manifest.get("metric"), manifest.get("evaluation")
            files.write_manifest(path, manifest["step"], draft.bytes, manifest["sha256"], *found)
        except OSError as error:
            return str(files.cannot_write(path, error))
    return ""


def pieces(size: int, giver: int, group: dist.ProcessGroup) -> Iterator[bytearray]:
    for count in sizes(size):
        piece = bytearray(count)
        dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), giver, group=group)
        yield piece


def sizes(size: int) -> list[int]:
    """`size` bytes in pieces."""
    return [min(BROADCAST_BYTES, size - start) for start in range(0, size, BROADCAST_BYTES)]
