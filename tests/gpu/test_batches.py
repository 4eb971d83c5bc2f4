"""Batches made on a GPU: the CPU's values within rounding, wherever the data lives, equal bits in any request, and none
that is overwritten while the model works on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train import dataset_files as disk
from train.datasets import Dataset, load
from train.datasets.loader import Loader
from train.datasets.sidestream import on_side_stream
from train.settings import Settings
from train.start.group import Place

pytestmark = pytest.mark.slow  # all of them together, on the CPU

CPU = torch.device("cpu")
BATCHES, SAMPLES = 60, 24  # of the tests under stress; samples of a batch
BUSY_CYCLES = 2_000_000  # of a GPU's clock: about a millisecond


def busy(device: torch.device) -> None:
    """The device falls behind the host by about a millisecond."""
    if device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)


def tolerance(dataset: Dataset) -> float:
    """The CPU's resize rounds to whole bytes."""
    return 1 / 255 / min(dataset.std) + 1e-4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("memory", [pytest.param("gpu", marks=pytest.mark.gpu), "ram"])
@pytest.mark.parametrize("name", ["digits", "fake", "fashion-mnist", "cifar10", "stl10", "imagefolder"])
def test_values_are_those_of_the_cpu(
    device: torch.device, tmp_path: Path, name: str, memory: str, channels_last: bool
) -> None:
    if name == "digits":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    disk.WRITERS[name](tmp_path)
    settings = Settings(dataset=name, data_dir=tmp_path, workers=0, memory=memory, channels_last=channels_last)
    dataset = load(settings, Place())
    samples = np.arange(min(len(dataset.train), 40), dtype=np.int64)
    requests = [samples, *(samples[k : k + 1] for k in range(5))]
    mine, on_cpu = (Loader(dataset, settings, where, Place()) for where in (device, CPU))
    theirs, _ = next(on_cpu.training([samples], 2))
    ours = list(mine.training(requests, 2))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert ours[0][0].is_contiguous(memory_format=layout) and ours[0][0].device == device
    assert (ours[0][0].cpu() - theirs).abs().max() < tolerance(dataset)
    for k, (image, label) in enumerate(ours[1:]):
        assert torch.equal(image[0], ours[0][0][k]) and int(label) == dataset.train.labels[k]


@pytest.mark.parametrize(
    ("name", "memory", "workers"),
    [
        pytest.param("fake", "gpu", 0, marks=pytest.mark.gpu),
        ("fake", "ram", 0),
        ("digits", "ram", 0),
        pytest.param("imagefolder", "auto", 2, marks=pytest.mark.long),
    ],
)
def test_no_batch_is_overwritten_while_the_device_is_behind(
    device: torch.device, tmp_path: Path, name: str, memory: str, workers: int
) -> None:
    """The host runs ahead of a busy device and lets go of each batch at once, so that its memory is taken for others
    (of the side stream, of pinned memory, of workers' slots). What the device saw is what the CPU makes."""
    if name == "digits":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    disk.WRITERS[name](tmp_path)
    settings = Settings(
        dataset=name, data_dir=tmp_path, workers=workers, memory=memory, channels_last=True, image_size=32
    )
    dataset = load(settings, Place())
    random = np.random.default_rng(3)
    requests = [random.integers(0, len(dataset.train), SAMPLES, dtype=np.int64) for _ in range(BATCHES)]
    seen = list[tuple[Tensor, Tensor]]()
    with Loader(dataset, settings, device, Place()) as loader:
        for images, labels in loader.training(requests, 1):
            busy(device)
            seen.append((images * 1.0, labels * 1))  # read when the device comes to it, as a model reads them
            del images, labels
    with Loader(dataset, settings, CPU, Place()) as loader:
        wanted = [(images.clone(), labels.clone()) for images, labels in loader.training(requests, 1)]
    assert len(seen) == len(wanted) == BATCHES
    for (images, labels), (theirs, their_labels) in zip(seen, wanted, strict=True):
        assert (images.cpu() - theirs).abs().max() < tolerance(dataset)
        assert labels.cpu().equal(their_labels)


@pytest.mark.gpu
def test_the_side_stream_and_the_models_stream_do_not_race(device: torch.device) -> None:
    """Each batch is written by a slow kernel of the side stream and read at once on the other one, hundreds of times,
    while memory of earlier batches is freed and taken again."""

    def make(number: int) -> tuple[Tensor, Tensor]:
        torch.cuda._sleep(BUSY_CYCLES // 20)
        return torch.full((1 << 16,), float(number), device=device), torch.full((8,), number, device=device)

    sums, batches = list[Tensor](), on_side_stream(range(500), make, torch.cuda.Stream(device))
    for number, (images, labels) in enumerate(batches):
        busy(device) if number % 7 == 0 else None
        sums.append(images.sum(dtype=torch.float64) + labels.sum())
        del images, labels
        torch.empty(1 << 16, device=device).fill_(-1.0)  # takes what was freed
    totals: Any = torch.stack(sums).tolist()
    assert totals == [float(number * ((1 << 16) + 8)) for number in range(500)]
