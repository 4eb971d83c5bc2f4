"""Promises of settings that are not the checkpoint's: they take effect and are announced, or are refused."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.resume_ranks import CRASH, Change, crash_in_step, end_of, in_order, train
from tests.train.test_resume import PARTS, assert_equal, settings_in
from train import session
from train.checkpoints import load
from train.datasets import DataError
from train.parallel import shares
from train.settings import EXIT_REFUSED

pytestmark = pytest.mark.slow


def notes(folder: Path) -> str:
    """What the last start said."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return "; ".join([event["notes"] for event in events if event["event"] == "start"][-1])


def break_and_resume(folder: Path, world_size: int, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Broken off after the checkpoint of step 6."""
    common = {"blocking_checkpoints": True, "keep": 20}
    broken = dict.fromkeys(range(world_size), crash_in_step(7))
    assert train(world_size, settings_in(folder, **common, **before), changes=broken) == [CRASH] * world_size
    assert train(world_size, settings_in(folder, **common, **now)) == [0] * world_size


def test_another_optimizer_is_refused_with_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(2, settings_in(tmp_path, epochs=1)) == [0, 0]
    capfd.readouterr()
    assert train(2, settings_in(tmp_path, optimizer="sgd")) == [EXIT_REFUSED] * 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "--optimizer sgd (the checkpoint has adamw)" in said[0] and "--resume none --init-from" in said[0]
    weights = tmp_path / "checkpoints" / "step-4.pt"
    assert train(2, settings_in(tmp_path, optimizer="sgd", resume="none", init_from=weights)) == [0, 0]


def test_settings_of_the_optimizer_take_effect_and_are_announced(tmp_path: Path) -> None:
    now = {"weight_decay": 0.3, "momentum": 0.6, "nesterov": True}
    break_and_resume(tmp_path, 1, {"optimizer": "sgd"}, {"optimizer": "sgd", **now})
    decayed, undecayed = end_of(tmp_path)["optimizer"]["groups"]
    assert {name: decayed[name] for name in now} == now
    assert undecayed["weight_decay"] == 0
    assert "momentum 0.9 -> 0.6, nesterov False -> True, weight_decay 0.05 -> 0.3" in notes(tmp_path)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_averages_that_are_newly_asked_for_begin_with_the_loaded_weights(parallel: str, tmp_path: Path) -> None:
    ways = {"parallel": parallel}
    break_and_resume(tmp_path, 2, ways, ways | {"ema": 0.9, "checkpoint_every": "1"})
    before, after = (load(tmp_path / "checkpoints", step) for step in (6, 7))
    decay = (1 + 7) / (10 + 7)
    for name, average in after["ema"].items():
        torch.testing.assert_close(average, decay * before["model"][name] + (1 - decay) * after["model"][name])
    assert "0.running_mean" not in after["ema"] and "1.running_mean" in after["ema"]
    assert "the checkpoint has no averaged weights: they begin with its weights" in notes(tmp_path)


def measured_as(weights: list[float]) -> Change:
    def change() -> None:
        mock.patch.object(shares, "measured", lambda *_: weights).start()

    return change


def test_measured_shares_are_kept_bit_by_bit(tmp_path: Path) -> None:
    first, second = (dict.fromkeys(range(2), measured_as(weights)) for weights in ([2.0, 1.0], [1.0, 3.0]))
    settings = settings_in(tmp_path / "whole", shares="auto")
    assert train(2, settings, changes=first) == [0, 0]
    settings = settings_in(tmp_path / "broken", shares="auto")
    crash = {rank: in_order(change, crash_in_step(7)) for rank, change in first.items()}
    assert train(2, settings, changes=crash) == [CRASH] * 2
    assert train(2, settings, changes=second) == [0, 0]
    whole, resumed = (end_of(tmp_path / name) for name in ("whole", "broken"))
    assert resumed["shares"] == [2.0, 1.0]
    for part in PARTS:
        assert_equal(resumed[part], whole[part], part)


@pytest.mark.parametrize(
    ("before", "now", "weights"),
    [
        ("", "3,1", [3.0, 1.0]),
        pytest.param("3,1", "1,2", [1.0, 2.0], marks=pytest.mark.long),
        ("3,1", "", [1.0, 1.0]),
    ],
)
def test_other_shares_take_effect(before: str, now: str, weights: list[float], tmp_path: Path) -> None:
    break_and_resume(tmp_path, 2, {"shares": before}, {"shares": now})
    assert end_of(tmp_path)["shares"] == weights
    assert f"shares {before} -> {now}" in notes(tmp_path)


@pytest.mark.parametrize("what", ["Loader", "some_samples"])
def test_data_that_one_rank_cannot_have_ends_all_ranks_with_its_reason(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def lacking(*arguments: object) -> None:
        raise DataError("/dev/shm is too small here")

    def change() -> None:
        mock.patch.object(session, what, lacking).start()

    assert train(2, settings_in(tmp_path, shares="auto"), changes={1: change}) == [EXIT_REFUSED] * 2
    assert "train: /dev/shm is too small here (rank 1)" in capfd.readouterr().err
