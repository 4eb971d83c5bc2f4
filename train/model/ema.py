"""Averaged weights: an exponential moving average (EMA) of the parameters, used for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (sharing memory), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(network: nn.Module) -> None:
    """Frees fsdp's gathered copies of the parameters. After a forward pass without backward fully_shard keeps those of
    its root, and would not see that the shards behind them were changed."""
    for module in network.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


class Ema:
    """float32 averages of the parameters on their own device; sharded where the parameters are.

    Buffers are not averaged: `swapped_in` leaves the network's own, which are averages already.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        """`network`: the bare module (plain names); with fsdp after fully_shard. decay: 0 <= decay < 1, say 0.999."""
        reshard(network)
        self.network, self.decay = network, decay
        self.parameters: dict[str, Tensor] = {name: p.detach() for name, p in network.named_parameters()}
        self.averages: dict[str, Tensor] = {
            name: p.detach().to(torch.float32, copy=True) for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer step of this number, counted from 1.

        The decay grows to its value as min(decay, (1 + step) / (10 + step)): the first averages would otherwise hold
        little but the random weights of the start, for 1 / (1 - decay) steps, and these runs are short.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        now = [local(p).float() for p in self.parameters.values()]
        torch._foreach_lerp_([local(a) for a in self.averages.values()], now, 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The network computes with the averages, then again with its own weights, the same bits as before.

        Values are copied, not tensors exchanged: optimizers, DDP's buckets and compiled code hold on to the tensors.
        Needs memory for one more copy of the parameters meanwhile. With fsdp all ranks enter and leave together.
        """
        reshard(self.network)
        held = [local(p) for p in self.parameters.values()]
        kept = [p.clone() for p in held]
        with torch.no_grad():
            torch._foreach_copy_(held, [local(a) for a in self.averages.values()])
        try:
            yield
        finally:
            reshard(self.network)
            with torch.no_grad():
                torch._foreach_copy_(held, kept)

    def state(self) -> dict[str, Tensor]:
        """Whole averages by plain parameter names; sharded ones are gathered, so all ranks call it together."""
        return {name: a.full_tensor() if isinstance(a, DTensor) else a for name, a in self.averages.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """The reverse of `state`, for any --parallel and number of ranks. Raises ValueError for other parameters."""
        if wrong := sorted(set(state) ^ set(self.averages)):
            raise ValueError(f"the averaged weights are those of another model: {', '.join(wrong[:5])} differ")
        for name, average in self.averages.items():
            whole = state[name].to(average.device, torch.float32)
            if isinstance(average, DTensor):
                whole = distribute_tensor(whole, average.device_mesh, average.placements, src_data_rank=None)
            local(average).copy_(local(whole))
