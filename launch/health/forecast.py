"""What a run will be like before it is run: step time, images/s and speed-up for each number of hosts. Pure.

From the document of `python -m train.forecast.probe --forecast` alone (train/forecast/step_times.py): how long the
steps of a host take, when its gradients are there, and how long all-reduces of these sizes take. A step is played
through bucket by bucket, as DDP does it: forward and backward go on while a bucket is summed; a bucket's sum begins
when its gradients are there on all ranks and the bucket before is done; the optimizer waits for the last one. On hosts
without GPUs a sum is also computing, on the cores that the backward pass needs; see `play`.

Not in it: evaluation, checkpoints, the time to start, and input that does not keep up because files are read at first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Document = Mapping[str, Any]

WORTH = 1.05  # times the images/s: what a host more, or another option, has to bring
WORTH_UNVERIFIED = 1.2  # the same of an option whose model no benchmark verifies
LEAST_SPEED = 0.1  # of a backward pass beside communication, whatever the figures say
LARGER = 4  # times the batch, where communication takes too much
FSDP_VOLUME = 1.5  # of an all-reduce: parameters gathered twice, gradients scattered once, each half of one


@dataclass(frozen=True)
class Compute:
    """One rank's own step, in seconds from its begin, without communication."""

    ready: tuple[float, ...]  # each bucket's last gradient
    backward_ends: float
    update: float  # how long it takes
    cores: float  # computing time per second
    capacity: float | None  # the most that the rank can have of it; None: communication takes none of it

    @property
    def seconds(self) -> float:
        return self.backward_ends + self.update


@dataclass(frozen=True)
class Reduce:
    """One bucket's all-reduce by itself."""

    seconds: float  # where no rank computes anything else
    busy_seconds: float  # where one does
    cpu_seconds: float  # computing time of each rank for it


@dataclass(frozen=True)
class Outlook:
    """What a run on the first `nodes` hosts will be like."""

    nodes: int
    option: str  # as the trainer's arguments say it
    counts: tuple[int, ...]  # samples of each rank in a step
    step_seconds: float
    images_per_second: float  # in training, as in the trainer's result.json
    speed_up: float  # times the first host alone
    efficiency: float  # part of the sum of what the hosts do alone
    waiting: float  # part of the step in which the slowest rank waits for communication
    verified: bool  # `make bench-forecast` holds the option's model against measured runs


def outlooks(document: Document) -> list[Outlook]:
    """For each number of hosts from 1, each communication option, the one that was asked for first."""
    found: list[Outlook] = []
    for cut in document["shares"]:
        for option in options(document, cut):
            found.append(outlook(document, cut, option, found[0] if found else None))
    return found


def options(document: Document, cut: Mapping[str, Any]) -> list[str]:
    """The ways to communicate that fit this number of hosts. The unequal shares only where they are unequal."""
    asked = asked_option(document["settings"])
    if cut["world_size"] == 1:
        return [asked]
    ways = [asked]
    if document["settings"]["shares"] in ("", "auto"):  # else `equal` holds the parts that were asked for
        ways.append("--parallel ddp")
    if cut["auto"] != cut["equal"]:
        ways.append("--parallel ddp --shares auto")
    return list(dict.fromkeys([*ways, "--parallel fsdp"]))


def asked_option(settings: Mapping[str, Any]) -> str:
    shares = settings["shares"]
    return f"--parallel {settings['parallel']}" + (f" --shares {shares}" if shares else "")


def outlook(document: Document, cut: Mapping[str, Any], option: str, alone: Outlook | None, times: int = 1) -> Outlook:
    """`alone`: the first host's, None where this is it. `times`: so many times the batch."""
    counts = [count * times for count in (cut["auto"] if "--shares auto" in option else cut["equal"])]
    ranks = [compute(document, rank, count) for rank, count in enumerate(counts)]
    sums = reduces(document, cut["nodes"], cut["world_size"])
    own = max(rank.seconds for rank in ranks)
    step = play_fsdp(ranks, sums) if "fsdp" in option and sums else play(ranks, sums)
    rate = sum(counts) / step
    speed_up = rate / alone.images_per_second if alone else 1.0
    return Outlook(
        nodes=cut["nodes"],
        option=option,
        counts=tuple(counts),
        step_seconds=step,
        images_per_second=rate,
        speed_up=speed_up,
        efficiency=speed_up / relative_power(document, cut["world_size"]),
        waiting=max(0.0, 1 - own / step),
        verified=option in ("--parallel ddp", "--parallel none") or not sums,
    )


def relative_power(document: Document, world: int) -> float:
    """What the first `world` ranks do in all, in units of the first host, all at the same samples per step."""
    first = document["shares"][0]["world_size"]
    samples = min(step["samples"] for steps in document["steps"] for step in steps)
    speeds = [1 / compute(document, rank, samples).seconds for rank in range(world)]
    return sum(speeds) / sum(speeds[:first])


# -- from what was measured to what a step needs -----------------------------------------------------------------------


def compute(document: Document, rank: int, samples: float) -> Compute:
    """A rank's step of so many samples: as measured, or on the line between (beyond) the two nearest measured ones."""
    steps = document["steps"][rank]
    backward, update, cores = (along(steps, name, samples) for name in ("backward", "update", "cores"))
    seconds = along(steps, "seconds", samples)
    ready = [backward + along_list(steps, "ready", index, samples) for index in range(len(document["buckets"]))]
    ends = seconds - update
    capacity = document["capacity"][rank]
    return Compute(
        ready=tuple(min(one, ends) for one in ready),
        backward_ends=ends,
        update=update,
        cores=cores,
        capacity=None if capacity is None else max(capacity, cores),
    )


def along(steps: Sequence[Mapping[str, Any]], name: str, samples: float) -> float:
    return line([(step["samples"], step[name]) for step in steps], samples)


def along_list(steps: Sequence[Mapping[str, Any]], name: str, index: int, samples: float) -> float:
    return line([(step["samples"], step[name][index]) for step in steps], samples)


def line(points: Iterable[tuple[float, float]], x: float) -> float:
    """The value at x on straight lines through the points, continued at both ends, never below 0."""
    known = sorted(dict(points).items())
    if len(known) == 1:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if x <= pair[1][0]), (known[-2], known[-1]))
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def reduces(document: Document, nodes: int, world: int) -> list[Reduce]:
    """Each bucket's all-reduce among the ranks of so many hosts; on a line between the measured numbers of ranks."""
    measured = document["communication"]
    if world == 1 or not measured:
        return []

    def at(name: str, index: int) -> float:
        exact = [entry[name][index] for entry in measured if entry["nodes"] == nodes]
        return exact[0] if exact else line([(entry["world_size"], entry[name][index]) for entry in measured], world)

    names = ("seconds", "busy_seconds", "cpu_seconds")
    return [Reduce(*(at(name, index) for name in names)) for index in range(len(document["buckets"]))]


# -- a step, played through --------------------------------------------------------------------------------------------


def play(ranks: Sequence[Compute], sums: Sequence[Reduce]) -> float:
    """Seconds of a step of all ranks, the slowest deciding.

    A bucket's sum goes at the speed that was measured beside other work as long as a rank computes, and takes computing
    time, which the backward pass then lacks where it needs all that the rank can have. The loop goes from event to
    event; between two, all speeds are constant.
    """
    now, at = 0.0, [0.0] * len(ranks)
    bucket, left = 0, 1.0
    tiny = 1e-12
    while bucket < len(sums) or any(rank.backward_ends - place > tiny for rank, place in zip(ranks, at, strict=True)):
        busy = [rank.backward_ends - place > tiny for rank, place in zip(ranks, at, strict=True)]
        going = bucket < len(sums) and all(
            place >= rank.ready[bucket] - tiny for rank, place in zip(ranks, at, strict=True)
        )
        rate = 1 / (sums[bucket].busy_seconds if any(busy) else sums[bucket].seconds) if going else 0.0
        speeds = [backward_speed(rank, rate * sums[bucket].cpu_seconds if going else 0.0) for rank in ranks]
        events = [left / rate] if going else []
        for rank, place, speed, works in zip(ranks, at, speeds, busy, strict=True):
            if works:
                waits = bucket < len(sums) and place < rank.ready[bucket] - tiny
                events.append(((rank.ready[bucket] if waits else rank.backward_ends) - place) / speed)
        passed = min(events)
        now += passed
        at = [
            min(place + speed * passed, rank.backward_ends)
            for rank, place, speed in zip(ranks, at, speeds, strict=True)
        ]
        left -= rate * passed
        if going and left <= tiny:
            bucket, left = bucket + 1, 1.0
    return now + max(rank.update for rank in ranks)


def backward_speed(rank: Compute, taken: float) -> float:
    """Parts of its own speed that a rank has left where communication takes so many cores."""
    if rank.capacity is None or rank.cores <= 0:
        return 1.0
    return min(1.0, max(LEAST_SPEED, (rank.capacity - taken) / rank.cores))


def play_fsdp(ranks: Sequence[Compute], sums: Sequence[Reduce]) -> float:
    """Seconds of a step of --parallel fsdp: half an all-reduce in front, beside forward; the whole volume beside
    backward; the optimizer's work divided among the ranks. Not held against measured runs.
    """
    gather = sum(one.seconds for one in sums) * (FSDP_VOLUME - 1)
    forward = min(rank.ready[0] for rank in ranks)
    late = max(0.0, gather - forward)
    cut = [
        Compute(rank.ready, rank.backward_ends, rank.update / len(ranks), rank.cores, rank.capacity) for rank in ranks
    ]
    return late + play(cut, sums)


# -- for a person ------------------------------------------------------------------------------------------------------

#: Stands below every forecast.
MEANING = (
    "Speed in the steady state. Starting, the first steps, evaluation, checkpoints and event files are not in it: a "
    "run, above all one of short epochs, is slower. Efficiency: part of what the same hosts do alone, added up."
)


def best(found: Sequence[Outlook]) -> Outlook:
    """The one to take: as few hosts and as usual an option as come near the fastest."""
    chosen = found[0]
    for one in sorted(found, key=lambda one: (not one.verified, one.nodes)):
        if one.images_per_second > chosen.images_per_second * (WORTH if one.verified else WORTH_UNVERIFIED):
            chosen = one
    return chosen


def recommend(document: Document, link: str = "link") -> str:
    """One sentence or two: what the hosts are worth together over this `link` ("1 Gbit/s link"), and what to do."""
    found = outlooks(document)
    alone, most = found[0], max(one.nodes for one in found)
    if most == 1:
        return f"1 host: {alone.images_per_second:.0f} images/s."
    asked = next(one for one in found if one.nodes == most)
    chosen = best(found)
    said = (
        f"{most} hosts over this {link}: {times(asked.speed_up)} of one ({asked.waiting:.0%} of the step waits for it)."
    )
    if (chosen.nodes, chosen.option) == (asked.nodes, asked.option):
        return f"{said} Use all {most}."
    if chosen.nodes > 1:
        other = "" if chosen.option == asked.option else f" with {chosen.option}"
        return f"{said} Use NODES={chosen.nodes}{other}: {times(chosen.speed_up)}."
    larger = with_larger_batch(document)
    if larger.speed_up > WORTH:
        size = document["settings"]["batch_size"] * LARGER
        return (
            f"{said} Use --batch-size {size} ({times(larger.speed_up)} of one host with that batch; another training: "
            "mind --lr), or stay on one."
        )
    return f"{said} Stay on one."


def times(factor: float) -> str:
    """1.7 x, 0.03 x."""
    return f"{factor:.1f} x" if factor >= 1 else f"{factor:.2g} x"


def with_larger_batch(document: Document) -> Outlook:
    """All hosts with LARGER times the batch, against the first with that batch: steps on the measured line beyond."""
    option = asked_option(document["settings"])
    first = outlook(document, document["shares"][0], option, None, LARGER)
    return outlook(document, document["shares"][-1], option, first, LARGER)
