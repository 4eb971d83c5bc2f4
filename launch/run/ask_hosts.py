"""The doors of all hosts of an inventory, asked at once. Hosts that do not answer are reported, not waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keeper.host import is_name
from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.refusal import Problem, Refusal
from launch.files import ROOT, runs_dir, stored
from launch.hosts import clustermap, door, inventory, ssh
from launch.hosts.connection import ANSWER_SECONDS, Machine, targets_of
from launch.hosts.inventory import Target
from launch.job.readiness import NO_ANSWER_FIX

Answers = dict[str, Any]  # by host: the answer, or the exception in its place


@dataclass(frozen=True)
class Known:
    """How to reach the hosts."""

    inventory: str  # as launch.files.stored
    targets: list[Target]
    known_hosts: Path


def known(path: Path) -> Known:
    """The hosts of an inventory as deployed, to see, stop and gather what runs there.

    Where nothing was deployed from here, as the inventory names them: another machine may have started the runs.
    Raises Refusal as `clustermap.read` and `inventory.read`.
    """
    try:
        cluster = clustermap.read(path, current=False)
    except Refusal:
        if clustermap.path_of(path).exists() or not path.exists():
            raise
        found = inventory.read(path)
        return Known(stored(path), [host.target for host in found.hosts], inventory.known_hosts_path(path))
    return Known(cluster.inventory, targets_of(cluster, cluster.hosts), ROOT / cluster.known_hosts)


@dataclass
class Hosts:
    """Connections to the hosts that let us in; `failed`: why not, by host, for the others."""

    machines: dict[str, Machine]
    failed: dict[str, BaseException]

    def each(self, work: Callable[[Machine], Any]) -> Answers:
        """work(machine) on all hosts at once: its result by host, or the exception that was raised instead."""
        machines = list(self.machines.values())
        results = ssh.in_parallel(work, machines)
        return self.failed | {machine.name: result for machine, result in zip(machines, results, strict=True)}

    def ask(self, verb: str, options: dict[str, Any] | None = None) -> Answers:
        """What each host's door answers."""
        return self.each(lambda machine: door.ask(machine, verb, options or {}, ANSWER_SECONDS))


@contextmanager
def reached(those: Known) -> Iterator[Hosts]:
    """Connections to all hosts, closed at the end."""
    known_hosts, targets = those.known_hosts, those.targets
    results = ssh.in_parallel(lambda target: Machine(target, known_hosts, ssh.connect(target, known_hosts)), targets)
    pairs = list(zip(targets, results, strict=True))
    hosts = Hosts(
        {target.name: result for target, result in pairs if not isinstance(result, BaseException)},
        {target.name: result for target, result in pairs if isinstance(result, BaseException)},
    )
    try:
        yield hosts
    finally:
        for machine in hosts.machines.values():
            machine.close()


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


def listed(answers: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """From the answers to the verb `runs`: run -> host -> how the run is there, the newest run first.

    A run is the name of a folder here. What a host lists under anything else is no run.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for host, answer in answers.items():
        for entry in answer["runs"] if isinstance(answer, dict) else []:
            if is_name(entry["run"]):
                found.setdefault(entry["run"], {})[host] = entry
    return dict(sorted(found.items(), reverse=True))


def known_runs() -> str:
    """The newest runs in runs/, for a message."""
    names = sorted((folder.name for folder in runs_dir().glob("*/") if folder.is_dir()), reverse=True)
    return f"the newest here: {', '.join(names[:5])}." if names else "no run has been gathered here yet."
