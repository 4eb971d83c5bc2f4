"""imagefolder: any images, in one folder for each class, under train/ and val/ of the data folder (ImageNet's layout).

As torchvision's ImageFolder: classes are numbered in the order of their names, folders are searched to any depth.
Files whose names begin with a dot are passed over. Only names and sizes are read here; see decode.py for the rest.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from train.datasets.base import Augmentation, DataError, Dataset, Files
from train.order import Ints

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
NAMED = 10  # names of a list that a message shows


@dataclass(frozen=True)
class FolderSource:
    """names: relative to root, UTF-8 bytes [N], compact to send to workers; sizes: bytes of each file."""

    root: Path
    names: npt.NDArray[np.bytes_]
    sizes: Ints
    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        return self.path_of(self.names[index])

    def path_of(self, name: bytes) -> Path:
        return self.root / os.fsdecode(bytes(name))

    def name(self, index: int) -> str:
        """With the part's folder: train/cat/0.jpg. Of bytes that are no UTF-8 their numbers."""
        return f"{self.root.name}/{bytes(self.names[index]).decode(errors='backslashreplace')}"

    def bare(self) -> "FolderSource":
        """The same folder without its files."""
        return FolderSource(self.root, self.names[:0], self.sizes[:0], self.labels[:0])

    def manifest(self) -> tuple[int, str]:
        digest = hashlib.sha256()
        for array in (self.names, self.sizes, self.labels):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        return int(self.sizes.sum()), digest.hexdigest()


def read(files: Files) -> Dataset:
    """Raises DataError that names every class that is missing or empty."""
    folders = [files.root / part for part in ("train", "val")]
    absent = [folder for folder in folders if not folder.is_dir()]
    if absent:
        raise DataError(
            f"dataset imagefolder: {' and '.join(map(str, absent))} not found. It needs train/ and val/, each with one "
            f"folder of images for each class: name their parent with --data-dir (now {files.root}), on hosts with "
            "data_dir in the inventory; `make data SRC=<parent> NAME=<name>` brings it there"
        )
    classes = [sorted(entry.name for entry in folder.iterdir() if is_class(entry)) for folder in folders]
    if not classes[0]:
        raise DataError(f"dataset imagefolder: {folders[0]} has no class folders: put one there for each class")
    if classes[0] != classes[1]:
        only = [sorted(set(classes[k]) - set(classes[1 - k])) for k in (0, 1)]
        raise DataError(
            "dataset imagefolder: the classes differ; "
            + "; ".join(f"only in {folders[k]}: {shown(only[k])}" for k in (0, 1) if only[k])
            + ". Both need the same class folders"
        )
    try:
        train, test = (scan(folder, classes[0]) for folder in folders)
    except OSError as error:
        raise DataError(f"dataset imagefolder: cannot be read ({error}). Fix or remove it") from error
    augmentation = Augmentation(resized_crop=(0.08, 1.0), mirror=True)
    return Dataset("imagefolder", tuple(classes[0]), train, test, MEAN, STD, 224, augmentation)


def is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def shown(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def scan(root: Path, classes: list[str]) -> FolderSource:
    names, sizes, labels, empty = list[bytes](), list[int](), list[int](), list[str]()
    for label, name in enumerate(classes):
        found = sorted(images_under(os.fsencode(root / name), os.fsencode(name)))
        if not found:
            empty.append(name)
        for relative, size in found:
            names.append(relative)
            sizes.append(size)
        labels += [label] * len(found)
    if empty:
        raise DataError(
            f"dataset imagefolder: no images in {len(empty)} class folders of {root}: {shown(empty)}. "
            f"Fill or remove them; images end in {' '.join(EXTENSIONS)}"
        )
    return FolderSource(root, np.array(names), np.array(sizes, dtype=np.int64), np.array(labels, dtype=np.int64))


def images_under(folder: bytes, relative: bytes) -> Iterator[tuple[bytes, int]]:
    """(name relative to the part's folder, bytes) of each image, links followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            name = relative + b"/" + entry.name
            if entry.is_dir():
                yield from images_under(entry.path, name)
            elif os.fsdecode(entry.name).lower().endswith(EXTENSIONS):
                yield name, entry.stat().st_size
