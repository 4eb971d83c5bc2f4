"""`make status`: every run's containers on every host of the cluster map, and the newest runs gathered here."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from launch.files import read_json, runs_dir
from launch.hosts import clustermap
from launch.job import container
from launch.run import ask_hosts


def status(path: Path, console: Console) -> int:
    """Show every run's containers on every host, and the newest runs gathered here.

    Returns UNREACHABLE when a host did not answer (the others are shown all the same).
    """
    cluster = clustermap.read(path, current=False)
    table = Table(title=f"Containers of runs on {cluster.inventory}")
    for column in ("run", "host", "node rank", "state", "owner"):
        table.add_column(column)
    answers = ask_hosts.on_every_host(cluster, container.listed)
    for host, answer in answers.items():
        for entry in answer if isinstance(answer, list) else []:
            labels = entry["Labels"]
            keys = ("muster.run", "muster.node_rank", "muster.owner")
            run, node_rank, owner = (labels.get(key, "?") for key in keys)
            table.add_row(run, host, node_rank, entry.get("Status") or entry.get("State", "?"), owner)
    failed = ask_hosts.report_failed(answers, path)
    answered = sum(isinstance(answer, list) for answer in answers.values())
    nothing = f"No run has a container on the hosts that answered ({answered} of {len(cluster.hosts)})."
    console.print(table if table.row_count else nothing)
    _show_gathered(console)
    return failed


def _show_gathered(console: Console) -> None:
    found = sorted(runs_dir().glob("*/summary.json"), reverse=True)[:10]
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
