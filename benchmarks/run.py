"""A run in progress on a lab, as the drills see it: from below its hosts, past SSH and past all that is measured.

Hosts are containers of this machine, so their ranks are watched in its /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.common import FAB, environment, run_in

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 150  # for a run to start, and to end after its fault


class Run:
    """A run in progress on a lab, as it is seen from below its hosts."""

    def __init__(self, lab: str, job: Mapping[str, object], nodes: int) -> None:
        self.lab = lab
        self.undo = ExitStack()  # what puts the hosts right again
        self.held: set[int] = set()  # threads that are held by ptrace (inject.py)
        self.lines: list[tuple[float, str]] = []  # (time.monotonic(), line) of what make train, then attach, printed
        self.process, self._reader = self._show("train", **job, NODES=nodes, WAIT=1)

    def attach(self) -> None:
        """Show the run again, whose command has ended."""
        self.process, self._reader = self._show("attach", RUN=self.id)

    def _show(self, task: str, **variables: object) -> tuple[subprocess.Popen[str], threading.Thread]:
        """A command that shows the run, and what reads it."""
        process = subprocess.Popen(
            [FAB, task], env=environment(self.lab, **variables), cwd=ROOT, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        return process, reader

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    @contextlib.contextmanager
    def undone_by(self, stack: ExitStack) -> Iterator[None]:
        """What is done meanwhile is put right again by this, not at the run's end."""
        before, self.undo = self.undo, stack
        try:
            yield
        finally:
            self.undo = before

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = LIMIT_SECONDS) -> Any:
        """The first true value. Raises SystemExit after so many seconds, or when make train ends before."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"no {what}; make train printed:\n{self.output}")
            time.sleep(0.05)
        return value

    @cached_property
    def id(self) -> str:
        """The run's id, as announced."""
        return str(self.wait_for(lambda: run_in(self.output), "run"))

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The run's plan."""
        path = ROOT / "runs" / self.id / "plan.json"
        self.wait_for(path.exists, "plan.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @cached_property
    def hosts(self) -> dict[str, int]:
        """Host -> the first process of its container, as this machine counts."""
        names = [host["host"] for host in self.plan["hosts"]]
        asked = ["podman", "inspect", "--format", "{{.State.Pid}}", *(self.container(name) for name in names)]
        pids = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        return dict(zip(names, map(int, pids), strict=True))

    def container(self, host: str) -> str:
        return f"muster-{self.lab}-{host}"

    def file(self, host: str, name: str) -> Path:
        """A file of the run's folder on a host."""
        return Path(f"/proc/{self.hosts[host]}/root/var/lib/muster/runs/{self.id}/{name}")

    def state(self, host: str, rank: int) -> dict[str, Any]:
        """What the keeper of a host last wrote down of a rank."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            found: dict[str, Any] = json.loads(self.file(host, "state.json").read_text())["ranks"][str(rank)]
            return found
        return {}

    def ranks_of(self, host: str) -> list[dict[str, Any]]:
        """What the keeper of a host last wrote down of its ranks, whatever their numbers are now."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return list(json.loads(self.file(host, "state.json").read_text())["ranks"].values())
        return []

    def last_rank(self, host: str) -> int:
        return int(next(one["ranks"][-1] for one in self.plan["hosts"] if one["host"] == host))

    def address(self, host: str) -> str:
        return str(next(one["address"] for one in self.plan["hosts"] if one["host"] == host))

    @cached_property
    def ranks(self) -> dict[int, tuple[str, int]]:
        """Rank -> (its host, its process as this machine counts)."""
        return {int(rank): found for rank, found in self.wait_for(self._find_ranks, "ranks").items()}

    def _find_ranks(self) -> dict[int, tuple[str, int]]:
        ranks = self.living_ranks()
        return ranks if len(ranks) == self.plan["world_size"] else {}

    def living_ranks(self) -> dict[int, tuple[str, int]]:
        """The same of those ranks that are there now, of each host's newest attempt."""
        processes = {host: {inner: outer for outer, inner in found} for host, found in self.processes().items()}
        ranks = {}
        for host in self.hosts:
            started = [event for event in self.events(host) if event["event"] == "started"]
            for rank, pid in (started[-1]["pids"] if started else {}).items():
                if pid in processes[host]:
                    ranks[int(rank)] = (host, processes[host][pid])
        return ranks

    def events(self, host: str) -> list[dict[str, Any]]:
        """What the keeper of a host has noted."""
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line) for line in self.file(host, "events.jsonl").read_text().splitlines()]
        return []

    def processes(self) -> dict[str, list[tuple[int, int]]]:
        """Host -> (pid of this machine, pid in its container) of every living process of the run."""
        networks = {os.readlink(f"/proc/{pid}/ns/net"): host for host, pid in self.hosts.items() if is_alive(pid)}
        found: dict[str, list[tuple[int, int]]] = {host: [] for host in self.hosts}
        mark = f"MUSTER_RUN_ID={self.id}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0") and is_alive(int(folder.name)):
                    host = networks.get(os.readlink(folder / "ns" / "net"))
                    inner = re.search(r"^NSpid:.*\s(\d+)$", (folder / "status").read_text(), re.MULTILINE)
                    if host and inner:
                        found[host].append((int(folder.name), int(inner[1])))
        return found

    def engine(self, host: str) -> str:
        """The container engine that the run is in there."""
        return str(next(one["command"][0] for one in self.plan["hosts"] if one["host"] == host))

    def on_host(self, host: str, *words: str) -> str:
        """Run a command inside a host, past SSH."""
        done = subprocess.run(["podman", "exec", self.container(host), *words], capture_output=True, text=True,
                              check=False, timeout=60)  # fmt: skip
        return done.stdout.strip()

    def in_network(self, host: str, *words: str) -> None:
        """Run a program of this machine in a host's network."""
        subprocess.run(["nsenter", f"--net=/proc/{self.hosts[host]}/ns/net", "--", *words], check=True, timeout=60)

    def left(self) -> list[str]:
        """Processes and containers of the run that are there now."""
        processes = [f"process {pid} on {host}" for host, found in self.processes().items() for pid, _ in found]
        ask = ("ps", "--all", "--quiet", "--filter", f"label=muster.run={self.id}")
        listed = {host: self.on_host(host, self.engine(host), *ask).split() for host in self.hosts}
        containers = [f"container {one} on {host}" for host, found in listed.items() for one in found]
        return processes + containers

    def end(self) -> None:
        """Whatever happened: no command goes on, and the hosts are right again."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(60)
        self._reader.join(5)
        self.undo.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def read_summary(run: Run) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((ROOT / "runs" / run.id / "summary.json").read_text())
        return found
    return {}
