"""Promise: a host that gets half of its computing time while a run trains is named with the reason, and so is the end.

How soon, and who is named in healthy runs: `make drill FAULT=slow_host REPEATS=20` and `FAULT=healthy`.
"""

from __future__ import annotations

import pytest

from benchmarks.faults import EVEN, measure_slow
from tests.lab.conftest import Lab

pytestmark = pytest.mark.lab


def test_a_host_whose_quota_is_halved_is_named_with_the_reason(lab: Lab) -> None:
    """h1 has one rank, and h2 two with as much time each, on one core: with these shares of the batch their steps took
    equally long (61 and 62 ms), where with even ones h1 took 1.4 times as long and was named."""
    seen = measure_slow(lab.name, "h2", {**EVEN, "ARGS": f"{EVEN['ARGS']} --shares 1,2,2"})
    print(seen)
    assert seen.steps is not None and "a CPU quota holds its ranks back" in seen.line, seen
    assert not (seen.orphans or seen.problems), seen
