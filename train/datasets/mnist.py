"""MNIST and Fashion-MNIST: idx files as torchvision leaves them, gzipped or not, under MNIST/raw or FashionMNIST/raw.

The idx format: two zero bytes, 8 (for uint8), the number of dimensions, each dimension as a big-endian 32-bit
number, then the bytes (http://yann.lecun.com/exdb/mnist).
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from train.datasets.base import ArraySource, Augmentation, Bytes, Dataset, Files, check_labels, numbered

FOLDERS = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CLASSES = 10


def read(files: Files) -> Dataset:
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    folder = files.folder(FOLDERS[files.dataset], *names, suffixes=("", ".gz"))
    train, test = (read_part(files, folder, part) for part in ("train", "t10k"))
    if files.dataset == "mnist":
        affine = Augmentation(degrees=10, scale=0.1, shift=0.07)
        return Dataset("mnist", numbered(CLASSES), train, test, (0.1307,) * 3, (0.3081,) * 3, 32, affine)
    crops = Augmentation(padding=2, mirror=True)
    return Dataset("fashion-mnist", FASHION, train, test, (0.2860,) * 3, (0.3530,) * 3, 32, crops)


def read_part(files: Files, folder: Path, part: str) -> ArraySource:
    images = read_idx(files, folder / f"{part}-images-idx3-ubyte", 3)
    path = folder / f"{part}-labels-idx1-ubyte"
    labels = read_idx(files, path, 1).astype(np.int64)
    check_labels(files, path, labels, CLASSES, len(images))
    return ArraySource(images[:, None], labels)


def read_idx(files: Files, path: Path, dimensions: int) -> Bytes:
    """The uint8 array in `path` or, where that is not there, `path`.gz. Raises DataError."""
    packed = path.with_name(path.name + ".gz")
    try:
        if not path.is_file():
            path = packed
            content = gzip.decompress(path.read_bytes())
        else:
            content = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise files.wrong(path, f"cannot be read ({error})") from error
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes([0, 0, 8, dimensions]):
        raise files.wrong(path, f"is no idx file of {dimensions}-dimensional bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) - head != expected:
        raise files.wrong(path, f"has {len(content) - head} bytes after its header, which announces {expected}")
    return np.frombuffer(bytearray(content), np.uint8, expected, head).reshape(shape)
