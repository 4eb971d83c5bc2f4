"""The datasets, whole and in memory as uint8: real handwritten digits that need no download, and fake images.

A dataset says how it may be augmented; `train.batches` makes float batches of it. The split into training and
held-out part is a pure function of the dataset's size. Later datasets join by one more entry in DATASETS.
"""

import gzip
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from train.order import Ints, permutation, uniform

SPLIT_SEED = 20
HELD_OUT = 5  # one in so many samples is held out

Bytes = npt.NDArray[np.uint8]


class DataError(Exception):
    """A dataset that cannot be read; the message says what, where and what to do."""


@dataclass(frozen=True)
class Augmentation:
    """Largest random change of a training image: rotation, relative scale, shift (part of the image's width),
    mirror.
    """

    degrees: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    mirror: bool = False


@dataclass(frozen=True)
class Part:
    """images: uint8 [N, C, H, W]; labels: int64 [N]."""

    images: Bytes
    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    name: str
    classes: int
    train: Part
    test: Part
    mean: float  # of pixel values scaled to 0 .. 1
    std: float
    augmentation: Augmentation


def split(samples: int) -> tuple[Ints, Ints]:
    """(training, held-out) sample numbers, disjoint and together all; the same for every seed of a run."""
    order = permutation(samples, SPLIT_SEED, 0)
    held_out = samples // HELD_OUT
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def digits_file() -> Path:
    """scikit-learn's own copy of the UCI optical digits. The package is found, not imported: importing takes
    a second.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"this scikit-learn has no digits at {path}: install the version that pyproject.toml pins")
    return path


def digits() -> Dataset:
    """1797 handwritten digits, 8x8, values 0 .. 16 (stored here times 15); 1438 to train, 359 held out."""
    with gzip.open(digits_file(), "rt") as file:
        table = np.array([line.split(",") for line in file], dtype=np.float32)
    images = (table[:, :64] * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    train, test = split(len(labels))
    return Dataset(
        "digits",
        10,
        Part(images[train], labels[train]),
        Part(images[test], labels[test]),
        mean=0.29,
        std=0.35,
        augmentation=Augmentation(degrees=12, scale=0.1, shift=0.06),
    )


def fake() -> Dataset:
    """643 noisy 3x32x32 images of ten random patterns: for trying things out, and odd on purpose (129th is
    held out).
    """
    samples, classes, pixels = 643, 10, 3 * 32 * 32
    labels = np.arange(samples, dtype=np.int64) % classes
    columns = np.arange(pixels, dtype=np.int64)
    patterns = uniform(1, np.arange(classes, dtype=np.int64)[:, None], columns)
    noise = uniform(2, np.arange(samples, dtype=np.int64)[:, None], columns)
    images = ((0.4 * patterns[labels] + 0.6 * noise) * 255).astype(np.uint8).reshape(-1, 3, 32, 32)
    train, test = split(samples)
    return Dataset(
        "fake",
        classes,
        Part(images[train], labels[train]),
        Part(images[test], labels[test]),
        mean=0.5,
        std=0.25,
        augmentation=Augmentation(mirror=False, shift=0.02),
    )


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": digits, "fake": fake}
