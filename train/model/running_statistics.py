"""Buffers (the running statistics of batch normalisation) that differ from rank to rank.

In training each rank keeps its own. Evaluation and checkpoints take their mean over the ranks, which is computed
on copies: evaluating never changes the training. A checkpoint also keeps every rank's own, so that resuming on
the same number of ranks is exact to the bit. Buffers outside the state dict (constants) are left alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.model.plain_names import plain
from train.torch_versions import all_gather_single

Buffers = Mapping[str, Tensor]


def buffers_of(network: nn.Module) -> dict[str, Tensor]:
    """The buffers of the state dict under plain names, in the model's order."""
    kept = network.state_dict().keys()
    return {plain(name): buffer for name, buffer in network.named_buffers() if name in kept}


def flat(buffers: Buffers) -> Tensor:
    """All buffers in a row, float64 [n] on their device: exact for float32, and for counts below 2**53."""
    pieces = [buffer.detach().reshape(-1).double() for buffer in buffers.values()]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64)


def unflat(buffers: Buffers, row: Tensor) -> dict[str, Tensor]:
    """The reverse of `flat`, as new tensors of the buffers' shapes and types; counts are rounded."""
    total = sum(buffer.numel() for buffer in buffers.values())
    if row.numel() != total:
        raise ValueError(f"{row.numel()} values for {total} buffer elements: they are of another model")
    pieces = torch.split(row, [buffer.numel() for buffer in buffers.values()])
    return {
        name: as_type(piece, buffer.dtype).view_as(buffer).to(buffer.device)
        for (name, buffer), piece in zip(buffers.items(), pieces, strict=True)
    }


def as_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)


@torch.no_grad()
def mean_of(buffers: Buffers) -> dict[str, Tensor]:
    """Each buffer's mean over the ranks, the same on all ranks (collective), as new tensors; {} without any."""
    row = flat(buffers)
    if row.numel() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(row)
        row /= dist.get_world_size()
    return unflat(buffers, row)


def mean_buffers(network: nn.Module) -> dict[str, Tensor]:
    """`mean_of` the network's buffers, under their plain names (collective)."""
    return mean_of(buffers_of(network))


@torch.no_grad()
def gather(buffers: Buffers) -> Tensor:
    """Every rank's own buffers, float64 [world_size, n] on the CPU, the same on all ranks (collective)."""
    row = flat(buffers)
    rows = torch.empty(dist.get_world_size(), row.numel(), dtype=row.dtype, device=row.device)
    if row.numel():
        all_gather_single(rows.view(-1), row)
    return rows.cpu()


def gather_buffers(network: nn.Module) -> Tensor:
    """`gather` of the network's buffers (collective)."""
    return gather(buffers_of(network))


@torch.no_grad()
def set_buffers(network: nn.Module, row: Tensor) -> None:
    """Puts one row of `gather_buffers` back. Raises ValueError if it is of another model."""
    put(network, unflat(buffers_of(network), row))


@torch.no_grad()
def put(network: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in buffers_of(network).items():
        buffer.copy_(values[name])


@contextmanager
def unchanged_buffers(network: nn.Module) -> Iterator[None]:
    """Whatever happens to the buffers inside, afterwards they are as before."""
    before = {name: buffer.detach().clone() for name, buffer in buffers_of(network).items()}
    try:
        yield
    finally:
        put(network, before)


@contextmanager
def evaluating_with(network: nn.Module, mean: dict[str, Tensor]) -> Iterator[None]:
    """The network with the buffers `mean` (of `mean_buffers`) inside, with its own ones again afterwards."""
    with unchanged_buffers(network):
        put(network, mean)
        yield
