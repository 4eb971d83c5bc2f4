"""Accuracy and loss over the held-out part: every sample exactly once, for any number of ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from train.datasets.base import DataError
from train.datasets.loader import Loader
from train.model.precision import Precision
from train.order import Cut, evaluation_passes
from train.start.group import Place
from train.start.muster_run import tell


@dataclass(frozen=True)
class Score:
    samples: int
    correct: int
    loss: float  # mean

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples


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
    for number, (piece, (images, labels, *good)) in enumerate(zip(passes, batches, strict=True)):
        tell("evaluating", number, len(passes))
        with precision.autocast():
            outputs = network(images)
        rows: Tensor | slice = slice(piece.count)
        if good and not good[0][: piece.count].all():
            rows = good[0][: piece.count].nonzero()[:, 0].to(precision.device)
        outputs, labels = outputs[rows].float(), labels[rows]
        sums[0] += (outputs.argmax(1) == labels).sum()
        sums[1] += functional.cross_entropy(outputs, labels, reduction="sum").double()
        sums[2] += len(labels)
    tell("evaluating", len(passes), len(passes))
    network.train(was_training)
    correct, loss, counted = sum_over_ranks(sums)
    if not counted:
        raise DataError("no held-out image can be decoded: `python -m train verify-data` says why of each")
    return Score(int(counted), int(correct), loss / counted)
