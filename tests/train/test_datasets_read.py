"""Reading: every format as torchvision reads it; every kind of damage refused with file, place and what to do."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train import dataset_files as disk
from train.datasets import DataError, Dataset, fingerprint, load
from train.datasets.base import ArraySource, data_dir_of
from train.names import DATASETS
from train.settings import Settings
from train.start.group import Place


def read(name: str, root: Path) -> Dataset:
    return load(Settings(dataset=name, data_dir=root), Place())


def arrays(dataset: Dataset) -> tuple[ArraySource, ArraySource]:
    assert isinstance(dataset.train, ArraySource) and isinstance(dataset.test, ArraySource)
    return dataset.train, dataset.test


def test_every_dataset_of_the_settings_can_be_loaded(tmp_path: Path) -> None:
    assert set(DATASETS) == set(disk.WRITERS)
    for name in DATASETS:
        root = tmp_path / name
        disk.WRITERS[name](root)
        dataset = read(name, root)
        assert dataset.name == name
        assert dataset.classes == len(set(dataset.class_names)) >= 2
        for part in (dataset.train, dataset.test):
            assert len(part) == len(part.labels) > 0
            assert part.labels.dtype == np.int64 and part.labels.max() < dataset.classes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files(tmp_path: Path, name: str, folder: str, packed: bool) -> None:
    disk.write_mnist(tmp_path, folder, packed)
    train, test = arrays(read(name, tmp_path))
    assert np.array_equal(train.images, disk.pixels(disk.TRAIN, disk.TRAIN, 1, 28, 28))
    assert np.array_equal(test.labels, disk.labels(disk.TEST))


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("write", [disk.write_cifar_python, disk.write_cifar_binary])
def test_cifar_in_both_layouts(tmp_path: Path, write: Callable[[Path, int], None], classes: int) -> None:
    write(tmp_path, classes)
    dataset = read(f"cifar{classes}", tmp_path)
    train, test = arrays(dataset)
    assert len(train) == disk.TRAIN * (5 if classes == 10 else 1)
    assert np.array_equal(train.images[: disk.TRAIN], disk.pixels(1, disk.TRAIN, 3, 32, 32))
    assert np.array_equal(test.images, disk.pixels(6, disk.TEST, 3, 32, 32))
    assert np.array_equal(test.labels, disk.labels(disk.TEST, classes))
    assert dataset.class_names[3] == "class3"


def test_stl10_is_mapped_not_read(tmp_path: Path) -> None:
    disk.write_stl10(tmp_path)
    train, test = arrays(read("stl10", tmp_path))
    assert train.transposed and np.array_equal(train.images, disk.pixels(disk.TRAIN, disk.TRAIN, 3, 96, 96))
    assert np.array_equal(test.labels, disk.labels(disk.TEST))
    assert isinstance(train.images.base, np.memmap)


def test_arrays_are_those_of_torchvision(tmp_path: Path) -> None:
    from torchvision import datasets

    for name in ("mnist", "stl10"):
        disk.WRITERS[name](tmp_path)
    ours, theirs = arrays(read("mnist", tmp_path))[0], datasets.MNIST(str(tmp_path))
    assert np.array_equal(ours.images[:, 0], theirs.data.numpy())
    stl10 = arrays(read("stl10", tmp_path))[0]
    reader = SimpleNamespace(root=str(tmp_path), base_folder="stl10_binary")
    theirs_images = getattr(datasets.STL10, "_STL10__loadfile")(reader, "train_X.bin")[0]  # noqa: B009
    assert np.array_equal(stl10.images.transpose(0, 1, 3, 2), theirs_images)


def test_digits_keep_their_split() -> None:
    train, test = arrays(read("digits", Path("unused")))
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape == (1438, 1, 8, 8)
    assert np.bincount(test.labels).tolist() == [32, 35, 45, 34, 33, 31, 39, 46, 36, 28]


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100", "stl10"])
def test_missing_files_are_all_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        read(name, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message and "--download" in message and "--data-dir" in message
    disk.WRITERS[name](tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in files[:2]:
        path.unlink()
    with pytest.raises(DataError) as caught:
        read(name, tmp_path)
    assert all(path.name in str(caught.value) for path in files[:2])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "stl10"])
def test_a_cut_file_is_named(tmp_path: Path, name: str) -> None:
    disk.WRITERS[name](tmp_path)
    for path in sorted(tmp_path.rglob("*")):
        if path.is_dir() or path.name == "class_names.txt":
            continue
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - 1 - len(whole) // 3])
        with pytest.raises(DataError) as caught:
            read(name, tmp_path)
        assert str(path.parent / path.name.removesuffix(".gz")) in str(caught.value)
        path.write_bytes(whole)
    read(name, tmp_path)


def test_labels_out_of_range(tmp_path: Path) -> None:
    disk.write_stl10(tmp_path)
    path = tmp_path / "stl10_binary" / "train_y.bin"
    for bad in (0, 11):
        path.write_bytes(bytes([1, 2, 3, bad]) + b"\1" * (disk.TRAIN - 4))
        with pytest.raises(DataError, match=r"train_y.bin has 1 labels that are not .* sample 3"):
            read("stl10", tmp_path)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_payload_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    disk.write_cifar_python(tmp_path, 10)
    trace = tmp_path / "it ran"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps({"data": Hostile(trace), "labels": []}, protocol=protocol))
    with pytest.raises(DataError, match=r"data_batch_3 is no intact CIFAR file \(.*mkdir"):
        read("cifar10", tmp_path)
    assert not trace.exists()


def test_a_pickle_that_holds_no_dictionary_is_refused(tmp_path: Path) -> None:
    disk.write_cifar_python(tmp_path, 10)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(DataError, match=r"data_batch_3 is no CIFAR file \(it holds no dictionary\)"):
        read("cifar10", tmp_path)


def test_imagefolder_names_empty_and_differing_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train and .*val not found.*--data-dir"):
        read("imagefolder", tmp_path)
    disk.write_imagefolder(tmp_path)
    (tmp_path / "train" / "emu").mkdir()
    with pytest.raises(DataError, match=r"only in .*train: emu"):
        read("imagefolder", tmp_path)
    (tmp_path / "val" / "emu").mkdir()
    with pytest.raises(DataError, match=r"no images in 1 class folders of .*train: emu"):
        read("imagefolder", tmp_path)


def test_imagefolder_numbers_samples_as_torchvision(tmp_path: Path) -> None:
    from torchvision.datasets import ImageFolder

    disk.write_imagefolder(tmp_path)
    for hidden in tmp_path.rglob("._*"):
        hidden.unlink()
    ours = read("imagefolder", tmp_path).train
    theirs = ImageFolder(str(tmp_path / "train"))
    assert [str(ours.path(i)) for i in range(len(ours))] == sorted(path for path, _ in theirs.samples)  # type: ignore[attr-defined]
    assert ours.labels.tolist() == theirs.targets


@pytest.mark.parametrize("name", DATASETS)
def test_fingerprint_is_equal_for_equal_data_and_changes_with_it(tmp_path: Path, name: str) -> None:
    prints = []
    for host in ("a", "b"):
        disk.WRITERS[name](tmp_path / host)
        prints.append(fingerprint(read(name, tmp_path / host)))
    assert prints[0] == prints[1]
    files = sorted(path for path in (tmp_path / "b").rglob("*[0-9X]*") if path.is_file() and path.stat().st_size > 99)
    if files and name != "fashion-mnist":  # gzip would notice
        content = bytearray(files[0].read_bytes())
        content[len(content) // 2] ^= 1
        files[0].write_bytes(content + (b"x" if name == "imagefolder" else b""))
        assert fingerprint(read(name, tmp_path / "b")) != prints[0]


def test_data_dir_is_as_given_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_DATA_DIR", "/somewhere")
    assert data_dir_of(Path("given")) == Path("given")
    assert data_dir_of(None) == Path("/somewhere")
    monkeypatch.delenv("MUSTER_DATA_DIR")
    assert data_dir_of(None) == (Path("/data") if Path("/data").is_dir() else Path("data"))


def test_importing_is_cheap() -> None:
    code = (
        "import sys, train.datasets; print([m for m in ('torch', 'torchvision', 'sklearn', 'PIL') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "[]"
