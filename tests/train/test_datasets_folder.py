"""imagefolder: torchvision's values, the same bits from worker processes, broken files, no leftovers."""

import os
import pickle
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.processes import running
from tests.train import dataset_files as disk
from tests.train.datasets_workers_run import workers_of
from train.datasets import DataError, load
from train.datasets.augment import box_draws, resized_crop
from train.datasets.decode import Job, Task, opened, tensor_of
from train.datasets.folder import FolderSource
from train.datasets.loader import Loader
from train.datasets.workers import auto_workers, chunk_of, slots_for
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
        while running(pid):
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
def test_a_workers_error_names_the_file(root: Path) -> None:
    path = root / "train" / "dog" / "0.JPEG"
    path.write_bytes(b"broken")
    settings = Settings(dataset="imagefolder", data_dir=root, workers=2, image_size=32, batch_size=6)
    dataset = load(settings, Place())
    with Loader(dataset, settings, CPU, Place()) as loader:
        pids = workers_of(loader)
        with pytest.raises(DataError) as error:
            list(loader.training([np.arange(len(dataset.train), dtype=np.int64)], 0))
    assert_gone(pids)
    message = str(error.value)
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


# -- what Pillow makes of a file -------------------------------------------------------------------------------------

RAMP = np.linspace(0, 65535, 48 * 48).reshape(48, 48).astype(np.uint16)


def png16(channels: int) -> bytes:
    """A PNG of 16 bits for each colour, which Pillow cannot write."""
    pixels = np.stack([np.roll(RAMP, 7 * channel, 0) for channel in range(channels)], -1)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", 48, 48, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def deep_images(folder: Path) -> dict[str, Path]:
    """Images of 16 bits whose red is RAMP."""
    files = {f"{channels}.png": png16(channels) for channels in (1, 2, 3, 4)}
    files["grey.pgm"] = b"P5 48 48 65535\n" + RAMP.astype(">u2").tobytes()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, kind in (("little.tif", "<u2"), ("big.tif", ">u2")):
        Image.fromarray(RAMP.astype(kind)).save(folder / name)
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def whole(path: Path) -> torch.Tensor:
    with opened(path) as image:
        return tensor_of(path, image, (0, 0, *image.size))[0]


def test_images_of_16_bits_are_scaled_to_8(tmp_path: Path) -> None:
    for name, path in deep_images(tmp_path).items():
        red = whole(path)[0].numpy()
        assert np.array_equal(red, (RAMP >> 8).astype(np.uint8)), name
        if name in ("1.png", "2.png", "grey.pgm", "little.tif", "big.tif"):
            assert whole(path)[0].equal(whole(path)[1]) and whole(path)[0].equal(whole(path)[2])


@pytest.mark.parametrize("epoch", [0, None])
def test_they_are_in_training_and_evaluation(root: Path, epoch: int | None) -> None:
    part = root / ("val" if epoch is None else "train") / "cat"
    for path in [path for path in part.rglob("*.*") if path.is_file()]:
        path.unlink()
    (part / "0.png").write_bytes(png16(1))
    image = decoded(job(root, augment="none"), epoch, 1)[0].float()
    assert 120 < image.mean() < 136 and image.max() < 255


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_a_mode_without_a_white_is_refused_by_name(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "a.tif"
    Image.fromarray(np.ones((9, 9), kind)).save(path)
    with pytest.raises(DataError, match=rf"{path} is no image .*32 bits, Pillow's mode [FI], .*save it with 8 or 16"):
        whole(path)


def test_other_modes_are_what_torchvision_makes_of_them(tmp_path: Path) -> None:
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms.v2.functional import pil_to_tensor

    colours, palette = disk.picture(3, 20, 16), disk.picture(3, 20, 16).convert("P")
    clear = colours.copy()
    clear.putalpha(disk.picture(4, 20, 16).convert("L"))
    colours.convert("CMYK").save(tmp_path / "cmyk.jpg")
    clear.save(tmp_path / "rgba.png")
    clear.convert("LA").save(tmp_path / "la.png")
    colours.convert("1").save(tmp_path / "bits.png")
    for name, transparent in (("one.png", 3), ("bytes.png", bytes(range(200)))):
        palette.save(tmp_path / name, transparency=transparent)
    for path in tmp_path.iterdir():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = whole(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about the palette
            assert ours.equal(pil_to_tensor(pil_loader(str(path)))), path


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "ranks", "on_gpu", "expected"),
    [(128, 8, True, 16), (192, 8, True, 24), (200, 1, True, 64), (2, 4, True, 1), (64, 1, False, 16)],
)
def test_workers_are_the_cores_of_a_rank(
    cores: int, ranks: int, on_gpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert auto_workers(ranks, on_gpu) == expected


def test_a_worker_gets_no_list_of_all_files() -> None:
    """Of ImageNet it would be 70 MB for each of them."""
    names, numbers = np.full(100_000, b"class/0123456789.jpg"), np.zeros(100_000, dtype=np.int64)
    source = FolderSource(Path("train"), names, numbers, numbers)
    work = Job(source, source, None, 0, SIZE, False)
    assert len(pickle.dumps(work.for_workers())) < 5000
    assert len(pickle.dumps(work.task(np.arange(16, dtype=np.int64), 0))) < 5000


COPIES = """
import os, sys
from pathlib import Path
import numpy as np, torch
from train.datasets import load
from train.datasets.loader import Loader
from train.settings import Settings
from train.start.group import Place
torch.set_num_threads(4)
settings = Settings(dataset="imagefolder", data_dir=Path(sys.argv[1]), image_size=224, workers=0, memory="ram")
dataset = load(settings, Place())
maker = Loader(dataset, settings, torch.device("cpu"), Place()).maker
pixels = torch.randint(0, 255, (8, 3, 224, 224), dtype=torch.uint8)
maker.normalised = lambda images: images  # a GPU's part, or evaluation's
before = len(os.listdir("/proc/self/task"))
made, _ = maker.batch(np.arange(8, dtype=np.int64), iter([(pixels[:4], []), (pixels[4:], [])]), True)
print(len(os.listdir("/proc/self/task")) - before, np.array_equal(made.numpy(), pixels.numpy()))
"""


@pytest.mark.slow
def test_chunks_are_copied_without_threads_beside_busy_workers(root: Path) -> None:
    command = [sys.executable, "-c", COPIES, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "0 True\n", done.stderr
