"""Keepers without processes and sockets: time, messages and ranks are simulated, the decisions are the real ones.

An attempt takes a step when the ranks of all its hosts run and can reach each other; each fifth step is kept on all of
them, and the next attempt goes on after the newest one that any of its hosts keeps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

from keeper import course as c
from keeper import decide as d
from keeper import known as k

PHASES = (Phase.explicit, Phase.generate)  # a failing case is small enough, and to shrink one takes minutes
STEP_SECONDS = 0.25
GRACE_SECONDS = 30.0
#: From the last fault to the last keeper's end: silence, the ranks' grace, and what is waited for beyond it.
LONGEST_SECONDS = d.START_SECONDS + 4 * d.LOST_SECONDS + GRACE_SECONDS + d.DONE_SECONDS + 2 * d.LINGER_SECONDS
#: The same where there may be other attempts.
LONGEST_WITH_RESTARTS = LONGEST_SECONDS + c.BETWEEN_SECONDS + 2 * c.MINORITY_SECONDS
KEPT_STEPS = 5
HOSTS = ("h1", "h2", "h3", "h4", "h5")
FAULTS = (
    *("rank dies", "launcher dies", "hang", "power", "container", "container asked to end", "cut", "alone", "heal"),
    *("disk", "store", "stop"),
)
RETURNS = "returns"  # a host whose keeper was ended with it, or with its container
WITNESS_FAULTS = ("witness goes", "witness comes", "witness cut", "witness heals")


def search(
    few: int, many: int, *strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A random search with few examples for `make test` and many for `make test-all`, also after a change of rules."""

    def decorate(holds: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.slow
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.long)])
        def test(examples: int) -> None:
            settings(max_examples=examples, deadline=None, phases=PHASES)(given(*strategies)(holds))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return decorate


@dataclass
class Host:
    """A host of the simulation: its keeper's course, and its ranks."""

    course: k.Course
    ranks: str = "gone"  # running, waiting (for a peer, for ever), failed, done (torchrun is still there), gone
    number: int = 0  # of the attempt whose ranks these are
    saved: int = 0
    store_lost: bool = False  # its torchrun does not learn of the end of the others' ranks
    powered: bool = True
    refuses: bool = False  # its container has ended: its keeper's port is closed
    deaf_to_term: bool = False
    held_up_until: float = 0.0  # by its disk: it sees nothing, while its words of before are still sent
    words: dict[str, Any] | None = None  # what it told last
    due: list[tuple[float, Any]] = field(default_factory=list)  # (when, event)
    said: float = 0.0
    notes: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> d.State:
        """Of its last attempt."""
        assert self.course.own is not None
        return self.course.own


@dataclass(frozen=True)
class Step:
    """A step that an attempt has taken."""

    at: float
    attempt: k.Attempt
    step: int


class World:
    """Hosts, the network between them, and a clock. The ranks' work is done at `finish` seconds, and not before
    `steps` steps."""

    def __init__(self, count: int, seed: int, finish: float, rules: k.Rules | None = None, steps: int = 0) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.finish, self.total = finish, steps
        rules = rules or k.Rules(nodes=count)
        names = HOSTS[:count]
        first = k.Attempt(names[: rules.nodes], (1, 2))
        self.first, self.rules = first, rules
        self.hosts = {name: Host(self.at_first(name, names)) for name in names}
        self.witnesses: dict[str, Host] = {}
        self.cut: set[frozenset[str]] = set()
        self.steps: list[Step] = []
        self.at_step: dict[int, int] = {}  # an attempt's identity -> its last step
        for name, host in self.hosts.items():
            self.happen(host, c.Ports(0.0, (self.chance.randrange(10), self.chance.randrange(10))))
            if name in first.hosts:
                self.start(host, first)

    def begin_witness(self) -> None:
        """A control machine has the run in view from now on."""
        name = f"{k.WITNESS}{len(self.witnesses)}"
        self.witnesses[name] = Host(self.at_first(name, list(self.hosts)))

    def at_first(self, name: str, names: Sequence[str]) -> k.Course:
        """The course of a keeper, or a witness, that knows no more than the plan."""
        return c.begin(name, names, self.rules, self.first, self.now, GRACE_SECONDS)

    def come_back(self, host: Host) -> None:
        """Its keeper is started again, with the promises that it has kept."""
        if not (host.powered or host.course.left):
            kept = json.loads(json.dumps(c.promises(host.course)))
            course = c.come_back(self.at_first(host.course.me, list(self.hosts)), kept, self.now)
            host.course, host.powered, host.refuses, host.due = course, True, False, []
            self.happen(host, c.Ports(self.now, (self.chance.randrange(10), self.chance.randrange(10))))

    def happen(self, host: Host, event: Any) -> None:
        if host.course.left or not host.powered:
            return
        host.course, actions = c.decide(host.course, event)
        for action in actions:
            self.do(host, action)

    def do(self, host: Host, action: Any) -> None:
        if isinstance(action, d.Tell):
            self.tell(host)
        elif isinstance(action, d.Note):
            host.notes.append((action.name, action.words))
        elif isinstance(action, c.Start):
            self.start(host, action.attempt)
        elif isinstance(action, d.Terminate) and not host.deaf_to_term:
            host.due.append((self.now + self.chance.uniform(0.1, 3), ("terminated", host.number)))
        elif isinstance(action, d.Kill):
            self.end_ranks(host, 137)

    def start(self, host: Host, attempt: k.Attempt) -> None:
        assert host.ranks == "gone", "ranks of an earlier attempt are still there"
        host.ranks, host.number, host.deaf_to_term = "running", attempt.number, False
        host.due.append((self.now + self.chance.uniform(0, 3), ("started", attempt.number)))

    def end_ranks(self, host: Host, status: int) -> None:
        if host.ranks != "gone":
            host.ranks = "gone"
            host.due.append((self.now, d.Ended(self.now, status)))

    def tell(self, host: Host) -> None:
        host.said = self.now
        if self.now >= host.held_up_until or host.words is None:
            host.words = c.beat(host.course, self.now)
        for name, other in {**self.hosts, **self.witnesses}.items():
            if other.refuses and self.reach(host.course.me, name):
                host.due.append((self.now, d.Refused(self.now, name)))
            elif other is not host and self.reach(host.course.me, name) and not other.course.left:
                slow = 2.0 if k.WITNESS in name + host.course.me else 0.5
                other.due.append((self.now + self.chance.uniform(0, slow), ("beat", host.course.me, host.words)))

    def reach(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut and not {one, other} <= self.witnesses.keys()

    def step(self) -> None:
        self.now += STEP_SECONDS
        for host in [*self.hosts.values(), *self.witnesses.values()]:
            if not host.powered or host.course.left:
                continue
            if self.now - host.said >= 1.0:
                self.tell(host)
            if self.now < host.held_up_until:
                continue
            due = sorted((entry for entry in host.due if entry[0] <= self.now), key=lambda entry: entry[0])
            host.due = [entry for entry in host.due if entry[0] > self.now]
            for _, what in due:
                self.arrive(host, what)
            self.finish_ranks(host)
            self.happen(host, d.Tick(self.now))
        self.train()

    def train(self) -> None:
        """Let each attempt whose hosts are all at work take a step."""
        for attempt in {host.course.attempt.identity: host.course.attempt for host in self.hosts.values()}.values():
            at_work = [self.hosts[name] for name in attempt.hosts]
            if self.apart(attempt) or not all(one.powered and self.works_in(one, attempt) for one in at_work):
                continue
            before = self.at_step.setdefault(attempt.identity, max(one.saved for one in at_work))
            if self.total and before >= self.total:
                continue
            step = self.at_step[attempt.identity] = before + 1
            self.steps.append(Step(self.now, attempt, step))
            for one in at_work:
                one.saved = step if step % KEPT_STEPS == 0 else one.saved
                self.happen(one, c.Stepped(self.now, step))

    def apart(self, attempt: k.Attempt) -> bool:
        """Whether two hosts of an attempt cannot reach each other."""
        return any(pair <= set(attempt.hosts) for pair in self.cut)

    @staticmethod
    def works_in(host: Host, attempt: k.Attempt) -> bool:
        return host.ranks == "running" and host.course.attempt.identity == attempt.identity

    def finish_ranks(self, host: Host) -> None:
        """Let ranks end well when the work is done, and torchrun when all ranks have."""
        attempt = host.course.attempt
        others = [self.hosts[name] for name in attempt.hosts]
        whole = not self.apart(attempt) and all(
            one.powered and one.ranks in ("running", "done", "gone") for one in others
        )
        trained = self.at_step.get(attempt.identity, 0) >= self.total
        if self.now >= self.finish and trained and whole and host.ranks == "running":
            host.ranks = "done"
            self.happen(host, d.Done(self.now))
        if host.ranks == "done" and not host.store_lost and all(one.ranks != "running" for one in others):
            self.end_ranks(host, 0)

    def arrive(self, host: Host, what: Any) -> None:
        if not isinstance(what, tuple):
            self.happen(host, what)
        elif what[0] == "beat":
            if self.reach(host.course.me, what[1]):
                self.happen(host, d.Heard(self.now, what[1], what[2]))
        elif what[1] == host.number:
            if what[0] == "started":
                self.happen(host, d.Started(self.now))
            else:
                self.end_ranks(host, 143)

    def inject(self, fault: str, name: str, other: str) -> None:
        host = self.hosts[name]
        if fault == "rank dies" and host.ranks == "running":
            host.ranks = "failed"
            cause = d.Cause("rank", name, 0, "killed by SIGKILL", self.now)
            self.happen(host, d.Failed(self.now, cause))
            host.due.append((self.now + 30.0, ("terminated", host.number)))
        elif fault == "launcher dies":
            self.end_ranks(host, 137)
        elif fault == "hang" and host.ranks == "running":
            host.deaf_to_term, host.ranks = True, "waiting"
            self.happen(host, d.Failed(self.now, d.Cause("hang", name, 0, "no progress", self.now)))
        elif fault in ("power", "container"):
            host.powered, host.ranks, host.refuses = False, "gone", fault == "container"
        elif fault == "container asked to end":
            self.happen(host, c.LeaveAsked(self.now, "SIGTERM"))
        elif fault == "cut" and other != name:
            self.cut.add(frozenset((name, other)))
        elif fault == "alone":
            self.cut.update(frozenset((name, peer)) for peer in self.hosts if peer != name)
        elif fault == RETURNS:
            self.come_back(host)
        elif fault == "heal":
            self.cut = {pair for pair in self.cut if pair & self.witnesses.keys()}
        elif fault == "witness comes":
            self.begin_witness()
        elif fault == "witness goes":
            for witness in self.witnesses.values():
                witness.powered = False
        elif fault == "witness cut":
            self.cut.update(frozenset((name, witness)) for witness in self.witnesses)
        elif fault == "witness heals":
            self.cut = {pair for pair in self.cut if not pair & self.witnesses.keys()}
        elif fault == "disk":
            host.held_up_until = self.now + self.chance.uniform(d.LOST_SECONDS, 3 * d.LOST_SECONDS)
        elif fault == "store":
            host.store_lost = True
        elif fault == "stop":
            self.happen(host, d.StopAsked(self.now, "make stop"))

    def run(self, faults: list[tuple[float, str, str, str]], longest: float = LONGEST_SECONDS) -> None:
        """To the end of all, or `longest` after the last fault and the end of the ranks' work."""
        pending = sorted(faults)
        limit = max([self.finish + self.total * STEP_SECONDS, *(at for at, *_ in pending)]) + longest
        while self.now < limit and not (self.ended() and RETURNS not in [fault for _, fault, *_ in pending]):
            while pending and pending[0][0] <= self.now:
                self.inject(*pending.pop(0)[1:])
            self.step()

    def ended(self) -> bool:
        return all(host.course.left or not host.powered for host in self.hosts.values())

    def survivors(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.powered]

    def verdicts(self) -> list[str]:
        return [c.verdict(host.course) for host in self.hosts.values() if host.powered]
