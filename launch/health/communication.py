"""`--communication auto`: how the hosts of a run exchange what they learned, chosen from a forecast before its start.

The forecast is that of `make check`, of the very training that is about to begin. A way that changes what is learned is
chosen only with --allow-approximate.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.health import forecast, run_probe
from launch.health.forecast import WORTH, Outlook, times
from launch.health.ways import is_advised, lost
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.job import trainer_arguments


def settled(
    settings: Mapping[str, Any],
    args: Sequence[str],
    cluster: ClusterMap,
    hosts: Sequence[MapHost],
    machines: Sequence[Machine],
    say: Callable[[str], object],
    wait: bool = False,
) -> tuple[str, ...]:
    """The trainer's arguments with the choice made; measures on the hosts where there is something to choose.

    settings: what args mean to the trainer. wait: for runs in progress. Raises Refusal as launch.health.run_probe.
    """
    args = trainer_arguments.without_choice(args)
    if len(hosts) == 1:
        say("communication: one host has nobody to talk to; nothing is changed")
        return args
    say(f"communication: measuring steps and exchanges on {len(hosts)} hosts, to choose")
    asked = ["--of-all", "--forecast", "--", *args]
    document = run_probe.run(cluster, hosts, machines, asked, wait=wait)["forecast"]
    made = [one for one in forecast.outlooks(document) if one.nodes == len(hosts)]
    approximate, optimizer = settings["allow_approximate"], settings["optimizer"]
    best = chosen(made, approximate, optimizer)
    say(f"communication: {sentence(made, best, optimizer)}{left_out(made, best, optimizer) if approximate else ''}")
    return (*args, *shlex.split(best.way.links))


def chosen(made: Sequence[Outlook], approximate: bool, optimizer: str) -> Outlook:
    """One of the fastest of those that are worth it; else the one that was asked for, which comes first. Pure.

    made: for all hosts of the run. Shares are as asked for. approximate: also ways that cost little accuracy with this
    optimizer.
    """
    asked = made[0]
    advised = [one for one in made if one.way.links and is_advised(one.way, optimizer)]
    may = [one for one in advised if approximate or not one.way.is_approximate]
    return forecast.most_accurate(may, optimizer, asked)


def sentence(made: Sequence[Outlook], best: Outlook, optimizer: str) -> str:
    """What was chosen, and why. Pure."""
    asked = made[0]
    if best.way == asked.way:
        waits = f"{asked.waiting:.0%} of a step is waiting for the network"
        more = "; --allow-approximate would find a faster way that changes what is learned"
        more = more if chosen(made, True, optimizer).way != asked.way else ""
        kind = "exact way" if more else "way"
        return f"nothing is changed: {waits}, and no {kind} is {WORTH - 1:.0%} faster{more}"
    gain = f"{times(best.speed_up)} the speed of one host, against {times(asked.speed_up)} without (forecast)"
    cost = "results differ by rounding"
    if best.way.is_approximate:
        points = lost(best.way, optimizer)
        cost = f"in our table it cost {points} points of accuracy with {optimizer} (docs/slow-links.md)"
    return f"{best.way.links}: {gain}; {cost}"


def left_out(made: Sequence[Outlook], best: Outlook, optimizer: str) -> str:
    """The fastest way that costs too much accuracy with this optimizer; "" where none is faster. Pure."""
    costly = [one for one in made if one.way.is_approximate and not is_advised(one.way, optimizer)]
    known = [one for one in costly if lost(one.way, optimizer) is not None]
    most = max(known, key=lambda one: one.images_per_second, default=best)
    if most.images_per_second <= WORTH * best.images_per_second:
        return ""
    cost = f"{lost(most.way, optimizer)} points of accuracy with {optimizer}"
    return f"; not taken: {most.way.links}, {times(most.speed_up)}, which lost {cost} in our table (docs/slow-links.md)"
