"""Promises of what the benchmarks share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.common import awake
from tests.processes import GUARD_SECONDS, running


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def gives_way(pid: int) -> bool:
    return os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_every_processor_is_kept_awake_by_what_gives_way_to_any_other() -> None:
    with awake(hosts=1) as pids:
        for pid, cpu in zip(pids, sorted(os.sched_getaffinity(0)), strict=True):
            wait_until(partial(gives_way, pid))
            assert os.sched_getaffinity(pid) == {cpu}
    assert not any(running(pid) for pid in pids)


def test_no_processor_is_kept_awake_while_two_hosts_share_one() -> None:
    with awake(hosts=len(os.sched_getaffinity(0)) + 1) as pids:
        assert pids == []


def test_an_interrupted_benchmark_leaves_nothing_that_keeps_processors_awake() -> None:
    script = "import os, benchmarks.common as b\nwith b.awake(hosts=1) as pids: print(*pids, flush=True); os._exit(1)"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False, timeout=300)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == len(os.sched_getaffinity(0))
    wait_until(lambda: not any(running(pid) for pid in pids))
