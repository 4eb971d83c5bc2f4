"""`make bench-away`: a run whose control machine is away for MINUTES (10), then another one attaches and gathers.

Two lab hosts lose the network that SSH uses; the training network stays. When it is back the first control machine
shows the run again; then it is killed (SIGKILL). A copy of the clone with the inventory, its key and the cluster map,
but with no runs, attaches and gathers. lines_lost counts in the files that it has gathered, shown_lost in what the
first one had printed until it was killed; longest_pause_seconds: between two lines of a rank, with ten lines a second.

MUSTER_TEST_LAB=name: on a lab that is up and deployed, left as it is.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.common import FAB, close, environment
from benchmarks.stream import JOB, lines_lost, log_of, some_lab
from containers import lab_plan
from launch.files import ROOT, runs_dir

RATE = 10  # lines a second of each host
BEFORE_SECONDS = 5.0  # of the run in view
AFTER_SECONDS = 45.0  # of the run when the network is back
LIMIT_SECONDS = 300
HOSTS = ("h1", "h2")

_LINE = re.compile(r"^(h\d) rank \d+ +\| \d+\.\d+ line (\d+) of")


def another_clone(folder: Path, name: str) -> Path:
    """A second control machine for lab `name`: this clone as it is, with the inventory and its key."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).exists():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
    shutil.copytree(ROOT / "inventory" / name, folder / "inventory" / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def cut(name: str, change: str) -> None:
    """Take the network of SSH from all hosts (change: down), or give it back (up)."""
    for index, host in enumerate(HOSTS):
        found = subprocess.run(
            ["podman", "inspect", "--format", "{{.State.Pid}}", f"muster-{name}-{host}"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        words = ["ip", "link", "set", lab_plan.nics(index).management, change]
        subprocess.run(["nsenter", "-t", found.stdout.strip(), "-n", *words], check=True)


class First:
    """`make train` of the first control machine; what it prints is kept."""

    def __init__(self, name: str, seconds: int) -> None:
        job = {"WORKLOAD": JOB, "SCRIPT": "chatty.py", "ARGS": f"{RATE} {seconds}", "NODES": 2, "SKIP_CHECK": 1}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [FAB, "train"], env=environment(name, **job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, text: str, times: int = 1) -> float:
        """Seconds until so many lines hold `text`. Raises SystemExit."""
        begun = time.monotonic()
        while sum(text in line for line in self.lines) < times:
            if self.process.poll() is not None or time.monotonic() - begun > LIMIT_SECONDS:
                raise SystemExit(f"benchmark: no `{text}` came:\n{''.join(self.lines[-40:])}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def missing(self) -> int:
        """How many lines were left out of what was printed of each host, up to the last one."""
        shown = {host: [int(found[2]) for line in self.lines if (found := _LINE.match(line)) and found[1] == host]
                 for host in HOSTS}  # fmt: skip
        return sum(abs(b - a - 1) for numbers in shown.values() for a, b in itertools.pairwise([-1, *numbers]))


def longest_pause(folder: Path) -> float:
    """The longest time between two lines of a rank, in seconds."""
    pauses = []
    for host in HOSTS:
        stamps = [float(line.split()[0]) for line in log_of(folder, host).read_text().splitlines()]
        pauses += [after - before for before, after in itertools.pairwise(stamps)]
    return max(pauses)


def main() -> None:
    """Measure and print."""
    away = float(os.environ.get("MINUTES") or 10) * 60
    seconds = int(BEFORE_SECONDS + away + AFTER_SECONDS)
    with some_lab("bench-away") as name, tempfile.TemporaryDirectory(prefix="bench-away-") as made:
        clone = another_clone(Path(made), name)
        first = First(name, seconds)
        try:
            first.wait_for("line 0 of", 2)
            time.sleep(BEFORE_SECONDS)
            cut(name, "down")
            try:
                time.sleep(away)
            finally:
                cut(name, "up")
            back = first.wait_for("in view again", 2)
            time.sleep(2)  # what was printed meanwhile comes now
        finally:
            first.process.kill()
        run = next(line.split()[3].rstrip(":") for line in first.lines if line.startswith("muster | run "))
        attached = subprocess.run(
            [FAB, "attach"], cwd=clone, env=environment(name, RUN=run), capture_output=True, text=True,
            timeout=seconds + LIMIT_SECONDS, check=False,
        )  # fmt: skip
        if attached.returncode != 0:
            sys.exit(f"benchmark: attach ended with {attached.returncode}:\n{attached.stdout}{attached.stderr}")
        folder = clone / "runs" / run
        figures = {
            "lines_lost": lines_lost(folder, RATE * seconds),
            "shown_lost": first.missing(),
            "longest_pause_seconds": round(longest_pause(folder), 2),
            "in_view_again_seconds": round(back, 1),
            "away_minutes": away / 60,
        }
    shutil.rmtree(runs_dir() / run, ignore_errors=True)
    close(figures)


if __name__ == "__main__":
    main()
