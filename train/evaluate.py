"""Accuracy and loss over the held-out part: every sample exactly once, for any number of ranks."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.datasets.base import DataError
from train.datasets.loader import Loader, counted_rows
from train.losses import Loss, per_sample, right
from train.model.precision import Precision
from train.order import Cut, evaluation_passes
from train.start.group import Place
from train.start.muster_run import tell


@dataclass(frozen=True)
class Score:
    samples: int
    correct: float | None  # None: there is no accuracy of such outputs and targets (see train.losses.right)
    loss: float  # mean

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / self.samples

    @property
    def metric(self) -> float:
        """The higher the better: the accuracy; where there is none, the loss with its sign changed."""
        return -self.loss if self.accuracy is None else self.accuracy


def sum_over_ranks(values: Tensor) -> list[float]:
    """Each value summed over all ranks, in float64: counts stay exact."""
    total = values.double()
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def evaluate(
    network: nn.Module,
    loader: Loader,
    samples: int,
    batch_size: int,
    cut: Cut,
    place: Place,
    precision: Precision,
    loss: Loss = per_sample,
) -> Score:
    """`network` is the bare module, not DDP's wrapper; `batch_size` counts the samples of one rank.

    Nothing is read from the device before the end. With --bad-samples skip bad samples are left out. Raises DataError,
    on all ranks alike, where none is left.
    """
    was_training = network.training
    network.eval()
    passes = list(evaluation_passes(samples, batch_size, cut, place.rank))
    sums = torch.zeros(3, dtype=torch.float64, device=precision.device)
    batches = loader.held_out(piece.indices for piece in passes)
    for number, (piece, batch) in enumerate(zip(passes, batches, strict=True)):
        tell("evaluating", number, len(passes))
        inputs, targets = batch[:2]
        with precision.autocast():
            outputs = network(inputs)
            losses = loss(outputs, targets)
        answers, rows = right(outputs, targets), counted_rows(batch, piece.count)
        sums[0] += math.nan if answers is None else answers[rows].double().sum()
        sums[1] += losses[rows].double().sum()
        sums[2] += len(losses[rows])
    tell("evaluating", len(passes), len(passes))
    network.train(was_training)
    correct, total, counted = sum_over_ranks(sums)
    if not counted:
        raise DataError("no held-out image can be decoded: `python -m train verify-data` says why of each")
    return Score(int(counted), None if math.isnan(correct) else correct, total / counted)
