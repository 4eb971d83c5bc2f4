"""Why a rank failed, in one line and a traceback: from its error file, its exit code and the end of its output. Pure,
but for the look at a network interface.

A failure is a dictionary as in failure.json; its schema: train/start/agent.py.
"""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import Any

EXIT_STOPPED = 75  # of ranks that saved and stopped as they were asked to; as in train.settings

# What gloo, NCCL and torch's store say on a rank whose peer has gone, or does not come.
PEER_LOST = re.compile(
    r"connection closed by peer|connection reset by peer|connection refused|broken pipe|remote process exited"
    r"|DistNetworkError|DistStoreError|ncclRemoteError|NCCL communicator was aborted"
    r"|socket timeout|timed out waiting|watchdog caught collective operation timeout",
    re.IGNORECASE,
)

# Why a C++ exception aborted a rank. NCCL's watchdog ends a rank so that has waited for the others too long.
ABORTED_BY = re.compile(r"^\s*what\(\):\s*(\S.*)$|(Watchdog caught collective operation timeout.*)$", re.MULTILINE)

# Of the host's memory, as this file and the kernel say it, and of a GPU's, as torch does.
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)

# Exceptions of our trainer that the same data and settings bring about each time; its own refusal has an exit status.
FINAL_ERRORS = re.compile(r"^(?:[\w.]+\.)?(DataError|NonFiniteLoss)\b")
EXIT_REFUSED = 2  # of ranks whose arguments are refused; as in train.settings

# What keeps a host from taking part again, whatever is started there.
UNFIT = re.compile(r"No space left on device|Disk quota exceeded|Read-only file system", re.IGNORECASE)

KILLED_WORKER = "is killed by signal: Killed"  # of a DataLoader's process, as torch says it
LINES_CHARACTERS = 4000  # of a rank's last lines together
LINE_CHARACTERS = 500  # of one of them

# torch puts this before each line of an uncaught exception once a process group exists.
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)


def interface_problem(name: str, interfaces: Path = Path("/sys/class/net")) -> str:
    """Why nothing can go over a network interface of this host; empty where nothing is known to be wrong with it."""
    if not (interfaces / name).is_dir():
        return f"its network interface {name} is gone"
    with contextlib.suppress(OSError):
        if (interfaces / name / "operstate").read_text().strip() in ("down", "lowerlayerdown", "notpresent"):
            return f"its network interface {name} is down"
    return ""


def last_traceback(text: str) -> str:
    """The last Python traceback in a rank's output, to the line of its exception; empty if there is none."""
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


def signal_name(exitcode: int) -> str | None:
    """ "SIGKILL" for -9, None for an exit code that is no signal's."""
    if exitcode >= 0:
        return None
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        return f"signal {-exitcode}"


def explanation(exitcode: int, recorded: str, recorded_trace: str, output: str) -> tuple[str, str]:
    """(exception, traceback) of a failed rank from what is known of it: error file first, then its output's end."""
    if recorded:
        return recorded.strip(), recorded_trace
    output = RANK_PREFIX.sub("", output)
    trace = last_traceback(output)
    if exitcode < 0:
        said = (
            [what or watchdog for what, watchdog in ABORTED_BY.findall(output)] if exitcode == -signal.SIGABRT else []
        )
        return f"killed by {signal_name(exitcode)}" + (f": {said[-1]}" if said else ""), trace
    if trace:
        return exception_line(trace), trace
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return (f"exit status {exitcode}; its last line: {last}" if last else f"exit status {exitcode}"), ""


def is_consequence(exception: str, exitcode: int) -> bool:
    """Whether a rank ended because of another: it lost a peer, torchrun ended it, or it stopped as all ranks did."""
    return bool(PEER_LOST.search(exception)) or exitcode in (-signal.SIGTERM, EXIT_STOPPED)


def is_final(exception: str, exitcode: int) -> bool:
    """Whether a rank that failed so would fail again: its arguments, its data or its numbers are bad."""
    return exitcode == EXIT_REFUSED or bool(FINAL_ERRORS.match(exception))


def completed(failure: dict[str, Any], output: str) -> dict[str, Any]:
    """The failure with what the end of the rank's output says of it, where the agent knew its exit code alone."""
    exitcode = failure["exitcode"]
    if failure["exception"] != explanation(exitcode, "", "", "")[0]:
        return failure
    exception, trace = explanation(exitcode, "", "", output)
    consequence = is_consequence(exception, exitcode)
    return {**failure, "exception": exception, "traceback": trace, "consequence": consequence}


def in_order(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cause first, as far as it can be known: consequences come after all others, then the earlier comes first."""
    return sorted(failures, key=lambda f: (f["consequence"], f["time"]))


def shortened(lines: list[str]) -> list[str]:
    """The last lines of a rank as they travel with the heartbeats: long ones cut off, LINES_CHARACTERS at most."""
    kept: list[str] = []
    for line in reversed(lines):
        kept.append(line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} ...")
        if sum(map(len, kept)) > LINES_CHARACTERS:
            kept.pop()
            break
    return kept[::-1]


def described(failure: dict[str, Any]) -> str:
    """One failure in a line: the exception with the exit code, or the signal, or the bare exit status."""
    text = str(failure["exception"]).splitlines()[0]
    known = failure["signal"] or text.startswith("exit status")
    return text if known else f"{text} (exit {failure['exitcode']})"
