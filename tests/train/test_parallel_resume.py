"""Promises of a resumed run: bit by bit the unbroken one, on as many ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.parallel_ranks import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    return run("parallel_resume", "ddp", tmp_path_factory.mktemp("ddp"), 1, 2, 3, 4)


def test_resumed_weights_are_the_unbroken_runs(ddp: dict[tuple[int, int], Any]) -> None:
    """With gradient accumulation, batch statistics, dropout, and layers that DDP sorts into other buckets."""
    for found in ddp.values():
        assert all(found["warm"][name].equal(value) for name, value in found["unbroken"].items())


def test_without_the_warm_up_they_are_not(ddp: dict[tuple[int, int], Any]) -> None:
    """Else the test above would show nothing: from three ranks on DDP's new buckets change the order of sums."""
    found = ddp[3, 0]
    assert not all(found["cold"][name].equal(value) for name, value in found["unbroken"].items())


def test_so_are_they_under_fsdp(tmp_path: Path) -> None:
    for found in run("parallel_resume", "fsdp", tmp_path, 3).values():
        assert all(found["warm"][name].equal(value) for name, value in found["unbroken"].items())
