"""What a dataset is: two sources of uint8 images with labels, and how its images are changed and normalised."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from train.order import Ints

Bytes: TypeAlias = npt.NDArray[np.uint8]
Triple: TypeAlias = tuple[float, float, float]

HASHED_WHOLE = 64 << 20  # bytes: of larger arrays only evenly spread images are hashed
HASHED_IMAGES = 1024


class DataError(Exception):
    """A dataset that cannot be read; the message says what, where and what to do."""


class BadSample(DataError):
    """One sample that cannot be read, which --bad-samples skip leaves out; others can be.

    reason: why, in a few words without the sample's name (default: the message).
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class Source(Protocol):
    """One part (training or held out) of a dataset: ArraySource, or folder.FolderSource."""

    @property
    def labels(self) -> Ints:
        """int64 [N]"""
        ...

    def __len__(self) -> int: ...

    def manifest(self) -> tuple[int, str]:
        """(bytes, SHA-256) of what makes this part; cheap, equal on hosts with equal data."""
        ...


@dataclass(frozen=True)
class Augmentation:
    """Largest random change of a training image. Drawn for each (seed, epoch, sample number).

    Either an affine map (degrees, scale, shift), or a crop (padding: as far as that many pixels of the stored size
    over each edge, black outside), or, for files, resized_crop: (least, largest) part of the image's area.
    """

    degrees: float = 0.0
    scale: float = 0.0  # relative
    shift: float = 0.0  # part of the image's width
    padding: int = 0  # pixels
    resized_crop: tuple[float, float] | None = None
    mirror: bool = False

    @property
    def affine(self) -> bool:
        return bool(self.degrees or self.scale or self.shift)


@dataclass(frozen=True)
class ArraySource:
    """Images of one size, in memory or memory-mapped.

    images: uint8 [N, C, H, W], C 1 or 3, contiguous; [N, C, W, H] where `transposed` (STL-10's files are).
    """

    images: Bytes
    labels: Ints
    transposed: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def manifest(self) -> tuple[int, str]:
        return self.images.nbytes, array_hash(self.images, self.labels)


def array_hash(images: Bytes, labels: Ints) -> str:
    digest = hashlib.sha256(repr(images.shape).encode())
    digest.update(np.ascontiguousarray(labels).data)
    if images.nbytes <= HASHED_WHOLE:
        digest.update(np.ascontiguousarray(images).data)
    else:
        for sample in np.linspace(0, len(images) - 1, HASHED_IMAGES).astype(np.int64):
            digest.update(np.ascontiguousarray(images[sample]).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Dataset:
    """mean, std: of red, green, blue scaled to 0 .. 1. image_size: pixels, where the settings ask for none."""

    name: str
    class_names: tuple[str, ...]
    train: Source
    test: Source
    mean: Triple
    std: Triple
    image_size: int
    augmentation: Augmentation = field(default_factory=Augmentation)

    @property
    def classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True)
class Files:
    """The folder of a dataset's files, and the errors for files that are missing or wrong."""

    dataset: str
    root: Path

    def folder(self, name: str, *needed: str, suffixes: tuple[str, ...] = ("",)) -> Path:
        """root/name, once it has every file in `needed`, with any of the suffixes. Raises DataError that names all
        that are missing.
        """
        folder = self.root / name
        missing = [one for one in needed if not any((folder / f"{one}{suffix}").is_file() for suffix in suffixes)]
        if missing:
            raise self.missing(folder, missing)
        return folder

    def missing(self, folder: Path, names: Sequence[str]) -> DataError:
        return DataError(
            f"dataset {self.dataset}: {folder} has no {', '.join(names)}. "
            "Run once with --download, or name the folder that holds the datasets: with --data-dir, on hosts with "
            "data_dir in the inventory; `make data SRC=<folder> NAME=<name>` brings one there"
        )

    def wrong(self, path: Path, what: str) -> DataError:
        """For a file that is there but cannot be right."""
        return DataError(
            f"dataset {self.dataset}: {path} {what}. Remove that file and run with --download, or copy it anew"
        )


def data_dir_of(given: Path | None) -> Path:
    """The folder of the datasets: as given, else MUSTER_DATA_DIR, else /data where there is one, else ./data."""
    if given is not None:
        return Path(given)
    from_environment = os.environ.get("MUSTER_DATA_DIR")
    if from_environment:
        return Path(from_environment)
    return Path("/data") if Path("/data").is_dir() else Path("data")


def numbered(classes: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(classes))


def check_labels(files: Files, path: Path, labels: Ints, classes: int, images: int) -> None:
    """Raises DataError unless there is one label, 0 .. classes-1, for each image."""
    if len(labels) != images:
        raise files.wrong(path, f"has {len(labels)} labels for {images} images")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        first = int(outside[0])
        raise files.wrong(
            path,
            f"has {len(outside)} labels that are not among its {classes} classes (the first: sample {first})",
        )
    if not images:
        raise files.wrong(path, "has no images")
