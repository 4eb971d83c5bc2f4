"""Tensors that lie in pieces on the ranks (DTensor, of fsdp), and such as are whole: one way to treat both."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from train.torch_versions import all_gather_single


def local(tensor: Tensor) -> Tensor:
    """This rank's piece, which shares its memory, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or what it is over all ranks if each has some of its rows or a part of its sum (collective).

    Rows are gathered here, as DTensor's own way breaks a rank's heap now and then on the CPU: gloo's two threads both
    set the name of the collective that ended last, without a lock, and the one used there has a name of more than 15
    letters, which lies in memory that both then free (torch 2.13; benchmarks/RESULTS.md, 2026-11-29).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.placements != (Shard(0),):
        return tensor.full_tensor()
    piece, ranks = tensor.to_local(), tensor.device_mesh.size()
    rows = -(-len(tensor) // ranks)  # of each rank; the last ones may have fewer
    mine = piece.new_zeros(rows, *piece.shape[1:])
    mine[: len(piece)] = piece
    gathered = mine.new_empty(rows * ranks, *piece.shape[1:])
    all_gather_single(gathered, mine)
    return gathered[: len(tensor)]


def like(target: Tensor, value: Tensor) -> Tensor:
    """The whole `value` on the device of `target`, cut as `target` is, without communication: every rank holds it."""
    value = value.to(device=target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
