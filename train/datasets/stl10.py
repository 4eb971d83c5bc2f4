"""STL-10: its binary files under stl10_binary, as torchvision leaves them, mapped into memory rather than read.

So loading takes no time, and the ranks of a host share one copy, the page cache's. The labelled 5,000 images are
trained on, the 8,000 of the test held out. The files hold each image column by column, labels from 1
(https://cs.stanford.edu/~acoates/stl10).
"""

from pathlib import Path

import numpy as np

from train.datasets.base import ArraySource, Augmentation, Dataset, Files, check_labels

FOLDER = "stl10_binary"
SIZE = 96
CLASSES = 10
MEAN, STD = (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)


def read(files: Files) -> Dataset:
    folder = files.folder(FOLDER, "train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
    train, test = (read_part(files, folder, part) for part in ("train", "test"))
    names = tuple((folder / "class_names.txt").read_text(encoding="utf-8", errors="replace").split())
    if len(names) != CLASSES:
        raise files.wrong(folder / "class_names.txt", f"has {len(names)} names, not {CLASSES}")
    return Dataset("stl10", names, train, test, MEAN, STD, 224, Augmentation(padding=12, mirror=True))


def read_part(files: Files, folder: Path, part: str) -> ArraySource:
    path, image = folder / f"{part}_X.bin", 3 * SIZE * SIZE
    size = path.stat().st_size
    if size == 0 or size % image:
        raise files.wrong(path, f"has {size} bytes, which are no whole images of {image}")
    # Copy on write: nothing is written, but torch wants arrays that could be.
    images = np.memmap(path, np.uint8, "c", shape=(size // image, 3, SIZE, SIZE))
    path = folder / f"{part}_y.bin"
    labels = np.fromfile(path, np.uint8).astype(np.int64) - 1
    check_labels(files, path, labels, CLASSES, len(images))
    return ArraySource(np.asarray(images), labels, transposed=True)
