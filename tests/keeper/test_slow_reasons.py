"""Promises: a reason is given where the host's counters show it, and none where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keeper.slow import Took
from keeper.slow_reasons import (
    TICK,
    Seen,
    Span,
    between,
    counters,
    cpu_list,
    cpu_times,
    gpu_reason,
    look,
    run_delay,
    why,
)

#: 50 steps of a rank of which each computes 0.4 s, and 0.2 s on the others.
OWN, OTHERS = Took(0.4, 0.0), Took(0.2, 0.0)
QUIET = Span(
    seconds=20.0, steps=50, held={3: 0.5}, busy=15.0, idle=5.0, steal=0.0, own=14.0, periods=0, throttled=0,
    stopped=0.0, hot={"heat": 0, "power": 0},
)  # fmt: skip
HELD = replace(QUIET, held={3: 10.0}, busy=20.0, idle=0.0)


@pytest.mark.parametrize(
    ("during", "said"),
    [
        (replace(HELD, stopped=9.0), "a CPU quota holds its ranks back for 190 ms of each step, of 400 ms"),
        (replace(HELD, periods=200, throttled=190), "its container's CPU quota is used up in 95% of its periods"),
        (
            replace(HELD, busy=8.0, idle=12.0),
            "a CPU quota holds its ranks back: they are ready to run, and 60% of their processors' time is idle",
        ),
        (replace(HELD, busy=12.0, steal=8.0), "other virtual machines take 40% of its processors' time"),
        (replace(HELD, own=10.0), "other processes take 50% of its processors' time"),
        (replace(HELD, own=19.5), "its ranks, and their threads, have too few processors: they wait for each other"),
        (replace(QUIET, hot={"heat": 7}), "its processors are too hot: they slowed down 7 times in 20 s"),
        (replace(QUIET, hot={"power": 3}), "its processors are at their power limit: they slowed down 3 times in 20 s"),
        (QUIET, ""),
        (replace(QUIET, stopped=0.1, throttled=1, periods=2), ""),  # of no account in the time that is missing
    ],
)
def test_the_reason_follows_from_what_changed(during: Span, said: str) -> None:
    assert why(OWN, OTHERS, during, QUIET, [3]) == said


def test_what_was_so_before_is_no_reason() -> None:
    held = replace(HELD, stopped=9.0)
    assert why(OWN, OTHERS, held, held, [3]) == ""
    assert why(OWN, OTHERS, held, None, [3]).startswith("a CPU quota")  # slow from the start: nothing to compare with
    assert why(OWN, OTHERS, held, None, [2]) == ""  # it is of another rank


def test_data_and_gpus_come_first() -> None:
    late = why(Took(0.2, 0.3), Took(0.2, 0.01), HELD, QUIET, [3])
    assert late == "each step waits 300 ms for data, on the others 10 ms"
    throttled = gpu_reason("0, 0x0000000000000001\n1, 0x0000000000000044\n")
    assert why(OWN, OTHERS, QUIET, QUIET, [3], throttled) == throttled


def test_gpus_that_are_slowed_down_are_named() -> None:
    assert gpu_reason("0, 0x0000000000000001\n") == ""  # idle
    assert gpu_reason("0, 0x0000000000000040\n1, 0x0000000000000084\n") == (
        "GPU 0 runs slower: hardware thermal slowdown; GPU 1 runs slower: power cap, power brake"
    )
    assert gpu_reason("0, [N/A]\nnot a line\n\n") == ""


def test_times_of_the_processors_that_ranks_may_use() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\ncpu1 100 0 0 50 0 0 0 1 0 0\nintr 5\n"
    assert cpu_times(stat, [0]) == pytest.approx((19 * TICK, 9 * TICK, 8 * TICK))
    assert cpu_times(stat, [0, 1]) == pytest.approx((119 * TICK, 59 * TICK, 9 * TICK))
    assert cpu_times(stat, []) == pytest.approx((45 * TICK, 18 * TICK, 9 * TICK))
    assert cpu_list("0-2,8\n") == [0, 1, 2, 8] and cpu_list("") == []


def test_counters_of_threads_and_groups() -> None:
    assert run_delay("5000000000 250000000 77\n") == 0.25 and run_delay("") is None
    assert counters("nr_periods 12\nthrottled_usec 5\nodd line here\nname x\n") == {
        "nr_periods": 12,
        "throttled_usec": 5,
    }


@pytest.mark.parametrize("version", [1, 2])
def test_a_host_is_looked_at(tmp_path: Path, version: int) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/stat", "cpu  0 0 0 0 0 0 0 0\ncpu0 100 0 0 0 0 0 0 0\ncpu1 0 0 0 300 0 0 0 0\n")
    write("proc/50/status", "Name:\tpython\nCpus_allowed_list:\t1\n")
    write("proc/50/task/50/schedstat", "1 2000000000 3\n")
    write("proc/50/task/51/schedstat", "1 500000000 3\n")
    if version == 2:
        write("sys/fs/cgroup/cpu.stat", "usage_usec 4000000\nnr_periods 9\nnr_throttled 3\nthrottled_usec 1\n")
        write("sys/fs/cgroup/cpu.stat.local", "throttled_usec 1500000\n")
    else:
        write("sys/fs/cgroup/cpu/cpu.stat", "nr_periods 9\nnr_throttled 3\nthrottled_time 1\n")
        write("sys/fs/cgroup/cpu/cpu.stat.local", "throttled_time 1500000000\n")
        write("sys/fs/cgroup/cpuacct/cpuacct.usage", "4000000000\n")
    write("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "2\n")
    write("sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count", "3\n")
    write("sys/devices/system/cpu/cpu1/thermal_throttle/core_power_limit_count", "4\n")
    seen = look({0: 50, 1: 99}, tmp_path)  # 99 has ended
    assert seen.waits == {0: {50: 2.0, 51: 0.5}, 1: {}}
    assert (seen.busy, seen.idle, seen.steal) == (0.0, 300 * TICK, 0.0)
    assert (seen.own, seen.periods, seen.throttled, seen.stopped) == (4.0, 9, 3, 1.5)
    assert seen.hot == {"heat": 5, "power": 4}


def test_a_host_that_tells_nothing_is_looked_at(tmp_path: Path) -> None:
    assert replace(look({0: 50}, tmp_path), at=0.0) == Seen(waits={0: {}})


def test_between_two_looks() -> None:
    first = Seen(at=1.0, waits={0: {5: 1.0, 6: 2.0}, 1: {}}, busy=1.0, stopped=0.5, hot={"heat": 1})
    last = Seen(at=3.0, waits={0: {5: 1.5, 6: 4.0, 7: 50.0}, 1: {8: 1.0}}, busy=2.5, stopped=1.5, hot={"heat": 4})
    span = between(first, last, 10)
    assert span.held == {0: 2.0, 1: 0.0}  # a thread that is new had no time to wait in this span
    assert (span.seconds, span.steps, span.busy, span.stopped, span.hot) == (2.0, 10, 1.5, 1.0, {"heat": 3})
