"""Own parts for test_own_parts.py that have what can go wrong: random numbers of all kinds, batch statistics, dropout,
inputs in a dict, masks, targets that are no class numbers.
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

COUNTS = {"train": 47, "val": 13}


class Noisy(Dataset[Any]):
    """Draws from all three global generators for each sample."""

    num_classes = 3

    def __init__(self, split: str) -> None:
        self.count = COUNTS[split]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Any], int]:
        image = torch.rand(3, 6, 6) + index % 3
        noise = np.random.rand(4).astype(np.float32) + random.random()
        return {"image": image, "extra": (noise, float(index))}, index % 3


def noisy(split: str, data_dir: Path) -> Noisy:
    return Noisy(split)


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2))
        self.head = nn.Linear(4 * 16 + 4, classes)

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        return self.head(torch.cat([self.features(inputs["image"]), inputs["extra"][0]], 1))


def net(num_classes: int) -> nn.Module:
    return Net(num_classes)


def narrow(num_classes: int) -> nn.Module:
    return Net(num_classes - 1)


def mirrored(split: str) -> Any:
    def change(inputs: dict[str, Any], target: int) -> tuple[dict[str, Any], int]:
        return inputs | {"image": inputs["image"].flip(2) if torch.rand(()) < 0.5 else inputs["image"]}, target

    return change


def image_alone(split: str) -> Any:
    """The image stays in bytes."""
    return lambda image, target: (image.flip(2) if torch.rand(()) < 0.5 else image, target)


def of_one_argument(split: str) -> Any:
    return lambda image: image


class Masks(Dataset[Any]):
    """Photographs and masks as a folder of files gives them: PIL's images."""

    classes = ("ground", "square")

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return COUNTS[self.split]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        mask = np.zeros((12, 12), np.uint8)
        row, column = index % 7, index * 3 % 7
        mask[row : row + 5, column : column + 5] = 1
        image = np.stack([mask * 200, 255 - mask * 100, mask], 2)
        return Image.fromarray(image), Image.fromarray(mask)


def masks(split: str, data_dir: Path) -> Masks:
    return Masks(split)


def joint(split: str) -> Any:
    """Image and mask get the same random crop."""
    crop = v2.Compose([v2.RandomCrop(8) if split == "train" else v2.CenterCrop(8), v2.RandomHorizontalFlip()])

    def change(image: Any, mask: Any) -> Any:
        return crop(tv_tensors.Image(v2.functional.to_image(image).float() / 255), tv_tensors.Mask(np.array(mask)))

    return change


def segment(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, num_classes, 1))


class Line(Dataset[Any]):
    """x [4] and the number that a model is to find."""

    def __init__(self, split: str) -> None:
        draw = torch.Generator().manual_seed(COUNTS[split])
        self.x = torch.randn(COUNTS[split], 4, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return self.x[index], float(self.x[index].sum())


def line(split: str, data_dir: Path) -> Line:
    return Line(split)


def linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, num_classes))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def mean_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return squares(outputs, targets).mean()


# -- parts that are wrong ----------------------------------------------------------------------------------------------

not_a_function = 3


def two_arguments(num_classes: int, depth: int) -> nn.Module:
    return nn.Linear(num_classes, depth)


def no_module(num_classes: int) -> int:
    return num_classes


def raising(num_classes: int) -> nn.Module:
    raise ValueError("no such depth")


def iterable(split: str, data_dir: Path) -> Any:
    return iter(range(3))


class Broken(Line):
    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if index == 5:
            raise KeyError("x5.png")
        return super().__getitem__(index)


def broken(split: str, data_dir: Path) -> Broken:
    return Broken(split)


class Uneven(Line):
    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return self.x[index][: 2 + index % 3], 0.0


def uneven(split: str, data_dir: Path) -> Uneven:
    return Uneven(split)


class Alone(Line):
    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index]}


def alone(split: str, data_dir: Path) -> Alone:
    return Alone(split)


class Locked(Line):
    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.key = lambda: split  # cannot be sent to a worker


def locked(split: str, data_dir: Path) -> Locked:
    return Locked(split)


class Deadly(Line):
    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        if index == 40 and torch.utils.data.get_worker_info() is not None:
            os._exit(1)
        return super().__getitem__(index)


def deadly(split: str, data_dir: Path) -> Deadly:
    return Deadly(split)


class Pixels(Line):
    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return self.x[index].to(torch.uint8), 0.0


def pixels(split: str, data_dir: Path) -> Pixels:
    return Pixels(split)
