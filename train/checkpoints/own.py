"""What each member alone knows (--sync-every, --compress powersgd), read again; all functions are collective.

A run that goes on with the same members finds each one's own file and is the unbroken run. With other members, or where
a file is gone, it goes on from the mean of the files that are there.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.checkpoints import files
from train.checkpoints.files import CheckpointError, Member, State
from train.start.group import Place, from_all_ranks

Found = dict[int, State]  # by the number of a member


def read_mine(path: Path, member: Member, place: Place) -> State | None:
    """This member's own state beside the checkpoint at `path`; None on all ranks where any of them finds none."""
    step = files.step_of(path)
    assert step is not None
    mine: State | None = None
    if member.number in files.members_of(path.parent, step, member.of):
        try:
            mine = files.load(path.parent, step, member=member.number)
        except CheckpointError:
            mine = None  # torn or altered: as if it were not there
    return mine if all(from_all_ranks(mine is not None, place)) else None


def read_any(path: Path, count: int, place: Place) -> tuple[Found, int, list[str]]:
    """(of `count` members' own states those that this rank is to add up, how many all ranks have found, complaints).

    Each is read by the lowest rank that is its host's first and has it.
    """
    step = files.step_of(path)
    assert step is not None
    mine = files.members_of(path.parent, step, count) if place.local_rank == 0 else []
    everywhere = from_all_ranks(mine, place)
    read, complaints = Found(), list[str]()
    for member in range(count):
        readers = [rank for rank, known in enumerate(everywhere) if member in known]
        if readers and readers[0] == place.rank:
            try:
                read[member] = files.load(path.parent, step, member=member)
            except CheckpointError as error:
                complaints.append(str(error))
    said = [text for texts in from_all_ranks(complaints, place) for text in texts]
    return read, sum(from_all_ranks(len(read), place)), said


@torch.no_grad()
def mean(read: Found, common: dict[str, Tensor], place: Place) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """(weights, optimizer, scaler) that are the mean of those in `read` on all ranks, each weighted by its part; the
    same on all ranks. common: weights by name, as all ranks have them. One rank at least has read something."""
    parts = {member: float(state["part"]) for member, state in read.items()}
    total = sum(from_all_ranks(sum(parts.values()), place))
    weights = {
        name: value + summed([(parts[m], read[m]["model"][name] - value) for m in read], value, total)
        for name, value in common.items()
    }
    first = read[min(read)] if read else None
    plans = from_all_ranks((plan_of(first["optimizer"]), first["scaler"]) if first else None, place)
    (shapes, groups), scaler = next(plan for plan in plans if plan)
    state: dict[str, dict[str, Any]] = {}
    for name, values in shapes.items():
        state[name] = {}
        for key, like in values.items():
            if isinstance(like, Tensor):
                terms = [(parts[m], read[m]["optimizer"]["state"][name][key]) for m in read]
                like = summed(terms, torch.empty_like(like, device="cpu"), total)
            state[name][key] = like
    return weights, {"state": state, "groups": groups}, scaler


def plan_of(optimizer: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """(the state with tensors that have no content, the groups)"""
    shapes = {
        name: {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in optimizer["state"].items()
    }
    return shapes, optimizer["groups"]


def summed(terms: list[tuple[float, Tensor]], like: Tensor, total: float) -> Tensor:
    """Of all ranks, divided by `total`; of `like`'s shape and type."""
    row = torch.zeros(like.shape, dtype=torch.float64 if like.numel() == 1 else torch.float32)
    for part, value in terms:
        row.add_(value.to(row.dtype), alpha=part)
    dist.all_reduce(row)
    return row.div_(total).to(like.dtype)
