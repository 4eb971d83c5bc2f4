"""Batches made on a GPU: the CPU's values within rounding, wherever the data lives, and equal bits in any request."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train import dataset_files as disk
from train.datasets import load
from train.datasets.loader import Loader
from train.settings import Settings
from train.start.group import Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("memory", ["gpu", "ram"])
@pytest.mark.parametrize("name", ["digits", "fake", "fashion-mnist", "cifar10", "stl10", "imagefolder"])
def test_values_are_those_of_the_cpu(tmp_path: Path, name: str, memory: str, channels_last: bool) -> None:
    disk.WRITERS[name](tmp_path)
    settings = Settings(dataset=name, data_dir=tmp_path, workers=0, memory=memory, channels_last=channels_last)
    dataset = load(settings, Place())
    samples = np.arange(min(len(dataset.train), 40), dtype=np.int64)
    requests = [samples, *(samples[k : k + 1] for k in range(5))]
    on_gpu, on_cpu = (Loader(dataset, settings, torch.device(kind), Place()) for kind in ("cuda:0", "cpu"))
    theirs, _ = next(on_cpu.training([samples], 2))
    ours = list(on_gpu.training(requests, 2))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert ours[0][0].is_contiguous(memory_format=layout)
    # The CPU's resize rounds to whole bytes.
    assert (ours[0][0].cpu() - theirs).abs().max() < 1 / 255 / min(dataset.std) + 1e-4
    for k, (image, label) in enumerate(ours[1:]):
        assert torch.equal(image[0], ours[0][0][k]) and int(label) == dataset.train.labels[k]
