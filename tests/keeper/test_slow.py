"""Promises: who holds up the others is named once, with its figure, within some tens of steps; what is no slowness of
one of them names nobody; and it is said once when it is over. On made series of steps, and on recorded ones."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import strategies as st

from keeper.slow import ALLOWANCE, SETTLING_STEPS, Slow, SlowWatch, Took, Work, compared, work_of
from tests.keeper.simulation import search

RECORDED = Path(__file__).parent / "data"
Seconds = Callable[[int, int], float]  # (rank, step) -> what it computes in it

THREE = {0: "h1", 1: "h2", 2: "h3"}
PAIRS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}


class Course:
    """A run in lockstep, as the keeper of each host sees it: its own ranks always, the others' once a second."""

    def __init__(self, hosts: Mapping[int, str], seconds: Seconds, data: Seconds = lambda rank, step: 0.0) -> None:
        self.hosts, self.seconds, self.data = hosts, seconds, data
        self.watches = {host: SlowWatch(host) for host in dict.fromkeys(hosts.values())}
        self.said: list[tuple[int, str, Slow]] = []  # (step, host, what)
        self.work = {rank: Work(0, 0, 0.0, 0.0) for rank in hosts}
        self.now = self.told = self.looked = 0.0
        self.step = 0

    def take(self, steps: int) -> Course:
        for _ in range(steps):
            self.step += 1
            took = {rank: (self.seconds(rank, self.step), self.data(rank, self.step)) for rank in self.hosts}
            self.now += max(map(sum, took.values()))
            for rank, (computed, waited) in took.items():
                had = self.work[rank]
                self.work[rank] = Work(self.step, self.step, had.computed + computed, had.waited + waited)
            self.report()
        return self

    def report(self) -> None:
        tells = self.now - self.told >= 1.0
        self.told = self.now if tells else self.told
        for rank, work in self.work.items():
            for host, watch in self.watches.items():
                if host == self.hosts[rank] or tells:
                    watch.report(self.hosts[rank], rank, work)
        for host, watch in self.watches.items():
            window = watch.look(self.now)
            if window and window.slow:
                self.said.append((self.step, host, window.slow))


def jitter(seed: int, spread: float) -> Seconds:
    """A fifth of a second, more or less."""
    drawn = random.Random(seed)
    return lambda rank, step: 0.2 * drawn.lognormvariate(0.0, spread)


@search(8, 100, st.integers(0, 10**6), st.floats(0.0, 0.2), st.sampled_from([THREE, PAIRS]))
def test_nobody_is_named_where_steps_only_vary(seed: int, spread: float, hosts: Mapping[int, str]) -> None:
    assert Course(hosts, jitter(seed, spread)).take(600).said == []


@search(
    *(10, 100, st.integers(0, 10**6), st.floats(0.0, 0.15), st.integers(0, 200), st.floats(2.0, 6.0)),
    *(st.floats(0.12, 3.0), st.sampled_from([{0: "h1", 1: "h2"}, THREE, PAIRS])),
)
def test_a_slow_host_is_named_within_50_steps_and_its_end_is_said(
    seed: int, spread: float, at: int, times: float, step: float, hosts: Mapping[int, str]
) -> None:
    even, over = jitter(seed, spread), at + 100

    def seconds(rank: int, now: int) -> float:
        return even(rank, now) * step / 0.2 * (times if hosts[rank] == "h2" and at < now <= over else 1.0)

    course = Course(hosts, seconds).take(over + 100)
    assert [(host, slow.rank, slow.over) for _, host, slow in course.said] == [("h2", None, False), ("h2", None, True)]
    (named, _, slow), (ended, _, _) = course.said
    assert max(at, SETTLING_STEPS) < named <= max(at, SETTLING_STEPS) + 50 and over < ended
    assert slow.times == pytest.approx(times, rel=0.4) and slow.own.seconds > slow.others.seconds
    assert slow.times == slow.own.seconds / slow.others.seconds


def test_one_rank_of_a_host_is_named_as_a_rank() -> None:
    course = Course(PAIRS, lambda rank, step: 0.5 if rank == 3 and step > 60 else 0.2).take(200)
    [(_, host, slow)] = course.said
    assert (host, slow.rank, slow.over) == ("h2", 3, False) and slow.times == pytest.approx(2.5, rel=0.2)


def test_a_run_on_one_host_names_a_rank() -> None:
    [(_, _, slow)] = Course({0: "h1", 1: "h1"}, lambda rank, step: 0.2 + 0.2 * rank).take(100).said
    assert slow.rank == 1


def test_waiting_for_data_counts_as_computing_does() -> None:
    course = Course(THREE, lambda rank, step: 0.2, lambda rank, step: 0.3 if rank == 0 and step > 50 else 0.0).take(120)
    [(_, host, slow)] = course.said
    assert host == "h1" and slow.own.data == pytest.approx(0.3, rel=0.3) and slow.others.data == 0.0


def test_a_machine_that_is_slower_by_nature_is_named_once() -> None:
    course = Course(THREE, lambda rank, step: 0.2 * (1.6 if rank == 2 else 1.0)).take(1000)
    [(step, host, slow)] = course.said
    assert host == "h3" and step < SETTLING_STEPS + 100 and not slow.over


@search(10, 100, st.floats(0.3, 3600.0), st.integers(0, 2), st.integers(1, 150))
def test_a_pause_of_one_rank_names_nobody(longest: float, rank: int, at: int) -> None:
    """A garbage collection, a checkpoint, a command that somebody types there: in one step, again after 100 more."""

    def seconds(one: int, step: int) -> float:
        return longest if one == rank and step in (at, at + 100) else 0.2

    assert Course(THREE, seconds).take(300).said == []


def test_slow_first_steps_name_nobody() -> None:
    assert Course(THREE, lambda rank, step: 9.0 if rank == 1 and step <= SETTLING_STEPS else 0.2).take(200).said == []


def test_all_hosts_slow_is_nobody_slow() -> None:
    assert Course(THREE, lambda rank, step: 0.2 if step < 100 else 0.8).take(300).said == []


def test_a_little_longer_is_not_slow_however_long_it_lasts() -> None:
    times = 1 + ALLOWANCE - 0.02
    assert Course(THREE, lambda rank, step: 0.2 * (times if rank == 1 else 1.0)).take(2000).said == []


@pytest.mark.parametrize(("longer", "named"), [(0.0019, []), (0.0021, ["h1"])])
def test_steps_of_a_millisecond_differ_without_one_being_slow(longer: float, named: list[str]) -> None:
    course = Course({0: "h1", 1: "h2"}, lambda rank, step: 0.001 + (longer if rank == 0 else 0.0)).take(10_000)
    assert [host for _, host, _ in course.said] == named


def test_uneven_steps_before_make_the_allowance_wider() -> None:
    """What is slow where steps were even is not where a host was a fifth faster or slower all the time."""

    def uneven(rank: int, step: int) -> float:
        return 0.2 * ((0.8, 1.2)[step // 40 % 2] if rank == 1 else 1.0)

    def then_longer(before: Seconds) -> Seconds:
        return lambda rank, step: before(rank, step) if step < 400 else 0.2 * (1.4 if rank == 1 else 1.0)

    two = {0: "h1", 1: "h2"}
    assert [host for _, host, _ in Course(two, then_longer(lambda rank, step: 0.2)).take(800).said] == ["h2"]
    assert Course(two, then_longer(uneven)).take(800).said == []


def test_a_rank_that_ended_is_not_waited_for() -> None:
    watch = SlowWatch("h1")
    course = Course(THREE, lambda rank, step: 0.2)
    course.watches["h1"] = watch
    course.take(50)
    del course.hosts, course.work[2]
    course.hosts = {0: "h1", 1: "h2"}
    watch.ended(2)
    course.seconds = lambda rank, step: 0.6 if rank == 0 else 0.2
    assert [host for _, host, _ in course.take(60).said] == ["h1"]


def test_nothing_is_compared_with_nobody() -> None:
    assert Course({0: "h1"}, lambda rank, step: 0.2 if step < 50 else 5.0).take(200).said == []
    assert compared({0: Took(1.0, 0.0)}, [0], {0: "h1"}) == {}


def test_a_host_is_as_slow_as_its_fastest_rank_and_is_compared_with_all_others() -> None:
    took = {0: Took(1.0, 0.0), 1: Took(3.0, 0.0), 2: Took(5.0, 1.0), 3: Took(2.0, 0.0)}
    hosts = {0: "h1", 1: "h2", 2: "h2", 3: "h3"}
    found = compared(took, [1, 2], hosts)
    assert found[None] == (Took(3.0, 0.0), Took(1.5, 0.0))
    assert found[1] == (Took(3.0, 0.0), Took(5.0, 1.0)) and found[2] == (Took(5.0, 1.0), Took(3.0, 0.0))
    assert compared(took | {1: Took(0.5, 0.0)}, [1, 2], hosts)[2] == (Took(5.0, 1.0), Took(1.0, 0.0))
    assert set(compared(took, [0], hosts)) == {None}


@pytest.mark.parametrize("words", [None, [1, 2, 3], [1, 2, "x", 4], [[], 1, 1, 1]])
def test_work_in_another_form_is_refused(words: list[float]) -> None:
    with pytest.raises((TypeError, ValueError)):
        work_of(words)


@pytest.mark.parametrize("file", sorted(RECORDED.glob("slow-*.json.gz")), ids=lambda path: path.name)
def test_recorded_runs(file: Path) -> None:
    """What both keepers of a lab run wrote of their ranks: h2 lost half of its quota at a known step, or nobody did."""
    recorded = json.loads(gzip.decompress(file.read_bytes()))
    watches = {host: SlowWatch(host) for host in ("h1", "h2")}
    said = []
    for now, host, rank, work in recorded["work"]:
        for me, watch in watches.items():
            watch.report(host, rank, work_of(work))
            window = watch.look(now)
            if window and window.slow:
                said.append((me, window.slow.over, work[0]))
    if recorded["fault_step"] is None:
        assert said == []
    else:
        assert [one[:2] for one in said] == [("h2", False), ("h2", True)]
        assert recorded["fault_step"] < said[0][2] <= recorded["fault_step"] + 50
