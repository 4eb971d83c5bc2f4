"""One optimizer step: the arithmetic of data-parallel training.

The update is that of the whole global batch's mean loss, for any number of ranks, any shares and any number of
passes: each pass adds the gradient of (this rank's sum of sample losses) * strategy.scale(global samples), and
the strategy's synchronisation, in the last pass, adds up or averages what that factor expects.

With --bad-samples skip a batch says which of its samples are good. The others have weight 0, and where any rank has one
the gradient is scaled once more, from the mean over all samples of the global batch to that over the good ones.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.datasets.loader import Batch, Rows, counted_rows
from train.losses import Loss, Mix, mixed, right
from train.model.precision import Precision
from train.order import Step
from train.parallel import Strategy


@dataclass(frozen=True)
class Sums:
    """This rank's own figures of a step, on the device: nothing here waits for it."""

    loss: Tensor  # float64 [], the sum over its samples
    correct: Tensor  # float64 [], not a number where there is no accuracy (train.losses.right)
    finite: Tensor  # bool []: its losses, and the gradient, unless an update with one that is not is skipped anyway
    grad_norm: Tensor  # float32 [], of the whole batch's gradient, before clipping
    images: int  # of all ranks: those whose mean loss the update is of


def optimizer_step(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    batches: Iterator[Batch],
    step: Step,
    mix: Mix | None,
    loss: Loss,
    clip: float,
    ranks: int = 1,
) -> Sums:
    """All passes of one step, then the update of the weights. `batches` yields one batch for each pass.

    A pass's padding (see train.order.Pass) takes part with weight 0: every rank goes through the same collectives.
    ranks: that take this step together; they count their good samples, where batches say which are.
    """
    scale = strategy.scale(max(1, step.update_count))  # 0 where the last batch is too short for this host
    losses, correct, finite = [], [], []
    good, counting = 0, None
    for number, piece in enumerate(step.passes, 1):
        batch, last = next(batches), number == len(step.passes)
        rows = counted_rows(batch, piece.count)
        if len(batch) > 2:
            good += piece.count if isinstance(rows, slice) else len(rows)
            counting = Counting(good, ranks) if last else None  # beside the last pass
        with strategy.passes(last=last):
            each, answers = forward(strategy, precision, batch, rows, mix, loss)
            counted, padding = each[rows].sum(), each[piece.count :].sum()
            precision.backward((counted + 0.0 * padding) * scale)
        losses.append(counted.detach().double())
        correct.append(answers)
        finite.append(torch.isfinite(each.detach()).all())
    strategy.before_step()
    images = counting.total() if counting else step.global_count
    if images != step.global_count:
        scale_gradients(strategy.network, step.global_count / max(1, images))
    precision.unscale(optimizer)
    norm = strategy.clip(clip) if clip else strategy.gradient_norm()
    if not precision.skips_overflow:
        finite.append(norm.isfinite())  # a finite loss may have an infinite gradient, which would spoil the weights
    precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return Sums(torch.stack(losses).sum(), torch.stack(correct).sum(), torch.stack(finite).all(), norm, images)


class Counting:
    """The good samples of all ranks, added up beside the training, without a GPU (collective)."""

    def __init__(self, good: int, ranks: int) -> None:
        self.good = torch.tensor(good)
        self.work = dist.all_reduce(self.good, async_op=True) if ranks > 1 else None

    def total(self) -> int:
        if self.work is not None:
            self.work.wait()
        return int(self.good)


def scale_gradients(network: nn.Module, factor: float) -> None:
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def forward(
    strategy: Strategy, precision: Precision, batch: Batch, rows: Rows, mix: Mix | None, loss: Loss
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, [n]; how many of `rows`, those that count, are right, float64 [], or not a number)"""
    inputs, targets, *good = batch
    with precision.autocast():
        if mix is None:
            outputs = strategy.module(inputs)
            losses = loss(outputs, targets)
        else:
            inputs, targets, partners, part = mix.apply(inputs, targets, *(mask for mask in good if not mask.all()))
            outputs = strategy.module(inputs)
            losses = mixed(outputs, targets, partners, part, loss)
    with torch.no_grad():
        answers = right(outputs, targets)
        if answers is None:
            return losses, losses.new_full((), math.nan, dtype=torch.float64)
        return losses, answers[rows].double().sum()
