"""What one keeper knows of the whole run: the data of course.py. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Optional, Set, Tuple

from keeper import decide as attempts
from keeper.decide import Words

WITNESS = "control:"  # before the name of a witness; no host's name has a colon


@dataclass(frozen=True)
class Rules:
    """What a run allows."""

    nodes: int  # hosts of the first attempt; later ones have as many at most
    max_restarts: int = 0  # below 0: none, unless the ranks say that they can go on; then so many
    min_nodes: int = 1
    max_host_failures: int = 2  # so many make a host that is left out
    steps_are_known: bool = True  # ranks report their steps, or have not begun


@dataclass(frozen=True)
class Attempt:
    """One attempt, as keepers agree on it."""

    hosts: Tuple[str, ...]  # in rank order; the first one is the master
    ports: Tuple[int, int]  # of the master: for the rendezvous, and a free one
    number: int = 1
    ballot: int = 1
    ends: Tuple[Words, ...] = ()  # of the attempts before: {"number", "hosts", "cause": CAUSE, "reached": step or null}
    left_out: Tuple[Tuple[str, str], ...] = ()  # hosts of the run that are not in it, and why not
    decided_by: str = ""  # who decides where exactly half of the hosts vote; empty: the master
    first_ballot: Optional[int] = None  # with which it began, where a later one has changed the decider

    @property
    def decider(self) -> str:
        """Who decides where exactly half of the hosts vote."""
        return self.decided_by or self.hosts[0]

    @property
    def identity(self) -> int:
        """What it keeps while only its decider changes: the ballot with which it began."""
        return self.ballot if self.first_ballot is None else self.first_ballot

    def words(self) -> Words:
        """As it travels."""
        return {
            "hosts": list(self.hosts), "ports": list(self.ports), "number": self.number, "ballot": self.ballot,
            "ends": list(self.ends), "left_out": [list(one) for one in self.left_out],
            "decider": self.decided_by, "first_ballot": self.first_ballot,
        }  # fmt: skip


def attempt_of(words: Words) -> Attempt:
    """An attempt that another host speaks of."""
    master, free = (int(port) for port in words["ports"])
    left_out = tuple((str(host), str(why)) for host, why in words["left_out"])
    hosts = tuple(str(host) for host in words["hosts"])
    ballot, first = int(words["ballot"]), words["first_ballot"]
    decider = str(words["decider"])
    return Attempt(hosts, (master, free), int(words["number"]), ballot, tuple(words["ends"]), left_out, decider, first)


def is_majority(voters: Set[str], attempt: Attempt) -> bool:
    """Whether these are more than half of an attempt's hosts, or exactly half with its decider."""
    return 2 * len(voters & set(attempt.hosts)) + (attempt.decider in voters) > len(attempt.hosts)


@dataclass(frozen=True)
class Over:
    """The run has ended."""

    status: str  # succeeded, failed, stopped
    reason: str  # why it does not go on, beyond the last cause; may be empty
    at: float
    alone: bool = False  # for this host: others may go on


@dataclass(frozen=True)
class Known:
    """What another keeper has said last."""

    at: float
    words: Words
    attempt: Attempt
    votes: Tuple[Attempt, ...]

    def is_fresh(self, now: float) -> bool:
        """Whether it was said a moment ago."""
        return now - self.at <= attempts.FRESH_SECONDS

    @property
    def stays(self) -> bool:
        """Whether it may take part in another attempt."""
        return not (self.words["over"] or self.words["leaving"])


@dataclass(frozen=True)
class Course:
    """What one keeper knows of the whole run. `all_hosts`: that have a keeper, in the plan's order."""

    me: str
    all_hosts: Tuple[str, ...]
    rules: Rules
    attempt: Attempt  # the newest one that was accepted, as far as is known here
    grace: float
    own: Optional[attempts.State] = None  # of this host in its last attempt; None: it was in none
    own_attempt: int = 0  # the identity of that attempt
    known: Mapping[str, Known] = field(default_factory=dict)
    votes: Tuple[Attempt, ...] = ()  # this keeper's, since the last attempt that was accepted
    voted_at: Optional[float] = None
    ports: Optional[Tuple[int, int]] = None
    reached: Optional[int] = None  # the last step of the attempt
    alone_since: Optional[float] = None  # waiting, and nobody of the attempt can be heard
    ended_at: Optional[float] = None  # when this host's ranks had ended
    stop: Optional[attempts.Stop] = None
    leaving: Optional[float] = None  # when this host was asked to end, while the run may go on without it
    over: Optional[Over] = None
    left: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether this host's ranks are, or were, in the newest attempt."""
        return self.own is not None and self.own_attempt == self.attempt.identity

    @property
    def has_ended(self) -> bool:
        """Whether no ranks of any attempt run here."""
        return self.own is None or self.own.status == "ended"

    @property
    def status(self) -> str:
        """starting, running, ending, ended; waiting: this host is not in the attempt."""
        if self.own is None or (self.own.status == "ended" and not self.takes_part):
            return "waiting"
        return self.own.status

    @property
    def restarts(self) -> bool:
        """Whether there may be another attempt."""
        return self.rules.max_restarts > 0

    def heard(self, now: float) -> Set[str]:
        """This keeper, and all that it hears now."""
        return {self.me, *(host for host, known in self.known.items() if known.is_fresh(now))}

    def is_in_view(self, now: float) -> bool:
        """Whether a control machine follows the run, which starts a keeper again that has ended."""
        return any(name.startswith(WITNESS) for name in self.heard(now))
