"""`make test`, `make test-all`, `make test-fast`: sessions of pytest that run at the same time.

    python -m tests.suite [all | fast]

Lab tests spend most of their time waiting, so their session has two workers, each with its own lab. The unit tests run
next to it at the lowest priority. The first session's output appears as it comes, that of the others when they have
ended (until then it is in build/tests-*.log). Exit status: 0 if all passed, else 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALL_MINUTES = 60
LOWEST_PRIORITY = 19
#: These import torch, which takes each process of pytest five seconds.
TRAINER = ("tests/train", "tests/gpu", "tests/benchmarks")


@dataclass(frozen=True)
class Session:
    """One call of pytest."""

    name: str
    words: Sequence[str]
    chosen: str  # pytest's -m
    priority: int = 0  # added to the niceness

    def start(self, log: Path | None) -> subprocess.Popen[bytes]:
        """Start it; it writes into `log`, or to where this process writes."""
        words = [sys.executable, "-m", "pytest", "-m", self.chosen, *self.words]
        output = log.open("wb") if log else None
        return subprocess.Popen(
            words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT if log else None,
            preexec_fn=lambda: os.nice(self.priority),
        )  # fmt: skip


def sessions(which: str) -> list[Session]:
    if which == "fast":
        chosen = "not lab and not slow and not browser and not long"
        others = [f"--ignore={folder}" for folder in TRAINER]
        return [Session("trainer", TRAINER, chosen), Session("others", others, chosen)]
    more, search = ("", ("--hypothesis-profile=all",)) if which == "all" else (" and not long", ())
    two_workers = (*search, "-n", "2", "--dist")
    return [
        Session(
            "lab", (*two_workers, "loadgroup", "--no-loadscope-reorder", "tests/lab", "tests/containers"), f"lab{more}"
        ),
        Session("unit", (*two_workers, "worksteal"), f"not lab{more}", LOWEST_PRIORITY),
    ]


def main(arguments: list[str]) -> int:
    which = arguments[0] if arguments else ""
    if which == "all":
        print(f"make test-all takes about {ALL_MINUTES} minutes on 2 cores", flush=True)
    began, build = time.monotonic(), ROOT / "build"
    build.mkdir(exist_ok=True)
    chosen = sessions(which)
    logs = {session.name: build / f"tests-{session.name}.log" for session in chosen[1:]}
    running = {session.name: session.start(logs.get(session.name)) for session in chosen}
    failed = []
    for name, process in running.items():
        try:
            process.wait()
        except KeyboardInterrupt:  # pytest has it, too, and clears away
            process.wait()
        if process.returncode != 0:
            failed.append(name)
        if name in logs:
            sys.stdout.write(logs[name].read_text(errors="replace"))
        print(f"{name}: {'failed' if name in failed else 'passed'}; {_time_since(began)}", flush=True)
    return int(bool(failed))


def _time_since(began: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    return f"{minutes} min {seconds} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
