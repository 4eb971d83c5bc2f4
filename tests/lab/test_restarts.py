"""Promise: a training run goes on by itself after a fault, from the newest checkpoint, and loses no step.

Every order of votes, cuts and deaths: tests/keeper/test_course.py; keepers as processes: tests/keeper/test_keeper.py.
Figures: `make bench-faults`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.faults import SURVIVED, Survived, measure_survival
from benchmarks.inject import lose_power
from tests.lab.conftest import Lab

pytestmark = pytest.mark.lab


@pytest.mark.long
@pytest.mark.parametrize("name", ["host_back", "master_of_two", "host_leaves", "container_back"])
def test_a_run_goes_on_after_a_fault(lab: Lab, name: str) -> None:
    seen = measure_survival(lab.name, SURVIVED[name])
    print(f"{name}: {seen}")
    assert not (seen.orphans or seen.problems), seen


def test_a_spare_takes_the_place_of_the_first_host_without_power(lab: Lab) -> None:
    fault = Survived("a host loses its power", lose_power("h1"), ("h2", "h3"), 25.0, lost="h1", nodes=2)
    with spare(lab, "h3"):
        seen = measure_survival(lab.name, fault)
    print(seen)
    assert not (seen.orphans or seen.problems), seen


@contextlib.contextmanager
def spare(lab: Lab, host: str) -> Iterator[None]:
    """One host of the lab is in the group of spares."""
    hosts = lab.inventory / "hosts.yml"
    before = hosts.read_text()
    hosts.write_text(f"{before}  children:\n    spares:\n      hosts:\n        {host}:\n")
    try:
        assert lab.fab("deploy", 300).returncode == 0
        yield
    finally:
        hosts.write_text(before)
        assert lab.fab("deploy", 300).returncode == 0
