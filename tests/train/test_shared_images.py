"""Promise: ranks of one host prepare and keep each image once, and see the bits that a rank alone sees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.processes import Forked
from tests.train import dataset_files as disk
from train.datasets import load
from train.datasets.loader import Loader
from train.settings import Settings
from train.start.group import Place

ROOT = Path(__file__).resolve().parents[2]


def said_by_ranks(data: Path, out: Path, *how: str) -> list[dict[str, Any]]:
    out.mkdir()
    process = Forked("tests.train.shared_images_ranks", [str(data), str(out), *how], ROOT, os.environ)
    assert process.wait() == 0, process.errors()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def alone(data: Path) -> list[list[str]]:
    """The same images of each rank and epoch, made by one that keeps none."""
    settings = Settings(dataset="stl10", data_dir=data, image_size=32, workers=0, memory="disk")
    dataset = load(settings, Place())
    half = np.arange(len(dataset.train), dtype=np.int64).reshape(2, -1)
    with Loader(dataset, settings, torch.device("cpu"), Place()) as loader:
        return [
            [
                images.numpy().tobytes().hex()
                for epoch in range(2)
                for images, _ in loader.training([half[(rank + epoch) % 2]], epoch)
            ]
            for rank in range(2)
        ]


@pytest.mark.slow
def test_ranks_of_a_host_prepare_each_image_once(tmp_path: Path) -> None:
    disk.WRITERS["stl10"](tmp_path)
    ranks, wanted = said_by_ranks(tmp_path, tmp_path / "out"), alone(tmp_path)
    half = sum(ranks[0]["prepared"])
    assert half > 0 and [one["prepared"] for one in ranks] == [[half, 0], [half, 0]]
    assert [one["images"] for one in ranks] == wanted
    assert [one["descriptors"] for one in ranks] == [2, 2]  # mmap keeps one for each part; the rest is closed


@pytest.mark.slow
def test_a_rank_that_cannot_have_the_memory_keeps_none_and_sees_the_same(tmp_path: Path) -> None:
    disk.WRITERS["stl10"](tmp_path)
    ranks = said_by_ranks(tmp_path, tmp_path / "out", "lost")
    assert [one["keeps"] for one in ranks] == [[True, True], [False, False]]
    assert [one["images"] for one in ranks] == alone(tmp_path)
