"""`make test`: the lab's tests, and beside them all the others, which need no container.

The lab's tests wait for hosts half of their time. The others take what processors have left: they run with `nice`, so
that the lab's are not held up. Lines of both come as they are printed, labelled, with the exit status of the first
that failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "lab": ["-m", "lab"],
    "others": ["-m", "not lab", "-n", "2", "--dist", "worksteal"],
}
NICE = {"lab": 0, "others": 10}


def main() -> int:
    """Exit status 0 when all tests have passed."""
    sys.path.insert(0, str(ROOT))
    from launch.deploy import control

    if control.has_root():
        control.ensure_ready(Console(width=120))  # what installs packages does it alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parts, which clear away
    parts = {name: _start(name) for name in PARTS}
    readers = [threading.Thread(target=_pass_on, args=(name, part.stdout)) for name, part in parts.items()]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    ended = {name: part.wait() for name, part in parts.items()}
    return next((status for status in ended.values() if status), 0)


def _start(name: str) -> subprocess.Popen[str]:
    words = ["nice", f"-n{NICE[name]}", sys.executable, "-m", "pytest", *PARTS[name], *sys.argv[1:]]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _pass_on(name: str, lines: IO[str] | None) -> None:
    for line in lines or ():
        print(f"{name:6} | {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
