"""Batches: equal bits in whatever company, pure functions of seed and epoch, and torchvision's own values."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from tests.train import dataset_files as disk
from train.datasets import Dataset, load
from train.datasets.augment import TRIES, Shifts, resized_crop
from train.datasets.base import ArraySource
from train.datasets.loader import Loader
from train.datasets.memory import Recycler
from train.datasets.transform import crop, crop_on_gpu
from train.order import Ints, uniform
from train.settings import Settings
from train.start.group import Place

CPU = torch.device("cpu")
NAMES = ("digits", "fake", "mnist", "fashion-mnist", "cifar10", "stl10")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for write in disk.WRITERS.values():
        write(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(root: Path, name: str, **options: object) -> tuple[Dataset, Loader]:
    settings = Settings(dataset=name, data_dir=root, workers=0, **options)  # type: ignore[arg-type]
    dataset = load(settings, Place())
    return dataset, Loader(dataset, settings, CPU, Place())


def numbers(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def training(loader: Loader, *requests: Ints, epoch: int = 0) -> list[tuple[Tensor, ...]]:
    return list(loader.training(requests, epoch))


@pytest.mark.parametrize("options", [{}, {"channels_last": True}, {"memory": "disk"}, {"image_size": 40}])
@pytest.mark.parametrize("name", [*NAMES, "imagefolder"])
def test_a_sample_has_the_same_bits_in_any_request(root: Path, name: str, options: dict[str, object]) -> None:
    dataset, loader = make(root, name, **options)
    samples = np.arange(min(len(dataset.train), 40), dtype=np.int64)
    whole, labels = training(loader, samples, epoch=3)[0]
    assert torch.equal(labels, torch.from_numpy(dataset.train.labels[samples]))
    _, again = make(root, name, **options)  # another rank: other requests, in another order, one of them empty
    shuffled = np.random.default_rng(1).permutation(samples)
    requests = [shuffled[:1], shuffled[1:1], shuffled[1:8], shuffled[8:], numbers(*[int(shuffled[0])] * 3)]
    for request, (images, _) in zip(requests, training(again, *requests, epoch=3), strict=True):
        assert torch.equal(images, whole[torch.from_numpy(request)])
    held_out = np.arange(len(dataset.test), dtype=np.int64)[:20]
    parts = list(loader.held_out([held_out, held_out[2:3]]))
    assert torch.equal(parts[0][0][2:3], parts[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@given(cut=st.integers(1, 39))
@hypothesis_settings(max_examples=12, deadline=None)
def test_bits_do_not_depend_on_threads_or_the_cut(threads: int, cut: int) -> None:
    expected = WHOLE()
    torch.set_num_threads(threads)
    _, loader = make(Path("unused"), "digits")
    samples = np.arange(40, dtype=np.int64)
    parts = [images for images, _ in loader.training([samples[:cut], samples[cut:]], 1)]
    assert torch.equal(torch.cat(parts), expected)


def WHOLE() -> Tensor:
    _, loader = make(Path("unused"), "digits")
    return training(loader, np.arange(40, dtype=np.int64), epoch=1)[0][0].clone()


@pytest.mark.parametrize("name", [*NAMES, "imagefolder"])
def test_form_of_a_batch(root: Path, name: str) -> None:
    dataset, loader = make(root, name)
    _, last = make(root, name, channels_last=True)
    images, labels = training(loader, numbers(0, 1, 2))[0]
    assert images.shape == (3, 3, dataset.image_size, dataset.image_size)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64 and images.is_contiguous()
    other = training(last, numbers(0, 1, 2))[0][0]
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(images, other, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "imagefolder"])
def test_augmentation_is_a_function_of_seed_and_epoch(root: Path, name: str) -> None:
    def images(epoch: int, **options: object) -> Tensor:
        return training(make(root, name, **options)[1], numbers(0, 1, 2, 3, 4), epoch=epoch)[0][0]

    assert torch.equal(images(1), images(1))
    assert not torch.equal(images(1), images(2))
    assert not torch.equal(images(1), images(1, seed=1))
    assert torch.equal(images(1, augment="none"), images(2, augment="none"))
    assert torch.equal(images(1, memory="ram"), images(1, memory="disk"))


def test_the_gpus_way_of_cropping_gives_the_same() -> None:
    images = torch.from_numpy(disk.pixels(1, 30, 3, 9, 9))
    places = np.random.default_rng(2).integers(-4, 5, (2, 30))
    change = Shifts(places[0], places[1], np.arange(30) % 2 == 0)
    every = np.arange(30, dtype=np.int64)
    assert torch.equal(crop(images, every, change), crop_on_gpu(images, change))


def test_global_generators_are_left_alone(root: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    training(make(root, "cifar10")[1], numbers(0, 1))
    training(make(root, "imagefolder")[1], numbers(0, 1))
    assert torch.equal(torch.rand(1), expected)


def normalised(dataset: Dataset, images: Tensor) -> Tensor:
    from torchvision.transforms.v2 import functional

    floats = functional.to_dtype(images, torch.float32, scale=True)
    return functional.normalize(floats, list(dataset.mean), list(dataset.std))


@pytest.mark.parametrize("memory", ["ram", "disk"])
def test_held_out_stl10_is_torchvisions_resize_and_normalize(root: Path, memory: str) -> None:
    from torchvision.transforms.v2 import functional

    dataset, loader = make(root, "stl10", memory=memory)
    assert isinstance(dataset.test, ArraySource)
    upright = torch.from_numpy(dataset.test.images.transpose(0, 1, 3, 2).copy())
    theirs = normalised(dataset, functional.resize(upright, [224, 224], antialias=True))
    for _ in range(2):
        ours = next(loader.held_out([np.arange(len(upright), dtype=np.int64)]))[0]
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("channels_last", [False, True])
def test_cifar_crops_are_windows_of_the_padded_image(root: Path, channels_last: bool) -> None:
    from torchvision.transforms.v2 import functional

    dataset, loader = make(root, "cifar10", channels_last=channels_last)
    assert isinstance(dataset.train, ArraySource)
    seen = set()
    samples = np.arange(40, dtype=np.int64)
    padded = functional.pad(torch.from_numpy(dataset.train.images[:40]), [4])
    for sample, image in zip(samples.tolist(), training(loader, samples, epoch=5)[0][0], strict=True):
        top, left = (int(uniform(0, 5, sample, axis)[0] * 9) for axis in (0, 1))
        mirror = bool(uniform(0, 5, sample, 4)[0] < 0.5)
        window = functional.crop(padded[sample], top, left, 32, 32)
        window = functional.horizontal_flip(window) if mirror else window
        assert torch.allclose(image, normalised(dataset, window), atol=1e-5)
        seen.add((top, left, mirror))
    assert len({top for top, _, _ in seen}) == 9 and {mirror for _, _, mirror in seen} == {False, True}


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 1000))
def test_resized_crop_lies_within_the_image(width: int, height: int, sample: int) -> None:
    draws = uniform(0, 0, sample, np.arange(2 * TRIES + 3))
    left, top, right, bottom = resized_crop(draws, width, height, (0.08, 1.0))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_resized_crop_spreads_over_areas_and_ratios() -> None:
    boxes = [
        resized_crop(uniform(0, 0, sample, np.arange(2 * TRIES + 3)), 400, 300, (0.08, 1.0)) for sample in range(2000)
    ]
    sizes = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
    areas, ratios = sizes.prod(1) / 120_000, sizes[:, 0] / sizes[:, 1]
    assert 0.07 < areas.min() < 0.1 and areas.max() > 0.85
    assert 0.74 < ratios.min() < 0.77 and 1.3 < ratios.max() < 1.35


def test_memory_of_a_batch_is_used_again_only_when_nobody_holds_it() -> None:
    recycler = Recycler()
    first = recycler.empty(12)
    address, view = first.data_ptr(), first.view(3, 4)[1]
    del first
    assert recycler.empty(12).data_ptr() != address  # the view lives
    weight = torch.ones(4, requires_grad=True)
    graph = (view * weight).sum()
    del view
    assert recycler.empty(12).data_ptr() != address  # autograd has it
    graph.backward()
    del graph
    assert address in {recycler.empty(12).data_ptr()}


def test_batches_that_are_kept_stay_as_they_are(root: Path) -> None:
    _, loader = make(root, "stl10")
    requests = [numbers(k, k + 1) for k in range(8)]
    kept = training(loader, *requests)
    fresh = [images.clone() for images, _ in (training(loader, one)[0] for one in requests)]
    assert all(torch.equal(one[0], other) for one, other in zip(kept, fresh, strict=True))


def test_waiting_is_measured(root: Path) -> None:
    _, loader = make(root, "stl10")
    assert loader.waited == 0
    training(loader, numbers(0, 1, 2))
    assert 0 < loader.waited < 60
