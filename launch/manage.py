"""`make status`, `make logs`, `make stop`: by run label, on every host of the cluster map. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch import clustermap, exits, ssh
from launch.clustermap import ClusterMap
from launch.follow import LineSink, split_label
from launch.machine import ANSWER_SECONDS, STOP_SECONDS, Machine
from launch.outcome import read_json
from launch.refusal import Problem, refuse
from launch.run import targets_of

_LIST = "podman ps --all --filter label=muster.run --format json"


def status(path: Path, console: Console) -> int:
    """Show every run's containers on every host, and the newest runs gathered here.

    Returns UNREACHABLE when a host did not answer (the others are shown all the same).
    """
    cluster = clustermap.read(path)
    table = Table(title=f"Containers of runs on {cluster.inventory}")
    for column in ("run", "host", "node rank", "state", "owner"):
        table.add_column(column)
    answers = _ask_all(cluster, lambda machine: list_containers(machine))
    for host, answer in answers.items():
        for entry in answer if isinstance(answer, list) else []:
            labels = entry["Labels"]
            words = (labels.get(key, "?") for key in ("muster.run", "muster.node_rank", "muster.owner"))
            run, node_rank, owner = words
            table.add_row(run, host, node_rank, entry.get("Status") or entry.get("State", "?"), owner)
    silent = _report_silent(answers)
    heard = sum(isinstance(answer, list) for answer in answers.values())
    none = f"No run has a container on the hosts that answered ({heard} of {len(cluster.hosts)})."
    console.print(table if table.row_count else none)
    _show_gathered(console)
    return silent


def list_containers(machine: Machine) -> list[dict[str, Any]]:
    """Containers with a run label on one host, as podman ps lists them."""
    listed: list[dict[str, Any]] = json.loads(machine.root(_LIST).stdout or "[]")
    return listed


def logs(path: Path, run: str, console: Console) -> int:
    """Print a run's output, labelled: from runs/<id>/logs when it has ended, from the hosts while it goes on.

    Raises:
        Refusal: when no such run is known here or on the hosts.
    """
    folder = Path("runs") / run
    if run and (folder / "summary.json").exists():
        # A run on hosts keeps each host's whole output; a run on this machine, each rank's.
        for file in sorted((folder / "logs").glob("*.log")) or sorted((folder / "logs").glob("rank-*.*")):
            for line in file.read_text(errors="replace").splitlines():
                print(" | ".join(split_label(file.stem, line)))
        return exits.SUCCEEDED
    cluster = clustermap.read(path)

    def show(machine: Machine) -> int:
        mine = [e for e in list_containers(machine) if e["Labels"].get("muster.run") == run]
        for entry in mine:
            sink = LineSink(lambda line: print(" | ".join(split_label(machine.name, line)), flush=True))
            machine.root(f"podman logs --follow {entry['Id']} 2>&1", None, sink)
            sink.finish()
        return len(mine)

    if not run:
        raise refuse("RUN", "which run?", f"give RUN=<id>; {_known_runs()}")
    answers = _ask_all(cluster, show)
    if not any(isinstance(answer, int) and answer for answer in answers.values()):
        _report_silent(answers)
        raise refuse("RUN", f"there is no run {run}, here or on the hosts", _known_runs())
    return _report_silent(answers)


def stop(path: Path, run: str, console: Console) -> int:
    """Stop a run on every host and remove its containers; who watches it elsewhere sees it end as `stopped`.

    Raises:
        Refusal: without RUN, or when no host has a container of it.
    """
    cluster = clustermap.read(path)
    if not run:
        listed = _ask_all(cluster, list_containers).values()
        live = {e["Labels"]["muster.run"] for answer in listed if isinstance(answer, list) for e in answer}
        raise refuse("RUN", "which run?", f"give RUN=<id>; on the hosts now: {', '.join(sorted(live)) or 'none'}")

    def end(machine: Machine) -> int:
        count = sum(e["Labels"].get("muster.run") == run for e in list_containers(machine))
        if count:
            machine.stop(run, f"make stop by {ssh.local_user()}")
            ids = f"podman ps --all --quiet --filter label=muster.run={run}"
            # Whoever follows the run removes its containers after gathering; what is still there is removed here.
            wait = f'for i in 1 2 3 4 5 6; do test -z "$({ids})" && break; sleep 0.5; done'
            remove = f'ids=$({ids}); test -z "$ids" || podman rm --force $ids'
            machine.root(f"{wait}; {remove}", ANSWER_SECONDS + STOP_SECONDS)
        return count

    answers = _ask_all(cluster, end)
    hosts = [host for host, answer in answers.items() if isinstance(answer, int) and answer]
    silent = _report_silent(answers)
    if not hosts and not silent:
        raise refuse("RUN", f"no host has a container of run {run}", "`make status` shows what runs now")
    console.print(f"Stopped run {run} on {', '.join(hosts) or 'no host'}.", highlight=False)
    return silent


def _ask_all(cluster: ClusterMap, work: Any) -> dict[str, Any]:
    """work(machine) on every host that can be reached, in parallel; exceptions stand in the answers' place."""
    known_hosts = Path(cluster.known_hosts)

    def ask(target: Any) -> Any:
        connection = ssh.connect(target, known_hosts)
        machine = Machine(target, known_hosts, connection)
        try:
            return work(machine)
        finally:
            machine.close()

    targets = targets_of(cluster, cluster.hosts)
    return dict(zip((t.name for t in targets), ssh.in_parallel(ask, targets), strict=True))


def _report_silent(answers: dict[str, Any]) -> int:
    problems: Sequence[Problem] = [
        answer.problem if isinstance(answer, ssh.Unreachable) else Problem(f"host {host}", str(answer), "look there")
        for host, answer in answers.items()
        if isinstance(answer, BaseException)
    ]
    for problem in problems:
        print(f"muster: did not answer:\n{problem}", file=sys.stderr)
    return exits.UNREACHABLE if problems else exits.SUCCEEDED


def _known_runs() -> str:
    names = sorted((folder.name for folder in Path("runs").glob("*/") if folder.is_dir()), reverse=True)
    return f"the newest here: {', '.join(names[:5])}." if names else "no run has been gathered here yet."


def _show_gathered(console: Console) -> None:
    found = sorted(Path("runs").glob("*/summary.json"), reverse=True)[:10]
    if not found:
        return
    table = Table(title="Newest runs gathered in runs/")
    for column in ("run", "status", "ranks", "test accuracy", "images/s", "reason"):
        table.add_column(column, justify="right" if column in ("ranks", "test accuracy", "images/s") else "left")
    for file in found:
        known = read_json(file)
        accuracy, rate = known.get("test_accuracy"), known.get("images_per_second")
        table.add_row(
            known.get("run", file.parent.name),
            known.get("status", "?"),
            str(known.get("world_size", "?")),
            "" if accuracy is None else f"{accuracy:.2%}",
            "" if rate is None else f"{rate:.0f}",
            known.get("reason") or "",
        )
    console.print(table)
