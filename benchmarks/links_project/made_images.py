"""Pictures of 96 x 96 pixels that are made, not downloaded: the second dataset of `make bench-links`, and a small net.

A class is a shape together with the texture that fills it: ten of them. A picture shows one such shape somewhere,
turned, in any colours, on a background of cloudy colours, with two smaller discs of either texture in front of or
behind it, and with noise. So neither the shape nor the texture alone tells the class, and a picture can be truly
unclear: a good training ends well below 100 % right answers, and a slightly worse one shows.

A picture is a function of its split and its number alone, on every machine. The folder is a project of the trainer
(docs/own-parts.md): it imports NumPy, torch and torchvision, and nothing of ours.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.models.resnet import BasicBlock

SIZE = 96  # pixels of an edge
IMAGES = {"train": 3000, "val": 4000}
SHAPES = ("triangle", "square", "disc", "flower", "ring")
TEXTURES = ("stripes", "checks")
CLASSES = tuple(f"{shape} of {texture}" for shape in SHAPES for texture in TEXTURES)
AT_ONCE = 200  # pictures that are made together
LARGE, SMALL = (0.22, 0.36), (0.08, 0.13)  # least and greatest radius of an object, in edges
WAVES = (7, 14)  # of a texture, from edge to edge
CLOUDS = (0.15, 0.85)  # least and greatest brightness of the background
NOISE = 0.35  # its standard deviation, where 1 is from black to white
CONTRAST = (0.15, 0.45)  # least and most, of a texture

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class MadeImages(Dataset[tuple[Tensor, int]]):
    """One split: float32 [3, 96, 96], about -1 to 1, and the class number. Each class has equally many."""

    classes = CLASSES

    def __init__(self, split: str, images: int | None = None) -> None:
        self.split = split
        self.images, self.labels = made(split, images or IMAGES[split])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index])
        if self.split == "train":
            image = mirrored(image)
        return image.float() / 127.5 - 1, int(self.labels[index])


def mirrored(image: Tensor) -> Tensor:
    """One of the picture's eight turned and mirrored forms, by torch's generator, which the trainer seeds."""
    left, top, corner = (torch.rand(3) < 0.5).tolist()
    image = image.flip([axis for axis, chosen in ((-1, left), (-2, top)) if chosen])
    return image.transpose(-1, -2) if corner else image


def dataset(split: str, data_dir: Path) -> MadeImages:
    """split: "train" or "val". data_dir: nothing is read there."""
    return MadeImages(split)


def net(num_classes: int) -> nn.Module:
    """Images [n, 3, 96, 96] -> outputs [n, num_classes]: a residual network that two cores train in a minute."""
    widths = (16, 32, 64, 128)
    stem = [nn.Conv2d(3, widths[0], 5, stride=2, padding=2, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    blocks = [block(before, width) for before, width in pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


def block(before: int, width: int) -> nn.Module:
    """A residual block that halves the edges."""
    shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride=2, bias=False), nn.BatchNorm2d(width))
    return BasicBlock(before, width, stride=2, downsample=shortcut)


# -- how a picture is made ---------------------------------------------------------------------------------------------


def made(split: str, count: int) -> tuple[Bytes, Ints]:
    """(pictures [count, 3, 96, 96], class numbers [count]); the classes take turns."""
    labels = np.arange(count) % len(CLASSES)
    pieces = []
    for first in range(0, count, AT_ONCE):
        random = np.random.default_rng([list(IMAGES).index(split), first])
        pieces.append(pictures(labels[first : first + AT_ONCE], random))
    return np.concatenate(pieces), labels


def pictures(labels: Ints, random: np.random.Generator) -> Bytes:
    """Pictures of these classes, uint8 [n, 3, 96, 96]: from the back to the front."""
    canvas = clouds(len(labels), random)
    paint(canvas, discs(len(labels), random), SMALL, random)
    paint(canvas, labels, LARGE, random)
    paint(canvas, discs(len(labels), random), SMALL, random)
    canvas += NOISE * random.standard_normal(canvas.shape, dtype=np.float32)
    return (np.clip(canvas, 0, 1) * 255).astype(np.uint8)


def clouds(count: int, random: np.random.Generator) -> Floats:
    """Smooth random colours, [count, 3, 96, 96]: a coarse grid of them, and straight lines between its points."""
    cells = 5
    at = np.linspace(0, cells - 1, SIZE, dtype=np.float32)
    spread = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(cells, dtype=np.float32)))
    grid = random.uniform(*CLOUDS, (count, 3, cells, cells)).astype(np.float32)
    return spread @ grid @ spread.T


def discs(count: int, random: np.random.Generator) -> Ints:
    """Class numbers of discs, each of any texture."""
    return SHAPES.index("disc") * len(TEXTURES) + random.integers(len(TEXTURES), size=count)


def paint(canvas: Floats, labels: Ints, radii: tuple[float, float], random: np.random.Generator) -> None:
    """Put an object of its class into each picture, anywhere. radii: the least and the greatest, in edges."""
    radius, turn = uniform(random, *radii, len(labels)), uniform(random, 0, 2 * np.pi, len(labels))
    middle = [uniform(random, 0, 1, len(labels)) * (1 - 2 * radius) + radius for _ in range(2)]
    places = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE
    x, y = places[None, None, :] - middle[0], places[None, :, None] - middle[1]
    inside = is_inside(labels, (np.hypot(x, y) / radius).astype(np.float32), np.arctan2(y, x) + turn)
    colour = random.uniform(0.2, 0.8, (len(labels), 3, 1, 1)).astype(np.float32)
    filled = colour + (uniform(random, *CONTRAST, len(labels)) * pattern(labels, x, y, random))[:, None]
    np.copyto(canvas, filled, where=inside[:, None])


def uniform(random: np.random.Generator, least: float, most: float, count: int) -> Floats:
    """One number for each picture, [count, 1, 1]."""
    return random.uniform(least, most, (count, 1, 1)).astype(np.float32)


def is_inside(labels: Ints, distance: Floats, angle: Floats) -> npt.NDArray[np.bool_]:
    """Which pixels belong to the object, [n, 96, 96]: by distance from its middle, in radii, and angle."""
    edges = {
        "triangle": lambda angle: polygon(3, angle),
        "square": lambda angle: polygon(4, angle),
        "disc": lambda angle: np.float32(0.9),
        "flower": lambda angle: 0.75 + 0.25 * np.cos(5 * angle),
        "ring": lambda angle: np.float32(0.9),
    }
    inside = np.zeros(distance.shape, dtype=np.bool_)
    for number, shape in enumerate(SHAPES):
        chosen = labels // len(TEXTURES) == number
        inside[chosen] = distance[chosen] < edges[shape](angle[chosen])
        if shape == "ring":
            inside[chosen] &= distance[chosen] > 0.5
    return inside


def polygon(corners: int, angle: Floats) -> Floats:
    """How far a regular polygon, whose corners are at 1, goes at each angle."""
    half = np.float32(np.pi / corners)
    return np.cos(half) / np.cos(angle % (2 * half) - half)


def pattern(labels: Ints, x: Floats, y: Floats, random: np.random.Generator) -> Floats:
    """The texture of each picture's class, -1 to 1, [n, 96, 96]: waves in one direction, or in two that cross."""
    count = len(labels)
    turn, waves = uniform(random, 0, np.pi, count), uniform(random, *WAVES, count)
    along = 2 * np.pi * waves * (x * np.cos(turn) + y * np.sin(turn)) + uniform(random, 0, 6, count)
    across = 2 * np.pi * waves * (y * np.cos(turn) - x * np.sin(turn)) + uniform(random, 0, 6, count)
    is_checked = (labels % len(TEXTURES) == TEXTURES.index("checks"))[:, None, None]
    return np.where(is_checked, np.sin(along) * np.sin(across), np.sin(along)).astype(np.float32)
