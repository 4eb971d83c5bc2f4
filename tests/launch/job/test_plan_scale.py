"""Promise: the work of making a plan, and its size, grow with the number of hosts and not with its square."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest

from launch.job import plan as plans
from launch.job.plan import Options, Ports
from tests.launch.samples import cluster


def work(hosts: int, options: Options) -> tuple[int, int]:
    """How many calls it takes to make the plan of so many hosts (each step of a generator is one), and its size."""
    known, ports, calls = cluster(*[1] * hosts), Ports(29500, 29501, (29400,) * hosts), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan = plans.make_plan(known, options, "some-run", ports, "me@here", "now")
    finally:
        sys.setprofile(None)
    return calls, len(json.dumps(plans.document(plan)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [Options(), Options(direct=True), Options(script="main.py", args=("--rank", "{rank}"), resume="other")],
)
def test_ten_times_the_hosts_are_ten_times_the_work(options: Options) -> None:
    few_calls, few_bytes = work(100, options)
    many_calls, many_bytes = work(1000, options)
    assert many_calls < 11 * few_calls
    assert many_bytes < 11 * few_bytes
