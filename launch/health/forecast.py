"""What a run will be like before it is run: step time, images/s and speed-up for each number of hosts. Pure.

Everything is calculated from the document of `python -m train.forecast.probe --forecast` (its schema is in
train/forecast/step_times.py): how long the steps of a host take, when its gradients are ready, and how long all-reduces
of these sizes take. A step is simulated bucket by bucket, as DDP does it: forward and backward continue while a bucket
is summed; a bucket's all-reduce begins when its gradients are ready on all ranks and the all-reduce before it has
ended; the optimizer waits for the last one. On hosts without GPUs, an all-reduce needs the same cores as the backward
pass; see `ddp_step_seconds`. With an exchange now and then (--sync-every), a period is simulated; see
`period_seconds`. Speeds are of the whole run: with its first steps, which take longer, what its first part sends more
than the rest, and exchanges before evaluations; see `steps_seconds`.

Not in the forecast: evaluation, checkpoints, the time to start, and the first epoch's reading of files from disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from launch.health import ways
from launch.health.ways import Way

Document = Mapping[str, Any]

WORTH = 1.05  # one host more, or another option, must bring at least this many times the images/s
WORTH_UNVERIFIED = 1.2  # the same for an option whose forecast no benchmark verifies
BUCKET_SIZES = (1, 2, 4, 8, 16)  # MiB, beside the usual one
LEAST_WAIT = 0.05  # part of a step; where less of it is waiting, no other buckets are tried
WORTH_A_ROW = 1.02  # other buckets must bring at least so many times the images/s
LEAST_SPEED = 0.1  # the part of its speed that a backward pass keeps at least beside communication
LARGER = 4  # times the batch that is recommended where communication takes too long
REDUCED = ("seconds", "busy_seconds", "cpu_seconds", "training_seconds")
FSDP_VOLUME = 1.5  # all-reduces: parameters are gathered twice and gradients scattered once, each half of one


@dataclass(frozen=True)
class Compute:
    """One rank's own step without communication; times in seconds since the step began."""

    ready: tuple[float, ...]  # each bucket's last gradient
    backward_ends: float
    update: float  # how long the optimizer takes
    cores: float  # seconds of computing time per second
    capacity: float | None  # the most of it that the rank can have; None: communication takes none of it

    @property
    def seconds(self) -> float:
        return self.backward_ends + self.update


@dataclass(frozen=True)
class Reduce:
    """One bucket's all-reduce by itself, or the exchange of a piece of the weights."""

    seconds: float  # while no rank computes anything else
    busy_seconds: float  # while a rank does
    cpu_seconds: float  # computing time that each rank spends on it
    training_seconds: float = 0.0  # of exchanges of weights: for which training waits in any case


@dataclass(frozen=True)
class Outlook:
    """What a run on the first `nodes` hosts is expected to be like."""

    nodes: int
    way: Way
    counts: tuple[int, ...]  # samples of each rank in a step
    step_seconds: float  # on average of the whole run
    images_per_second: float  # in training, as in the trainer's result.json
    steady_images_per_second: float  # after the first part of a run
    speed_up: float  # times the first host alone
    efficiency: float  # part of the sum of what the hosts do alone
    waiting: float  # part of the step in which the slowest rank waits for communication
    verified: bool  # `make bench-forecast` compares forecasts of this way with real runs

    @property
    def option(self) -> str:
        """As arguments of the trainer."""
        return str(self.way)


def outlooks(document: Document) -> list[Outlook]:
    """For each number of hosts from 1, each way to communicate, the one that was asked for first."""
    made: list[Outlook] = []
    for share in document["shares"]:
        for way in ways.compared(document, share):
            made.append(outlook(document, share, way, made[0] if made else None))
            made += better_buckets(document, share, made[-1], made[0])
    return made


def better_buckets(document: Document, share: Mapping[str, Any], usual: Outlook, alone: Outlook) -> list[Outlook]:
    """The same way with the size of DDP's buckets that is best for these links, if that gains anything to speak of."""
    asked = ways.asked_for(document["settings"])
    is_open = asked.bucket_mb == ways.BUCKET_MB and asked.shares == usual.way.shares and "gradients" in document
    helps = share["nodes"] > 1 and usual.way.sends_buckets and usual.waiting > LEAST_WAIT
    if not (is_open and helps):
        return []
    tried = [outlook(document, share, replace(usual.way, bucket_mb=size), alone) for size in BUCKET_SIZES]
    best = max(tried, key=lambda one: one.images_per_second)
    return [best] if best.images_per_second > usual.images_per_second * WORTH_A_ROW else []


def outlook(document: Document, share: Mapping[str, Any], way: Way, alone: Outlook | None, times: int = 1) -> Outlook:
    """`alone`: the outlook of the first host alone; None where this is it. `times`: factor by which the batch grows."""
    plain = ways.without_links(way) if share["nodes"] == 1 else way  # a host alone has no slow link
    counts = [count * times for count in (share["auto"] if way.shares == "auto" else share["equal"])]
    ranks = [compute(document, rank, count) for rank, count in enumerate(counts)]
    sums = reduces(document, share["nodes"], share["world_size"], plain)
    if plain.sends_buckets and plain.bucket_mb != ways.asked_for(document["settings"]).bucket_mb:
        buckets = bucketed(document, plain.bucket_mb)
        sums = resized(sums, document["buckets"], [sum(document["gradients"][i] for i in each) for each in buckets])
        ranks = [with_buckets(document, one, rank, counts[rank], buckets) for rank, one in enumerate(ranks)]
    within = reduces(document, 1, document["shares"][0]["world_size"]) if plain.sync_every else []
    if plain.sync_every and not within:  # a host of one rank has nothing to average
        ranks = [without_ddp(one, part) for one, part in zip(ranks, document["without_ddp"], strict=False)]
    steady, average = steps_seconds(document, share, plain, ranks, within, sums)
    step = average + max(document["cold"][: len(ranks)]) * times / document["run"]["steps"]
    speed = sum(counts) / step
    speed_up = speed / alone.images_per_second if alone else 1.0
    return Outlook(
        nodes=share["nodes"],
        way=way,
        counts=tuple(counts),
        step_seconds=step,
        images_per_second=speed,
        steady_images_per_second=sum(counts) / steady,
        speed_up=speed_up,
        efficiency=speed_up / relative_power(document, share["world_size"]),
        waiting=max(0.0, 1 - max(rank.seconds for rank in ranks) / average),
        verified=way.is_verified or not sums,
    )


def steps_seconds(
    document: Document,
    share: Mapping[str, Any],
    way: Way,
    ranks: Sequence[Compute],
    within: Sequence[Reduce],
    sums: Sequence[Reduce],
) -> tuple[float, float]:
    """A step's seconds in a run's steady state, and on average of the whole run, which may send more at first and
    before evaluations.

    within: all-reduces of the ranks of a host; of --sync-every alone.
    """
    run = document["run"]
    if way.sync_every:
        steady = period_seconds(ranks, within, sums, way.sync_every, way.stream) / way.sync_every
        waited = sum(piece.seconds + piece.training_seconds for piece in sums)
        warmup = run["warmup"] * ddp_step_seconds(ranks, within)
        whole = warmup + (run["steps"] - run["warmup"]) * steady + sum(run["exchanges"][str(way.sync_every)]) * waited
    elif way.compress.startswith("powersgd"):
        steady = ddp_step_seconds(ranks, sums)
        uncompressed = reduces(document, share["nodes"], share["world_size"], ways.without_links(way))
        first = ddp_step_seconds(ranks, uncompressed)
        whole = run["powersgd"] * first + (run["steps"] - run["powersgd"]) * steady
    else:
        steady = fsdp_step_seconds(ranks, sums) if way.parallel == "fsdp" and sums else ddp_step_seconds(ranks, sums)
        return steady, steady
    return steady, whole / run["steps"]


def relative_power(document: Document, world: int) -> float:
    """The speed of the first `world` ranks together, in units of the first host's, with the same samples per step."""
    first = document["shares"][0]["world_size"]
    samples = min(step["samples"] for steps in document["steps"] for step in steps)
    speeds = [1 / compute(document, rank, samples).seconds for rank in range(world)]
    return sum(speeds) / sum(speeds[:first])


# -- from what was measured to what a step needs -----------------------------------------------------------------------


def compute(document: Document, rank: int, samples: float) -> Compute:
    """A rank's step of so many samples: as measured, or on the line through the two nearest measured ones.

    Beyond the measured ones more samples take no less time, and at most in proportion: of a model so small that its
    steps take nearly the same time with any batch, what the measurements vary by would else become the line.
    """
    steps, capacity = document["steps"][rank], document["capacity"][rank]
    measured = [step["samples"] for step in steps]
    seconds, backward, update, cores = (
        line(measured, [step[name] for step in steps], samples) for name in ("seconds", "backward", "update", "cores")
    )
    nearest = min(steps, key=lambda step: abs(step["samples"] - samples))
    bounds = sorted((nearest["seconds"], nearest["seconds"] * samples / nearest["samples"]))
    if not min(measured) <= samples <= max(measured):
        seconds = min(max(seconds, bounds[0]), bounds[1])
        update = min(update, seconds)
    ready = [
        backward + line(measured, times, samples) for times in zip(*(step["ready"] for step in steps), strict=True)
    ]
    ends = seconds - update
    capacity = None if capacity is None else max(capacity, cores)
    return Compute(tuple(min(one, ends) for one in ready), ends, update, cores, capacity)


def bucketed(document: Document, bucket_mb: int) -> list[list[int]]:
    """The parameters in each of DDP's buckets of this size, in the order in which it sends them off: as their gradients
    come, each bucket full when it has at least so many MiB (torch's compute_bucket_assignment_by_size)."""
    last = max(document["steps"][0], key=lambda step: step["samples"])["gradients"]
    made, size = [list[int]()], 0
    for number in sorted(range(len(last)), key=last.__getitem__):
        if size >= bucket_mb << 20:
            made.append([])
            size = 0
        made[-1].append(number)
        size += document["gradients"][number]
    return made


def resized(sums: Sequence[Reduce], sizes: Sequence[int], wanted: Sequence[int]) -> list[Reduce]:
    """What buckets of the wanted sizes take, from those that were measured: a time for each, and one for each byte."""
    if not sums:
        return []
    lines = {name: fitted(sizes, [getattr(one, name) for one in sums]) for name in REDUCED}
    return [Reduce(**{name: each + slope * size for name, (each, slope) in lines.items()}) for size in wanted]


def fitted(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(the value at 0, the slope) of the line with the least squares through the points, neither below 0."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((each - x) ** 2 for each in xs)
    slope = sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True)) / spread if spread else y / x
    if slope < 0:
        return y, 0.0
    if y - slope * x < 0:
        return 0.0, y / x
    return y - slope * x, slope


def with_buckets(
    document: Document, one: Compute, rank: int, samples: float, buckets: Sequence[Sequence[int]]
) -> Compute:
    """The rank's step when its gradients go in these buckets, of the numbers of parameters."""
    steps = document["steps"][rank]
    measured = [step["samples"] for step in steps]
    backward = line(measured, [step["backward"] for step in steps], samples)
    ready = [
        backward + line(measured, [max(step["gradients"][number] for number in each) for step in steps], samples)
        for each in buckets
    ]
    return replace(one, ready=tuple(min(each, one.backward_ends) for each in ready))


def without_ddp(rank: Compute, part: float) -> Compute:
    """The rank between exchanges of weights; part: of its time that is left then."""
    ends = max(0.0, rank.seconds * part - rank.update)
    return replace(rank, backward_ends=ends, ready=tuple(min(one, ends) for one in rank.ready))


def line(xs: Iterable[float], ys: Iterable[float], x: float) -> float:
    """The value at x on straight lines through the points, continued at both ends, never below 0."""
    known = sorted(dict(zip(xs, ys, strict=True)).items())
    if len(known) == 1:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if x <= pair[1][0]), (known[-2], known[-1]))
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def reduces(document: Document, nodes: int, world: int, way: Way = ways.PLAIN) -> list[Reduce]:
    """What a step's all-reduces, or a period's exchanges, take on `nodes` hosts with `world` ranks; interpolated where
    that number was not measured."""
    known = [(entry, found) for entry in document["communication"] if (found := ways.measured(way, entry))]
    if world == 1 or not known or (nodes == 1 and known[0][0]["nodes"] > 1):
        return []  # of one host with one rank
    exact = [each for each in known if each[0]["nodes"] == nodes][:1] or known
    worlds = [entry["world_size"] for entry, _ in exact]
    names = [name for name in REDUCED if name in exact[0][1]]
    return [
        Reduce(**{name: line(worlds, [found[name][index] for _, found in exact], world) for name in names})
        for index in range(len(exact[0][1]["seconds"]))
    ]


# -- a simulated step --------------------------------------------------------------------------------------------------


def ddp_step_seconds(ranks: Sequence[Compute], sums: Sequence[Reduce]) -> float:
    """Seconds of a step of all ranks with --parallel ddp; the slowest rank decides.

    As long as a rank computes, a bucket's all-reduce has the speed that was measured beside other work. It also takes
    computing time from the backward pass, if that needs all that the rank can have. The loop goes from event to event;
    between two events all speeds are constant.
    """
    now, at, bucket, left, tiny = 0.0, [0.0] * len(ranks), 0, 1.0, 1e-12
    while True:
        busy = [rank.backward_ends - place > tiny for rank, place in zip(ranks, at, strict=True)]
        if bucket == len(sums) and not any(busy):
            return now + max(rank.update for rank in ranks)
        going = bucket < len(sums) and all(p >= r.ready[bucket] - tiny for r, p in zip(ranks, at, strict=True))
        rate = 1 / (sums[bucket].busy_seconds if any(busy) else sums[bucket].seconds) if going else 0.0
        speeds = [backward_speed(rank, rate * sums[bucket].cpu_seconds if going else 0.0) for rank in ranks]
        events = [left / rate] if going else []
        for rank, place, speed, works in zip(ranks, at, speeds, busy, strict=True):
            if works:
                waits = bucket < len(sums) and place < rank.ready[bucket] - tiny
                events.append(((rank.ready[bucket] if waits else rank.backward_ends) - place) / speed)
        passed = min(events)
        now += passed
        at = [min(p + speed * passed, r.backward_ends) for r, p, speed in zip(ranks, at, speeds, strict=True)]
        left -= rate * passed
        if going and left <= tiny:
            bucket, left = bucket + 1, 1.0


def backward_speed(rank: Compute, taken: float) -> float:
    """The part of its own speed that a rank keeps while communication takes `taken` cores."""
    if rank.capacity is None or rank.cores <= 0:
        return 1.0
    return min(1.0, max(LEAST_SPEED, (rank.capacity - taken) / rank.cores))


def fsdp_step_seconds(ranks: Sequence[Compute], sums: Sequence[Reduce]) -> float:
    """Seconds of a step of all ranks with --parallel fsdp. Not compared with real runs.

    Half an all-reduce goes on beside the forward pass and a whole one beside the backward pass; the ranks divide the
    optimizer's work.
    """
    gather = sum(one.seconds for one in sums) * (FSDP_VOLUME - 1)
    waiting = max(0.0, gather - min(rank.ready[0] for rank in ranks))
    divided = [replace(rank, update=rank.update / len(ranks)) for rank in ranks]
    return waiting + ddp_step_seconds(divided, sums)


def period_seconds(
    ranks: Sequence[Compute], within: Sequence[Reduce], pieces: Sequence[Reduce], every: int, stream: int
) -> float:
    """Seconds of `every` steps and the exchange that belongs to them (--sync-every); the slowest rank decides.

    within: all-reduces of the ranks of a host. pieces: of the weights. Without stream training waits for all of them.
    With it a piece has the time until the next one leaves, and takes computing time from the steps meanwhile.
    """
    step = ddp_step_seconds(ranks, within)
    training = sum(piece.training_seconds for piece in pieces)
    if not stream:
        return every * step + training + sum(piece.seconds for piece in pieces)
    until_next = step * max(1, every // stream)
    taken = max(
        sum(p.busy_seconds * (1 - backward_speed(rank, p.cpu_seconds / p.busy_seconds)) for p in pieces)
        for rank in ranks
    )
    return every * step + training + taken + sum(max(0.0, p.busy_seconds - until_next) for p in pieces)


# -- for a person ------------------------------------------------------------------------------------------------------

#: What is said below every forecast.
MEANING = (
    "This is the speed without starting, evaluation, checkpoints and event files: a run, above all one with short "
    "epochs, is slower. Efficiency: this speed as a part of all hosts' speeds alone."
)
#: And this where there are approximate ways.
APPROXIMATE = (
    " --sync-every and powersgd change what is learned, a short run most (docs/slow-links.md). They send more in the "
    "first part of a run; these are the speeds of a whole run."
)


def recommended(outlooks: Sequence[Outlook]) -> Outlook:
    """The outlook with the fewest hosts, and a verified way if possible, that is nearly as fast as the fastest.

    None is approximate, unless it was asked for.
    """
    chosen, asked = outlooks[0], outlooks[0].way
    may = [one for one in outlooks if one.way == asked or not one.way.is_approximate]
    for one in sorted(may, key=lambda one: (not one.verified, one.nodes)):
        if one.images_per_second > chosen.images_per_second * (WORTH if one.verified else WORTH_UNVERIFIED):
            chosen = one
    return chosen


def most_accurate(advised: Sequence[Outlook], optimizer: str, asked: Outlook) -> Outlook:
    """Of the ways that are worth it beside what was asked for, and nearly as fast as the fastest of them, the one that
    lost least accuracy; of equal ones the fastest. What was asked for, if none is worth it."""
    worth = [one for one in advised if one.images_per_second > asked.images_per_second * WORTH]
    most = max((one.images_per_second for one in worth), default=0.0)
    near = [one for one in worth if one.images_per_second * WORTH >= most]
    return min(near, key=lambda one: (ways.lost(one.way, optimizer), -one.images_per_second), default=asked)


def recommend(document: Document, link: str = "link") -> str:
    """A few sentences: how fast the hosts are together over this `link` ("1 Gbit/s link"), and what to do."""
    made = outlooks(document)
    said, chosen = advice(document, made, link), recommended(made)
    most = max(one.nodes for one in made)
    training = ways.training_of(document)
    others = [one for one in made if one.nodes == most and one.way.is_approximate and one.way != made[0].way]
    rough = [one for one in others if ways.is_advised(one.way, training)]
    best = most_accurate(rough, training.optimizer, chosen)
    if best is not chosen:
        cost = f"At some cost ({ways.cost(best.way, training)}, docs/slow-links.md)"
        said += f" {cost}: {times(best.speed_up)} with {best.option}."
    return said


def advice(document: Document, made: Sequence[Outlook], link: str) -> str:
    """What to do without approximation."""
    alone, most = made[0], max(one.nodes for one in made)
    if most == 1:
        return f"1 host: {alone.images_per_second:.0f} images/s."
    asked = next(one for one in made if one.nodes == most)  # the way that was asked for comes first
    chosen = recommended(made)
    waiting = f"{asked.waiting:.0%} of the step is waiting for it"
    said = f"{most} hosts over this {link}: {times(asked.speed_up)} the speed of one host ({waiting})."
    if (chosen.nodes, chosen.option) == (asked.nodes, asked.option):
        return f"{said} Use all {most}."
    if chosen.nodes > 1:
        other = "" if chosen.option == asked.option else f" with {chosen.option}"
        return f"{said} Use NODES={chosen.nodes}{other}: {times(chosen.speed_up)}."
    # All hosts and the first one alone, both with the larger batch; the steps are extrapolated.
    first = outlook(document, document["shares"][0], asked.way, None, LARGER)
    larger = outlook(document, document["shares"][-1], asked.way, first, LARGER)
    if larger.speed_up > WORTH:
        size = document["settings"]["batch_size"] * LARGER
        said += f" Use --batch-size {size} ({times(larger.speed_up)} the speed of one host with that batch;"
        return f"{said} as this changes the training, adapt --lr), or stay on one host."
    return f"{said} Stay on one host."


def times(factor: float) -> str:
    """A factor with its unit: "1.7 x", "0.03 x"."""
    return f"{factor:.1f} x" if factor >= 1 else f"{factor:.2g} x"
