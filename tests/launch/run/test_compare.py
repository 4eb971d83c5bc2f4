"""Promises: two runs are called the same only where each step, epoch and tensor is; else where they first differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.run import compare, origin
from launch.run.compare import Compared
from launch.run.origin import Origin

LOSSES = [2.3025850929940455, 2.2, 2.1, 0.10000000149011612]  # the last one as a 32-bit float


def left(
    folder: Path,
    losses: list[float],
    weights: list[float] | None = None,
    accuracy: float = 0.5,
    restarts: int = 0,
    seconds: float = 1.0,
    **plan: Any,
) -> Path:
    """What our trainer left of a run: an epoch of so many steps, and a checkpoint after it."""
    import torch

    from train.checkpoints.files import write

    files.write_json(folder / "plan.json", {"script": None, "hosts": [], **plan})
    files.write_json(folder / "settings.json", {"shares": ""})
    files.write_json(folder / "summary.json", {"restarts": restarts})
    events: list[dict[str, Any]] = [{"event": "start", "device": "cpu"}]
    for step, loss in enumerate(losses, 1):
        figures = {"step": step, "epoch": 1, "loss": loss, "lr": 0.1, "images": 8, "seconds": seconds * step}
        events.append({"event": "step", **figures})
    known = {"train_loss": 2.0, "train_accuracy": 0.4, "test_loss": 2.0, "test_accuracy": accuracy}
    events.append({"event": "epoch", "epoch": 1, "step": len(losses), "seconds": seconds, **known})
    lines = [json.dumps({"time": seconds, **event}) for event in events]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    state = {"model": {"weight": torch.tensor(weights or [1.0, 2.0]), "bias": torch.zeros(3)}, "seconds": seconds}
    write(folder / "checkpoints", len(losses), state)
    return folder


@pytest.mark.slow  # it imports torch
def test_the_same_run_is_the_same_to_the_bit_however_long_it_took(tmp_path: Path) -> None:
    found = compare.compare(left(tmp_path / "a", LOSSES), left(tmp_path / "b", LOSSES, seconds=7.0))
    (line,) = found.lines
    assert found.same is True
    assert line.startswith("the same as run a to the bit: the loss of 4 steps; losses and accuracy of 1 epoch")
    assert (
        "50.00% in the last of them; all 2 tensors of the checkpoint step-4.pt (weights and optimizer), SHA-256 "
        in line
    )


@pytest.mark.slow  # it imports torch
def test_the_first_step_that_differs_is_named_with_both_losses(tmp_path: Path) -> None:
    other = [*LOSSES[:2], 2.1000000000000005, 0.3]
    found = compare.compare(left(tmp_path / "a", LOSSES), left(tmp_path / "b", other))
    assert found.same is False
    first = "the first step that differs is 3, after 2 that are the same: loss 2.1 then, 2.1000000000000005 now"
    assert found.lines[0] == f"not the same as run a: {first}"
    assert next(line for line in found.lines[1:] if "tensors" in line).startswith("the same in both: all 2 tensors")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"weights": [1.0, 2.0000002]}, "1 of 2 tensors of the checkpoint step-4.pt (weights and optimizer) differ"),
        ({"accuracy": 0.75}, "the first epoch that differs is 1: test_accuracy 0.5 then, 0.75 now"),
    ],
)
@pytest.mark.slow  # it imports torch
def test_what_differs_besides_the_steps_is_named(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = compare.compare(left(tmp_path / "a", LOSSES), left(tmp_path / "b", LOSSES, **other))
    assert found.same is False and found.lines[0] == f"not the same as run a: {said}"


@pytest.mark.slow  # it imports torch
def test_a_run_that_ended_early_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    found = compare.compare(left(tmp_path / "a", LOSSES), left(tmp_path / "b", LOSSES[:3]))
    assert (
        found.same is True and f"the loss of 3 steps that both made, of {len(LOSSES)} then, 3 now; " in found.lines[0]
    )
    assert "tensors" not in found.lines[0] and "weights are not compared: the two runs have no" in found.lines[1]


@pytest.mark.slow  # it imports torch
def test_known_reasons_for_a_difference_are_said(tmp_path: Path) -> None:
    one, other = left(tmp_path / "a", LOSSES, restarts=2), left(tmp_path / "b", [1.0])
    files.write_json(one / "settings.json", {"shares": "auto"})
    origin.write(other, Origin(reproduces="a", differences=["host h1: address: 1 then, 2 now"]))
    lines = "\n".join(compare.compare(one, other).lines)
    assert "can come of this: host h1: address: 1 then, 2 now" in lines
    assert "run a was restarted 2 times" in lines and "--shares auto" in lines and "GPUs" not in lines


def test_a_scripts_files_are_compared_byte_for_byte(tmp_path: Path) -> None:
    one, other = tmp_path / "a", tmp_path / "b"
    for folder in (one, other):
        files.write_json(folder / "plan.json", {"script": "main.py", "hosts": []})
        (folder / "workload").mkdir()
        (folder / "workload" / "weights.bin").write_bytes(b"1")
        (folder / "logs").mkdir()
        (folder / "logs" / "rank-0.log").write_text(folder.name)
    assert compare.compare(one, other) == Compared(True, ["the same as run a to the bit: 1 file that the script wrote"])
    (other / "scores.csv").write_text("0.5")
    found = compare.compare(one, other)
    assert found.same is False
    assert found.lines[0] == "not the same as run a: 1 of 2 files that the script wrote: scores.csv"


def test_where_nothing_can_be_compared_nothing_is_claimed(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert compare.compare(tmp_path / "a", tmp_path / "b").same is None
    (tmp_path / "a").mkdir()
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert found == Compared(None, ["nothing is there by which this run could be compared with run a"])


@pytest.mark.slow  # it imports torch
def test_what_is_no_checkpoint_is_not_compared(tmp_path: Path) -> None:
    one, other = left(tmp_path / "a", LOSSES), left(tmp_path / "b", LOSSES)
    (other / "checkpoints" / "step-4.pt").write_bytes(b"no archive")
    found = compare.compare(one, other)
    assert found.same is True and "tensors" not in found.lines[0]
    assert found.lines[1:] == ["weights are not compared: step-4.pt of run b cannot be read"]
    assert compare.tensors(tmp_path / "absent.pt") is None
