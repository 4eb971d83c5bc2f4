"""Which rank or host the others wait for: whose steps take clearly longer, for a while. Pure. Why: slow_reasons.py.

In data-parallel training all ranks' steps take equally long, as each waits for the slowest. What differs is how long a
rank works in a step: its computing (forward and backward, without the all-reduces) and its waiting for data. Ranks
count both from their start on, which their keepers tell each other:

    WORK = [steps, timed steps, seconds that it computed in these, seconds that it waited for data in all steps]

Counted sums lose nothing where messages are dropped; and where a quota of the CPU lets one short step pass and stops
the next one, only their mean says how long a step takes.

Steps are looked at in windows (LEAST_WINDOW_STEPS, LEAST_WINDOW_SECONDS). In each a host's steps take so many times as
long as the others'; by how much that exceeds 1 and an ALLOWANCE is added up, never below 0 (Page's cumulative sum,
Biometrika 41, 1954), and at ENOUGH the host is named. So twice as long is enough after three windows, half as long
again after eight, and a pause of one rank (a garbage collection, a checkpoint, a command that somebody types there)
never is: MOST bounds what one window counts. Evaluation and saving are no steps. The allowance is wider where steps
were less even before. Less than LEAST_LONGER_SECONDS a step is the scheduler's and the caches' doing, and no slowness:
so ranks differ whose steps take a millisecond. Machines that differ by nature are named, too, once: all others wait for
the slowest, and unequal shares of the batch are the fix.

Every keeper judges its own host, and its own ranks where the host as a whole is not slow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import mean, median
from typing import Deque, Dict, List, Mapping, Optional, Sequence, Tuple

SETTLING_STEPS = 10  # of a rank are not looked at: memory is taken, caches fill
LEAST_WINDOW_STEPS = 6  # of every rank, at least, are one window
LEAST_WINDOW_SECONDS = 1.0  # that a window lasts, at least
LEAST_LONGER_SECONDS = 0.002  # than the others' that a mean step must take, to count at all
ALLOWANCE = 0.25  # beyond 1: so many times as long as the others a host may take
MOST_ALLOWANCE = 0.45  # the same, however uneven the steps were before
DEVIATIONS = 2.0  # of the windows before, for which the allowance must do
EVEN_WINDOWS = 40  # of those before: the latest
FEW_WINDOWS = 5  # of so few it is not known how even they are
MOST = 0.8  # that one window counts, at most
ENOUGH = 1.8  # added up, for a name
BACK = 3.0  # times as fast as it rose the sum falls, once a name was said: it is over at 0
LATEST = 3  # windows: what is said of a slow one is their mean

Subject = Optional[int]  # a rank of this host, or None for all of them


@dataclass(frozen=True)
class Work:
    """What a rank has done since its start."""

    steps: int
    timed: int
    computed: float  # seconds
    waited: float  # seconds

    def is_window_from(self, before: "Work") -> bool:
        """Whether enough was done since then to be judged."""
        return self.steps - before.steps >= LEAST_WINDOW_STEPS and self.timed > before.timed

    def since(self, before: "Work") -> "Took":
        """The mean of the steps since then; some of them were timed."""
        waited = (self.waited - before.waited) / (self.steps - before.steps)
        return Took((self.computed - before.computed) / (self.timed - before.timed), waited)


@dataclass(frozen=True)
class Took:
    """Seconds of a rank's mean step in a window."""

    computing: float
    data: float

    @property
    def seconds(self) -> float:
        """How long the others wait for it."""
        return self.computing + self.data


@dataclass(frozen=True)
class Slow:
    """What has become of a rank, or of the whole host: slow, or no longer so."""

    rank: Subject
    times: float  # as long as the others, of late
    over: bool
    own: Took
    others: Took
    windows: int  # for how many it is slow


@dataclass(frozen=True)
class Window:
    """One that has just ended."""

    steps: int  # of this host's ranks
    suspected: bool  # whether somebody here may be slow
    slow: Optional[Slow]  # what is to be said


def work_of(words: Sequence[float]) -> Work:
    """WORK as it is sent. Raises TypeError or ValueError."""
    steps, timed, computed, waited = words
    return Work(int(steps), int(timed), float(computed), float(waited))


def compared(
    took: Mapping[int, Took], own: Sequence[int], hosts: Mapping[int, str]
) -> Dict[Subject, Tuple[Took, Took]]:
    """For this host (None), and for each of its ranks where it has several: its mean step, and the others'.

    took: by rank. own: this host's ranks. hosts: rank -> host. A host is as slow as its fastest rank, and is compared
    with the median of the other hosts' ranks. A rank is compared with the median of all other ranks, or of those beside
    it where these take longer: where the whole host is slow none of its ranks is.
    """
    there = [one for one in own if one in took]
    elsewhere = [took[rank] for rank in took if hosts[rank] != hosts[own[0]]]
    found: Dict[Subject, Tuple[Took, Took]] = {}
    if there and elsewhere:
        found[None] = min((took[rank] for rank in there), key=lambda one: one.seconds), middle(elsewhere)
    for rank in there if len(there) > 1 else ():
        beside, all_others = [one for one in there if one != rank], [one for one in took if one != rank]
        both = (middle([took[one] for one in ranks]) for ranks in (all_others, beside))
        found[rank] = took[rank], max(both, key=lambda one: one.seconds)
    return found


def middle(many: Sequence[Took]) -> Took:
    """The one in the middle, by its seconds; of an even number the mean of both."""
    ordered = sorted(many, key=lambda one: one.seconds)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return Took((low.computing + high.computing) / 2, (low.data + high.data) / 2)


class _Judged:
    """What the windows said of a rank, or of the whole host."""

    def __init__(self) -> None:
        self.score = 0.0
        self.windows = 0  # since it was 0
        self.latest: Deque[Tuple[Took, Took]] = deque(maxlen=LATEST)  # its mean step, and the others'
        self.even: Deque[float] = deque(maxlen=EVEN_WINDOWS)  # times as long as theirs, in windows that counted nothing

    @property
    def allowance(self) -> float:
        """Beyond 1; the wider, the less even its steps were."""
        if len(self.even) < FEW_WINDOWS:
            return ALLOWANCE
        centre = median(self.even)
        deviation = 1.4826 * median(abs(times - centre) for times in self.even)  # as a normal distribution's
        return min(MOST_ALLOWANCE, max(ALLOWANCE, DEVIATIONS * deviation))

    def add(self, own: Took, others: Took, named: bool) -> None:
        """Another window. named: whether it was said that this one is slow."""
        longer = own.seconds - others.seconds
        counts = others.seconds > 0 and not 0 <= longer < LEAST_LONGER_SECONDS
        times = own.seconds / others.seconds if counts else 1.0
        change = min(MOST, times - 1 - self.allowance)
        self.score = min(ENOUGH, max(0.0, self.score + (BACK * change if named and change < 0 else change)))
        self.windows = self.windows + 1 if self.score > 0 else 0
        self.latest.append((own, others))
        if not self.score:
            self.even.append(times)

    def said(self, rank: Subject, over: bool) -> Slow:
        """In the latest windows."""
        own, others = (
            Took(mean(pair[place].computing for pair in self.latest), mean(pair[place].data for pair in self.latest))
            for place in (0, 1)
        )
        return Slow(rank, own.seconds / others.seconds, over, own, others, self.windows)


class SlowWatch:
    """Is told what ranks have done, and says who of this host's is slow, and when that is over; each change once."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._hosts: Dict[int, str] = {}
        self._work: Dict[int, Work] = {}
        self._before: Dict[int, Work] = {}  # at the beginning of the window
        self._since = 0.0  # when that was
        self._judged: Dict[Subject, _Judged] = {}
        self._named: List[Subject] = []  # who is slow, as was said: nobody, or one

    def report(self, host: str, rank: int, work: Work) -> None:
        """What a rank has done so far."""
        if rank not in self._hosts or work.steps < self._work[rank].steps:
            self._before.clear()  # a new rank: a window is one of all of them
        self._hosts[rank], self._work[rank] = host, work

    def ended(self, rank: int) -> None:
        """This rank has ended; it is not waited for."""
        for known in (self._hosts, self._work, self._before):
            known.pop(rank, None)

    def look(self, now: float) -> Optional[Window]:
        """The window that has ended, if one has. now: seconds of any monotonic clock."""
        if not self._before:
            if self._work and all(work.steps >= SETTLING_STEPS and work.timed for work in self._work.values()):
                self._begin(now)
            return None
        if now - self._since < LEAST_WINDOW_SECONDS:
            return None
        pairs = {rank: (work, self._before[rank]) for rank, work in self._work.items()}
        if not all(one.is_window_from(two) for one, two in pairs.values()):
            return None
        own = [rank for rank, host in self._hosts.items() if host == self._me]
        steps = max((pairs[rank][0].steps - pairs[rank][1].steps for rank in own), default=0)
        took = {rank: one.since(two) for rank, (one, two) in pairs.items()}
        self._begin(now)
        return self._judge(steps, compared(took, own, self._hosts) if own else {})

    def _begin(self, now: float) -> None:
        self._before, self._since = dict(self._work), now

    def _judge(self, steps: int, found: Mapping[Subject, Tuple[Took, Took]]) -> Window:
        for subject, (own, others) in found.items():
            self._judged.setdefault(subject, _Judged()).add(own, others, subject in self._named)
        suspected = any(judged.score > 0 for judged in self._judged.values())
        return Window(steps, suspected, self._over() if self._named else self._begun(list(found)))

    def _begun(self, found: Sequence[Subject]) -> Optional[Slow]:
        """The host before its ranks."""
        for subject in sorted(found, key=lambda one: -1 if one is None else one):
            if self._judged[subject].score >= ENOUGH:
                self._named = [subject]
                return self._judged[subject].said(subject, over=False)
        return None

    def _over(self) -> Optional[Slow]:
        [subject] = self._named
        if self._judged[subject].score > 0:
            return None
        self._named = []
        return self._judged[subject].said(subject, over=True)
