"""One optimizer step: the arithmetic of data-parallel training.

The update is that of the whole global batch's mean loss, for any number of ranks, any shares and any number of
passes: each pass adds the gradient of (this rank's sum of sample losses) * strategy.scale(global samples), and
the strategy's synchronisation, in the last pass, adds up or averages what that factor expects.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses import Mix, logits, mixed, per_sample
from train.model.precision import Precision
from train.order import Pass, Step
from train.parallel import Strategy

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sums:
    """This rank's own figures of a step, on the device: nothing here waits for it."""

    loss: Tensor  # float64 [], the sum over its samples
    correct: Tensor  # int64 []
    finite: Tensor  # bool []: its losses, and the gradient, unless an update with one that is not is skipped anyway
    grad_norm: Tensor  # float32 [], of the whole batch's gradient, before clipping


def optimizer_step(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    batches: Iterator[Batch],
    step: Step,
    mix: Mix | None,
    smoothing: float,
    clip: float,
) -> Sums:
    """All passes of one step, then the update of the weights. `batches` yields one batch for each pass.

    A pass's padding (see train.order.Pass) takes part with weight 0: every rank goes through the same collectives.
    """
    scale = strategy.scale(step.global_count)
    losses, correct, finite = [], [], []
    for number, piece in enumerate(step.passes, 1):
        with strategy.passes(last=number == len(step.passes)):
            each, right = forward(strategy, precision, next(batches), piece, mix, smoothing)
            counted, padding = each[: piece.count].sum(), each[piece.count :].sum()
            precision.backward((counted + 0.0 * padding) * scale)
        losses.append(counted.detach().double())
        correct.append(right)
        finite.append(torch.isfinite(each.detach()).all())
    strategy.before_step()
    precision.unscale(optimizer)
    norm = strategy.clip(clip) if clip else strategy.gradient_norm()
    if not precision.skips_overflow:
        finite.append(norm.isfinite())  # a finite loss may have an infinite gradient, which would spoil the weights
    precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return Sums(torch.stack(losses).sum(), torch.stack(correct).sum(), torch.stack(finite).all(), norm)


def forward(
    strategy: Strategy, precision: Precision, batch: Batch, piece: Pass, mix: Mix | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, float32 [n]; correct answers among the counted ones)"""
    images, labels = batch
    with precision.autocast():
        if mix is None:
            outputs = strategy.module(images)
            losses = per_sample(outputs, labels, smoothing)
        else:
            images, labels, partners, part = mix.apply(images, labels)
            outputs = strategy.module(images)
            losses = mixed(outputs, labels, partners, part, smoothing)
    with torch.no_grad():
        right = (logits(outputs)[: piece.count].argmax(1) == labels[: piece.count]).sum()
    return losses, right
