"""Accuracy and loss over the held-out part: every sample exactly once, for any number of ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from train.batches import Batches
from train.order import evaluation_indices


@dataclass(frozen=True)
class Score:
    samples: int
    correct: int
    loss: float  # mean

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Each value summed over all ranks, in float64: counts stay exact."""
    total: Tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, batch_size: int, rank: int, world_size: int) -> Score:
    """`model` is the bare module, not DDP's wrapper: ranks hold different numbers of batches here."""
    was_training = model.training
    model.eval()
    mine = evaluation_indices(len(batches.labels), rank, world_size)
    correct = torch.zeros((), dtype=torch.int64, device=batches.device)
    loss = torch.zeros((), dtype=torch.float64, device=batches.device)
    for start in range(0, len(mine), batch_size):
        images, labels = batches.plain(mine[start : start + batch_size])
        outputs = model(images)
        correct += (outputs.argmax(1) == labels).sum()
        loss += functional.cross_entropy(outputs, labels, reduction="sum").double()
    model.train(was_training)
    samples, right, total = sum_over_ranks([len(mine), int(correct), float(loss)], batches.device)
    return Score(int(samples), int(right), total / samples)
