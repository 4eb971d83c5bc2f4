"""Live output of all hosts of a run, labelled by host and rank; and who ended how. Prints; decides nothing.

A rank's lines carry the prefix that launch.job.plan has torchrun put before them; others come from torchrun itself.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.files import shown
from launch.hosts.connection import HostLost, Machine
from launch.hosts.ssh import LineSink
from launch.job import container
from launch.job.plan import HostPlan

DRAIN_SECONDS = 5  # how long the output of an ended container may take to arrive

_PREFIX = re.compile(r"^\[rank(\d+)\]:")
_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)  # ANSI; a host keeps its colour


def split_label(host: str, line: str) -> tuple[str, str]:
    """The label of a line (`h2 rank 1`, or `h2` for torchrun's own) and its text. Pure."""
    found = _PREFIX.match(line)
    if not found:
        return host, line
    # The prefix stands again where a line came in parts (progress bars); torch's own has a blank behind it.
    return f"{host} rank {found[1]}", re.sub(rf"\[rank{found[1]}\]:(?! )", "", line[found.end() :])


@dataclass(frozen=True)
class Ended:
    """A host's container ended with `status`; None: the host does not answer any more."""

    host_plan: HostPlan
    status: int | None
    reason: str = ""


class Labeller:
    """Prints whole lines under one lock, so that hosts do not write into each other's lines."""

    def __init__(self, host_plans: Sequence[HostPlan], colour: bool | None = None) -> None:
        self._lock = threading.Lock()
        self._colour = sys.stdout.isatty() if colour is None else colour
        self._width = max(len(f"{host_plan.host} rank {max(host_plan.ranks)}") for host_plan in host_plans)
        self._codes = {host_plan.host: _COLOURS[i % len(_COLOURS)] for i, host_plan in enumerate(host_plans)}

    def label(self, host: str, line: str) -> str:
        """The line as shown: `h2 rank 1 | text`."""
        name, text = split_label(host, line)
        head = name.ljust(self._width)
        if self._colour:
            head = f"\x1b[{self._codes[host]}m{head}\x1b[0m"
        return f"{head} | {text}"

    def show(self, host: str, line: str) -> None:
        with self._lock:
            print(self.label(host, line), flush=True)


class Follower:
    """Follows every host of a run: its output to the terminal and to a log file, its end to a queue."""

    def __init__(self, pairs: Sequence[tuple[Machine, HostPlan]], logs: Path) -> None:
        self.ended: queue.Queue[Ended] = queue.Queue()
        self._labeller = Labeller([host_plan for _, host_plan in pairs])
        self._readers = []
        logs.mkdir(parents=True, exist_ok=True)
        for machine, host_plan in pairs:
            reader = threading.Thread(target=self._read, args=(machine, host_plan, logs), daemon=True)
            reader.start()
            self._readers.append(reader)
            threading.Thread(target=self._watch, args=(machine, host_plan), daemon=True).start()

    def _read(self, machine: Machine, host_plan: HostPlan, logs: Path) -> None:
        unkept = False  # whether lines are missing in the log
        kept = logs / f"{host_plan.host}.log"
        kept.unlink(missing_ok=True)

        def hand_on(line: str) -> None:
            nonlocal unkept
            try:
                try:
                    with kept.open("a", encoding="utf-8", errors="replace") as file:
                        file.write(line + "\n")
                finally:
                    self._labeller.show(host_plan.host, line)
            except OSError as error:  # a full disk: through_drops would take it for a lost connection
                if not unkept:
                    unkept = True
                    print(f"muster: {shown(kept)} lacks lines from here on: {error}", file=sys.stderr, flush=True)

        sink = LineSink(hand_on)

        def stream() -> object:
            sink.restart()
            return container.stream_output(machine, host_plan, sink)

        with contextlib.suppress(HostLost):  # _watch reports it
            machine.through_drops(stream)
        sink.finish()

    def _watch(self, machine: Machine, host_plan: HostPlan) -> None:
        try:
            self.ended.put(Ended(host_plan, container.wait(machine, host_plan)))
        except HostLost as error:
            self.ended.put(Ended(host_plan, None, str(error)))
        except Exception as error:
            self.ended.put(Ended(host_plan, None, f"{type(error).__name__}: {error}"))

    def drain(self) -> None:
        """Wait for the last lines of containers that have ended, DRAIN_SECONDS for all hosts together."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
