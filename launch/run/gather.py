"""`make gather`, and the end of every watched run: what a run wrote on its hosts comes to runs/<id>/ here.

May be repeated, after a failure too, and by any control machine: what is here already is not sent again. Only after a
host's files are all here its container and its copy of a script's folder are removed there (the door's `seal`). Files
from hosts are not trusted: none replaces one of ours, none leads out of the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from keeper import OWN_NAMES, output
from launch import files
from launch.cli.make_variables import name_inventory
from launch.hosts import door, openssh, ssh
from launch.hosts.connection import ANSWER_SECONDS, LINK_ERRORS, LINK_SECONDS, Machine
from launch.job.plan import HostPlan, Plan, document
from launch.report.documents import PAGE
from launch.run import origin

SILENCE_SECONDS = 60  # of rsync, after which it has failed: a large checkpoint over a slow link takes its time
OFFER_SECONDS = 300  # for the door to look through a script's folder
SEAL_SECONDS = 300  # for the door to remove containers and old runs
ATTEMPTS = 3  # over connections that could be made
AGAIN_SECONDS = 2.0  # between two attempts over a broken connection

#: Names in runs/<id>/ that are Muster's own. A script's file with such a name stays on its host, which is said.
OURS = ("plan.json", origin.NAME, "summary.json", PAGE, "logs", "hosts")
#: The documents of each host: they are kept with its logs. The schemas: keeper/__init__.py.
DOCUMENTS = ("events.jsonl", "state.json", "exit.json", "failure.json", "stacks")
#: What is not copied from a host's folder as it is.
_NOT_AS_IT_IS = (*OURS, *OWN_NAMES)
#: Podman's State of a host's container, as it was before it was removed.
CONTAINER = "container.json"

#: rsync's exit statuses for a connection that broke or was silent (its manual page).
_BROKEN = (10, 12, 30, 35, 255)

_ALL = 10**9  # more runs than a host ever has

T = TypeVar("T")


class BrokenCopy(OSError):
    """The connection broke while rsync copied."""


@dataclass
class Gathered:
    """What a host's part of a gathering brought."""

    left: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # what the run left there: containers, processes
    removed: Sequence[str] = ()  # old runs that were removed there
    cleared: bool = True  # whether all that it left is gone
    elsewhere: str = ""  # who has fetched what the script wrote, where it is not to be had here any more
    kept: Sequence[str] = ()  # files of the script that stay there, as their names are Muster's here
    checkpoint: int = -1  # the step of the newest one of our trainer's there; below 0: there is none


def gather_host(
    machine: Machine,
    plan: Plan,
    host_plan: HostPlan,
    keep: int,
    after_first: Callable[[], object] = lambda: None,
    first: str = "",
) -> Gathered:
    """Copy what a host has of an ended run, and remove there what is then of no use.

    Of a script's files, those of the first host come as they are; of another host those that differ: to hosts/<host>/.
    keep: how many gathered runs the host keeps; 0: all. after_first: returns when the first host's files are here, or
    will not come. first: that host, the master of the last attempt; empty: that of the first one.
    Raises RuntimeError with the reason when it could not be done; what was copied stays, for the next time.
    """

    offer = _through_drops(machine, lambda: door.ask(machine, "offer", {"run": plan.run}, OFFER_SECONDS))
    if offer.get("running"):
        raise RuntimeError(f"the run has not ended there: `make stop RUN={plan.run}` ends it, a frozen one too")
    logs = files.runs_dir() / plan.run / "logs" / host_plan.host
    _fetch_logs(machine, host_plan, offer, logs)
    is_first = host_plan.host == (first or plan.hosts[0].host)
    elsewhere = _fetch_files(machine, plan, host_plan, offer, after_first, is_first)
    asked = {"run": plan.run, "keep": keep or _ALL, "by": ssh.local_user()}
    sealed = _through_drops(machine, lambda: door.ask(machine, "seal", asked, SEAL_SECONDS))
    _remove_parts(logs)
    kept = tuple(name for name in OURS if name in offer.get("more", ()))
    newest = -1 if plan.script else max((int(step) for step in offer.get("checkpoints", ())), default=-1)
    return Gathered(
        sealed.get("left") or {}, sealed.get("removed") or (), bool(sealed.get("cleared")), elsewhere, kept, newest
    )


def _fetch_logs(machine: Machine, host_plan: HostPlan, offer: Mapping[str, Any], logs: Path) -> None:
    """Copy a host's output and documents to `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    if offer.get("container"):
        files.write_json(logs / CONTAINER, offer["container"])
    wanted = [f"--include=/{name}" for name in ("output", "output/**", "stacks/**", *DOCUMENTS)]
    _copy(machine, f"{host_plan.run_dir}/", logs, ["-rt", *wanted, "--exclude=*"])
    _assemble(logs)


def _fetch_files(
    machine: Machine,
    plan: Plan,
    host_plan: HostPlan,
    offer: Mapping[str, Any],
    after_first: Callable[[], object],
    first: bool,
) -> str:
    """Copy what ranks and script wrote; returns who has it, where somebody else has fetched it meanwhile."""
    folder, options = files.runs_dir() / plan.run, ["-rlt", "--safe-links"]
    written = [path for path in map(str, offer.get("written", ())) if _stays_inside(path)]
    if first:
        into = folder
    elif plan.script and (written or offer.get("more")):
        after_first()
        # Replicas of the first host's files, mostly, written at other times: with -t each of them would differ.
        options = ["-rl", "--safe-links", "--checksum", "--prune-empty-dirs"]
        into = folder / "hosts" / host_plan.host
        into.mkdir(parents=True, exist_ok=True)
    else:
        return ""
    elsewhere = ""
    if first or offer.get("more"):
        left_out = ["--exclude=__pycache__", "--exclude=/.*", *(f"--exclude=/{name}" for name in _NOT_AS_IT_IS)]
        differing = [] if first else [f"--compare-dest={folder}"]
        _copy(machine, f"{host_plan.run_dir}/", into, [*options, *differing, *left_out])
    if written:
        differing = [] if first else [f"--compare-dest={folder / 'workload'}"]
        elsewhere = _fetch_written(machine, plan.run, host_plan, into / "workload", [*options, *differing], written)
    if not first:
        _remove_empty(folder / "hosts", into)
    return elsewhere


def _fetch_written(
    machine: Machine, run: str, host_plan: HostPlan, into: Path, options: Sequence[str], written: Sequence[str]
) -> str:
    """Copy these files of a script's folder; returns who has them, where somebody else has fetched them meanwhile."""
    into.mkdir(exist_ok=True)
    listed = [*options, "--from0", "--files-from=-"]
    try:
        _copy(machine, f"{host_plan.run_dir}/workload/", into, listed, "\0".join(written))
    except RuntimeError:
        elsewhere = _through_drops(machine, lambda: _fetched_by(machine, run))
        if not elsewhere:
            raise
        are_here = all((into / path).exists() for path in written)
        return "" if are_here else elsewhere
    return ""


def _fetch_newest_checkpoint(
    plan: Plan, machines: Mapping[str, Any], newest: Sequence[tuple[HostPlan, int]], say: Callable[[str], None]
) -> None:
    """Copy the newest checkpoint from a host that has a newer one than came with the results.

    newest: the step of each host's. The master of the last attempt may not have written one before the run was stopped.
    """
    folder = files.runs_dir() / plan.run / "checkpoints"
    host_plan, step = max(newest, key=lambda one: one[1], default=(None, -1))
    here = [int(name) for path in folder.glob("step-*.json") if (name := path.stem.removeprefix("step-")).isdigit()]
    if host_plan is None or step <= max(here, default=-1):
        return
    names = [f"step-{step}.pt", f"step-{step}.json"]  # in this order: without its manifest there is no checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            _copy(machines[host_plan.host], f"{host_plan.run_dir}/checkpoints/{name}", folder, ["-t"])
    except (RuntimeError, OSError) as error:
        say(f"{host_plan.host}: its checkpoint of step {step} could not be gathered: {error}")
        return
    say(f"the newest checkpoint, of step {step}, came from {host_plan.host}")


def _remove_empty(above: Path, folder: Path) -> None:
    """Remove folders in which nothing came, from this one's up to `above`."""
    if not folder.is_relative_to(above):
        return
    for here, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # there is something in it
            os.rmdir(here)
    with contextlib.suppress(OSError):
        above.rmdir()


def _fetched_by(machine: Machine, run: str) -> str:
    """Which control machine has gathered a run from this host; nothing where none has."""
    entries = door.ask(machine, "runs", {"run": run}, ANSWER_SECONDS)["runs"]
    return next((str(entry["gathered"]["by"]) for entry in entries if entry.get("gathered")), "")


def _stays_inside(path: str) -> bool:
    """Whether a path that a host names lies below the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "__pycache__" not in parts


def _through_drops(machine: Machine, work: Callable[[], T]) -> T:
    """work(), and again over a new connection while it fails for want of one.

    For LINK_SECONDS at most; and ATTEMPTS times where a connection can be made: then something else is wrong.
    """
    begun, attempts = time.monotonic(), 1
    while True:
        try:
            return work()
        except LINK_ERRORS as error:
            if attempts == ATTEMPTS or time.monotonic() - begun > LINK_SECONDS:
                raise RuntimeError(str(error) or "the connection broke") from error
            time.sleep(AGAIN_SECONDS)
            with contextlib.suppress(ssh.Unreachable):
                machine.reconnect()
                attempts += 1


def _copy(machine: Machine, source: str, into: Path, options: Sequence[str], stdin: str = "") -> None:
    """Copy from a host with rsync, however often the connection breaks. Raises RuntimeError with the reason."""
    if shutil.which("rsync") is None:
        raise RuntimeError("this machine has no rsync: apt-get install rsync")
    _through_drops(machine, lambda: _copy_once(machine, source, into, options, stdin))


def _copy_once(machine: Machine, source: str, into: Path, options: Sequence[str], stdin: str) -> None:
    """Raises BrokenCopy for a broken connection, RuntimeError for anything else."""
    shell = openssh.rsync_shell(machine.target, Path(machine.known_hosts))
    words = ["rsync", f"--timeout={SILENCE_SECONDS}", "--partial", *options, "-e", shell]
    with openssh.login_slot(machine.target):
        done = subprocess.run(
            [*words, openssh.rsync_source(machine.target, source), f"{into}/"],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C goes to the whole process group of a terminal: this ends in its own time
        )
    said = "; ".join(done.stderr.strip().splitlines())[:300]
    if done.returncode in _BROKEN:
        raise BrokenCopy(f"rsync ended with {done.returncode}: {said}")
    if done.returncode != 0:
        raise RuntimeError(f"rsync ended with {done.returncode}: {said}")


def _assemble(logs: Path) -> None:
    """Make one file of each stream's parts: output/ of a host becomes rank-<rank>.log and torchrun.log."""
    parts = logs / "output"
    for stream in output.Reader(parts).files():
        with (logs / f"{Path(stream).name}.log").open("wb") as whole:
            output.assemble(parts, stream, whole)


def _remove_parts(logs: Path) -> None:
    """Remove the parts of which `_assemble` made whole files. What a script has put beside them stays."""
    parts = logs / "output"
    for stream, starts in output.Reader(parts).files().items():
        for start in starts:
            (parts / output.file_name(stream, start)).unlink()
    _remove_empty(logs, parts)


def gather_run(
    plan: Plan, machines: Mapping[str, Any], kept_runs: int, say: Callable[[str], None], first: str = ""
) -> list[str]:
    """Gather an ended run from all its hosts that can be reached; returns those from which nothing came.

    machines: by host; None, or not there: it cannot be reached. first: as in `gather_host`.
    """
    first = first or plan.hosts[0].host
    folder = files.runs_dir() / plan.run
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / "plan.json", document(plan))
    reached = [host_plan for host_plan in plan.hosts if machines.get(host_plan.host)]
    first_is_here = threading.Event()

    def one(host_plan: HostPlan) -> Gathered:
        try:
            return gather_host(machines[host_plan.host], plan, host_plan, kept_runs, first_is_here.wait, first)
        finally:
            if host_plan.host == first:
                first_is_here.set()

    if not machines.get(first):
        first_is_here.set()
    results = ssh.in_parallel(one, reached)
    missing = [host_plan.host for host_plan in plan.hosts if host_plan not in reached]
    removed: list[str] = []
    for host_plan, result in zip(reached, results, strict=True):
        if isinstance(result, BaseException):
            say(f"{host_plan.host}: could not gather: {result}")
            missing.append(host_plan.host)
            continue
        removed += result.removed
        if result.elsewhere:
            say(f"{host_plan.host}: what the script wrote is not there any more: {result.elsewhere} has fetched it")
        if result.kept:
            where = f"left in {host_plan.run_dir} there, as these names are Muster's here"
            say(f"{host_plan.host}: {where}: {', '.join(result.kept)}")
        if not result.cleared:
            say(f"{host_plan.host}: not all that the run left there could be cleared")
        if left := [f"{kind} {', '.join(map(str, found))}" for kind, found in result.left.items() if found]:
            done = ", and cleared" if result.cleared else ""
            say(f"{host_plan.host}: left by the run{done}: {'; '.join(left)}")
    pairs = zip(reached, results, strict=True)
    newest = [(host_plan, result.checkpoint) for host_plan, result in pairs if isinstance(result, Gathered)]
    _fetch_newest_checkpoint(plan, machines, newest, say)
    if removed:
        runs = sorted(set(removed))
        say(f"removed from the hosts, as KEEP_RUNS={kept_runs}: {', '.join(runs)}")
    if missing:
        later = name_inventory(f"`make gather RUN={plan.run}`", Path(plan.inventory))
        say(f"nothing was gathered from {', '.join(missing)}; {later} when {'it' if len(missing) == 1 else 'they'} can")
    return missing
