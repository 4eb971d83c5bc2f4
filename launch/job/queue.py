"""A start's turn on all its hosts: first come, first served, or refused at once. The hosts' half: keeper/queue.py.

The door's verb `queue` keeps this start's ticket on each host for as long as its SSH channel is open, so a control
machine that dies gives its place back. In the uncontended case there is one round trip for the proposals of all hosts,
at once, and one for the commit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from launch.cli import exits, units
from launch.cli.refusal import Problem, Refusal
from launch.hosts.connection import ANSWER_SECONDS, Machine
from launch.hosts.door import Door
from launch.job.readiness import NO_ANSWER_FIX

PING_SECONDS = 5  # the host gives a place away when it has heard nothing for a minute
SAY_SECONDS = 30  # the longest that a start waits without a line
TOGETHER_SECONDS = 0.5  # what changes on many hosts at once is one line


@dataclass(frozen=True)
class Place:
    """How a start stands on one host."""

    ahead: list[dict[str, Any]]  # as keeper/queue.py sends it
    lease: dict[str, Any] | None  # as keeper/lease.py returns it
    heard: float  # monotonic clock of this machine

    @property
    def is_its_turn(self) -> bool:
        """Nobody has the host, and nobody comes before this start."""
        return not self.ahead and self.lease is None

    @property
    def is_undecided(self) -> bool:
        """Those ahead are about to go, to wait or to leave; a moment later it is known which."""
        return self.lease is None and bool(self.ahead) and all(one["state"] == "undecided" for one in self.ahead)


@dataclass(frozen=True)
class Blocker:
    """A run that keeps this start from some of its hosts."""

    run: str
    owner: str
    state: str  # "runs", or as in keeper/queue.py
    since: float  # monotonic clock of this machine
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        age = units.age(max(0.0, time.monotonic() - self.since))
        if self.state == "runs":
            return f"run {self.run} of {self.owner} is in progress ({age})"
        if self.state == "waits":
            return f"run {self.run} of {self.owner} comes first; it has waited for {age}"
        return f"run {self.run} of {self.owner} is starting ({age})"

    @property
    def where(self) -> str:
        """The hosts in words."""
        return f"host{'s' if len(self.hosts) > 1 else ''} {', '.join(self.hosts)}"

    def problem(self) -> Problem:
        """What a start that does not wait is refused with."""
        fix = f"wait for it with `WAIT=1`, or end it with `make stop RUN={self.run}`"
        return Problem(self.where, str(self), "wait behind it with `WAIT=1`" if self.state == "waits" else fix)


@contextmanager
def turn(
    machines: Sequence[Machine],
    run: str,
    owner: str,
    wait: bool,
    say: Callable[[str], None],
    open_door: Callable[[Machine, str, dict[str, Any]], Door] = Door,
) -> Iterator[None]:
    """Enters when it is this run's turn on all hosts; others stay behind it until the `with` block, the start, ends.

    With `wait` it waits for its turn, without a limit, and says for whom, for how long and at which place.
    Raises Refusal naming every run that comes first, without `wait`; with UNREACHABLE, naming every host that does not
    answer within ANSWER_SECONDS or whose connection ends.
    """
    doors = _Doors(machines, {"run": run, "owner": owner, "wait": wait}, open_door)
    try:
        proposed = doors.first_answers("proposed")
        doors.send({"commit": max(words["proposed"] for words in proposed.values())})
        places = {name: _place(words) for name, words in doors.first_answers("place").items()}
        _await_turn(doors, places, say if wait else None)
        doors.send({"starts": True})
        yield
    finally:
        doors.close()


def blockers(places: Mapping[str, Place]) -> list[Blocker]:
    """Who keeps the start from each of its hosts, one run for a host: the lease's holder, else the first in the queue
    that is not undecided. Pure."""
    found: dict[tuple[str, str], Blocker] = {}
    for name, place in places.items():
        if place.is_its_turn:
            continue
        if place.lease:
            one = {**place.lease, "state": "runs", "since": place.lease["seconds"]}
        else:
            one = next((other for other in place.ahead if other["state"] != "undecided"), place.ahead[0])
        key = (one["run"], one["state"])
        hosts = (*found[key].hosts, name) if key in found else (name,)
        since = min([place.heard - one["since"], *([found[key].since] if key in found else [])])
        found[key] = Blocker(one["run"], one["owner"], one["state"], since, hosts)
    return list(found.values())


def number_in_queue(places: Mapping[str, Place]) -> int:
    """1: no other start waits for one of these hosts before this one. Pure."""
    running = {place.lease["run"] for place in places.values() if place.lease}
    ahead = {one["run"] for place in places.values() for one in place.ahead if one["state"] != "starts"}
    return 1 + len(ahead - running)


def _await_turn(doors: _Doors, places: dict[str, Place], say: Callable[[str], None] | None) -> None:
    """Returns when it is this start's turn. Without `say` raises Refusal when it is known that it is not."""
    begun = due = time.monotonic()
    said: object = None
    while not all(place.is_its_turn for place in places.values()):
        now = time.monotonic()
        in_the_way = blockers(places)
        situation = [(one.run, one.state, one.hosts) for one in in_the_way], number_in_queue(places)
        if say is None:
            due = begun + ANSWER_SECONDS
            if now >= due or not any(place.is_undecided for place in places.values()):
                raise Refusal(one.problem() for one in in_the_way)
        elif situation != said:
            due = min(due, now + TOGETHER_SECONDS)
        if say and now >= due:
            named = "; ".join(f"{one.where}: {one}" for one in in_the_way)
            say(f"waiting for {units.age(now - begun)}, place {situation[1]} in the queue; {named}")
            said, due = situation, now + SAY_SECONDS
        answer = doors.next(due - now)
        if answer:
            places[answer[0]] = _place(answer[1])


def _place(words: Mapping[str, Any]) -> Place:
    return Place(words["ahead"], words["lease"], time.monotonic())


class _Doors:
    """The queue's doors on all hosts: opened at once, read by a thread each, pinged, and closed together."""

    def __init__(
        self,
        machines: Sequence[Machine],
        options: dict[str, Any],
        open_door: Callable[[Machine, str, dict[str, Any]], Door],
    ) -> None:
        self._names = [machine.name for machine in machines]
        self._inbox: SimpleQueue[tuple[str, dict[str, Any] | Exception]] = SimpleQueue()
        self._opened: dict[str, Door] = {}
        self._closed = Event()

        def listen(machine: Machine) -> None:
            try:
                door = self._opened[machine.name] = open_door(machine, "queue", options)
                if self._closed.is_set():
                    door.close()
                for frame in door.frames(ANSWER_SECONDS):  # pings are answered, so silence is a host that is gone
                    self._inbox.put((machine.name, frame.words))
                raise EOFError("the connection has ended")
            except Exception as error:
                self._inbox.put((machine.name, error))

        def ping() -> None:
            while not self._closed.wait(PING_SECONDS):
                self.send({"ping": True})

        for machine in machines:
            Thread(target=listen, args=(machine,), daemon=True, name="muster-queue").start()
        Thread(target=ping, daemon=True, name="muster-queue-ping").start()

    def send(self, words: dict[str, Any]) -> None:
        """Send one request to all hosts. A connection that has ended shows where it is read."""
        for door in list(self._opened.values()):
            with contextlib.suppress(Exception):
                door.send(words)

    def first_answers(self, key: str) -> dict[str, dict[str, Any]]:
        """The first frame with this key of every host, in the hosts' order.

        Raises Refusal, naming every host that failed or sent none within ANSWER_SECONDS.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        answers: dict[str, dict[str, Any] | Exception] = {}
        while len(answers) < len(self._names):
            try:
                name, words = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if isinstance(words, Exception) or key in words:
                answers[name] = words
        silent = TimeoutError(f"nothing came within {ANSWER_SECONDS} s")
        listed = {name: answers.get(name, silent) for name in self._names}
        problems = [_no_answer(name, words) for name, words in listed.items() if isinstance(words, Exception)]
        if problems:
            raise Refusal(problems, exits.UNREACHABLE)
        return {name: words for name, words in listed.items() if isinstance(words, dict)}

    def next(self, seconds: float) -> tuple[str, dict[str, Any]] | None:
        """The next place that a host sends, after `seconds` None. Raises Refusal when a host fails."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                name, words = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return None
            if isinstance(words, Exception):
                raise Refusal([_no_answer(name, words)], exits.UNREACHABLE)
            if "place" in words:
                return name, words

    def close(self) -> None:
        """Close all doors, and with them the tickets."""
        self._closed.set()
        for door in list(self._opened.values()):
            with contextlib.suppress(Exception):
                door.close()


def _no_answer(name: str, error: Exception) -> Problem:
    said = str(error) or type(error).__name__
    return Problem(f"host {name}", f"its queue of starts did not answer: {said}", NO_ANSWER_FIX)
