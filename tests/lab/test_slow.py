"""Promise: a host that gets half of its computing time while a run trains is named, and so is the end.

How soon, and who is named in healthy runs: `make drill FAULT=slow_host REPEATS=20` and `FAULT=healthy`.
"""

from __future__ import annotations

import re

import pytest

from benchmarks.faults import measure_slow
from tests.lab.conftest import Lab

pytestmark = pytest.mark.lab


def test_a_host_whose_quota_is_halved_is_named(lab: Lab) -> None:
    seen = measure_slow(lab.name, "h2")
    print(seen)
    assert seen.steps is not None, seen
    # Where others use its processors, these may be the reason, or take so much that no reason explains half of it.
    reason = r"(: a CPU quota holds its ranks back.*|: other processes take \d+% of its processors' time)?"
    assert re.search(rf"h2 is slow: .* as long as the others', \d+ : \d+ ms \(step \d+\){reason}$", seen.line), seen
    assert not (seen.orphans or seen.problems), seen
