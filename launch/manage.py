"""`make status`, `make logs`, `make stop`: by run label, on every host of the cluster map. Starts nothing."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from launch import clustermap, exits, ssh
from launch.clustermap import ClusterMap
from launch.follow import LineSink, split_label
from launch.inventory import Target
from launch.machine import ANSWER_SECONDS, STOP_SECONDS, Machine
from launch.outcome import read_json
from launch.refusal import Problem, Refusal, refuse
from launch.run import targets_of
from launch.signals import nobody_reads

LEAVE_SECONDS = 1.5  # to end the reading on the hosts when a live view is left

_LIST = "podman ps --all --filter label=muster.run --format json"
_PID = "muster-pid="


def status(path: Path, console: Console) -> int:
    """Show every run's containers on every host, and the newest runs gathered here.

    Returns UNREACHABLE when a host did not answer (the others are shown all the same).
    """
    cluster = clustermap.read(path, current=False)
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
        Refusal: when no such run is known here or on the hosts, or none of its output is here.
        KeyboardInterrupt: when a live view is left; it says that the run goes on.
    """
    folder = Path("runs") / run
    if run and (folder / "summary.json").exists():
        # A run on hosts keeps each host's whole output; a run on this machine, each rank's.
        for file in sorted((folder / "logs").glob("*.log")) or sorted((folder / "logs").glob("rank-*.*")):
            for line in file.read_text(errors="replace").splitlines():
                print(" | ".join(split_label(file.stem, line)))
        return exits.SUCCEEDED
    cluster = clustermap.read(path, current=False)
    if not run:
        raise refuse("RUN", "which run?", f"give RUN=<id>; {_known_runs()}")
    view = _View(cluster, run)
    try:
        answers = view.watch()
    except KeyboardInterrupt:
        shown = view.leave()
        if not shown:
            raise
        raise KeyboardInterrupt(f"left the view; run {run} goes on, `make stop RUN={run}` ends it") from None
    if not any(isinstance(answer, int) and answer for answer in answers.values()):
        silent = _report_silent(answers)
        raise _nothing_to_show(run, silent)
    return _report_silent(answers)


def _nothing_to_show(run: str, silent: int) -> Refusal:
    """Why there is no output of a run without a summary and without containers; `silent`: of hosts, or 0."""
    status = silent or exits.REFUSED
    heard = "no host that answered" if silent else "no host"
    folder = Path("runs") / run
    if not folder.is_dir():
        where = "here or on the hosts that answered" if silent else "here or on the hosts"
        return refuse("RUN", f"there is no run {run}, {where}", _known_runs(), status)
    what = f"{heard} has a container of run {run}, and it has no summary here: it was not followed to its end"
    if any(file.is_file() and file.stat().st_size for file in (folder / "logs").rglob("*")):
        return refuse("RUN", what, f"read its output as far as it was followed in {folder}/logs", status)
    mend = f"see {folder} for what there is of it; none of its output was kept here"
    return refuse("RUN", what, mend, status)


class _View:
    """The live output of a run, from every host. It can be left at any time: what waits for a host is a daemon."""

    def __init__(self, cluster: ClusterMap, run: str) -> None:
        self._cluster = cluster
        self._run = run
        self._printing = threading.Lock()
        self._left = False
        self._reading: dict[tuple[str, str], tuple[Machine, int]] = {}  # (host, container): pid of podman logs

    def watch(self) -> dict[str, int | BaseException]:
        """Print until the run has ended on every host, or nobody reads; how many containers each host has had."""
        known_hosts = Path(self._cluster.known_hosts)
        answers: dict[str, int | BaseException] = {}

        def work(target: Target) -> None:
            try:
                machine = Machine(target, known_hosts, ssh.connect(target, known_hosts))
                try:
                    answers[target.name] = self._show(machine)
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
                    return dict.fromkeys((target.name for target in targets), 1)  # something was shown: it is unread
        return {target.name: answers[target.name] for target in targets}

    def leave(self) -> int:
        """Print no more, and end the reading on the hosts, bounded; how many containers were being read."""
        self._left = True
        reading = list(self._reading.items())

        def end(container: str, machine: Machine, pid: int) -> None:
            # Only while the process is still the one that reads: its number may have gone to another by now.
            same = f"grep -qs {shlex.quote(container)} /proc/{pid}/cmdline"
            machine.root(f"{same} && kill {pid}", LEAVE_SECONDS)

        enders = [
            threading.Thread(target=_quietly, args=(end, container, machine, pid), daemon=True)
            for (_, container), (machine, pid) in reading
        ]
        for ender in enders:
            ender.start()
        deadline = time.monotonic() + LEAVE_SECONDS
        for ender in enders:
            ender.join(max(0.0, deadline - time.monotonic()))
        return len(reading)

    def _show(self, machine: Machine) -> int:
        mine = [e for e in list_containers(machine) if e["Labels"].get("muster.run") == self._run]
        for entry in mine:
            container = entry["Id"]
            sink = LineSink(functools.partial(self._take, machine, container))
            # An SSH channel that closes ends nothing on the host: the process says its number, to be ended by.
            machine.root(f"echo {_PID}$$; exec podman logs --follow {container} 2>&1", None, sink)
            sink.finish()
            self._reading.pop((machine.name, container), None)
        return len(mine)

    def _take(self, machine: Machine, container: str, line: str) -> None:
        key = (machine.name, container)
        if line.startswith(_PID) and key not in self._reading:
            self._reading[key] = machine, int(line.removeprefix(_PID))
            return
        with self._printing:
            if not self._left:
                print(" | ".join(split_label(machine.name, line)), flush=True)


def _quietly(work: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(Exception):
        work(*arguments)


def stop(path: Path, run: str, console: Console) -> int:
    """Stop a run on every host and remove its containers; who watches it elsewhere sees it end as `stopped`.

    Raises:
        Refusal: without RUN, or when no host has a container of it.
    """
    cluster = clustermap.read(path, current=False)
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
