"""`--communication auto`: how the hosts of a run exchange what they learned, chosen from a forecast before its start.

The forecast is that of `make check`, of the very training that is about to begin. A way that changes what is learned is
chosen only with --allow-approximate.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.health import forecast, rank_measurements, run_probe
from launch.health.forecast import WORTH, Outlook, times
from launch.health.ways import Training, cost, is_advised, lost, training_of
from launch.hosts.clustermap import ClusterMap, MapHost
from launch.hosts.connection import Machine
from launch.job import trainer_arguments
from launch.network import links


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
    about = f"about {expected_seconds(cluster, hosts):.0f} s, more with a large model"
    say(f"communication: measuring steps and exchanges on {len(hosts)} hosts, to choose ({about})")
    asked = ["--of-all", "--forecast", "--", *args]
    document = run_probe.run(cluster, hosts, machines, asked, wait=wait)["forecast"]
    made = [one for one in forecast.outlooks(document) if one.nodes == len(hosts)]
    approximate, training = settings["allow_approximate"], training_of(document)
    best = chosen(made, approximate, training)
    say(f"communication: {sentence(made, best, training)}{left_out(made, best, training) if approximate else ''}")
    return (*args, *shlex.split(best.way.links))


def expected_seconds(cluster: ClusterMap, hosts: Sequence[MapHost]) -> float:
    """How long measuring takes over the links that the deploy has measured."""
    names = {host.name for host in hosts}
    known = links.of_deploy(cluster.measured, cluster.network.name)
    among = [link for link in known if {link.source, link.target} <= names]
    return rank_measurements.forecast_seconds(len(hosts), among, of_all=True)


def chosen(made: Sequence[Outlook], approximate: bool, training: Training) -> Outlook:
    """One of the fastest of those that are worth it; else the one that was asked for, which comes first. Pure.

    made: for all hosts of the run. Shares are as asked for. approximate: also ways that cost little accuracy in such a
    training.
    """
    asked = made[0]
    advised = [one for one in made if one.way.links and is_advised(one.way, training)]
    may = [one for one in advised if approximate or not one.way.is_approximate]
    return forecast.most_accurate(may, training.optimizer, asked)


def sentence(made: Sequence[Outlook], best: Outlook, training: Training) -> str:
    """What was chosen, and why. Pure."""
    asked = made[0]
    if best.way == asked.way:
        waits = f"{asked.waiting:.0%} of a step is waiting for the network"
        more = "; --allow-approximate would find a faster way that changes what is learned"
        more = more if chosen(made, True, training).way != asked.way else ""
        faster = any(one.images_per_second > WORTH * asked.images_per_second for one in made if one.way.is_approximate)
        kind = "exact way" if faster else "way"
        return f"nothing is changed: {waits}, and no {kind} is {WORTH - 1:.0%} faster{more}"
    gain = f"{times(best.speed_up)} the speed of one host, against {times(asked.speed_up)} without (forecast)"
    what = "results differ by rounding"
    if best.way.is_approximate:
        what = f"it lost {cost(best.way, training)} (docs/slow-links.md)"
    return f"{best.way.links}: {gain}; {what}"


def left_out(made: Sequence[Outlook], best: Outlook, training: Training) -> str:
    """What would be faster, and costs too much accuracy in such a training; "" where nothing would. Pure."""
    costly = [one for one in made if one.way.is_approximate and not is_advised(one.way, training)]
    known = [one for one in costly if lost(one.way, training.optimizer) is not None]
    most = forecast.most_accurate(known, training.optimizer, best)
    if most is best:
        return ""
    short = f", and may lose more in the {training.steps} steps of this run" if training.is_short else ""
    loss = f"which lost {cost(most.way, training)}{short}"
    return f"; not taken: {most.way.links}, {times(most.speed_up)}, {loss} (docs/slow-links.md)"
