"""CIFAR-10 and CIFAR-100: the Python (pickle) layout that torchvision leaves on disk, or the binary layout.

A pickle can run any program when it is loaded. These hold nothing but dictionaries, lists, text and byte arrays, so
that is all that the unpickler here will make.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.datasets.base import ArraySource, Augmentation, Bytes, DataError, Dataset, Files, Triple, check_labels
from train.order import Ints

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Variant:
    """label_bytes: before each image in the binary layout; the last of them counts."""

    classes: int
    python: str
    binary: str
    train: tuple[str, ...]
    test: str
    meta: str
    meta_key: str
    names: str  # of the binary layout's text file of class names
    label_key: str
    label_bytes: int
    mean: Triple
    std: Triple


VARIANTS = {
    "cifar10": Variant(
        10, "cifar-10-batches-py", "cifar-10-batches-bin",
        tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch",
        "batches.meta", "label_names", "batches.meta.txt", "labels", 1,
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Variant(
        100, "cifar-100-python", "cifar-100-binary", ("train",), "test",
        "meta", "fine_label_names", "fine_label_names.txt", "fine_labels", 2,
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    ),
}  # fmt: skip


def read(files: Files) -> Dataset:
    """The binary layout where only that is there, else the Python one. Raises DataError."""
    variant = VARIANTS[files.dataset]
    binary = (files.root / variant.binary).is_dir() and not (files.root / variant.python).is_dir()
    train, test, names = read_binary(files, variant) if binary else read_python(files, variant)
    if len(names) != variant.classes:
        raise DataError(f"dataset {files.dataset}: {len(names)} class names in {files.root}, not {variant.classes}")
    augmentation = Augmentation(padding=4, mirror=True)
    return Dataset(files.dataset, names, train, test, variant.mean, variant.std, 32, augmentation)


def read_python(files: Files, variant: Variant) -> tuple[ArraySource, ArraySource, tuple[str, ...]]:
    folder = files.folder(variant.python, *variant.train, variant.test, variant.meta)

    def part(*names: str) -> ArraySource:
        batches = [python_batch(files, folder / name, variant) for name in names]
        return ArraySource(np.concatenate([one[0] for one in batches]), np.concatenate([one[1] for one in batches]))

    meta = unpickle(files, folder / variant.meta).get(variant.meta_key)
    if not isinstance(meta, list):
        raise files.wrong(folder / variant.meta, f"has no {variant.meta_key}")
    return part(*variant.train), part(variant.test), tuple(str(name) for name in meta)


def python_batch(files: Files, path: Path, variant: Variant) -> tuple[Bytes, Ints]:
    content = unpickle(files, path)
    data, labels = content.get("data"), content.get(variant.label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise files.wrong(path, f"has no array of images with {PIXELS} bytes each")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise files.wrong(path, f"has no list of {variant.label_key}")
    numbers = np.array(labels, dtype=np.int64)
    check_labels(files, path, numbers, variant.classes, len(data))
    return data.reshape(-1, 3, 32, 32), numbers


def read_binary(files: Files, variant: Variant) -> tuple[ArraySource, ArraySource, tuple[str, ...]]:
    train, test = [f"{name}.bin" for name in variant.train], f"{variant.test}.bin"
    folder = files.folder(variant.binary, *train, test, variant.names)

    def part(*names: str) -> ArraySource:
        return ArraySource(*binary_batches(files, [folder / name for name in names], variant))

    text = (folder / variant.names).read_text(encoding="utf-8", errors="replace")
    return part(*train), part(test), tuple(text.split())


def binary_batches(files: Files, paths: list[Path], variant: Variant) -> tuple[Bytes, Ints]:
    images, labels = [], []
    for path in paths:
        table = np.fromfile(path, dtype=np.uint8)
        record = variant.label_bytes + PIXELS
        if len(table) % record:
            raise files.wrong(path, f"has {len(table)} bytes, which are no whole records of {record}")
        table = table.reshape(-1, record)
        labels.append(table[:, variant.label_bytes - 1].astype(np.int64))
        images.append(table[:, variant.label_bytes :].reshape(-1, 3, 32, 32))
        check_labels(files, path, labels[-1], variant.classes, len(table))
    return np.concatenate(images), np.concatenate(labels)


def encode_latin1(text: str, encoding: str) -> bytes:
    """In place of _codecs.encode, by which Python 3 writes bytes into old pickles; other codecs can do harm."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the text encoding {encoding}")
    return text.encode("latin1")


class ArraysOnly(pickle.Unpickler):
    """Loads plain values and NumPy arrays, and refuses all else before it is made."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return encode_latin1
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        raise pickle.UnpicklingError(f"{module}.{name}, which has no place in this dataset")


def unpickle(files: Files, path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle. Raises DataError for anything else, and runs nothing of it."""
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # whatever a corrupt or hostile pickle makes of itself
        raise files.wrong(path, f"is no intact CIFAR file ({error})") from error
    if not isinstance(content, dict):
        raise files.wrong(path, "is no CIFAR file (it holds no dictionary)")
    return {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
