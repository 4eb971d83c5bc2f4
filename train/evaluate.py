"""Loss and accuracy over the held-out part: every sample exactly once, for any number of ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.datasets.base import DataError
from train.datasets.loader import Loader, Rows, counted_rows
from train.losses import Loss, per_sample, right, right_among_five
from train.model.precision import Precision
from train.order import Cut, evaluation_passes
from train.start.group import Place
from train.start.muster_run import tell


@dataclass(frozen=True)
class Score:
    """What an evaluation found. It is kept in the manifest of the checkpoint that it was made of."""

    samples: int
    correct: float | None  # None: there is no accuracy of such outputs and targets (see train.losses.right)
    loss: float  # mean
    correct5: float | None = None  # right among the five best; None as `correct`, and for five classes or fewer

    @property
    def accuracy(self) -> float | None:
        return None if self.correct is None else self.correct / self.samples

    @property
    def top5(self) -> float | None:
        return None if self.correct5 is None else self.correct5 / self.samples

    @property
    def metric(self) -> float:
        """The higher the better: the accuracy; where there is none, the loss with its sign changed."""
        return -self.loss if self.accuracy is None else self.accuracy


def never() -> bool:
    return False


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
    stopping: Callable[[], bool] = never,
) -> Score | None:
    """`network` is the bare module, not DDP's wrapper; `batch_size` counts the samples of one rank. With --bad-samples
    skip bad samples are left out.

    stopping: asked before each batch, on all ranks at the same one, and answered alike on all of them; after a yes the
    evaluation ends there and returns None. Nothing else is read from the device before the end. Raises DataError, on
    all ranks alike, where no sample is left.
    """
    was_training = network.training
    network.eval()
    passes = list(evaluation_passes(samples, batch_size, cut, place.rank))
    sums = torch.zeros(4, dtype=torch.float64, device=precision.device)
    stopped = False
    batches = loader.held_out(piece.indices for piece in passes)
    for number, (piece, batch) in enumerate(zip(passes, batches, strict=True)):
        tell("evaluating", number, len(passes))
        if stopped := stopping():
            break
        inputs, targets = batch[:2]
        with precision.autocast():
            outputs = network(inputs)
            losses = loss(outputs, targets)
        rows = counted_rows(batch, piece.count)
        sums[0] += losses[rows].double().sum()
        sums[1] += how_many(right(outputs, targets), rows)
        sums[2] += how_many(right_among_five(outputs, targets), rows)
        sums[3] += len(losses[rows])
    tell("evaluating", len(passes), len(passes))
    network.train(was_training)
    if stopped:
        return None
    total, correct, correct5, counted = sum_over_ranks(sums)
    if not counted:
        raise DataError("no held-out image can be decoded: `python -m train verify-data` says why of each")
    return Score(int(counted), known(correct), total / counted, known(correct5))


def how_many(answers: Tensor | None, rows: Rows) -> Tensor | float:
    """How many of the rows are right, float64 []; not a number where there is no such count, which no sum changes."""
    return math.nan if answers is None else answers[rows].double().sum()


def known(count: float) -> float | None:
    return None if math.isnan(count) else count
