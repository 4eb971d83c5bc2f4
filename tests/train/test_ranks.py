"""Promises of a step, an epoch and an evaluation: the number of ranks changes nothing but the speed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
Results = dict[tuple[int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    out = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, "-m", "tests.train.ranks", str(out)], cwd=ROOT, check=True, timeout=120)
    return {(w, r): torch.load(out / f"{w}-{r}.pt") for w in (1, 2, 3) for r in range(w)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_epoch_gives_the_weights_that_one_rank_gives(results: Results, world_size: int) -> None:
    """Also where the last batch is so short that ranks have no sample of it."""
    for ours, alone in zip(results[world_size, 0]["weights"], results[1, 0]["weights"], strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_are_equal_bit_by_bit(results: Results, world_size: int) -> None:
    for rank in range(1, world_size):
        for name in ("weights", "buffers"):
            pairs = zip(results[world_size, rank][name], results[world_size, 0][name], strict=True)
            assert all(mine.equal(theirs) for mine, theirs in pairs)


def test_batch_statistics_are_the_mean_over_the_ranks(results: Results) -> None:
    assert results[3, 1]["buffers"][0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_figures_of_training_are_those_of_one_rank(results: Results, world_size: int) -> None:
    assert results[world_size, world_size - 1]["train"] == pytest.approx(results[1, 0]["train"], rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_counts_every_sample_exactly_once(results: Results, world_size: int) -> None:
    samples, correct, loss = results[world_size, 0]["test"]
    assert samples == 13
    assert correct == results[1, 0]["test"][1]
    assert loss == pytest.approx(results[1, 0]["test"][2], rel=1e-5)
