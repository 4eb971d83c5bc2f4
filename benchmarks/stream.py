"""`make bench-stream`: two hosts whose scripts print 10,000 lines a second each, for a minute; what comes of it here.

Lines carry their number and the time of day, which is one on all lab hosts. lines_lost: that are not in the gathered
files, in order. view_lag_seconds: between a line's time and that at which this program has read it from `make train`,
the 99th percentile of the oldest lines of the pieces that came. The share of a core and the memory are those of the
control process; growth: from 10 s after the first line to the last one.

MUSTER_TEST_LAB=name: on a lab that is up and deployed, left as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import FAB, close, environment, fab, lab
from launch.files import runs_dir

RATE = 10_000  # lines a second of each host
SECONDS = 60
SETTLED_SECONDS = 10  # after which memory has to stay as it is
LIMIT_SECONDS = 600
JOB = Path(__file__).parent / "stream_job"

_LINE = re.compile(rb"^h\d+ rank \d+ +\| (\d+\.\d+) line \d+ of a chatty script$", re.MULTILINE)


@dataclass
class Seen:
    """What was seen of the control process, at each look."""

    printed: bytearray = field(default_factory=bytearray)  # its own lines
    lags: list[float] = field(default_factory=list)  # seconds
    first: float = 0.0  # time.monotonic() of the first line of a rank
    last: float = 0.0
    cpu: list[tuple[float, float]] = field(default_factory=list)  # (time.monotonic(), seconds of computing so far)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (time.monotonic(), MiB)


def read(process: subprocess.Popen[bytes], seen: Seen) -> None:
    """Read all that is printed, as a terminal would; look at the oldest line in each piece."""
    assert process.stdout is not None
    rest = b""
    while piece := os.read(process.stdout.fileno(), 1 << 20):
        now, moment = time.time(), time.monotonic()
        lines, _, rest = (rest + piece).rpartition(b"\n")
        if oldest := _LINE.search(lines):
            seen.first = seen.first or moment
            seen.last = moment
            seen.lags.append(now - float(oldest[1]))
        else:
            seen.printed += lines + b"\n"
    seen.printed += rest


def watch(process: subprocess.Popen[bytes], seen: Seen) -> None:
    """Look at the computing time and the memory of a process each second, until it ends."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    while process.poll() is None:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            now = time.monotonic()
            seen.cpu.append((now, (int(words[11]) + int(words[12])) / ticks))
            seen.memory.append((now, int(words[21]) * page / 2**20))
        time.sleep(1)


def chatter(name: str) -> Seen:
    """One run of the chatty script on the first two hosts of a lab."""
    job = {"WORKLOAD": JOB, "SCRIPT": "chatty.py", "ARGS": f"{RATE} {SECONDS}", "NODES": 2, "SKIP_CHECK": 1}
    seen = Seen()
    process = subprocess.Popen(
        [FAB, "train"], env=environment(name, **job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    watching = threading.Thread(target=watch, args=(process, seen))
    watching.start()
    read(process, seen)
    if process.wait(LIMIT_SECONDS) != 0:
        raise SystemExit(f"benchmark: the run ended with {process.returncode}:\n{seen.printed.decode()[-3000:]}")
    watching.join()
    return seen


def log_of(folder: Path, host: str) -> Path:
    """The gathered output of the rank that printed."""
    [file] = [file for file in (folder / "logs" / host).glob("rank-*.log") if file.stat().st_size]
    return file


def lines_lost(folder: Path, lines_of_host: int) -> int:
    """How many lines the gathered files of a run lack; a line that is not where it belongs counts too."""
    lost = 0
    for host in ("h1", "h2"):
        expected = 0
        with log_of(folder, host).open("rb") as lines:
            for line in lines:
                number = int(line.split()[2])
                lost += abs(number - expected)
                expected = number + 1
        lost += lines_of_host - expected
    return lost


def at(looks: list[tuple[float, float]], moment: float) -> tuple[float, float]:
    """The first look from a moment on, or the last one."""
    return next((look for look in looks if look[0] >= moment), looks[-1])


@contextlib.contextmanager
def some_lab(new: str) -> Iterator[str]:
    """A deployed lab of two hosts or more: MUSTER_TEST_LAB, or a new one."""
    if kept := os.environ.get("MUSTER_TEST_LAB"):
        yield kept
        return
    with lab(new, 2) as name:
        fab(name, "deploy")
        yield name


def main() -> None:
    """Measure and print."""
    with some_lab("bench-stream") as name:
        seen = chatter(name)
    [run] = re.findall(rb"muster \| run (\S+): \d+ ranks on", bytes(seen.printed))
    folder = runs_dir() / run.decode()
    lost = lines_lost(folder, RATE * SECONDS)
    shutil.rmtree(folder)  # over 100 MB
    settled = seen.first + SETTLED_SECONDS
    (begin, used), (end, used_at_end) = at(seen.cpu, settled), at(seen.cpu, seen.last - 2)
    growth = at(seen.memory, seen.last - 2)[1] - at(seen.memory, settled)[1]
    lags = sorted(seen.lags)
    close(
        {
            "lines_lost": lost,
            "view_lag_seconds": round(lags[int(0.99 * (len(lags) - 1))], 2),
            "view_lag_median_seconds": round(lags[len(lags) // 2], 2),
            "view_lag_worst_seconds": round(lags[-1], 2),
            "control_cpu_share": round((used_at_end - used) / (end - begin), 3),
            "control_memory_mib": round(at(seen.memory, settled)[1], 1),
            "control_memory_growth_mib": round(growth, 1),
            "lines": 2 * RATE * SECONDS,
            "seconds": round(seen.last - seen.first, 1),
        }
    )


if __name__ == "__main__":
    main()
