"""One optimizer step: the arithmetic of data-parallel training.

The update is that of the whole global batch's mean loss, for any number of ranks, any shares and any number of
passes: each pass adds the gradient of (this rank's sum of sample losses) * strategy.scale(global samples), and
the strategy's synchronisation, in the last pass, adds up or averages what that factor expects.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from train.losses import Mix, logits, mixed, per_sample, right
from train.model.precision import Precision
from train.order import Pass, Step
from train.parallel import Strategy

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sums:
    """This rank's own figures of a step, on the device: nothing here waits for it."""

    loss: Tensor  # float64 [], the sum over its samples
    correct: Tensor  # float64 [], not a number where there is no accuracy (train.losses.right)
    finite: Tensor  # bool []


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
            each, answers = forward(strategy, precision, next(batches), piece, mix, smoothing)
            counted, padding = each[: piece.count].sum(), each[piece.count :].sum()
            precision.backward((counted + 0.0 * padding) * scale)
        losses.append(counted.detach().double())
        correct.append(answers)
        finite.append(torch.isfinite(each.detach()).all())
    strategy.before_step()
    if clip:
        precision.unscale(optimizer)
        strategy.clip(clip)
    precision.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return Sums(torch.stack(losses).sum(), torch.stack(correct).sum(), torch.stack(finite).all())


def forward(
    strategy: Strategy, precision: Precision, batch: Batch, piece: Pass, mix: Mix | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """(loss of each sample, float32 [n]; how many of the counted answers are right, float64 [], or not a number)"""
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
        answers = right(logits(outputs)[: piece.count], labels[: piece.count])
        correct = losses.new_tensor(math.nan, dtype=torch.float64) if answers is None else answers.double().sum()
    return losses, correct
