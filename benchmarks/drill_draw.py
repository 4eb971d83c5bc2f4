"""Which faults `make drill FAULTS=` puts into its runs, when, and what a run can bear. Pure: a seed gives one draw.

Faults are drawn in blocks, one for each run: in the first, third, ... only such that leave a run all of its hosts; in
the others also LOSSES such that take one from it. Within each of these two sorts every kind comes once before any
comes again. Clocks that differ are not among them: the hosts of a lab share one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from keeper.known import Attempt, is_majority

BLOCK_FAULTS = 5  # in a run
LOSSES = 2  # at most, in a run that may lose hosts
GAP_SECONDS = (15.0, 30.0)  # from the first step after a fault to the next fault
START_SECONDS = (0.0, 3.0)  # from the start of an attempt's ranks to a fault in its start-up
IN_START, IN_SAVING = 0.3, 0.4  # of the faults that can come there


@dataclass(frozen=True)
class Kind:
    """A kind of faults."""

    what: str  # {host}: where
    restarts: bool = True  # whether ranks are started anew after it
    loses: bool = False  # whether the run may go on without a host
    pair: bool = False  # it is about two hosts
    in_start: bool = False  # it also comes before an attempt's first step
    in_saving: bool = False  # it also comes while a host writes a checkpoint
    seconds: tuple[float, float] = (0.0, 0.0)  # after which it is over by itself
    alone: bool = False  # it waits until the faults before it are over


SHORT = (3.0, 6.0)  # less than a host may be silent (keeper/decide.py: LOST_SECONDS)
LONG = (20.0, 40.0)
KINDS = {
    "rank_killed": Kind("a rank is killed on {host}", in_start=True, in_saving=True),
    "torchrun_killed": Kind("torchrun is killed on {host}", in_start=True, in_saving=True),
    "rank_stopped": Kind("a rank is stopped (SIGSTOP) on {host}", in_start=True),
    "rank_held": Kind("a rank on {host} stands still, and no state says so"),
    "out_of_memory": Kind("the container on {host} has no memory left"),
    "bit_flipped": Kind("a rank is killed on {host}, and a bit of its newest checkpoint is flipped"),
    "cut_short": Kind("{host} do not reach each other", restarts=False, pair=True, seconds=SHORT),
    "link_down_short": Kind("the network interface of {host} is down", restarts=False, seconds=SHORT),
    "control_away": Kind("no host can be reached over SSH", restarts=False, in_start=True, seconds=(5.0, 20.0),
                         alone=True),
    "control_killed": Kind("make train is killed (kill -9); later: make attach", restarts=False, in_start=True,
                           in_saving=True, seconds=(2.0, 8.0)),
    "slow_host": Kind("{host} has half of its computing time", restarts=False, seconds=(15.0, 25.0)),
    "keeper_killed": Kind("the keeper is killed on {host}, and with it its container", loses=True, in_start=True,
                          in_saving=True, alone=True),
    "power_loss": Kind("{host} loses its power, and is booted later", loses=True, in_start=True, in_saving=True,
                       seconds=LONG, alone=True),
    "cut_long": Kind("{host} do not reach each other", loses=True, pair=True, seconds=LONG, alone=True),
    "link_down_long": Kind("the network interface of {host} is down", loses=True, seconds=LONG, alone=True),
    "disk_full": Kind("the disk of {host} is full", loses=True, seconds=SHORT, alone=True),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """One fault, as it was drawn."""

    kind: str
    moment: str  # "training", "start" (of an attempt, before its first step), "saving" (a checkpoint)
    after: float  # seconds, from GAP_SECONDS or START_SECONDS
    place: float  # from 0 to 1: on which of the hosts that a run can bear it on
    seconds: float  # after which it is over by itself


def draw(seed: int, number: int) -> list[tuple[Drawn, ...]]:
    """So many faults, in blocks."""
    chance = random.Random(seed)
    keeping = _endless(chance, [name for name, kind in KINDS.items() if not kind.loses])
    losing = _endless(chance, [name for name, kind in KINDS.items() if kind.loses])
    blocks: list[tuple[Drawn, ...]] = []
    while (left := number - sum(map(len, blocks))) > 0:
        size = min(left, BLOCK_FAULTS)
        losses = min(LOSSES, size) if len(blocks) % 2 else 0
        names = [next(losing) for _ in range(losses)] + [next(keeping) for _ in range(size - losses)]
        chance.shuffle(names)
        blocks.append(tuple(_with_moments(chance, names)))
    return blocks


def _endless(chance: random.Random, names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from chance.sample(names, len(names))


def _with_moments(chance: random.Random, names: Sequence[str]) -> Iterator[Drawn]:
    before: Drawn | None = None
    for name in names:
        kind = KINDS[name]
        moment = "training"
        # In the start-up only after what ends the attempt before, and never twice in a row: three attempts without a
        # new step are the end of a run.
        starts = before is None or (KINDS[before.kind].restarts and before.moment != "start")
        if kind.in_start and starts and chance.random() < IN_START:
            moment = "start"
        elif kind.in_saving and chance.random() < IN_SAVING:
            moment = "saving"
        after = round(chance.uniform(*(START_SECONDS if moment == "start" else GAP_SECONDS)), 1)
        before = Drawn(name, moment, after, chance.random(), round(chance.uniform(*kind.seconds), 1))
        yield before


def bearable(kind: Kind, hosts: Sequence[str]) -> list[tuple[str, ...]]:
    """The hosts of an attempt, or pairs of them, on which a run survives a fault.

    hosts: of the attempt, in rank order. A loss must leave a majority (keeper/course.py).
    """
    if kind.pair:
        return list(combinations(hosts, 2))
    if not kind.loses:
        return [(host,) for host in hosts]
    attempt = Attempt(tuple(hosts), (0, 0))
    return [(host,) for host in hosts if is_majority(set(hosts) - {host}, attempt)]
