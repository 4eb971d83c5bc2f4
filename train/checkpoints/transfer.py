"""A checkpoint's bytes from one host to those that lack it, over torch.distributed. Collective.

All of it goes through the default process group, which has a part for tensors of the CPU, also where GPUs have NCCL. A
group of some ranks is no way: where the default group is bound to a GPU, torch 2.13 splits its NCCL communicator on
the ranks outside of a new group, but not on those in it where that is gloo's (_new_process_group_helper); ncclCommSplit
wants all ranks, so those outside would wait for ever.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from train.checkpoints import files
from train.checkpoints.files import CheckpointError, Manifest
from train.start.group import Place, from_all_ranks
from train.start.muster_run import tell
from train.whole_files import Draft

PIECE_BYTES = 4 << 20


def raise_together(complaint: str, place: Place) -> None:
    """Raises CheckpointError on all ranks where any has a complaint; a barrier otherwise."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(from_all_ranks(complaint, place)) if text]
    if found:
        raise CheckpointError("; ".join(found))


def hand_out(source: Path, folder: Path, manifest: Manifest, giver: int, takers: list[int], place: Place) -> None:
    """Rank `giver` sends its file in `source`; each of `takers` writes file and manifest into `folder`.

    All ranks meet after each piece: none waits longer than a piece takes, however long the whole file does.
    Raises CheckpointError on all ranks where one could not write it, or got other bytes than the manifest says.
    """
    line, complaint = [giver, *takers], ""
    if place.rank == giver:
        complaint = send(files.path_of(source, manifest["step"]), manifest["bytes"], line)
    elif place.rank in takers:
        complaint = receive(files.path_of(folder, manifest["step"]), manifest, line)
    else:
        for _ in pieces(manifest["bytes"], line):
            pass
    raise_together(complaint, place)


def send(path: Path, size: int, line: list[int]) -> str:
    """Sends `size` bytes whatever happens, so that no rank waits for them. Returns the complaint."""
    complaint = ""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as error:
            file, complaint = None, f"cannot read {path}: {error}"
        for number, count in enumerate(sizes(size)):
            piece = bytearray(count)
            try:
                if file:
                    file.readinto(piece)
            except OSError as error:
                file, complaint = None, f"cannot read {path}: {error}"
            pass_on(piece, line)
            tell("fetching", number, len(sizes(size)))
    return complaint


def receive(path: Path, manifest: Manifest, line: list[int]) -> str:
    """Receives all pieces even where they cannot be written. Returns the complaint."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Draft(path)
    except OSError as error:
        for _ in pieces(manifest["bytes"], line):
            pass
        return str(files.cannot_write(path, error))
    with draft:
        for piece in pieces(manifest["bytes"], line):
            draft.write(memoryview(piece))
        if draft.sha256() != manifest["sha256"] and draft.error is None:
            return f"{path} arrived altered from rank {line[0]}; try again"
        try:
            more = {key: manifest[key] for key in ("evaluation", "members") if manifest.get(key)}
            files.commit(draft, manifest["step"], manifest.get("metric"), more)
        except OSError as error:
            return str(files.cannot_write(path, error))
    return ""


def pieces(size: int, line: list[int]) -> Iterator[bytearray]:
    """What the first of `line` sends, on its other ranks; on all others as many pieces that mean nothing."""
    for number, count in enumerate(sizes(size)):
        piece = bytearray(count)
        pass_on(piece, line)
        tell("fetching", number, len(sizes(size)))
        yield piece


def pass_on(piece: bytearray, line: list[int]) -> None:
    """The content of the first rank's `piece` to the others of `line`; then all ranks of the group meet.

    In each round every rank that has it sends it to one that has not, as a broadcast in a group of these ranks would.
    """
    tensor, rank = torch.frombuffer(piece, dtype=torch.uint8), dist.get_rank()
    mine = line.index(rank) if rank in line else len(line)
    have = 1
    while have < len(line):
        if mine < have and mine + have < len(line):
            dist.send(tensor, line[mine + have])
        elif have <= mine < min(2 * have, len(line)):
            dist.recv(tensor, line[mine - have])
        have *= 2
    dist.all_reduce(torch.zeros(1))


def sizes(size: int) -> list[int]:
    """`size` bytes in pieces."""
    return [min(PIECE_BYTES, size - start) for start in range(0, size, PIECE_BYTES)]
