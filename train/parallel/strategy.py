"""The interface of all ways of data parallelism.

One step of the trainer with it:

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

from torch import Tensor, nn
from torch.optim import Optimizer

Groups = list[dict[str, Any]]  # an optimizer's parameter groups


class Strategy(Protocol):
    """How the ranks train one model together. Methods marked "collective" are called by all ranks, in the same order.

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

        Not needed for train.order's batches, which are even. Raises SettingsError where it is not possible.
        """

    def scale(self, global_count: int) -> float:
        """What a rank's sum of sample losses is multiplied by, so that the synchronised gradient is that of the mean
        over the `global_count` samples of all ranks, however they are cut.
        """

    def before_step(self) -> None:
        """After the last backward, before anything reads a gradient (horovod waits for its all-reduces here)."""

    def gradient_norm(self) -> Tensor:
        """The global norm of the synchronised gradients, [] on the device, the same on all ranks (collective)."""

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

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        """Before the first step of a run resumed after one step at least: sums then go in the order of the unbroken
        run's (collective).

        Changes neither weights, gradients, buffers, optimizer nor random numbers. `forward`: a pass as training makes
        it, of any samples, to the losses: in another precision or size it would take more memory than training does,
        or make torch.compile compile for it.
        """

    def own_state(self) -> dict[str, Any] | None:
        """What only this member's ranks know (error feedback), for a file of its own beside the checkpoint; None where
        there is nothing, and on ranks that write none."""

    def load_own_state(self, own: dict[str, Any] | None, step: int) -> None:
        """The reverse, after `warm_up`. own: None where it is lost or of other members; then it begins anew at this
        step."""

    def close(self) -> None:
        """After the last step."""

    def comm_share(self) -> float | None:
        """Part of the step, 0 to 1, that waits for communication that no computing hides. None if not known."""

    def computing_seconds(self) -> float | None:
        """Of the last step that was timed: what this rank computed, without waiting for others. None if not known.

        All ranks' steps take equally long, as each waits for the slowest; this tells which one that is.
        """
