"""How fast ranks are in the training image on the real hosts: a short all-reduce, and what a forecast is made from.

Both are measured by `python -m train.forecast.probe`, which probe.py runs. The forecast itself is made in forecast.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.cli.refusal import Refusal
from launch.cli.units import rate
from launch.health import forecast, run_probe
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.network import choose
from launch.network.links import Link

ALL_REDUCE_SECONDS = 3.0  # the limit of its repeats
#: The part of the slowest link that an all-reduce reaches at least, unless the processors are the limit.
ALL_REDUCE_PART = 0.5
#: Bytes of one checkpoint in units of the gradients': the weights and, with AdamW, two numbers for each of them.
CHECKPOINT_PER_GRADIENT = 3
#: The properties of its image that a rank reports (launch.health.sameness).
REPORTED = ("torch", "cuda", "nccl", "code")

#: About what the probe does (train/forecast/probe.py, step_times.py): for the time that it is expected to take.
PROBE_START_SECONDS = 6.0
ALL_REDUCE_BYTES, LONGEST_SUM_SECONDS = (2**20, 2**24, 2**27), 10.0
FORECAST_STEPS_SECONDS, SUMS_SECONDS = 4.0, 3.0  # of a round's steps in all sweeps; of a round's sums, at least
OPTIONS_SECONDS, OPTIONS_SUMS = 18.0, 15  # of the options for slow links: in any case; in sums of a round
SHORT_SUM_SECONDS = 0.05  # for which they are left out
RESNET18_BYTES = 46_800_000  # of its gradients


@dataclass(frozen=True)
class Measured:
    """What a short all-reduce or a forecast showed."""

    verdicts: list[Verdict]
    report: dict[str, Any] | None = None  # as launch.health.records.document describes it
    inside: dict[str, dict[str, str]] = field(default_factory=dict)  # by host what its image says of itself
    checkpoint_bytes: int | None = None  # None: not known


def sum_seconds(count: int, hosts: int, mbits: float) -> float:
    """About how long an all-reduce of `count` bytes takes where the slowest link carries `mbits`; 0 for unknown."""
    return 2 * (hosts - 1) / hosts * count * 8 / (mbits * 1e6) if mbits else 0.0


def all_reduce_seconds(hosts: int, links: Sequence[Link]) -> float:
    """How long `all_reduce` is expected to take."""
    sums = [sum_seconds(count, hosts, choose.slowest(links)) for count in ALL_REDUCE_BYTES]
    return PROBE_START_SECONDS + max(ALL_REDUCE_SECONDS, sum(one for one in sums if one <= LONGEST_SUM_SECONDS))


def forecast_seconds(hosts: int, links: Sequence[Link], of_all: bool = False) -> float:
    """How long `make_forecast` is expected to take for a model of the size of resnet18. of_all: measured for one host
    and for all alone.

    In the round of k hosts, its gradients are summed three times at least: at first, alone, and beside other work.
    Where that takes long, so do the exchanges of the options for slow links.
    """
    between = set() if of_all else {*range(1, min(hosts, 4) + 1), *(2**k for k in range(2, hosts.bit_length()))}
    rounds = {1, *between, hosts}
    slowest = choose.slowest(links)
    sums = [sum_seconds(RESNET18_BYTES, count, slowest) for count in rounds if count > 1]
    steps = FORECAST_STEPS_SECONDS * len(rounds)
    options = OPTIONS_SECONDS + OPTIONS_SUMS * sum(sums) if max(sums, default=0.0) > SHORT_SUM_SECONDS else 0.0
    return PROBE_START_SECONDS + steps + sum(one + 2 * max(one, SUMS_SECONDS) for one in sums) + options


def all_reduce(
    cluster: ClusterMap, hosts: Sequence[MapHost], machines: Sequence[Machine], links: Sequence[Link]
) -> Measured:
    """Run a short all-reduce of all ranks. Every rank checks the values: a wrong one is an error."""
    try:
        document = run_probe.run(cluster, hosts, machines, ["--seconds", str(ALL_REDUCE_SECONDS)])
    except Refusal as refusal:
        return Measured([Verdict("all-reduce", p.where, ERROR, p.what, p.fix) for p in refusal.problems])
    measured = document["all_reduce"]
    sizes = measured["sizes"]
    rows = [{"bytes": e["bytes"], "seconds": e["seconds"], "bus_mbits": bus_mbits(e)} for e in sizes]
    inside = {rank["host"]: {key: rank[key] for key in REPORTED} for rank in document["ranks"]}
    report = {"rows": rows, "note": "; ".join(["Every rank has checked all values.", *measured["notes"]])}
    return Measured([all_reduce_verdict(sizes, links)], report, inside)


def bus_mbits(entry: Mapping[str, Any]) -> float:
    """The bus bandwidth of a size (train/forecast/probe.py) in 10^6 bit/s, comparable with the bandwidth of a link."""
    return float(entry["bus_bytes_per_second"]) * 8 / 1e6


def all_reduce_verdict(sizes: Sequence[Mapping[str, Any]], links: Sequence[Link]) -> Verdict:
    """The largest all-reduce compared with the slowest link. Pure."""
    if not sizes:
        return Verdict("all-reduce", "cluster", INCOMPLETE, "no size was measured in time", "check the links")
    largest = max(sizes, key=lambda entry: entry["bytes"])
    mbits, slowest = bus_mbits(largest), choose.slowest(links)
    seconds, mib = largest["seconds"], largest["bytes"] / 2**20
    what = f"{mib:.0f} MiB in {seconds:.3g} s with correct values, bus bandwidth {rate(mbits)}"
    if 0 < slowest < choose.CORE_LIMITED_MBITS and mbits < ALL_REDUCE_PART * slowest:
        what += f", {mbits / slowest:.0%} of what the slowest link carries ({rate(slowest)})"
        return Verdict("all-reduce", "cluster", WARNING, what, "see whether the hosts' processors are busy (`top`)")
    return Verdict("all-reduce", "cluster", HEALTHY, what)


def make_forecast(
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    arguments: Sequence[str],
    links: Sequence[Link],
) -> Measured:
    """Measure what a forecast needs on the hosts, and make it. `arguments`: the trainer's."""
    try:
        measured = run_probe.run(cluster, hosts, machines, ["--forecast", "--", *arguments])["forecast"]
    except Refusal as refusal:
        return Measured([Verdict("forecast", p.where, ERROR, p.what, p.fix) for p in refusal.problems])
    outlooks = forecast.outlooks(measured)
    rows = [
        {
            "nodes": one.nodes,
            "option": one.option + ("" if one.verified else " *"),
            "step_seconds": one.step_seconds,
            "images_per_second": one.images_per_second,
            "steady_images_per_second": one.steady_images_per_second,
            "speedup": one.speed_up,
            "efficiency": one.efficiency,
        }
        for one in outlooks
    ]
    slowest = choose.slowest(links)
    advice = forecast.recommend(measured, f"{rate(slowest)} link" if slowest else "link")
    note = forecast.MEANING
    if any(one.way.is_approximate for one in outlooks):
        note += forecast.APPROXIMATE
    if not all(one.verified for one in outlooks):
        note += " * Calculated only: forecasts of this option have not been compared with real runs."
    report = {"rows": rows, "recommendation": advice, "note": note}
    return Measured([], report, checkpoint_bytes=measured["gradient_bytes"] * CHECKPOINT_PER_GRADIENT)
