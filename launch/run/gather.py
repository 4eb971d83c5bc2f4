"""Copies what a run wrote on its hosts to runs/<id>/ here, and removes its containers. Starts and stops nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.hosts import openssh
from launch.hosts.connection import Machine
from launch.job import container
from launch.job.plan import HostPlan

GATHER_SECONDS = 600  # for one copy from one host
#: Names in runs/<id>/ that are Muster's own. A script's file with such a name stays on its host.
OURS = ("plan.json", "summary.json", "logs")
NOTES = ("failure.json", "stopped")  # of each host: they are kept with its logs


def gather(machine: Machine, host_plan: HostPlan, folder: Path) -> dict[str, Any]:
    """Remove a host's container and copy its logs here; from the first host all else too, but no links that lead out.

    Returns what `container.finish` does. Raises RuntimeError when rsync fails.
    """
    finished = container.finish(machine, host_plan)
    logs = folder / "logs" / host_plan.host
    logs.mkdir(parents=True, exist_ok=True)
    shell = openssh.rsync_shell(machine.target, Path(machine.known_hosts))
    rsync(shell, machine, [f"{host_plan.run_dir}/{name}" for name in ("logs/", *NOTES)], logs, [])
    if host_plan.node_rank == 0:
        left_out = ["--exclude=__pycache__", *(f"--exclude=/{name}" for name in (*OURS, *NOTES))]
        rsync(shell, machine, [f"{host_plan.run_dir}/"], folder, left_out)
    return finished


def rsync(shell: str, machine: Machine, sources: Sequence[str], into: Path, options: Sequence[str]) -> None:
    """Copy from a host. A missing source is no error: not every run leaves everything."""
    words = ["rsync", "-rlt", "--safe-links", "--ignore-missing-args", *options, "-e", shell]
    with openssh.login_slot(machine.target):
        done = subprocess.run(
            [*words, *(openssh.rsync_source(machine.target, source) for source in sources), f"{into}/"],
            capture_output=True,
            text=True,
            timeout=GATHER_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C goes to the whole process group of a terminal: this ends in its own time
        )
    if done.returncode not in (0, 23, 24):  # 23: a folder that is not there, too; 24: a file vanished meanwhile
        raise RuntimeError(f"rsync ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def stopped_elsewhere(logs: Path, host_plans: Sequence[HostPlan]) -> str | None:
    """The note that `make stop` writes on each host, if somebody stopped this run."""
    for host_plan in host_plans:
        note = logs / host_plan.host / "stopped"
        if note.exists() and (text := note.read_text().strip()).startswith("make stop"):
            return text
    return None
