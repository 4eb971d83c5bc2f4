"""From uint8 samples to float batches on the device: one affine resampling resizes and augments at once.

The augmentation of a sample depends on (seed, epoch, its number in the dataset) alone.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train.data import Augmentation, Dataset, Part
from train.order import Ints, uniform


def affine_maps(augmentation: Augmentation, seed: int, epoch: int, indices: Ints) -> Tensor:
    """float32 [N, 2, 3]: the map of each sample in the convention of torch's affine_grid."""
    draw = [uniform(seed, epoch, indices, axis) * 2 - 1 for axis in range(5)]
    angle = np.deg2rad(augmentation.degrees) * draw[0]
    zoom = 1 + augmentation.scale * draw[1]
    mirror = np.where(draw[4] < 0, -1.0, 1.0) if augmentation.mirror else np.ones(len(indices))
    shift = 2 * augmentation.shift
    rows = [
        [zoom * np.cos(angle) * mirror, -zoom * np.sin(angle), shift * draw[2]],
        [zoom * np.sin(angle) * mirror, zoom * np.cos(angle), shift * draw[3]],
    ]
    return torch.from_numpy(np.array(rows, dtype=np.float32).transpose(2, 0, 1).copy())


def identity_maps(count: int) -> Tensor:
    return torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).expand(count, 2, 3)


class Batches:
    """Float batches of one part of a dataset, normalised RGB [N, 3, size, size], with int64 labels [N]."""

    def __init__(self, dataset: Dataset, part: Part, size: int, device: torch.device) -> None:
        self.dataset, self.size, self.device = dataset, size, device
        self.images = torch.from_numpy(part.images).to(device)
        self.labels = torch.from_numpy(part.labels).to(device)

    def training(self, indices: Ints, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        return self._make(indices, affine_maps(self.dataset.augmentation, seed, epoch, indices))

    def plain(self, indices: Ints) -> tuple[Tensor, Tensor]:
        return self._make(indices, identity_maps(len(indices)))

    def _make(self, indices: Ints, maps: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices).to(self.device)
        images = self.images[chosen].float().div_(255).sub_(self.dataset.mean).div_(self.dataset.std)
        shape = [len(indices), images.shape[1], self.size, self.size]
        grid = functional.affine_grid(maps.to(self.device), shape, align_corners=False)
        images = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
        return images.expand(-1, 3, -1, -1), self.labels[chosen]
