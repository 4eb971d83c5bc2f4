"""`make demo`: a lab of two hosts on this machine, trust, deploy, a two-host run, where to look. The lab stays up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from containers import lab as labs
from launch.cli import exits
from launch.cli.make_variables import naming
from launch.cli.refusal import refuse
from launch.deploy import control, deploy
from launch.files import ROOT, read_json, runs_dir, shown
from launch.hosts import clustermap, trust
from launch.job.outcome import reached
from launch.report.documents import PAGE
from launch.run import train as run

LAB = "lab"
HOSTS = 2


def demo(console: Console) -> int:
    """The main job from nothing; returns the run's exit status. Raises Refusal without root, or when a step fails."""
    if not control.has_root():
        fix = "run it as root (or with passwordless sudo); `make local` trains on this machine without root"
        raise refuse("make demo", "it makes container hosts on this machine, which needs root", fix)
    if os.environ.get("LAB", LAB) != LAB:
        raise refuse("LAB", f"make demo has a lab of its own, called {LAB}", "leave it out, or `make lab LAB=name`")
    path, began = Path(shown(ROOT / "inventory" / LAB)), time.monotonic()
    steps = Table(title="What the demo did")
    for column in ("step", "command", "seconds"):
        steps.add_column(column, justify="right" if column == "seconds" else "left")

    def step(title: str, command: str, work: Callable[[], int]) -> None:
        console.rule(f"{title}: {command}")
        begun = time.monotonic()
        status = work()
        steps.add_row(title, command, f"{time.monotonic() - begun:.1f}")
        if status != exits.SUCCEEDED:
            raise refuse(command, f"ended with exit status {status}", "see its own words above", status)

    control.ensure_ready(console)
    hosts = max(HOSTS, len(labs.labs().get(LAB, [])))
    step("two hosts", f"make lab HOSTS={hosts}", lambda: labs.main(["up", "--name", LAB, "--hosts", str(hosts)]))
    step("trust their keys", f"make trust {naming(path)} YES=1", lambda: trust.trust(path, True, console))
    step("deploy", f"make deploy {naming(path)}", lambda: deploy.deploy(path, console))
    request = run.Request(inventory=path, nodes=str(HOSTS))
    before = set(runs_dir().glob("*/plan.json"))
    step("train", f"make train NODES={HOSTS} {naming(path)}", lambda: run.train(request, console))
    console.rule()
    console.print(steps)
    console.print(_closing(path, max(set(runs_dir().glob("*/plan.json")) - before)))
    console.print(f"Done in {time.monotonic() - began:.0f} s. The lab stays up; `make lab-down` removes it.")
    return exits.SUCCEEDED


def _closing(path: Path, plan: Path) -> Table:
    """The result, and where to look."""
    folder = plan.parent
    known = read_json(folder / "summary.json")
    cluster = clustermap.read(path)
    table = Table(title="The run", show_header=False)
    table.add_row(*reached(known))
    table.add_row("speed", f"{known['images_per_second']:.0f} images/s on {known['world_size']} ranks")
    table.add_row("network", f"{cluster.network.name}: {cluster.network.reason}")
    table.add_row("curves", shown(folder / "curves.png"))
    table.add_row("report", shown(folder / PAGE))
    table.add_row("checkpoint", shown(folder / "checkpoints"))
    table.add_row("every rank's output", shown(folder / "logs"))
    table.add_row("the plan: what ran where", shown(plan))
    table.add_row("again", f"make train NODES=2 {naming(path)} ARGS='--epochs 3'")
    own = f"make train NODES=2 {naming(path)} WORKLOAD=examples SCRIPT=own_script.py"
    table.add_row("a script of your own", own)
    table.add_row("what runs, what it prints", f"make status {naming(path)}, make logs {naming(path)} RUN=<id>")
    table.add_row("what a run will be worth", f"make check {naming(path)}")
    login = f"ssh -i {path}/id_ed25519 -o UserKnownHostsFile={path}/known_hosts"
    table.add_row("log in to a host", f"{login} muster@{cluster.hosts[0].ssh['address']}")
    return table
