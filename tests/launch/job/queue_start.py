"""A start in a process of its own, for test_queue.py: `RUN FOLDER...` waits for its turn on hosts that are folders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from launch.files import ROOT
from launch.job.queue import turn

#: The verb as the door runs it, without the door: requests on standard input, frames as lines.
VERB = """
import json, sys
from keeper import queue
queue.queue(json.loads(sys.argv[1]), 0, lambda words: print(json.dumps(words), flush=True))
"""


class Host(NamedTuple):
    """A folder that stands for a host; in the place of a Machine."""

    name: str
    root: str


class Frame(NamedTuple):
    """As launch/hosts/door.py has it."""

    words: dict[str, Any]
    data: bytes = b""


class LocalDoor:
    """A door to a verb in a process of this machine, in the place of launch.hosts.door.Door."""

    def __init__(self, machine: Any, verb: str, options: dict[str, Any]) -> None:
        assert verb == "queue"
        words = json.dumps({**options, "root": machine.root})
        command = [sys.executable, "-S", "-c", VERB, words]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, words: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def frames(self, idle_timeout: float | None) -> Iterator[Frame]:
        assert self.process.stdout
        for line in self.process.stdout:
            yield Frame(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    hosts: Any = [Host(Path(root).name, root) for root in sys.argv[2:]]
    opened: Any = LocalDoor
    with turn(hosts, sys.argv[1], "ann@laptop", True, lambda text: print(text, flush=True), opened):
        print("its turn", flush=True)
        sys.stdin.read()
