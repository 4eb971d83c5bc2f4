"""Trainings with parts of the user's own, for the tests of own parts: their settings, and what they leave."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.resume_ranks import SETTINGS, crash_in_step, train
from train import own_parts, run
from train.checkpoints import load, saved_steps
from train.model.build import build
from train.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, ODD = ROOT / "examples" / "own_parts", Path(__file__).parent / "own_project"
CPU = torch.device("cpu")
EXAMPLE_PARTS: dict[str, Any] = {
    "model": "parts:net",
    "dataset": "parts:digits",
    "loss": "parts:loss",
    "transform": "parts:shaken",
}
NOISY: dict[str, Any] = {"model": "odd:net", "dataset": "odd:noisy", "transform": "odd:mirrored"}
SEGMENTATION: dict[str, Any] = {"model": "odd:segment", "dataset": "odd:masks", "transform": "odd:joint"}
REGRESSION: dict[str, Any] = {"model": "odd:linear", "dataset": "odd:line", "loss": "odd:squares", "classes": 1}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's and the tests' own parts can be imported during a test."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    own_parts.use(EXAMPLE)
    own_parts.use(ODD)


def own(project: Path | None = ODD, **changes: Any) -> Settings:
    plain = dataclasses.replace(SETTINGS, image_size=0, batch_size=16, epochs=2, workers=0, project=project)
    return dataclasses.replace(plain, **changes)


def with_own_model() -> None:
    """In a rank of resume_ranks, which has its own network else."""
    mock.patch.object(run, "build_model", build).start()


def trained(world_size: int, settings: Settings, crash: int = 0) -> list[int]:
    def change() -> None:
        with_own_model()
        if crash:
            crash_in_step(crash)()

    return train(world_size, settings, changes=dict.fromkeys(range(world_size), change))


def newest(settings: Settings) -> dict[str, Any]:
    folder = settings.run_dir / "checkpoints"
    return load(folder, saved_steps(folder)[-1])


def result(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((settings.run_dir / "result.json").read_text())
    return found
