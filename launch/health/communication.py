"""`--communication auto`: how the hosts of a run exchange what they learned, chosen from a forecast before its start.

The forecast is that of `make check`, of the very training that is about to begin. A way that changes what is learned is
chosen only with --allow-approximate.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.health import forecast, run_probe
from launch.health.forecast import WORTH, Outlook, times
from launch.health.ways import ACCURACY, BUCKET_MB
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
    best = chosen(made, settings["allow_approximate"])
    say(f"communication: {sentence(made, best)}")
    return (*args, *shlex.split(best.way.links))


def chosen(made: Sequence[Outlook], approximate: bool) -> Outlook:
    """The fastest, if it is worth it; else the one that was asked for, which comes first. Pure.

    made: for all hosts of the run. Shares are as asked for.
    """
    asked = made[0]
    may = [one for one in made if one.way.links and (approximate or not one.way.is_approximate)]
    best = max(may, key=lambda one: one.images_per_second, default=asked)
    return best if best.images_per_second > WORTH * asked.images_per_second else asked


def sentence(made: Sequence[Outlook], best: Outlook) -> str:
    """What was chosen, and why. Pure."""
    asked = made[0]
    if best.way == asked.way:
        waits = f"{asked.waiting:.0%} of a step is waiting for the network"
        more = "; --allow-approximate would find a faster way that changes what is learned"
        more = more if chosen(made, True).way != asked.way else ""
        kind = "exact way" if more else "way"
        return f"nothing is changed: {waits}, and no {kind} is {WORTH - 1:.0%} faster{more}"
    gain = f"{times(best.speed_up)} the speed of one host, against {times(asked.speed_up)} without (forecast)"
    cost = "results differ by rounding"
    if best.way.is_approximate:
        lost = ACCURACY[replace(best.way, bucket_mb=BUCKET_MB).links]
        cost = f"in our table it cost {lost} of accuracy with SGD (docs/slow-links.md)"
    return f"{best.way.links}: {gain}; {cost}"
