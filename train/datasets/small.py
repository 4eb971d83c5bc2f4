"""Datasets that need no files of the user's: real handwritten digits from scikit-learn, and fake images.

The split into training and held-out part is a pure function of the dataset's size.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from train.datasets.base import ArraySource, Augmentation, Bytes, DataError, Dataset, Files, numbered
from train.order import Ints, permutation, uniform

SPLIT_SEED = 20
HELD_OUT = 5  # one in so many samples is held out


def read(files: Files) -> Dataset:
    return digits() if files.dataset == "digits" else fake()


def split(samples: int) -> tuple[Ints, Ints]:
    """(training, held-out) sample numbers, disjoint and together all; the same for every seed of a run."""
    order = permutation(samples, SPLIT_SEED, 0)
    held_out = samples // HELD_OUT
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def parts(images: Bytes, labels: Ints) -> tuple[ArraySource, ArraySource]:
    train, test = split(len(labels))
    return ArraySource(images[train], labels[train]), ArraySource(images[test], labels[test])


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
    train, test = parts((table[:, :64] * 15).astype(np.uint8).reshape(-1, 1, 8, 8), table[:, 64].astype(np.int64))
    grey = 0.29, 0.35
    augmentation = Augmentation(degrees=12, scale=0.1, shift=0.06)
    return Dataset("digits", numbered(10), train, test, (grey[0],) * 3, (grey[1],) * 3, 32, augmentation)


def fake() -> Dataset:
    """643 noisy 3x32x32 images of ten random patterns: for trying things out, and odd on purpose (128 are
    held out).
    """
    samples, classes, pixels = 643, 10, 3 * 32 * 32
    labels = np.arange(samples, dtype=np.int64) % classes
    columns = np.arange(pixels, dtype=np.int64)
    patterns = uniform(1, np.arange(classes, dtype=np.int64)[:, None], columns)
    noise = uniform(2, np.arange(samples, dtype=np.int64)[:, None], columns)
    images = ((0.4 * patterns[labels] + 0.6 * noise) * 255).astype(np.uint8).reshape(-1, 3, 32, 32)
    train, test = parts(images, labels)
    return Dataset("fake", numbered(classes), train, test, (0.5,) * 3, (0.25,) * 3, 32, Augmentation(padding=1))
