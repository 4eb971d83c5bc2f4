"""The training of examples/plain_ddp.py as functions for the trainer: a model, a dataset, a loss and a transform.

make local PROJECT=examples/own_parts ARGS="--model parts:net --dataset parts:digits --loss parts:loss"
make train PROJECT=examples/own_parts ARGS="--model parts:net --dataset parts:digits --transform parts:shaken"
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchvision.transforms import v2


def net(num_classes: int) -> nn.Module:
    """Images [n, 1, 8, 8] -> outputs [n, num_classes]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, num_classes),
    )


class Digits(Dataset[tuple[Tensor, int]]):
    """1,797 handwritten digits of 8 x 8 pixels; one in five is held out."""

    classes = tuple("0123456789")

    def __init__(self, split: str) -> None:
        digits = load_digits()
        held_out = torch.arange(len(digits.target)) % 5 == 0
        chosen = held_out if split == "val" else ~held_out
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen, None] / 16
        self.labels = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def digits(split: str, data_dir: Path) -> Digits:
    """split: "train" or "val". data_dir: the folder of the datasets on this host; the digits need none."""
    return Digits(split)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs [n, classes] and class numbers [n] -> one loss for each sample, [n]."""
    return functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def shaken(split: str) -> Callable[[Any, Any], Any]:
    """(image, class number) -> (image, class number), for each sample of the split."""
    return v2.RandomAffine(12, (0.06, 0.06), (0.9, 1.1)) if split == "train" else v2.Identity()
