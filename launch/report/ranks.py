"""How long each rank computes in a step, and how long it waits: who holds up the others. Pure.

All ranks' steps take equally long, as each waits for the slowest; what differs is how the time is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from launch.job.outcome import number
from launch.page.colours import variable
from launch.page.drawing import TICKS, Figure, Key, Line, Point, Spec, digits, lines
from launch.report.documents import Metrics, Run

LINED_RANKS = 6  # ranks with a line each; of more, the slowest, the median and the fastest are drawn
BARRED_RANKS = 64  # ranks with a bar each; of more, each host's slowest has one
BAR_PIXELS = 22
SLOWER = 1.2  # times what the others compute in a step: a rank is named as the slowest
MILLISECONDS = 1000.0


@dataclass(frozen=True)
class RankTimes:
    """A rank's median step, in seconds, of the later half of the steps that it timed: without those of its start."""

    rank: int
    host: str
    computing: float
    waiting: float

    @property
    def name(self) -> str:
        return f"rank {self.rank}, {self.host}" if self.host else f"rank {self.rank}"


def times(run: Run) -> list[RankTimes]:
    """Of all ranks that have timed a step, in order."""
    if run.metrics is None:
        return []
    hosts, found = run.host_of, []
    for rank in range(_count(run.metrics)):
        pairs = _pairs(run.metrics, rank)
        late = pairs[len(pairs) // 2 :]
        if late:
            halves = (median(computing for _, computing, _ in late), median(waiting for _, _, waiting in late))
            found.append(RankTimes(rank, hosts.get(rank, ""), *halves))
    return found


def _count(metrics: Metrics) -> int:
    return max((len(event["computing"]) for event in metrics.timed if isinstance(event["computing"], list)), default=0)


def _pairs(metrics: Metrics, rank: int) -> list[tuple[float, float, float]]:
    """(step, seconds computing, seconds waiting) of a rank."""
    found = []
    for event in metrics.timed:
        both = [event.get(name) for name in ("computing", "waiting")]
        one = [number(part[rank]) if isinstance(part, list) and rank < len(part) else None for part in both]
        if one[0] is not None and one[1] is not None:
            found.append((float(event["step"]), one[0], one[1]))
    return found


def slowest(known: Sequence[RankTimes]) -> str:
    """A sentence about the rank for which the others wait; empty where none computes clearly longer than they do."""
    if len(known) < 2:
        return ""
    worst = max(known, key=lambda one: one.computing)
    others = median(one.computing for one in known if one is not worst)
    if worst.computing < SLOWER * others:
        return ""
    return f"The others wait for {worst.name}: it computes {worst.computing / others:.1f} times as long as they do."


def figures(run: Run) -> list[Figure]:
    """The median step by rank, and what ranks compute over the run; empty where no rank timed its steps."""
    known = times(run)
    if run.metrics is None or len(known) < 2:
        return []
    several = "Of the last attempt alone. " if len(run.attempts) > 1 else ""
    return [_bars(known, several), _over_time(run.metrics, known, several)]


def _bars(known: Sequence[RankTimes], several: str) -> Figure:
    shown = known
    note = f"{several}The median of the later half of the timed steps."
    if len(known) > BARRED_RANKS:
        by_host = {one.host: one for one in sorted(known, key=lambda one: one.computing)}
        shown = sorted(by_host.values(), key=lambda one: one.rank)
        note = f"Each host's slowest rank, of {len(known)} ranks in all. {note}"
    parts = (("computing", "l0"), ("waiting", "faint"))
    values = [
        {
            "rank": one.host if len(known) > BARRED_RANKS else one.name,
            "part": part,
            "ms": digits(getattr(one, part) * MILLISECONDS),
        }
        for one in shown
        for part, _ in parts
    ]
    order = list(dict.fromkeys(value["rank"] for value in values))
    colours = {"domain": [part for part, _ in parts], "range": [variable(colour) for _, colour in parts]}
    axis = {"labelColor": variable("ink"), "ticks": False, "labelLimit": 170}
    spec: Spec = {
        "data": {"values": values},
        "mark": {"type": "bar", "height": {"band": 0.7}},
        "encoding": {
            "y": {"field": "rank", "type": "nominal", "sort": order, "title": None, "axis": axis},
            "x": {
                "field": "ms",
                "type": "quantitative",
                "title": "milliseconds of a step",
                "axis": {"grid": True, "tickCount": TICKS},
            },
            "color": {"field": "part", "type": "nominal", "scale": colours, "legend": None},
            "order": {"field": "part", "sort": "ascending"},
            "tooltip": [
                {"field": "rank", "title": "rank"},
                {"field": "part", "title": "part"},
                {"field": "ms", "title": "ms"},
            ],
        },
    }
    key = [Key("computing", "l0", "bar"), Key("waiting for other ranks and the network", "faint", "bar")]
    return Figure("A step, by rank", spec, BAR_PIXELS * len(shown), key, note)


def _over_time(metrics: Metrics, known: Sequence[RankTimes], several: str) -> Figure:
    points: dict[int, list[Point]] = {
        one.rank: [(step, computing * MILLISECONDS) for step, computing, _ in _pairs(metrics, one.rank)]
        for one in known
    }
    if len(known) <= LINED_RANKS:
        drawn = [Line(one.name, f"l{number}", points[one.rank]) for number, one in enumerate(known)]
    else:
        steps: dict[float, list[float]] = {}
        for step, value in (point for line in points.values() for point in line):
            steps.setdefault(step, []).append(value)
        ways = (("slowest rank", "l1", max), ("median", "l0", median), ("fastest rank", "l2", min))
        drawn = [
            Line(name, colour, [(step, way(of)) for step, of in sorted(steps.items())]) for name, colour, way in ways
        ]
    spec = lines(drawn, "step", "milliseconds of computing", zero=True)
    note = f"{several}Each of its first ten steps, which are slower, and then the mean of each hundred."
    return Figure(
        "Computing, over the run",
        spec,
        max(BAR_PIXELS * len(known[:LINED_RANKS]), 180),
        [one.key() for one in drawn],
        note,
    )
