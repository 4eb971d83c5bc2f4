"""Promises: ranks that hang are found within their phase's limit and no others are; the one to blame is named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from keeper.hang import (
    EXCUSED_SECONDS,
    FIRST_STEPS_SECONDS,
    PATIENCE,
    TRAINING_SECONDS,
    HangWatch,
    culprits,
    describe,
    dumps,
    limit,
    moves,
)

BAR_SECONDS = 15.0  # from the hang to the end of all ranks, for short steps
TIMES_BAR = 5.0  # the same in steps, for long ones
LOOK_SECONDS = 1.0  # between two looks of a keeper


class Clock:
    """A run on a clock of its own: a keeper looks once a second, ranks report."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.watch = HangWatch()

    def silence(self, seconds: float) -> float | None:
        """Nobody reports for so long. Returns after how many seconds ranks are hung, if they are."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS
            if self.watch.hung(self.now):
                return seconds - (end - self.now)
        return None

    def say(self, *ranks: int, **message: Any) -> None:
        for rank in ranks:
            self.watch.report(self.now, rank, message)

    def train(self, ranks: Iterable[int], times: Iterable[float], **message: Any) -> None:
        """A step of each of these times, which no rank may take for a hang."""
        for step, seconds in enumerate(times, 1):
            assert self.silence(seconds) is None, (step, seconds)
            self.say(*ranks, phase="training", step=step, **message)


def test_a_hang_is_found_in_time() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    found = clock.silence(60)
    assert found is not None and found < BAR_SECONDS - 3 and clock.watch.hung(clock.now) == [0, 1]


@pytest.mark.parametrize("step", [3.0, 10.0, 60.0])
def test_long_steps_have_more_time(step: float) -> None:
    clock = Clock()
    clock.train((0, 1), [step] * 50)
    found = clock.silence(1000)
    assert found is not None and 2 * step < found < max(BAR_SECONDS, TIMES_BAR * step) - 2


def test_first_steps_have_more_time() -> None:
    clock = Clock()
    clock.train((0,), [FIRST_STEPS_SECONDS - 10, 1.0])
    assert clock.silence(100) is None
    assert limit([1.0] * 5, "training") == TRAINING_SECONDS


def test_a_hang_in_the_first_seconds_is_found_by_the_steps_of_the_ranks_nearby() -> None:
    clock = Clock()
    clock.say(0, 1, phase="training", step=0)
    for step in range(1, 81):
        clock.now += 0.05
        clock.say(0, phase="training", step=step)
        if step % 20 == 0:  # another host's rank is heard once a second
            clock.say(1, phase="training", step=step)
    found = clock.silence(60)
    assert found is not None and found < BAR_SECONDS - 3


def test_steps_whose_times_vary_are_no_hang() -> None:
    clock = Clock()
    clock.train((0, 1), [1.0, 2.0, 9.0] * 20 + [12.0, 18.0])
    assert limit([0.1] * 199 + [9.0], "training") > 9.0 * 1.4  # the longest counts, however rare


def test_one_slow_rank_that_goes_on_keeps_those_that_wait_for_it() -> None:
    """As the evaluation of unequal shares, or a checkpoint of the host with the slowest disk."""
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    for step in range(300):
        clock.say(1, phase="evaluating", step=step)
        assert clock.silence(2.0) is None
    clock.say(1, phase="saving", step=50)
    assert clock.silence(PATIENCE["saving"] - 10) is None
    assert clock.silence(30) is not None


@pytest.mark.parametrize("phase", ["starting", "compiling", "fetching", "saving"])
def test_phases_without_steps_have_their_time(phase: str) -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    clock.say(0, 1, phase=phase)
    assert clock.silence(PATIENCE[phase]) is None
    assert clock.silence(5) is not None


def test_a_hang_in_the_evaluation_is_found_and_its_steps_are_its_own() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    for step in range(20):
        clock.say(0, 1, phase="evaluating", step=step)
        assert clock.silence(30.0) is None
    assert limit([30.0] * 20, "evaluating") == 105.0 and limit([0.1] * 20, "evaluating") == PATIENCE["evaluating"]
    assert clock.silence(74) is None and clock.silence(5) is not None
    clock.say(0, 1, phase="training", step=51)
    found = clock.silence(60)
    assert found is not None and found < BAR_SECONDS


def test_a_rank_that_says_the_same_step_again_still_works() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    for _ in range(30):  # an exchange over a slow link
        assert clock.silence(2.0) is None
        clock.say(0, phase="training", step=50)
    found = clock.silence(60)
    assert found is not None and found < BAR_SECONDS


def test_who_never_reports_is_not_judged() -> None:
    clock = Clock()
    assert clock.silence(10_000) is None


def test_who_has_ended_is_not_waited_for() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    clock.watch.ended(0)
    clock.say(1, phase="saving")
    assert clock.silence(300) is None
    clock.watch.ended(1)
    assert clock.silence(10_000) is None


def test_a_script_has_the_patience_that_it_asks_for() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50, patience=120.0)
    assert clock.silence(119) is None and clock.silence(5) is not None


def test_a_script_that_reports_epochs_is_no_hang_from_the_second_on() -> None:
    clock = Clock()
    clock.train((0,), [500.0] * 10, patience=120.0)


def test_a_machine_that_slept_finds_no_hang() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    clock.now += 8 * 3600
    assert clock.silence(TRAINING_SECONDS) is None
    assert clock.silence(3) is not None


def test_what_other_hosts_say_counts_by_its_age() -> None:
    clock = Clock()
    clock.train((0,), [0.1] * 50)
    for second in range(100):  # rank 1 of another host makes a step each 8 s
        clock.watch.report(clock.now, 1, {"phase": "training", "step": second // 8}, age=second % 8)
        assert clock.silence(1.0) is None
    for second in range(100):  # and now it stands still
        clock.watch.report(clock.now, 1, {"phase": "training", "step": 13}, age=float(second))
        if clock.silence(1.0):
            break
    assert TRAINING_SECONDS < second < TIMES_BAR * 8


def test_a_moving_stack_excuses_but_not_for_ever() -> None:
    clock = Clock()
    clock.train((0, 1), [0.1] * 50)
    excuses = 0
    while clock.silence(1000) is not None and clock.watch.excuse(clock.now, 1):
        excuses += 1
    assert 10 < excuses < EXCUSED_SECONDS / TRAINING_SECONDS


@pytest.mark.parametrize("message", [{}, {"phase": "training", "patience": "long"}])
def test_other_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        HangWatch().report(0.0, 0, message)


def stacks(name: str) -> dict[int, str]:
    """rank -> what faulthandler wrote, of two gloo ranks of which rank 1 was hung as `name` says (torch 2.13)."""
    text = (Path(__file__).parent / "stacks.txt").read_text()
    found = re.findall(rf"^===== {name} (\d+)\n(.*?)(?=^=====|\Z)", text, re.MULTILINE | re.DOTALL)
    return {int(rank): stack for rank, stack in found}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("loader", "/workload/main.py:15 __getitem__"),
        ("forward", "/workload/main.py:22 forward"),
        ("stopped", ""),  # SIGSTOP: no stack
        ("barrier", "/workload/main.py:35 <module>"),
        ("gather", "/workload/main.py:38 <module>"),
        ("worker", "/workload/main.py:29 <module>"),  # a worker process of its data loader hangs
    ],
)
def test_the_rank_that_is_in_no_collective_is_named_with_its_place(name: str, where: str) -> None:
    found = stacks(name)
    assert culprits(found) == [1]
    assert describe(found[1]) == where


def test_where_several_ranks_may_be_to_blame_the_odd_one_is_named() -> None:
    """As on GPUs, where ranks wait for a collective in any call that needs its result."""
    waiting, hung = stacks("item")[0], stacks("item")[1]
    assert culprits({0: waiting, 1: waiting, 2: hung, 3: waiting}) == [2]
    assert culprits({0: waiting, 1: hung}) == [0, 1]


def test_nobody_is_named_where_all_wait() -> None:
    assert culprits({0: stacks("loader")[0], 1: stacks("forward")[0]}) == []


def test_the_main_thread_is_read_of_each_dump() -> None:
    text = stacks("worker")[1]
    assert [frames[-1] for frames in dumps(text)] == [("/workload/main.py", 29, "<module>")] * 2
    assert not moves(text) and moves(text + stacks("loader")[1])
    assert dumps("") == [] and describe("nonsense") == ""
