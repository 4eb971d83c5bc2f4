"""Small datasets written in the real on-disk formats, with known content: `pixels(seed, shape)`, label i % classes."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from train.datasets.base import Bytes

TRAIN, TEST = 10, 5


def pixels(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def labels(count: int, classes: int = 10) -> npt.NDArray[np.uint8]:
    return (np.arange(count) % classes).astype(np.uint8)


def write_mnist(root: Path, folder: str = "MNIST", packed: bool = False) -> None:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        for kind, array in (("images-idx3", pixels(count, count, 28, 28)), ("labels-idx1", labels(count))):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            content = head + array.tobytes()
            name = f"{part}-{kind}-ubyte"
            if packed:
                (raw / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (raw / name).write_bytes(content)


def write_cifar_python(root: Path, classes: int) -> None:
    """As the originals: protocol 2, text keys."""
    folder = root / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder.mkdir(parents=True)
    batches = {f"data_batch_{number}": number for number in range(1, 6)} if classes == 10 else {"train": 1}
    key = "labels" if classes == 10 else "fine_labels"
    for name, seed in {**batches, ("test_batch" if classes == 10 else "test"): 6}.items():
        count = TEST if seed == 6 else TRAIN
        content = {"data": pixels(seed, count, 3072), key: labels(count, classes).tolist(), "filenames": ["a.png"]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    names = [f"class{number}" for number in range(classes)]
    meta = {"label_names": names} if classes == 10 else {"fine_label_names": names, "coarse_label_names": ["all"]}
    (folder / ("batches.meta" if classes == 10 else "meta")).write_bytes(pickle.dumps(meta, protocol=2))


def write_cifar_binary(root: Path, classes: int) -> None:
    folder = root / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    folder.mkdir(parents=True)
    batches = {f"data_batch_{number}": number for number in range(1, 6)} if classes == 10 else {"train": 1}
    for name, seed in {**batches, ("test_batch" if classes == 10 else "test"): 6}.items():
        count = TEST if seed == 6 else TRAIN
        columns = [labels(count, classes)[:, None], pixels(seed, count, 3072)]
        if classes == 100:
            columns.insert(0, np.full((count, 1), 19, np.uint8))  # the coarse label
        np.concatenate(columns, axis=1).tofile(folder / f"{name}.bin")
    names = "\n".join(f"class{number}" for number in range(classes)) + "\n\n"
    (folder / ("batches.meta.txt" if classes == 10 else "fine_label_names.txt")).write_text(names)


def write_stl10(root: Path) -> None:
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for part, count in (("train", TRAIN), ("test", TEST)):
        pixels(count, count, 3, 96, 96).tofile(folder / f"{part}_X.bin")
        (labels(count) + 1).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("\n".join(f"class{number}" for number in range(10)))


def write_imagefolder(root: Path, per_class: int = 4) -> None:
    """Two classes; JPEGs of several sizes and modes, PNGs, one nested folder, one hidden file to pass over."""
    for part in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = root / part / name
            (folder / "more").mkdir(parents=True)
            for number in range(per_class):
                image = picture(number + 100 * label, 40 + 9 * number, 64 - 5 * number)
                where = folder / "more" if number == 1 else folder
                if number % 3 == 2:
                    image.convert("P").save(where / f"{number}.png")
                else:
                    image.convert("L" if number == 3 else "RGB").save(where / f"{number}.JPEG", quality=90)
            (folder / "._0.jpg").write_bytes(b"not an image")


def picture(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(pixels(seed, 6, 8, 3)).resize((width, height), Image.Resampling.BICUBIC)


WRITERS = {
    "mnist": write_mnist,
    "fashion-mnist": lambda root: write_mnist(root, "FashionMNIST", packed=True),
    "cifar10": lambda root: write_cifar_python(root, 10),
    "cifar100": lambda root: write_cifar_python(root, 100),
    "stl10": write_stl10,
    "imagefolder": write_imagefolder,
    "digits": lambda root: None,
    "fake": lambda root: None,
}
