"""Promises of `make bench-train` and `make bench-gpu`: what is compared with what, and how turns become one figure."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu, train
from benchmarks.train import apart, epoch_rates, summary
from benchmarks.train_rank import is_real


def test_a_ratio_is_the_median_of_the_turns_with_its_spread() -> None:
    found = {
        "model_bound": [[90.0], [100.0], [120.0]],
        "model_bound_plain": [[100.0], [100.0], [100.0]],
        "tuned_plain": [[100.0], [125.0], [120.0]],
        "input_bound": [[20.0, 80.0, 60.0, 70.0]],
        "input_bound_plain": [[10.0, 10.0, 12.0]],
    }
    figures = summary(found)
    assert (figures["model_bound_ratio"], figures["tuned_ratio"]) == (1.0, 0.9)
    assert figures["spread"]["model_bound_ratio"] == [0.9, 1.2]
    assert (figures["input_bound_first_epoch"], figures["input_bound_ratio"]) == (2.0, 7.0)
    assert not {"jpeg_ratio", "synthetic_share"} & figures.keys()  # a part that was not measured has no figure


def test_epochs_with_and_without_input_make_pairs_in_either_order() -> None:
    assert [is_real(epoch) for epoch in range(8)] == [True, False, False, True] * 2
    found = apart([1.0, 1.0, 50.0, 40.0, 41.0, 49.0])
    assert found == {"with_input": [[40.0], [41.0]], "without_input": [[50.0], [49.0]]}
    assert summary(found)["synthetic_share"] == pytest.approx((40 / 50 + 41 / 49) / 2, abs=1e-3)


def test_the_first_steps_of_an_epoch_do_not_count() -> None:
    steps = [
        {"event": "step", "epoch": epoch, "images": 8, "time": 100 * epoch + max(0.0, number - 3.0) * epoch}
        for epoch in (1, 2)
        for number in range(1, 8)
    ]
    rates = epoch_rates("".join(json.dumps(step) + "\n" for step in steps))
    assert rates == [pytest.approx(3 * 8 / 4), pytest.approx(3 * 8 / 8)]  # a step's time is that of the one before it


def test_the_best_number_of_workers_is_the_plain_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "plain", lambda work, data, workers: [{0: 5.0, 1: 9.0, 2: 7.0}[workers]])
    assert train.fastest(train.JPEG, train.ROOT) == 1


def test_a_row_of_the_gpu_that_failed_leaves_the_others_their_figures() -> None:
    found = {
        "with_input": [95.0, 96.0],
        "without_input": [100.0, 100.0],
        "plain": [80.0],
        "jpeg": [40.0],
        "decode": [50.0],
        "copy": [900.0],
    }
    figures = gpu.figures(found)
    assert (figures["over_plain"], figures["over_recipe"], figures["bottleneck"]) == (1.25, None, "decode")
    assert figures["synthetic_share"] == 0.955 and figures["jpeg"]["plain"] is None
    del found["with_input"], found["without_input"], found["copy"]
    assert {gpu.figures(found)[name] for name in ("images_per_second", "synthetic_share", "bottleneck")} == {None}


def test_a_row_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 0.01)
    with pytest.raises(gpu.RowFailed, match=r"time\.sleep\(60\)' took more than 0.01 s"):
        gpu.in_a_process("-c", "import time; time.sleep(60)")


def test_without_a_gpu_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main([])
