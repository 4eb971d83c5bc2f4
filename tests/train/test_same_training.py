"""Promises of the whole trainer: same seed and global batch, same training, however the work is spread over ranks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.resume_ranks import SETTINGS, STEPS, end_of, train

SETTINGS = dataclasses.replace(
    SETTINGS, checkpoint_every="epoch", optimizer="sgd", lr=0.1
)  # AdamW makes much of rounding
MIXED = {
    "mixup": 0.4,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "ema": 0.9,
    "clip": 0.5,
    "augment": "rand",
    "random_erasing": 0.3,
}


def epochs(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "epoch"]


def result(folder: Path, world_size: int, **changes: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(final weights, figures of the epochs) of a network without batch statistics and dropout."""
    assert (
        train(world_size, dataclasses.replace(SETTINGS, run_dir=folder, **changes), normalised=False)
        == [0] * world_size
    )
    return end_of(folder)["model"], epochs(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, --parallel none: plain and with all that changes the loss."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        "plain": result(folder / "plain", 1, parallel="none"),
        "mixed": result(folder / "mixed", 1, parallel="none", **MIXED),
    }


def matrix() -> list[Any]:
    """Each way to spread the work with each kind of loss; what occurs in no other case runs always."""
    cases: list[tuple[int, dict[str, Any], str | None]] = [
        (1, {"parallel": "ddp"}, None),
        (2, {"parallel": "ddp"}, "mixed"),
        (4, {"parallel": "ddp"}, "plain"),
        (2, {"parallel": "ddp", "shares": "3,1"}, None),
        (3, {"parallel": "ddp", "shares": "1,5,2", "micro_batch": 9}, "mixed"),
        (3, {"parallel": "ddp", "micro_batch": 7}, None),
        (2, {"parallel": "fsdp"}, None),
        (3, {"parallel": "fsdp", "micro_batch": 16}, "plain"),
        (1, {"parallel": "dp"}, "plain"),
    ]
    return [
        pytest.param(
            size, changes, kind, id=f"{size}-{changes}-{kind}", marks=() if kind == usual else pytest.mark.long
        )
        for size, changes, usual in cases
        for kind in ("plain", "mixed")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "changes", "kind"), matrix())
def test_weights_and_figures_are_those_of_one_process(
    kind: str, world_size: int, changes: dict[str, Any], alone: dict[str, Any], tmp_path: Path
) -> None:
    weights, figures = result(tmp_path, world_size, **changes, **(MIXED if kind == "mixed" else {}))
    expected_weights, expected = alone[kind]
    for name in expected_weights:
        torch.testing.assert_close(weights[name], expected_weights[name], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(figures, expected, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["test_accuracy"] == theirs["test_accuracy"]  # each held-out sample exactly once
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
    assert figures[-1]["step"] == STEPS


@pytest.mark.slow
def test_shares_by_measured_speed_train_the_same(alone: dict[str, Any], tmp_path: Path) -> None:
    weights, _ = result(tmp_path, 2, shares="auto")
    for name, expected in alone["plain"][0].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)
