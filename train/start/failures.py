"""What is known of ranks that failed: one dictionary each, and failure.json, whose schema agent.py gives."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from signal import SIGTERM
from typing import Any

from keeper.causes import EXIT_STOPPED, PEER_LOST, explanation, is_consequence, signal_name
from train.whole_files import write_json

FAILURE_SCHEMA = 1
STDERR_TAIL_BYTES = 65536

Failure = dict[str, Any]  # as in failure.json


def only_stopped(exitcodes: Iterable[int]) -> bool:
    """Whether ranks stopped on request: EXIT_STOPPED, or torchrun's SIGTERM, which follows the first end of a rank."""
    codes = set(exitcodes)
    return EXIT_STOPPED in codes and codes <= {EXIT_STOPPED, -SIGTERM}


def tail_of_stderr(log_dir: str | None, local_rank: int, since: float) -> str:
    """The end of this local rank's newest stderr log under torchrun's log folder; empty if there is none."""
    if not log_dir:
        return ""
    logs = [p for p in Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log") if p.stat().st_mtime >= since - 1]
    if not logs:
        return ""
    with max(logs, key=lambda p: p.stat().st_mtime).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        return file.read().decode(errors="replace")


def describe(rank: int | None, failure: Any, log_dir: str | None = None, since: float = 0) -> Failure:
    """`failure`: torch's ProcessFailure."""
    data = failure.error_file_data.get("message")
    data = data if isinstance(data, dict) else {}  # a string where there is no error file
    exception, trace = explanation(
        failure.exitcode,
        data.get("message", ""),
        data.get("extraInfo", {}).get("py_callstack", ""),
        tail_of_stderr(log_dir, failure.local_rank, since),
    )
    return {
        "rank": rank,
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exitcode": failure.exitcode,
        "signal": signal_name(failure.exitcode),
        "exception": exception,
        "traceback": trace,
        "time": getattr(failure, "noticed", float(failure.timestamp)),
        "consequence": is_consequence(exception, failure.exitcode),
    }


def own_failure(error: BaseException) -> Failure:
    """torchrun itself failed: no rank is to blame."""
    return {
        "rank": None,
        "local_rank": None,
        "pid": os.getpid(),
        "exitcode": 1,
        "signal": None,
        "exception": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "consequence": bool(PEER_LOST.search(f"{type(error).__name__}: {error}")),
    }


def report(failures: list[Failure], node_rank: int) -> None:
    """Writes failure.json, whole or not at all, and, without a keeper, one line for each failure to stderr."""
    host = os.environ.get("MUSTER_HOST") or socket.gethostname()
    for failure in failures if "MUSTER_KEEPER" not in os.environ else ():  # the keeper says it, for all hosts
        who = "torchrun" if failure["rank"] is None else f"rank {failure['rank']}"
        print(f"{who} on {host} failed: {failure['exception'].splitlines()[0]}", file=sys.stderr, flush=True)
    folder = os.environ.get("MUSTER_RUN_DIR")
    if not folder:
        return
    document = {"schema": FAILURE_SCHEMA, "node_rank": node_rank, "host": host, "failures": failures}
    path = Path(folder) / "failure.json"
    try:
        write_json(path, document)
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)
