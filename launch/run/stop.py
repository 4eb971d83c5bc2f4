"""`make stop`: ends a run on every host of the cluster map, by its label."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from launch.cli.refusal import refuse
from launch.hosts import clustermap, ssh
from launch.hosts.machine import Machine
from launch.job import container
from launch.run import cluster_hosts


def stop(path: Path, run: str, console: Console) -> int:
    """Stop a run on every host and remove its containers; who watches it elsewhere sees it end as `stopped`.

    Raises:
        Refusal: without RUN, or when no host has a container of it.
    """
    cluster = clustermap.read(path, current=False)
    if not run:
        listed = cluster_hosts.ask_all(cluster, container.listed).values()
        live = {e["Labels"]["muster.run"] for answer in listed if isinstance(answer, list) for e in answer}
        raise refuse("RUN", "which run?", f"give RUN=<id>; on the hosts now: {', '.join(sorted(live)) or 'none'}")

    def end(machine: Machine) -> int:
        count = sum(e["Labels"].get("muster.run") == run for e in container.listed(machine))
        if count:
            container.stop(machine, run, f"make stop by {ssh.local_user()}")
            container.remove(machine, run)
        return count

    answers = cluster_hosts.ask_all(cluster, end)
    hosts = [host for host, answer in answers.items() if isinstance(answer, int) and answer]
    silent = cluster_hosts.report_silent(answers)
    if not hosts and not silent:
        raise refuse("RUN", f"no host has a container of run {run}", "`make status` shows what runs now")
    console.print(f"Stopped run {run} on {', '.join(hosts) or 'no host'}.", highlight=False)
    return silent
