"""Ways of data parallelism (`--parallel`) behind one interface, one small module each.

Order of construction: network on the CPU; SyncBatchNorm, activation checkpointing, memory format; `make`, which
moves it to the device; `Strategy.compile`; then parameter groups of `Strategy.network` and `Strategy.optimizer`
(fsdp puts new parameters in place of those it is given). One step:

    for number, (images, labels, weights) in enumerate(passes):
        with strategy.passes(last=number == len(passes) - 1):
            losses = loss(strategy.module(images), labels)                 # one for each sample
            ((losses * weights).sum() * strategy.scale(global_count)).backward()
    strategy.before_step()
    norm = strategy.clip(max_norm)
    optimizer.step()
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.group import Place
from train.settings import Settings, SettingsError

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> a tensor to go backward from
Groups = list[dict[str, Any]]  # an optimizer's parameter groups


class Strategy(Protocol):
    """How the ranks train one model together. What says "collective" is called by all ranks, in the same order.

    equal_passes: every pass through `module` or `network`, in evaluation too, is one of all ranks together: they make
        the same number of them (fsdp gathers parameters in each).
    note: one line for the user about a choice made for him, or empty.
    """

    module: nn.Module  # call this for training
    network: nn.Module  # the bare model on the device: its names, its evaluation
    equal_passes: bool
    note: str

    def compile(self, **options: Any) -> None:
        """Applies torch.compile in place; no name changes. To be called once, before the first pass."""

    def optimizer(self, make: Callable[[Groups], Optimizer], groups: Groups) -> Optimizer:
        """`make(groups)`, wrapped where the way of parallelism asks for it; `groups` of `network`'s parameters."""

    def passes(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch. Gradients add up and are synchronised in the last one.

        Raises RuntimeError, naming them, where parameters got no gradient (see `train.parallel.ddp`).
        """

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        """Around an epoch whose ranks have different numbers of steps (a loader that cannot be cut evenly).

        Not for train.order's batches: those are even. Raises SettingsError where there is no such thing.
        """

    def scale(self, global_count: int) -> float:
        """What a rank's sum of sample losses is multiplied by, so that the synchronised gradient is that of the mean
        over the `global_count` samples of all ranks, however they are cut.
        """

    def before_step(self) -> None:
        """After the last backward, before anything reads a gradient (horovod waits for its all-reduces here)."""

    def clip(self, max_norm: float) -> Tensor:
        """Scales gradients down to this global norm. Returns the norm before, the same on all ranks (collective)."""

    def model_state(self) -> dict[str, Tensor]:
        """The whole model under plain names, buffers as this rank has them (collective).

        Whole at least on every local rank 0, possibly empty elsewhere. Tensors may be the live ones: copy them.
        """

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer keyed by parameter names (`train.parallel.state`), whole where the above is (collective)."""

    def load(self, model: dict[str, Tensor], optimizer: Optimizer | None, state: dict[str, Any] | None) -> None:
        """The reverse of the two above, from states that are whole on every rank. Raises SettingsError if unfit."""

    def warm_up(self, images: Tensor, labels: Tensor, loss: Loss) -> None:
        """Before the first step of a run resumed after one step at least: sums then go in the order of the unbroken
        run's (collective).

        Changes neither weights, gradients, buffers, optimizer nor random numbers. `images`, `labels`: any batch.
        """

    def comm_share(self) -> float | None:
        """Part of the step, 0 to 1, that waits for communication that no computing hides. None if not known."""


def make(settings: Settings, network: nn.Module, place: Place, device: torch.device) -> Strategy:
    """The strategy of `settings.parallel`, with `network` moved to the device (collective).

    Raises SettingsError for ways that do not go with this number of ranks, this torch, these GPUs.
    """
    name = settings.parallel
    if name in ("none", "dp") and place.world_size > 1:
        raise SettingsError(
            f"--parallel {name}: it is one process, and these are {place.world_size} ranks: --parallel ddp"
        )
    match name:
        case "none":
            from train.parallel.single import Single

            return Single(network, device)
        case "ddp":
            from train.parallel.ddp import Ddp

            return Ddp(network, place, device, settings.find_unused_parameters, settings.static_graph)
        case "dp":
            from train.parallel.dp import make_dp

            return make_dp(network, device, settings.batch_size, settings.gpu0_batch)
        case "fsdp":
            from train.parallel.fsdp import Fsdp

            return Fsdp(network, place, device)
        case "horovod":
            from train.parallel.horovod import Horovod

            return Horovod(network, place, device, settings.timeout)
    raise SettingsError(f"--parallel {name}: it is none of ddp, dp, fsdp, horovod, none")
