"""Promises: starts go in one order on all hosts, none waits for ever, no two have a host; a refusal names who has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st

from keeper import lease
from keeper.engines import ROOTS
from keeper.queue import Ticket, waiting
from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.files import ROOT
from launch.hosts.connection import connected
from launch.hosts.door import Door
from launch.hosts.inventory import Target
from launch.job import queue
from launch.job.queue import Place
from tests.keeper.simulation import search
from tests.launch.hosts.sshd import Sshd, user_key
from tests.launch.job.queue_start import Frame, Host, LocalDoor
from tests.processes import GUARD_SECONDS

BOB = {"run": "20260101-000000-bobs", "owner": "bob@pc"}


def quiet(_text: str) -> None:
    pass


@pytest.fixture
def hosts(tmp_path: Path) -> list[Any]:
    return [Host(name, str(tmp_path / name)) for name in ("h1", "h2", "h3")]


def folder(host: Host) -> str:
    return host.root + ROOTS.lease


@contextmanager
def turn(
    hosts: list[Any],
    run: str,
    wait: bool = False,
    say: Callable[[str], None] = quiet,
    door: Any = LocalDoor,
    owner: str = "ann@laptop",
) -> Iterator[None]:
    with queue.turn(hosts, run, owner, wait, say, door):
        yield


@contextmanager
def running(*hosts: Host, **words: Any) -> Iterator[None]:
    """A run that has these hosts."""
    taken = [lease.take(folder(host), {**BOB, **words}) for host in hosts]
    try:
        yield
    finally:
        for one in taken:
            one.release()


# One start


def test_free_hosts_are_one_starts_turn_at_once_and_others_are_refused_until_it_has_started(hosts: list[Any]) -> None:
    with turn(hosts, "a"):
        assert [[one["run"] for one in waiting(folder(host))] for host in hosts] == [["a"]] * 3
        with pytest.raises(Refusal, match=r"run a of ann@laptop is starting") as refused, turn(hosts[1:], "b"):
            pass
        assert [problem.where for problem in refused.value.problems] == ["hosts h2, h3"]
    assert [waiting(folder(host)) for host in hosts] == [[], [], []]
    with turn(hosts, "b"):
        pass


def test_an_uncontended_start_sends_one_commit_and_needs_two_answers_of_each_host(hosts: list[Any]) -> None:
    sent: list[dict[str, Any]] = []

    class Counting(LocalDoor):
        def send(self, words: dict[str, Any]) -> None:
            sent.append(words)
            super().send(words)

    with turn(hosts, "a", door=Counting):
        assert sent == [{"commit": 1}] * 3 + [{"starts": True}] * 3


def test_a_refusal_names_every_busy_host_with_run_owner_age_and_what_to_do(hosts: list[Any]) -> None:
    with (
        running(hosts[0], hosts[1], time=time.time() - 720),
        running(hosts[2], run="other", owner="eve@lab", time=time.time() - 7200),
        pytest.raises(Refusal) as refused,
        turn(hosts, "a"),
    ):
        pass
    assert refused.value.status == exits.REFUSED
    assert str(refused.value).splitlines() == [
        "  hosts h1, h2: run 20260101-000000-bobs of bob@pc is in progress (12 min)",
        "      fix: wait for it with `WAIT=1`, or end it with `make stop RUN=20260101-000000-bobs`",
        "  host h3: run other of eve@lab is in progress (2.0 h)",
        "      fix: wait for it with `WAIT=1`, or end it with `make stop RUN=other`",
    ]
    assert [waiting(folder(host)) for host in hosts] == [[], [], []]


@pytest.mark.slow
def test_a_refusal_names_the_start_that_waits_already(hosts: list[Any]) -> None:
    with running(hosts[0]), in_thread(hosts[:2], "first", wait=True):
        until(partial(waits, "first", hosts[:2]))
        with (
            pytest.raises(Refusal, match="run first of ann@laptop comes first; it has waited for") as refused,
            turn(hosts[1:], "a"),
        ):
            pass
    (problem,) = refused.value.problems
    assert (problem.where, problem.fix) == ("host h2", "wait behind it with `WAIT=1`")


@pytest.mark.slow
def test_a_waiting_start_says_for_whom_how_long_and_its_place_at_once_when_it_changes_and_now_and_then(
    hosts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SAY_SECONDS", 0.8)
    said: list[str] = []
    behind: list[str] = []
    held = running(hosts[0], hosts[1], time=time.time() - 720)
    held.__enter__()
    with in_thread(hosts, "a", wait=True, say=said.append) as a:
        until(lambda: len(said) == 1)
        who = "hosts h1, h2: run 20260101-000000-bobs of bob@pc is in progress (12 min)"
        assert re.fullmatch(rf"waiting for \d+ s, place 1 in the queue; {re.escape(who)}", said[0])
        with in_thread(hosts[2:], "b", wait=True, say=behind.append):
            until(lambda: bool(behind))
            comes = "host h3: run a of ann@laptop comes first; it has waited for"
            assert re.match(rf"waiting for \d+ s, place 2 in the queue; {comes}", behind[0])
        until(lambda: len(said) >= 3)
        assert said[1].endswith(who) and said[1] != said[0]
        assert not a.entered.is_set()
        held.__exit__(None, None, None)
        assert a.entered.wait(GUARD_SECONDS)


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_and_so_is_one_that_fails(
    hosts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ANSWER_SECONDS", 1)

    class Silent:
        def __init__(self, machine: Any, verb: str, options: dict[str, Any]) -> None:
            if machine.name == "h3":
                raise OSError("no route to host")
            self.name, self.closed = machine.name, threading.Event()

        def frames(self, idle_timeout: float | None) -> Iterator[Frame]:
            if self.name == "h1":
                raise RuntimeError("disk full")
            self.closed.wait()
            yield Frame({})

        def close(self) -> None:
            self.closed.set()

    with pytest.raises(Refusal) as refused, turn(hosts, "a", door=Silent):
        pass
    assert refused.value.status == exits.UNREACHABLE
    assert [(problem.where, problem.what.split(": ")[1]) for problem in refused.value.problems] == [
        ("host h1", "disk full"),
        ("host h2", "nothing came within 1 s"),
        ("host h3", "no route to host"),
    ]


@pytest.mark.slow
def test_a_connection_that_ends_while_a_start_waits_ends_the_start(hosts: list[Any]) -> None:
    with running(hosts[0]), in_thread(hosts[:1], "a", wait=True) as a:
        until(partial(waits, "a", hosts[:1]))
        a.cut()
        until(lambda: a.error is not None)
    assert isinstance(a.error, Refusal) and a.error.status == exits.UNREACHABLE and "host h1" in str(a.error)


@pytest.mark.slow
def test_the_same_through_real_doors_and_an_ended_connection_frees_the_place(tmp_path: Path, hosts: list[Any]) -> None:
    server = Sshd(open_to_all=True)
    (tmp_path / "known_hosts").write_text(server.known_hosts_line)
    key = str(user_key(tmp_path))
    targets = [Target(host.name, "127.0.0.1", server.port, "root", key, python=sys.executable) for host in hosts]
    roots = {host.name: host.root for host in hosts}

    def door(machine: Any, verb: str, options: Any) -> Door:
        return Door(machine, verb, {**options, "root": roots[machine.name]})

    def tickets() -> list[list[str]]:
        return [[one["run"] for one in waiting(folder(host))] for host in hosts]

    try:
        with connected(targets, tmp_path / "known_hosts") as machines:
            with turn(machines, "a", door=door):
                assert tickets() == [["a"]] * 3
            until(lambda: tickets() == [[]] * 3)
            with running(hosts[1]), pytest.raises(Refusal, match="host h2: run 20260101-000000-bobs of bob@pc is in"):
                turn(machines, "b", door=door).__enter__()
            with turn(machines, "c", door=door):
                for machine in machines:
                    machine.close()
                until(lambda: tickets() == [[]] * 3)
    finally:
        server.close()


# Several starts. Their tickets are held by real processes


@dataclass
class Started:
    """A start in a thread: whether it had its turn, or what it was refused with."""

    entered: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    doors: list[LocalDoor] = field(default_factory=list)

    def cut(self) -> None:
        """End its connections."""
        for door in list(self.doors):
            door.process.kill()


@contextmanager
def in_thread(hosts: list[Any], run: str, wait: bool, say: Callable[[str], None] = quiet) -> Iterator[Started]:
    started = Started()

    def door(*arguments: Any) -> LocalDoor:
        started.doors.append(LocalDoor(*arguments))
        return started.doors[-1]

    def work() -> None:
        try:
            with turn(hosts, run, wait, say, door):
                started.entered.set()
                started.leave.wait()
        except BaseException as error:
            started.error = error

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield started
    finally:
        started.leave.set()
        if not started.entered.is_set():
            started.cut()
        thread.join(30)


def waits(run: str, hosts: list[Any]) -> bool:
    """Whether it has its place on all hosts and waits for its turn."""
    return all((run, "waits") in [(one["run"], one["state"]) for one in waiting(folder(host))] for host in hosts)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_of_two_starts_at_the_same_moment_over_the_same_hosts_one_goes_and_one_is_refused(hosts: list[Any]) -> None:
    for number in range(3):
        barrier, both_decided = threading.Barrier(2), threading.Barrier(2)
        outcome: dict[str, str] = {}

        def start(run: str, hosts: list[Any], barrier: Any, both_decided: Any, outcome: dict[str, str]) -> None:
            barrier.wait()
            try:
                with turn(hosts, run), running(*hosts, run=run):
                    outcome[run] = "goes"
                    both_decided.wait(30)
            except Refusal as refusal:
                outcome[run] = str(refusal)
                both_decided.wait(30)

        names = [f"{number}a", f"{number}b"]
        arguments = [(names[0], hosts), (names[1], hosts[::-1])]
        threads = [threading.Thread(target=start, args=(*each, barrier, both_decided, outcome)) for each in arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winner = next(run for run, said in outcome.items() if said == "goes")
        (loser,) = set(names) - {winner}
        assert f"run {winner} of " in outcome[loser] and "make stop" in outcome[loser], outcome


@pytest.mark.slow
def test_waiting_starts_go_one_after_the_other_in_the_order_in_which_they_came(hosts: list[Any]) -> None:
    order: list[str] = []

    def go(run: str, hosts: list[Any]) -> None:
        with turn(hosts, run, wait=True):
            leases = [lease.take(folder(host), {"run": run, "owner": "o"}) for host in hosts]
            order.append(run)
        time.sleep(0.1)
        for taken in leases:
            taken.release()

    threads = []
    wanted = [hosts[:2], hosts[::-1][:2], [hosts[0], hosts[2]], hosts[:2]]
    with running(*hosts):
        for number, wants in enumerate(wanted):
            threads.append(threading.Thread(target=go, args=(f"r{number}", wants)))
            threads[-1].start()
            until(partial(waits, f"r{number}", wants))
    for thread in threads:
        thread.join(30)
    assert order == ["r0", "r1", "r2", "r3"]


@pytest.mark.slow
def test_a_control_machine_that_is_killed_while_it_waits_frees_its_place(hosts: list[Any]) -> None:
    code = ["-m", "tests.launch.job.queue_start"]
    roots = [host.root for host in hosts]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    started: list[subprocess.Popen[str]] = []
    try:
        with running(hosts[0]):
            for run in ("a", "b"):
                started.append(subprocess.Popen([sys.executable, *code, run, *roots], **pipes))
                assert "run 20260101-000000-bobs of bob@pc" in said(started[-1])
            os.kill(started[0].pid, signal.SIGKILL)
            until(lambda: [one["run"] for one in waiting(folder(hosts[2]))] == ["b"])
        while (line := said(started[1])) != "its turn\n":
            assert line.startswith("waiting")
    finally:
        for one in started:
            one.kill()
            one.communicate()
    until(lambda: not any(waiting(folder(host)) for host in hosts))


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline()


# The model: any starts, any interleaving of their messages, any deaths; tickets and leases are real files


@dataclass
class Start:
    """One start as its control machine sees it, and its run."""

    run: str
    hosts: list[int]
    wait: bool
    tickets: dict[int, Ticket] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    committed: set[int] = field(default_factory=set)
    places: dict[str, Place] = field(default_factory=dict)
    leases: dict[int, lease.Lease] = field(default_factory=dict)
    state: str = "asks"  # "goes", "runs", "ended", "refused", "dead"

    @property
    def number(self) -> int:
        return max(self.numbers)


class World:
    """Hosts that are folders, and starts that take one step at a time."""

    def __init__(self, root: Path, starts: list[Start], hosts: int) -> None:
        self.folders = [str(root / f"h{number}") for number in range(hosts)]
        self.starts = starts
        self.went: list[list[Start]] = [[] for _ in self.folders]  # on each host, in the order of their leases
        self.came_after: list[tuple[Start, Start]] = []  # the second one asked when the first was committed everywhere

    def steps(self, start: Start, faults: bool = False) -> list[Callable[..., None]]:
        """What a start can do now, each step to be called with the start."""
        found: list[Callable[..., None]] = []
        if start.state == "asks":
            asked = len(start.tickets) == len(start.hosts)
            for host in start.hosts:
                if host not in start.tickets:
                    found.append(partial(self.ask, host))
                elif asked and host not in start.committed:
                    found.append(partial(self.commit, host))
                elif asked:
                    found.append(partial(self.report, host))
            if len(start.places) == len(start.hosts):
                found.append(self.decide)
        if start.state == "goes":
            found += [partial(self.take, host) for host in start.hosts if host not in start.leases] or [self.leave]
        if start.state == "runs":
            found.append(self.end)
        if faults and start.tickets and start.state in ("asks", "goes"):
            found.append(self.die)
        return found

    def ask(self, host: int, start: Start) -> None:
        if not start.tickets:
            settled = [one for one in self.starts if one.state == "asks" and len(one.committed) == len(one.hosts)]
            self.came_after += [(one, start) for one in settled]
        start.tickets[host] = Ticket(self.folders[host], start.run, "o", start.wait)
        start.numbers.append(start.tickets[host].number)

    def commit(self, host: int, start: Start) -> None:
        start.tickets[host].hear({"commit": start.number})
        start.committed.add(host)

    def report(self, host: int, start: Start) -> None:
        words = start.tickets[host].place()
        start.places[str(host)] = Place(words["ahead"], words["lease"], 0.0)

    def decide(self, start: Start) -> None:
        if all(place.is_its_turn for place in start.places.values()):
            for ticket in start.tickets.values():
                ticket.hear({"starts": True})
            start.state = "goes"
        elif not start.wait and not any(place.is_undecided for place in start.places.values()):
            assert queue.blockers(start.places)
            start.state = "refused"
            self.leave(start)

    def take(self, host: int, start: Start) -> None:
        start.leases[host] = lease.take(self.folders[host], {"run": start.run, "owner": "o"})  # Busy: two on one host
        self.went[host].append(start)

    def leave(self, start: Start) -> None:
        for ticket in start.tickets.values():
            ticket.close()
        start.state = "runs" if start.state == "goes" else start.state

    def end(self, start: Start) -> None:
        for taken in start.leases.values():
            taken.release()
        start.state = "ended"

    def die(self, start: Start) -> None:
        """Its control machine is gone: the kernel closes what the doors had open; their files stay."""
        for ticket in start.tickets.values():
            os.close(ticket._fd)
        start.state = "runs" if start.leases else "dead"


@search(
    30,
    500,
    st.lists(st.tuples(st.sets(st.integers(0, 2), min_size=1), st.booleans()), min_size=2, max_size=5),
    st.randoms(use_true_random=True),
    st.booleans(),
)
def test_starts_go_in_one_order_on_all_hosts_none_waits_for_ever_and_no_two_have_a_host(
    wanted: list[tuple[set[int], bool]], chance: Random, faults: bool
) -> None:
    play(wanted, chance, faults)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [45, pytest.param(1000, marks=pytest.mark.long)])
def test_the_same_for_two_starts_over_the_same_two_hosts(seeds: int) -> None:
    for seed in range(seeds):
        play([({0, 1}, False), ({0, 1}, seed % 3 == 0)], Random(seed), False)


def play(wanted: list[tuple[set[int], bool]], chance: Random, faults: bool) -> None:
    """Any steps of starts, each on some of three hosts, waiting or not; then all go on to their end."""
    root = tempfile.mkdtemp(prefix="muster-queue-")
    try:
        starts = [Start(f"r{number}", sorted(hosts), wait) for number, (hosts, wait) in enumerate(wanted)]
        world = World(Path(root), starts, 3)
        for _ in range(chance.randrange(8, 25 * len(starts))):
            start = chance.choice(starts)
            steps = world.steps(start, faults and chance.random() < 0.1)
            if steps:
                chance.choice(steps)(start)
        died = sum(start.state == "dead" for start in starts)
        # From here on everybody goes on, in turns: whoever has not gone at the end has starved or is in a deadlock.
        for start in starts * len(starts):
            for number in range(24):
                if steps := world.steps(start):
                    steps[number % len(steps)](start)
        assert {start.state for start in starts} <= {"ended", "refused", "dead"}
        assert all(start.state != "refused" for start in starts if start.wait)
        assert died or any(start.state == "ended" for start in starts), "not all refuse each other"
        order = TopologicalSorter[str]()
        for went in world.went:
            for before, after in pairwise(went):
                order.add(after.run, before.run)
        order.prepare()  # raises CycleError where two hosts have another order
        for first, second in world.came_after:
            for went in world.went:
                if first in went and second in went:
                    assert went.index(first) < went.index(second), "first come, first served"
    finally:
        shutil.rmtree(root)
