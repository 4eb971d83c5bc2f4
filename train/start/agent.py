"""torchrun, and a document that says which rank failed and why.  python -m train.start.agent <torchrun's arguments>

Or `--direct RANK WORLD_SIZE MASTER_ADDR MASTER_PORT MODULE [argument ...]`: the only rank of a host, in this process,
without torchrun: for short tasks, which would otherwise wait twice for the import of torch.

torchrun does all the work; this only catches its end and writes $MUSTER_RUN_DIR/failure.json (schema
below), so that the control side need not read logs. A script needs nothing of ours: without @record the
exception is read from the end of the rank's stderr log (give torchrun --log-dir and --tee 3).

Exit status: torchrun's 0; 1 when a rank failed or the ranks did not find each other; 2 for arguments that
torchrun refuses; 75 when ranks ended with that status, as they do once one of them, maybe on another host, was
asked to stop and all have saved a checkpoint; 128 + the signal's number when this process itself was asked to stop:
its ranks get the signal and TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default 30) to finish their step and save.
Stopped is not failed: there is no failure.json then.

failure.json: {"schema": 1, "node_rank", "host", "failures": [{"rank", "local_rank", "pid", "exitcode",
"signal", "exception", "traceback", "time", "consequence"}]}. The first failure is the cause as far as it can
be known: those that only lost the connection to a peer ("consequence": true) come after the others, then the
earlier first. `rank` is null when torchrun itself failed, e.g. in the rendezvous; `signal` is e.g. "SIGKILL"
or null; `time` is in unix seconds.

Run it with python -P where the working directory may hold a train.py of the user's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from train.whole_files import write_json

FAILURE_SCHEMA = 1
SHUTDOWN_GRACE_SECONDS = "30"  # that ranks get between SIGTERM and SIGKILL
EXIT_STOPPED = 75  # as in train.settings, which is not imported here: a launcher starts fast
STDERR_TAIL_BYTES = 65536

# What gloo, NCCL and torch's store say on a rank whose peer has gone.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|connection refused|broken pipe|remote process exited"
    r"|DistNetworkError|DistStoreError|ncclRemoteError|NCCL communicator was aborted"
    r"|socket timeout|timed out waiting",
    re.IGNORECASE,
)

# torch puts this before each line of an uncaught exception once a process group exists.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)

Failure = dict[str, Any]


def last_traceback(text: str) -> str:
    """The last Python traceback in a stderr log, to the line of its exception; empty if there is none."""
    start = text.rfind("Traceback (most recent call last):\n")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    exception = (n for n, line in enumerate(lines) if n and line and not line.startswith(" "))
    return "\n".join(lines[: next(exception, len(lines) - 1) + 1])


def exception_line(trace: str) -> str:
    """The line of a traceback that names the exception, e.g. "ValueError: bad"."""
    unindented = [line for line in trace.splitlines()[1:] if line and not line.startswith(" ")]
    return unindented[0] if unindented else ""


def explanation(exitcode: int, recorded: str, recorded_trace: str, stderr: str) -> tuple[str, str]:
    """(exception, traceback) of a failed rank from what is known of it: error file first, then its stderr."""
    if recorded:
        return recorded.strip(), recorded_trace
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}", last_traceback(stderr)
    trace = last_traceback(stderr)
    if trace:
        return exception_line(trace), trace
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    return (f"exit status {exitcode}: {last}" if last else f"exit status {exitcode}"), ""


def in_order(failures: list[Failure]) -> list[Failure]:
    return sorted(failures, key=lambda f: (f["consequence"], f["time"]))


def only_stopped(exitcodes: Iterable[int]) -> bool:
    """Whether ranks stopped on request: EXIT_STOPPED, or torchrun's SIGTERM, which follows the first end of a rank."""
    codes = set(exitcodes)
    return EXIT_STOPPED in codes and codes <= {EXIT_STOPPED, -signal.SIGTERM}


def tail_of_stderr(log_dir: str | None, local_rank: int, since: float) -> str:
    """The end of this local rank's newest stderr log under torchrun's log folder; empty if there is none."""
    if not log_dir:
        return ""
    logs = [p for p in Path(log_dir).glob(f"*/attempt_*/{local_rank}/stderr.log") if p.stat().st_mtime >= since - 1]
    if not logs:
        return ""
    with max(logs, key=lambda p: p.stat().st_mtime).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        return RANK_PREFIX.sub("", file.read().decode(errors="replace"))


def describe(rank: int, failure: Any, log_dir: str | None, since: float) -> Failure:
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
        "signal": signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None,
        "exception": exception,
        "traceback": trace,
        "time": getattr(failure, "noticed", float(failure.timestamp)),
        "consequence": bool(PEER_LOST.search(exception)) or failure.exitcode in (-signal.SIGTERM, EXIT_STOPPED),
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
    """Writes failure.json, whole or not at all, and one line for each failure to stderr."""
    host = os.environ.get("MUSTER_HOST") or socket.gethostname()
    for failure in failures:
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


def direct(rank: str, world_size: str, address: str, port: str, module: str, *arguments: str) -> int:
    """A rank as torchrun would start it, in this process. Returns its exit status, or 1."""
    error_file = Path(tempfile.mkdtemp()) / "error.json"  # where torch writes the exception of a rank
    os.environ.update(
        RANK=rank, LOCAL_RANK="0", WORLD_SIZE=world_size, LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=address, MASTER_PORT=port, TORCHELASTIC_ERROR_FILE=str(error_file),
    )  # fmt: skip
    sys.argv = [module, *arguments]
    trace, status = "", 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace, status = "".join(traceback.format_exception(error)), 1
    if status:
        said = json.loads(error_file.read_text())["message"] if error_file.exists() else ""
        said = said if isinstance(said, str) else said["message"]
        exception, trace = explanation(status, said, trace, trace)
        lost = bool(PEER_LOST.search(exception))
        report([own_failure(RuntimeError()) | {
            "rank": int(rank), "local_rank": 0, "exitcode": status, "exception": exception, "traceback": trace,
            "consequence": lost,
        }], int(rank))  # fmt: skip
    return status and 1


def note_time_of_failures() -> None:
    """torch keeps the time of a failure in whole seconds, too coarse to know which rank failed first."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    made = ProcessFailure.__post_init__

    def note(self: Any) -> None:
        self.noticed = time.time()
        made(self)

    ProcessFailure.__post_init__ = note  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_GRACE_SECONDS)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the same is reported below, in one line
    note_time_of_failures()
    options = torchrun.parse_args(arguments)
    # torchrun fills in templates ("$$", "${local_rank}"): arguments shall arrive as they were given.
    options.training_script_args = [word.replace("$", "$$") for word in options.training_script_args]
    since = time.time()
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if only_stopped(failure.exitcode for failure in error.failures.values()):
            return EXIT_STOPPED
        failures = [describe(rank, f, options.log_dir, since) for rank, f in error.failures.items()]
        report(in_order(failures), options.node_rank)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:
        report([own_failure(error)], options.node_rank)
        return 1
    return 0


def leave_at_once_until_there_are_ranks() -> None:
    """Lets SIGTERM, SIGINT and SIGHUP end this process while there is nothing to end in order.

    In a container this is process 1, which the kernel shields from signals without a handler, and while it waits for
    the other hosts in torch's C++ no Python handler runs: the wakeup descriptor is written all the same. torchrun sets
    its own handlers just before it starts the ranks; from then on they alone count.
    """

    def early(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)

    def watch() -> None:
        while number := os.read(reading, 1):
            if signal.getsignal(number[0]) is early:
                os._exit(128 + number[0])

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, early)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


def leave(status: int) -> None:
    """Ends the process at once. An orderly end would wait for torchrun's threads that copy the ranks' output, and could
    replace the status by the interpreter's 120 when one of them still writes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave_at_once_until_there_are_ranks()
    leave(direct(*sys.argv[2:]) if sys.argv[1:2] == ["--direct"] else main(sys.argv[1:]))
