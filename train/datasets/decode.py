"""One image file to uint8 pixels of the wanted size: what a worker process does for imagefolder.

JPEGs much larger than needed are decoded at a half, a quarter or an eighth (Pillow's draft), by a rule that depends
on the file and the size alone. EXIF orientation is not applied, as in torchvision.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from train.datasets.augment import BOX_AXES, Box, box_draws, resized_crop
from train.datasets.base import Augmentation, Bytes, DataError
from train.datasets.folder import FolderSource
from train.datasets.transform import resize
from train.order import Ints

DRAFT = 2  # decoded edges are at least this many times the wanted size
SHORTER_SIDE = 256 / 224  # of a held-out image, relative to the centre crop that is taken of it


@dataclass(frozen=True)
class Task:
    """indices: int64 [n], sample numbers of the training part where epoch is not None, else of the held-out one."""

    indices: Ints
    epoch: int | None


@dataclass(frozen=True)
class Job:
    """All that a worker has to know."""

    train: FolderSource
    test: FolderSource
    augmentation: Augmentation | None
    seed: int
    size: int
    channels_last: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one decoded sample."""
        return (self.size, self.size, 3) if self.channels_last else (3, self.size, self.size)

    def into(self, out: Tensor, task: Task) -> None:
        """out: uint8 [n, *shape]. Raises DataError that names the file."""
        source = self.test if task.epoch is None else self.train
        draws: npt.NDArray[np.float64] | None = None
        if task.epoch is not None and self.augmentation is not None and self.augmentation.resized_crop:
            draws = box_draws(self.seed, task.epoch, task.indices)
        for place, index in enumerate(task.indices.tolist()):
            path = source.path(index)
            image = self._centre(path) if draws is None else self._random(path, draws[place])
            out[place].copy_(image if not self.channels_last else image.permute(1, 2, 0))

    def _random(self, path: Path, draws: npt.NDArray[np.float64]) -> Tensor:
        assert self.augmentation is not None and self.augmentation.resized_crop is not None
        with opened(path, DRAFT * self.size) as image:
            box = resized_crop(draws, *image.size, self.augmentation.resized_crop)
            pixels = resize(tensor_of(path, image, box), (self.size, self.size))[0]
        if self.augmentation.mirror and draws[BOX_AXES - 1] < 0.5:
            pixels = pixels.flip(2)
        return pixels

    def _centre(self, path: Path) -> Tensor:
        """torchvision's Resize(shorter side), CenterCrop(size)."""
        with opened(path, DRAFT * self.size) as image:
            width, height = image.size
            short = round(self.size * SHORTER_SIDE)
            long = int(short * max(width, height) / min(width, height))
            shape = (short, long) if height <= width else (long, short)
            pixels = resize(tensor_of(path, image, (0, 0, width, height)), shape)[0]
        top, left = (round((edge - self.size) / 2) for edge in shape)
        return pixels[:, top : top + self.size, left : left + self.size]


def opened(path: Path, least: int) -> Image.Image:
    """The image, its pixels not yet decoded, its edges no smaller than `least` pixels where they were not before."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(path)
        image.draft(image.mode, (least, least))
    except Exception as error:
        raise undecodable(path, error) from error
    return image


def tensor_of(path: Path, image: Image.Image, box: Box) -> Tensor:
    """uint8 [1, 3, height, width] of the box, in NHWC memory."""
    try:
        cut: Bytes = np.array(image.convert("RGB").crop(box))
    except Exception as error:
        raise undecodable(path, error) from error
    return torch.from_numpy(cut).permute(2, 0, 1)[None]


def undecodable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"dataset imagefolder: {path} is no image that can be decoded ({error}). Replace or remove that file "
        "on every host"
    )
