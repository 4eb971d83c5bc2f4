"""One question to every host of a cluster map at once. Hosts that do not answer are reported; nobody waits for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.refusal import Problem
from launch.files import ROOT, runs_dir
from launch.hosts import ssh
from launch.hosts.clustermap import ClusterMap
from launch.hosts.connection import Machine, targets_of
from launch.hosts.inventory import Target
from launch.job.readiness import NO_ANSWER_FIX


def on_every_host(cluster: ClusterMap, work: Callable[[Machine], Any]) -> dict[str, Any]:
    """work(machine) on all hosts in parallel. Returns its result by host, or the exception that was raised instead."""
    known_hosts = ROOT / cluster.known_hosts

    def ask(target: Target) -> Any:
        machine = Machine(target, known_hosts, ssh.connect(target, known_hosts))
        try:
            return work(machine)
        finally:
            machine.close()

    targets = targets_of(cluster, cluster.hosts)
    return dict(zip((t.name for t in targets), ssh.in_parallel(ask, targets), strict=True))


def report_failed(answers: Mapping[str, Any], inventory: Path) -> int:
    """Report the hosts that could not be reached, or whose command failed; returns the exit status of that."""
    problems = [
        answer.problem if isinstance(answer, ssh.Unreachable) else Problem(f"host {host}", str(answer), NO_ANSWER_FIX)
        for host, answer in answers.items()
        if isinstance(answer, BaseException)
    ]
    if not problems:
        return exits.SUCCEEDED
    lines = "\n".join(map(str, problems))
    print(
        f"muster: no answer from {len(problems)} of {len(answers)} hosts:\n{name_inventory(lines, inventory)}",
        file=sys.stderr,
    )
    return exits.UNREACHABLE


def known_runs() -> str:
    """The newest runs in runs/, for a message."""
    names = sorted((folder.name for folder in runs_dir().glob("*/") if folder.is_dir()), reverse=True)
    return f"the newest here: {', '.join(names[:5])}." if names else "no run has been gathered here yet."
