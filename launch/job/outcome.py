"""How a run ended: the failure that came first, and the content of runs/<id>/summary.json. Writes nothing."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cli import exits
from launch.files import read_json

#: 128 + SIGTERM: torchrun received SIGTERM, and sent it to its ranks.
TERMINATED = 143
#: How a container ends where nothing went wrong but somebody asked for the end.
STOPPED_STATUSES = (exits.STOPPED, TERMINATED)


def verdict(statuses: Sequence[int | None]) -> str:
    """ "succeeded", "stopped" or "failed", from the exit statuses of all hosts' containers.

    A run was stopped if its ranks saved a checkpoint and ended because one of them received a signal. SIGTERM alone,
    without such a rank, is a failure: nothing was saved.
    """
    if all(status == 0 for status in statuses):
        return "succeeded"
    asked = all(status == 0 or status in STOPPED_STATUSES for status in statuses)
    return "stopped" if asked and exits.STOPPED in statuses else "failed"


def stopped_reason(signalled: Sequence[str]) -> str:
    """Why a run stopped that Muster did not stop. `signalled`: hosts whose torchrun received SIGTERM."""
    who = f"torchrun on {', '.join(signalled)}" if signalled else "a rank"
    return f"{who} received a signal to stop, not from Muster; all ranks saved a checkpoint and ended"


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, or the host where no rank can be named."""

    host: str
    rank: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}" if self.rank is None else f"rank {self.rank} on {self.host}: {self.reason}"


def root_failure(reports: Mapping[str, Mapping[str, Any]], ends: Mapping[str, str]) -> Failure | None:
    """The first cause among all hosts' failures.

    `reports` is host -> failure.json as train/start/agent.py writes it (`consequence` marks failures that only follow
    from another rank's: those yield to any that do not; of the rest, the earliest counts). `ends` is host -> how its
    container ended, for hosts that ended badly.
    """
    failures = [(host, failure) for host, report in reports.items() for failure in report.get("failures", [])]
    first = min(failures, key=lambda f: (f[1]["consequence"], f[1]["time"]), default=None)
    silent = {host: how for host, how in ends.items() if host not in reports}
    if silent and (first is None or first[1]["consequence"]):
        host, how = next(iter(silent.items()))
        return Failure(host, None, how)
    if first is None:
        return None
    host, failure = first
    return Failure(host, failure["rank"], describe_failure(failure))


def describe_failure(failure: Mapping[str, Any]) -> str:
    """One failure in a line: the exception with the exit code, or the signal, or the bare exit status."""
    text: str = str(failure["exception"]).splitlines()[0]
    known = failure["signal"] or text.startswith("exit status")
    return text if known else f"{text} (exit {failure['exitcode']})"


def refused_its_settings(reports: Mapping[str, Mapping[str, Any]], folder: Path) -> bool:
    """Whether our trainer refused its arguments: it then exits with REFUSED before it writes any metrics."""
    codes = {failure["exitcode"] for report in reports.values() for failure in report["failures"]}
    return exits.REFUSED in codes and not (folder / "metrics.jsonl").exists()


def describe_end(status: int | None, state: Mapping[str, Any], reason: str = "", what: str = "the container") -> str:
    """How a container (or `what` else runs the ranks) ended, if no rank has reported a failure.

    status: its exit status, 128 + the number of a signal that killed it; None: the host does not answer, for `reason`.
    state: Podman's of the container, or {}.
    """
    if status is None:
        return f"lost: {reason}"
    if state.get("OOMKilled"):
        return "out of memory: the kernel killed the container (exit 137)"
    if status - 128 in list(signal.Signals):
        return f"{what} was killed by {signal.Signals(status - 128).name}"
    return f"{what} ended with exit status {status}" if status >= 0 else f"{what} is gone"


def summary(
    run: str,
    nodes: int,
    world_size: int,
    master_addr: str,
    status: str,
    failure: Failure | None = None,
    result: Mapping[str, Any] | None = None,
    refused: bool = False,
    reason: str | None = None,
) -> dict[str, Any]:
    """runs/<id>/summary.json. `status` is as `verdict` returns it.

    failure: what came first in a run that failed. refused: whether the trainer refused its settings. result: what it
    left in result.json, of a run that succeeded. reason: why a run was stopped.
    """
    codes = {"succeeded": exits.SUCCEEDED, "failed": exits.FAILED, "stopped": exits.INTERRUPTED}
    return {
        "run": run,
        "status": status,
        "exit_status": exits.REFUSED if refused else codes[status],
        "nodes": nodes,
        "world_size": world_size,
        "master_addr": master_addr,
        **{key: (result or {}).get(key) for key in ("test_accuracy", "images_per_second", "train_seconds")},
        "failed_rank": failure.rank if failure else None,
        "failed_host": failure.host if failure else None,
        "reason": failure.reason if failure else reason,
    }


def reports_of(logs: Path, hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each host's failure.json, gathered into logs/<host>/, where there is one."""
    found = {host: read_json(logs / host / "failure.json") for host in hosts}
    return {host: report for host, report in found.items() if report}
