"""imagefolder: torchvision's values, the same bits from worker processes, broken files, no leftovers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.train import dataset_files as disk
from train.datasets import DataError, load
from train.datasets.augment import box_draws, resized_crop
from train.datasets.decode import Job, Task
from train.datasets.folder import FolderSource
from train.datasets.loader import Loader
from train.datasets.workers import chunk_of, slots_for
from train.settings import Settings
from train.start.group import Place

CPU = torch.device("cpu")
SIZE = 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    disk.write_imagefolder(tmp_path / "data")
    return tmp_path / "data"


def job(root: Path, augment: str = "standard", size: int = SIZE) -> Job:
    dataset = load(Settings(dataset="imagefolder", data_dir=root), Place())
    assert isinstance(dataset.train, FolderSource) and isinstance(dataset.test, FolderSource)
    change = dataset.augmentation if augment == "standard" else None
    return Job(dataset.train, dataset.test, change, seed=0, size=size, channels_last=False)


def decoded(work: Job, epoch: int | None, count: int) -> torch.Tensor:
    out = torch.empty((count, *work.shape), dtype=torch.uint8)
    work.into(out, Task(np.arange(count, dtype=np.int64), epoch))
    return out


def test_held_out_images_are_torchvisions_resize_and_center_crop(root: Path) -> None:
    from torchvision.transforms.v2 import functional

    work = job(root)
    ours = decoded(work, None, len(work.test))
    for index, image in enumerate(ours):
        theirs = functional.pil_to_tensor(Image.open(work.test.path(index)).convert("RGB"))
        theirs = functional.resize(theirs, [round(SIZE * 256 / 224)], antialias=True)
        assert torch.equal(image, functional.center_crop(theirs, [SIZE, SIZE]))


def test_training_images_are_torchvisions_resized_crop(root: Path) -> None:
    from torchvision.transforms.v2 import functional

    work, epoch = job(root), 2
    indices = np.arange(len(work.train), dtype=np.int64)
    draws = box_draws(0, epoch, indices)
    for index, image in enumerate(decoded(work, epoch, len(indices))):
        whole = functional.pil_to_tensor(Image.open(work.train.path(index)).convert("RGB"))
        left, top, right, bottom = resized_crop(draws[index], whole.shape[2], whole.shape[1], (0.08, 1.0))
        theirs = functional.resized_crop(whole, top, left, bottom - top, right - left, [SIZE, SIZE], antialias=True)
        theirs = functional.horizontal_flip(theirs) if draws[index, -1] < 0.5 else theirs
        assert torch.equal(image, theirs)


def test_large_jpegs_are_decoded_smaller_and_look_the_same(tmp_path: Path) -> None:
    disk.write_imagefolder(tmp_path)
    for path in tmp_path.rglob("0.JPEG"):
        disk.picture(1, 800, 600).save(path, quality=95)
    work = job(tmp_path, augment="none")
    ours = decoded(work, 0, 1)[0].int()
    whole = Image.open(work.train.path(0)).resize((49, 37), Image.Resampling.BILINEAR)
    theirs = torch.from_numpy(np.array(whole.crop((8, 2, 40, 34)))).permute(2, 0, 1).int()
    assert (ours - theirs).abs().float().mean() < 3


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_an_image_that_cannot_be_decoded_is_named(root: Path, content: bytes | None) -> None:
    path = root / "train" / "cat" / "0.JPEG"
    path.write_bytes(path.read_bytes()[:700] if content is None else content)
    settings = Settings(dataset="imagefolder", data_dir=root, image_size=SIZE, workers=0)
    loader = Loader(load(settings, Place()), settings, CPU, Place())
    with pytest.raises(DataError, match=rf"{path} is no image that can be decoded .*Replace or remove"):
        list(loader.training([np.array([0, 1])], 0))


def program(action: str, root: Path, out: Path) -> list[int]:
    """Runs it; returns the process ids of it and its workers."""
    command = [sys.executable, "-m", "tests.train.datasets_workers_run", action, str(root), str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == (-9 if action == "killed" else 0), result.stderr
    assert action == "killed" or not result.stderr
    return [int(word) for word in out.with_suffix(".pids").read_text().split()]


def assert_gone(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            os.sched_yield()  # bounded by the test's own timeout in CI


@pytest.mark.slow
def test_workers_give_the_bits_of_this_process_and_leave_nothing(root: Path, tmp_path: Path) -> None:
    pids = program("batches", root, tmp_path / "out.pt")
    assert_gone(pids)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]
    training, held_out = torch.load(tmp_path / "out.pt", weights_only=True)
    settings = Settings(dataset="imagefolder", data_dir=root, image_size=SIZE, workers=0)
    dataset = load(settings, Place())
    loader = Loader(dataset, settings, CPU, Place())
    assert torch.equal(training, next(loader.training([np.arange(len(dataset.train))], 1))[0])
    assert torch.equal(held_out, next(loader.held_out([np.arange(len(dataset.test))]))[0])


@pytest.mark.slow
def test_a_workers_error_names_the_file(root: Path, tmp_path: Path) -> None:
    path = root / "train" / "dog" / "0.JPEG"
    path.write_bytes(b"broken")
    assert_gone(program("broken", root, tmp_path / "out"))
    message = (tmp_path / "out").read_text()
    assert message.startswith("dataset imagefolder:") and str(path) in message and "Traceback" not in message


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(root: Path, tmp_path: Path) -> None:
    assert_gone(program("killed", root, tmp_path / "out"))


def test_held_out_images_are_decoded_once(root: Path) -> None:
    settings = Settings(dataset="imagefolder", data_dir=root, image_size=SIZE, workers=0, memory="ram")
    loader = Loader(load(settings, Place()), settings, CPU, Place())
    requests = [np.array([0, 1, 2]), np.array([3]), np.array([3])]
    first = [images.clone() for images, _ in loader.held_out(requests)]
    for path in (root / "val").rglob("*.*"):
        path.unlink()
    again = list(loader.held_out(requests[::-1]))
    assert all(torch.equal(one, other) for one, (other, _) in zip(first, again[::-1], strict=True))


def test_chunks_and_slots() -> None:
    assert chunk_of(64, 1) == 16 and chunk_of(8, 4) == 2 and chunk_of(1, 8) == 1
    assert slots_for(100, 16, 64, 2, 1) == 10
    with pytest.raises(DataError, match="remount,size"):
        slots_for(1 << 40, 16, 64, 2, 1)
