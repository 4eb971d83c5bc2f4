"""Policies and random erasing: torchvision's own changes, a function of seed, epoch and sample number alone."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.train import dataset_files as disk
from tests.train.datasets_workers_run import workers_of
from train.datasets import Dataset, load
from train.datasets.augment import Shifts, shifts
from train.datasets.base import ArraySource, DataError
from train.datasets.file_batches import FileBatches
from train.datasets.loader import Loader
from train.datasets.policy import ERASING_AXIS, POLICY_AXIS
from train.datasets.transform import crop
from train.order import word
from train.settings import Settings, problems
from train.start.group import Place

CPU = torch.device("cpu")
NAMES = ("fake", "fashion-mnist", "cifar10", "stl10", "imagefolder")
SAMPLES = np.arange(10, dtype=np.int64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in NAMES:
        disk.WRITERS[name](folder)
    return folder


def make(root: Path, name: str, **options: Any) -> tuple[Dataset, Loader]:
    settings = Settings(**{"dataset": name, "data_dir": root, "workers": 0, "image_size": 32, **options})
    dataset = load(settings, Place())
    return dataset, Loader(dataset, settings, CPU, Place())


def images(loader: Loader, *requests: Any, epoch: int = 3) -> list[Tensor]:
    return [batch[0].clone() for batch in loader.training(requests, epoch)]


@pytest.mark.parametrize(
    ("augment", "channels_last"),
    [
        ("standard", True),
        ("trivial", False),
        ("rand", True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("standard", False), ("trivial", True), ("rand", False))
        ),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_has_the_same_bits_in_any_request(root: Path, name: str, augment: str, channels_last: bool) -> None:
    options = {"augment": augment, "random_erasing": 0.5, "channels_last": channels_last}
    count = min(len(make(root, name)[0].train), len(SAMPLES))
    samples = SAMPLES[:count]
    (whole,) = images(make(root, name, **options)[1], samples)
    shuffled = np.random.default_rng(1).permutation(samples)
    requests = [shuffled[:1], shuffled[1:4], shuffled[4:], shuffled[[2, 2]]]
    for request, part in zip(requests, images(make(root, name, **options)[1], *requests), strict=True):
        assert part.equal(whole[torch.from_numpy(request)])
    (other,) = images(make(root, name, **options)[1], samples, epoch=4)
    (seeded,) = images(make(root, name, seed=1, **options)[1], samples)
    assert not other.equal(whole) and not seeded.equal(whole)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_images_are_left_alone(root: Path, name: str) -> None:
    held_out = [np.arange(4, dtype=np.int64)]
    (plain,), (changed,) = (
        [batch[0] for batch in make(root, name, **options)[1].held_out(held_out)]
        for options in ({}, {"augment": "trivial", "random_erasing": 1.0})
    )
    assert plain.equal(changed)


def cropped(dataset: Dataset, epoch: int) -> Tensor:
    """uint8: what `--augment standard` makes of CIFAR's images, before they are normalised."""
    assert isinstance(dataset.train, ArraySource)
    change: Shifts = shifts(dataset.augmentation, 1.0, 0, epoch, SAMPLES)
    return crop(torch.from_numpy(dataset.train.images), SAMPLES, change)


@pytest.mark.parametrize(("augment", "transform"), [("trivial", "TrivialAugmentWide"), ("rand", "RandAugment")])
def test_the_policy_is_torchvisions_after_the_usual_changes(root: Path, augment: str, transform: str) -> None:
    from torchvision.transforms import v2

    dataset, loader = make(root, "cifar10", augment=augment)
    (ours,) = images(loader, SAMPLES)
    usual, policy = cropped(dataset, 3), getattr(v2, transform)()
    for sample, image in enumerate(ours):
        torch.manual_seed(word(0, 3, sample, POLICY_AXIS))
        theirs = v2.functional.to_image(policy(Image.fromarray(usual[sample].permute(1, 2, 0).numpy())))
        theirs = v2.functional.to_dtype(theirs, torch.float32, scale=True)
        theirs = v2.functional.normalize(theirs, list(dataset.mean), list(dataset.std))
        assert torch.allclose(image, theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["cifar10", "imagefolder"])
def test_erasing_is_torchvisions_on_the_normalised_image(root: Path, name: str) -> None:
    from torchvision.transforms import v2

    dataset, plain = make(root, name)
    samples = SAMPLES[: len(dataset.train)]
    (whole,), (ours,) = images(plain, samples), images(make(root, name, random_erasing=0.6)[1], samples)
    eraser, erased = v2.RandomErasing(0.6), 0
    for sample, image in enumerate(ours):
        torch.manual_seed(word(0, 3, sample, ERASING_AXIS))
        assert image.equal(eraser(whole[sample]))
        erased += not image.equal(whole[sample])
    assert 0 < erased < len(samples)


@pytest.mark.parametrize("name", ["cifar10", "imagefolder"])
def test_no_generator_is_used_up(root: Path, name: str) -> None:
    """Dropout draws from torch's; Python's and NumPy's would not be seeded by the sample."""
    _, loader = make(root, name, augment="trivial", random_erasing=0.5)
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))
    images(loader, SAMPLES[:8], SAMPLES[:4])
    assert torch.get_rng_state().equal(before[0])
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before[1:]


@pytest.mark.parametrize("augment", ["trivial", "rand"])
def test_policies_are_refused_where_they_would_spoil_or_do_nothing(augment: str, root: Path) -> None:
    for settings, said in (
        (Settings(dataset="digits", augment=augment), "it is made for photographs; --dataset digits is handwriting"),
        (Settings(dataset="cifar10", augment=augment, memory="gpu"), "changes images in the CPU's memory"),
    ):
        (problem,) = problems(settings, 1)
        assert said in problem
    digits = load(Settings(dataset="digits"), Place())
    with pytest.raises(DataError, match=f"--augment {augment}: dataset digits has turns"):
        Loader(digits, Settings(dataset="own", augment=augment), CPU, Place())


@pytest.mark.parametrize("part", [-0.1, 1.1, float("nan")])
def test_a_probability_is_a_probability(part: float) -> None:
    assert problems(Settings(random_erasing=part), 1) == [f"--random-erasing {part}: from 0 to 1"]
    assert problems(Settings(random_erasing=1.0), 1) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cifar10", *(pytest.param(name, marks=pytest.mark.long) for name in ("stl10", "imagefolder"))]
)
def test_workers_give_the_bits_of_this_process(root: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    samples = np.arange(8, dtype=np.int64)
    options = {"augment": "trivial", "random_erasing": 0.5, "batch_size": 6}
    with make(root, name, workers=2, **options)[1] as loader:
        assert os.getpid() not in workers_of(loader)
        theirs = torch.cat(images(loader, samples[:3], samples[3:4], samples[4:8], epoch=1))
    assert theirs.equal(images(make(root, name, **options)[1], samples, epoch=1)[0])
    assert capfd.readouterr().err == ""


def test_arrays_with_a_policy_are_made_by_workers_only_in_front_of_a_gpu(root: Path) -> None:
    _, loader = make(root, "cifar10", augment="trivial", workers=-1)
    assert isinstance(loader.maker, FileBatches) and loader.maker.pool.executor is None
