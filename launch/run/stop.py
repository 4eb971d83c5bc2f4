"""`make stop`: ends a run on every host of the cluster map, by its label."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from launch.cli import exits
from launch.cli.refusal import refuse
from launch.hosts import clustermap, ssh
from launch.hosts.connection import Machine
from launch.job import container
from launch.run import ask_hosts


def stop(path: Path, run: str, console: Console) -> int:
    """Stop a run on every host and remove its containers; who watches it elsewhere sees it end as `stopped`.

    Returns UNREACHABLE when a host did not answer or could not stop it (the others stop it all the same).
    Raises Refusal without RUN, or when no host has a container of it.
    """
    cluster = clustermap.read(path, current=False)
    if not run:
        answers = ask_hosts.on_every_host(cluster, container.listed)
        failed = ask_hosts.report_failed(answers, path)
        live = {e["Labels"]["muster.run"] for answer in answers.values() if isinstance(answer, list) for e in answer}
        on_hosts = f"on the hosts{' that answered' if failed else ''} now: {', '.join(sorted(live)) or 'none'}"
        raise refuse("RUN", "which run?", f"give RUN=<id>; {on_hosts}", failed or exits.REFUSED)

    def end(machine: Machine) -> int:
        count = sum(e["Labels"].get("muster.run") == run for e in container.listed(machine))
        if count:
            container.stop(machine, run, f"make stop by {ssh.local_user()}")
            container.remove(machine, run)
        return count

    answers = ask_hosts.on_every_host(cluster, end)
    stopped = [host for host, answer in answers.items() if isinstance(answer, int) and answer]
    failed = ask_hosts.report_failed(answers, path)
    if not stopped and not failed:
        raise refuse("RUN", f"no host has a container of run {run}", "`make status` shows what runs now")
    if stopped:
        console.print(f"Stopped run {run} on {', '.join(stopped)}.", highlight=False)
    if failed:
        console.print(f"Run {run} may go on where there was no answer.", highlight=False)
    return failed
