"""`make logs`: a run's output, labelled by host and rank; from runs/<id>/logs, or live from the hosts."""

from __future__ import annotations

import contextlib
import functools
import shlex
import threading
import time
from pathlib import Path

from rich.console import Console

from launch.cli import exits
from launch.cli.output import nobody_reads
from launch.cli.refusal import Refusal, refuse
from launch.files import ROOT, runs_dir, shown
from launch.hosts import clustermap, ssh
from launch.hosts.connection import Machine, targets_of
from launch.hosts.inventory import Target
from launch.job import container
from launch.run import ask_hosts
from launch.run.follow import split_label

END_READING_SECONDS = 1.5  # to end the reading on the hosts when a live view is left

_PID = "muster-pid="


def logs(path: Path, run: str, console: Console) -> int:
    """Print a run's output, labelled: from runs/<id>/logs when it has ended, from the hosts while it goes on.

    Raises Refusal when no such run is known here or on the hosts, or none of its output is here, and
    KeyboardInterrupt when the user leaves a live view, with the message that the run continues.
    """
    folder = runs_dir() / run
    if run and (folder / "summary.json").exists():
        # A run on hosts keeps each host's whole output; a run on this machine, each rank's.
        for file in sorted((folder / "logs").glob("*.log")) or sorted((folder / "logs").glob("rank-*.*")):
            for line in file.read_text(errors="replace").splitlines():
                print(" | ".join(split_label(file.stem, line)))
        return exits.SUCCEEDED
    cluster = clustermap.read(path, current=False)
    if not run:
        raise refuse("RUN", "which run?", f"give RUN=<id>; {ask_hosts.known_runs()}")
    view = _View(cluster, run)
    try:
        answers = view.watch()
    except KeyboardInterrupt:
        shown = view.leave()
        if not shown:
            raise
        raise KeyboardInterrupt(f"left the view; run {run} goes on, `make stop RUN={run}` ends it") from None
    failed = ask_hosts.report_failed(answers, path)
    if not view.containers:
        raise _nothing_to_show(run, failed)
    return failed


def _nothing_to_show(run: str, failed: int) -> Refusal:
    """Why there is no output of a run without summary and containers; `failed` is UNREACHABLE or 0."""
    status = failed or exits.REFUSED
    nobody = "no host that answered" if failed else "no host"
    folder = runs_dir() / run
    if not folder.is_dir():
        where = "here or on the hosts that answered" if failed else "here or on the hosts"
        return refuse("RUN", f"there is no run {run}, {where}", ask_hosts.known_runs(), status)
    what = f"{nobody} has a container of run {run}, and it has no summary here: it was not followed to its end"
    if any(file.is_file() and file.stat().st_size for file in (folder / "logs").rglob("*")):
        return refuse("RUN", what, f"read its output as far as it was followed in {shown(folder)}/logs", status)
    fix = f"see {shown(folder)} for what there is of it; none of its output was kept here"
    return refuse("RUN", what, fix, status)


class _View:
    """The live output of a run, from every host. It can be left at any time: what waits for a host is a daemon."""

    def __init__(self, cluster: clustermap.ClusterMap, run: str) -> None:
        self._cluster = cluster
        self._run = run
        self._printing = threading.Lock()
        self._left = False
        self.containers = 0  # whose output was read
        self._reading: dict[tuple[str, str], tuple[Machine, int]] = {}  # (host, container): pid of podman logs

    def watch(self) -> dict[str, BaseException | None]:
        """Print until the run has ended on every host, or nobody reads; what went wrong, by host."""
        known_hosts, answers = ROOT / self._cluster.known_hosts, dict[str, BaseException | None]()

        def work(target: Target) -> None:
            try:
                machine = Machine(target, known_hosts, ssh.connect(target, known_hosts))
                try:
                    self._show(machine)
                finally:
                    machine.close()
            except Exception as error:
                answers[target.name] = error

        targets = targets_of(self._cluster, self._cluster.hosts)
        workers = [threading.Thread(target=work, args=(target,), daemon=True) for target in targets]
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(0.1)
                if nobody_reads():
                    self.leave()
                    return {}
        return {target.name: answers.get(target.name) for target in targets}

    def leave(self) -> int:
        """Print no more, and end the reading on the hosts, bounded; how many containers were being read."""
        self._left = True
        reading = list(self._reading.items())

        def end(container_id: str, machine: Machine, pid: int) -> None:
            # Only while the process is still the one that reads: its number may have gone to another by now.
            same = f"grep -qs {shlex.quote(container_id)} /proc/{pid}/cmdline"
            with contextlib.suppress(Exception):
                machine.root(f"{same} && kill {pid}", END_READING_SECONDS)

        enders = [
            threading.Thread(target=end, args=(container_id, machine, pid), daemon=True)
            for (_, container_id), (machine, pid) in reading
        ]
        for ender in enders:
            ender.start()
        deadline = time.monotonic() + END_READING_SECONDS
        for ender in enders:
            ender.join(max(0.0, deadline - time.monotonic()))
        return len(reading)

    def _show(self, machine: Machine) -> None:
        mine = [e for e in container.listed(machine) if e["Labels"].get("muster.run") == self._run]
        self.containers += len(mine)
        for entry in mine:
            container_id = entry["Id"]
            sink = ssh.LineSink(functools.partial(self._take, machine, container_id))
            # Closing an SSH channel ends no process on the host: this one prints its number, so that we can end it.
            done = machine.root(f"echo {_PID}$$; exec podman logs --follow {container_id} 2>&1", None, sink)
            sink.finish()
            if done.exited < 0:  # the channel closed without an exit status
                raise EOFError("the SSH connection was lost; the run goes on there")
            self._reading.pop((machine.name, container_id), None)

    def _take(self, machine: Machine, container_id: str, line: str) -> None:
        key = (machine.name, container_id)
        if line.startswith(_PID) and key not in self._reading:
            self._reading[key] = machine, int(line.removeprefix(_PID))
            return
        with self._printing:
            if not self._left:
                print(" | ".join(split_label(machine.name, line)), flush=True)
