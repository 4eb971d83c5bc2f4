"""Pictures of noise, as many as a run is long: for the speed part of `make bench-links`, where nothing is learned.

`noise_images:of_960_32` is a dataset of 960 pictures of 32 x 32 pixels. All of the steps of a run are one epoch then,
whose length is chosen, so that a checkpoint or an evaluation never comes between the steps that are timed. Reading a
picture costs next to nothing. A project of the trainer, as made_images.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

DIFFERENT = 64  # pictures; then they come again
HELD_OUT = 12


class NoiseImages(Dataset[tuple[Tensor, int]]):
    """float32 [3, size, size], and the class number, one of ten."""

    num_classes = 10

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.images = torch.randn((DIFFERENT, 3, size, size), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index % DIFFERENT], index % self.num_classes


def __getattr__(name: str) -> Callable[[str, Path], NoiseImages]:
    """`of_<pictures>_<size>`, as the trainer asks the module for it."""
    asked = re.fullmatch(r"of_(\d+)_(\d+)", name)
    if asked is None:
        raise AttributeError(f"noise_images has no {name}: of_960_32 is 960 pictures of 32 x 32 pixels")
    count, size = int(asked[1]), int(asked[2])

    def dataset(split: str, data_dir: Path) -> NoiseImages:
        return NoiseImages(count if split == "train" else HELD_OUT, size)

    return dataset
