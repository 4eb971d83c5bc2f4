"""Loss and accuracy over the held-out part: every sample exactly once, for any number of ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from train.datasets.loader import Loader
from train.losses import logits, right, right_among_five
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
    stopping: Callable[[], bool] = never,
) -> Score | None:
    """`network` is the bare module, not DDP's wrapper; `batch_size` counts the samples of one rank.

    stopping: asked before each batch, on all ranks at the same one, and answered alike on all of them; after a yes the
    evaluation ends there and returns None. Nothing else is read from the device before the end.
    """
    was_training = network.training
    network.eval()
    passes = list(evaluation_passes(samples, batch_size, cut, place.rank))
    sums = torch.zeros(3, dtype=torch.float64, device=precision.device)
    stopped = False
    batches = loader.held_out(piece.indices for piece in passes)
    for number, (piece, (images, labels)) in enumerate(zip(passes, batches, strict=True)):
        tell("evaluating", number, len(passes))
        if stopped := stopping():
            break
        with precision.autocast():
            outputs = network(images)
        outputs, labels = logits(outputs)[: piece.count].float(), labels[: piece.count]
        sums[0] += functional.cross_entropy(outputs, labels, reduction="sum").double()
        sums[1] += counted(right(outputs, labels), sums)
        sums[2] += counted(right_among_five(outputs, labels), sums)
    tell("evaluating", len(passes), len(passes))
    network.train(was_training)
    if stopped:
        return None
    loss, correct, correct5 = sum_over_ranks(sums)
    return Score(samples, known(correct), loss / samples, known(correct5))


def counted(answers: Tensor | None, like: Tensor) -> Tensor:
    """How many are right, float64 []; not a number where there is no such count, which no sum changes."""
    return like.new_tensor(math.nan) if answers is None else answers.double().sum()


def known(count: float) -> float | None:
    return None if math.isnan(count) else count
