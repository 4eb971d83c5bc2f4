"""Ends a command with all of its descendants; as a program, when the process that wanted the command has died.

    python guard.py command ...

runs the command and ends it when standard input is closed. The starter holds the other end of that pipe, so it need
only close it or die. Exit status: the command's, or 143 if it was ended. Imports nothing of the project, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

TERMINATE_SECONDS = 10.0  # how long a command that is ended may take to remove what it made
ENDED = 128 + signal.SIGTERM


def end(process: subprocess.Popen[Any], seconds: float = TERMINATE_SECONDS) -> None:
    """End a command that has not ended yet, beginning with its last descendants: a program whose child has failed
    removes what it made. (`podman build` that is ended itself leaves its container, which goes on running.)

    After `seconds` all of them get SIGKILL.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        children = _children()
        every = [process.pid]
        for pid in every:
            every += children[pid]
        last = [pid for pid in every if not children[pid]]
        if time.monotonic() > deadline:
            _signal(signal.SIGKILL, every)
        else:
            _signal(signal.SIGTERM if last == [process.pid] else signal.SIGKILL, last)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)


def _children() -> dict[int, list[int]]:
    """Process id -> process ids of its children that run; for all processes of this machine."""
    found = defaultdict[int, list[int]](list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(parent)].append(int(folder.name))
    return found


def _signal(number: int, pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:  # sudo started it, so it is root's
            subprocess.run(["sudo", "-n", "kill", f"-{number}", str(pid)], check=False)


def main(command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    asked = threading.Event()

    def watch() -> None:
        os.read(0, 1)  # returns when the pipe is closed: nobody writes to it
        asked.set()
        end(process)

    threading.Thread(target=watch, daemon=True).start()
    status = process.wait()
    return ENDED if asked.is_set() else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
