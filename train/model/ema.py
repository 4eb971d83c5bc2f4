"""Averaged weights: an exponential moving average (EMA) of parameters and buffers, used for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from train.model.pieces import like, local, whole
from train.model.running_statistics import buffers_of, gather, mean_of, unflat


def reshard(network: nn.Module) -> None:
    """Frees fsdp's gathered copies of the parameters. After a forward pass without backward fully_shard keeps those of
    its root, and would not see that the shards behind them were changed."""
    for module in network.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


class Ema:
    """float32 averages on their own device: of the parameters, sharded where those are, and of the buffers that are
    no counts (batch normalisation's statistics), as averaged weights have other activations than the last ones.

    In training each rank averages its own buffers. Evaluation and checkpoints take the mean over the ranks, as of the
    network's buffers (`train.model.running_statistics`).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        """`network`: the bare module (plain names); with fsdp after fully_shard. decay: 0 <= decay < 1, say 0.999."""
        reshard(network)
        self.network, self.decay = network, decay
        self.parameters: dict[str, Tensor] = {name: p.detach() for name, p in network.named_parameters()}
        self.buffers = {name: b for name, b in buffers_of(network).items() if b.is_floating_point()}
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """The averages are what the network has now."""
        self.averages = {name: p.to(torch.float32, copy=True) for name, p in self.parameters.items()}
        self.averaged_buffers = {name: b.to(torch.float32, copy=True) for name, b in self.buffers.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the optimizer step of this number, counted from 1.

        The decay grows to its value as min(decay, (1 + step) / (10 + step)): the first averages would otherwise hold
        little but the random weights of the start, for 1 / (1 - decay) steps, and these runs are short.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        now = [local(each).float() for each in (*self.parameters.values(), *self.buffers.values())]
        averages = [local(each) for each in (*self.averages.values(), *self.averaged_buffers.values())]
        torch._foreach_lerp_(averages, now, 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The network computes with the averages, then again with its own weights and buffers, the same bits as before.

        Values are copied, not tensors exchanged: optimizers, DDP's buckets and compiled code hold on to the tensors.
        Needs memory for one more copy of the parameters meanwhile. All ranks enter and leave together.
        """
        reshard(self.network)
        held = [local(each) for each in (*self.parameters.values(), *self.buffers.values())]
        kept = [each.clone() for each in held]
        averages = [local(each) for each in (*self.averages.values(), *mean_of(self.averaged_buffers).values())]
        with torch.no_grad():
            torch._foreach_copy_(held, averages)
        try:
            yield
        finally:
            reshard(self.network)
            with torch.no_grad():
                torch._foreach_copy_(held, kept)

    def state(self) -> dict[str, Tensor]:
        """Whole averages by plain names, the buffers' as their mean over the ranks; all ranks call it together."""
        averages = {name: whole(average) for name, average in self.averages.items()}
        return averages | mean_of(self.averaged_buffers)

    def rank_buffers(self) -> Tensor:
        """Every rank's own averages of the buffers, float64 [world_size, n], the same on all ranks (collective)."""
        return gather(self.averaged_buffers)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], own_buffers: Tensor | None = None) -> None:
        """The reverse of `state`, for any --parallel and number of ranks; own_buffers: this rank's row of
        `rank_buffers`, where there are as many ranks as then.

        Older states have no buffers: their averages begin with the network's. Raises ValueError for another model's.
        """
        wrong = (set(self.averages) - set(state)) | (set(state) - set(self.averages) - set(self.averaged_buffers))
        if wrong:
            raise ValueError(f"the averaged weights are those of another model: {', '.join(sorted(wrong)[:5])} differ")
        for name, average in self.averages.items():
            local(average).copy_(local(like(average, state[name].float())))
        own = {} if own_buffers is None else unflat(self.averaged_buffers, own_buffers)
        for name, average in self.averaged_buffers.items():
            average.copy_(own.get(name, state.get(name, self.buffers[name])))
