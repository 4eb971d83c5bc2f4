"""`make bench-faults` and `make drill FAULT=name`: faults put into a run on lab hosts, and what happens then, measured.

FAULTS is the one list of them; tests/lab/test_faults.py runs the short ones. Each has a job of `make train`, a fault
that is put into it while it trains, and what must be said of it. A figure counts from the fault until the last rank
that can be reached has ended and the line that names host and cause has been printed, whichever is later. Hosts are
containers of this machine, so ranks are watched in its /proc, past SSH and past all that is measured.

    make bench-faults REPEATS=5           medians against the bars, on a lab of three hosts of its own
    make drill                            lists the faults
    make drill FAULT=kill REPEATS=1       one of them
    make drill FAULTS=20                  many, drawn at random: drill.py

    make drill FAULT=slow_host REPEATS=20 a host's CPU quota is halved: after how many steps it is named, and its end
    make drill FAULT=healthy REPEATS=20   nothing is done: who is named as slow all the same

MUSTER_BENCH_LAB=name uses a deployed lab of three hosts that is up, and leaves it so (for slow_host and healthy of two
hosts: limits of their computing time are lifted at the end).

A host that loses its power first loses all links (killing it alone would send a FIN to everybody), and is booted again
at the end; what it has of the run is then gathered, and must be cleared. A rank that stands still without being stopped
is held by ptrace: no look at its state tells, and nothing of it answers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import FAB, close, environment, fab, whole_number
from benchmarks.common import lab as new_lab
from containers import lab_plan

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
HOSTS = 3
LIMIT_SECONDS = 150  # for a run to start, and to end after its fault
LOOK_SECONDS = 0.01  # between two looks at the ranks
KNOWN_STEPS = 60  # before a silence: of the first ones it is not known how long they take
HELD_STATE_SECONDS = 2.5  # for the keeper to write down what a held rank said last
LEFT_BYTES = 2**26  # of memory for a container that has nearly none
PTRACE_ATTACH, PTRACE_DETACH, WALL = 16, 17, 0x40000000  # of sys/ptrace.h and sys/wait.h
SCRIPT = {"WORKLOAD": "tests/lab/test_jobs", "SCRIPT": "faults.py", "SKIP_CHECK": 1}
STEPS = {**SCRIPT, "ARGS": "steps"}
LEAVING = {**SCRIPT, "ARGS": "leave"}
TRAINER = {"ARGS": "--epochs 1000 --batch-size 8 --model shufflenet_v2_x0_5", "SKIP_CHECK": 1, "MAX_RESTARTS": 0}
SURVIVING = {**TRAINER, "ARGS": f"{TRAINER['ARGS']} --checkpoint-every 20", "MAX_RESTARTS": 3}
#: Of slow hosts: two equal ones, each on a core of its own of which it gets EVEN_CPUS, so that both get that also while
#: others use the machine: the kernel shares a core out evenly. Then one of them gets half.
EVEN = {**TRAINER, "ARGS": "--epochs 1000 --batch-size 32 --model shufflenet_v2_x0_5 --checkpoint-every 50"}
EVEN_CPUS = 0.4
HEALTHY_STEPS = 300
SAID_SECONDS = 240.0
NAMED_STEPS = 50  # the bar
SLOW, OVER = "{} is slow: ", "{} is no longer slow"
STEPPING = re.compile(r"10 steps|first optimizer step")
#: Lines of the control machine that are no verdict.
NO_VERDICT = re.compile(
    r"run \S+: |.*: (no view|in view again|left by the run|could not gather|the run stops|ranks that had not ended)"
    r"|.* is (slow|no longer slow)\b"
    "|stopping the run|waiting|the ranks of the run are being ended"
)


class Run:
    """A run in progress on a lab, as it is seen from below its hosts."""

    def __init__(self, lab: str, job: Mapping[str, object], nodes: int) -> None:
        self.lab = lab
        self.undo = ExitStack()  # what puts the hosts right again
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
        return str(self.wait_for(lambda: re.search(r"^muster \| run (\S+):", self.output, re.MULTILINE), "run")[1])

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
        ask = ("podman", "ps", "--all", "--quiet", "--filter", f"label=muster.run={self.id}")
        containers = [f"container {one} on {host}" for host in self.hosts for one in self.on_host(host, *ask).split()]
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


# -- what is done to a run: each returns time.monotonic() of the fault -------------------------------------------------


def signal_rank(host: str, number: int) -> Callable[[Run], float]:
    def inject(run: Run) -> float:
        os.kill(run.ranks[run.last_rank(host)][1], number)
        return time.monotonic()

    return inject


def stand_still(host: str) -> Callable[[Run], float]:
    """A rank of a script that reports its progress sleeps, when enough is known of its steps."""

    def inject(run: Run) -> float:
        run.wait_for(lambda: run.state(host, run.last_rank(host)).get("step", 0) > KNOWN_STEPS, "steps")
        return signal_rank(host, signal.SIGUSR2)(run)

    return inject


def kill_above_ranks(host: str, generations: int) -> Callable[[Run], float]:
    """SIGKILL to torchrun, which is the parent of the ranks, or to the keeper, which is its parent."""

    def inject(run: Run) -> float:
        pid = run.ranks[run.last_rank(host)][1]
        for _ in range(generations):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    return inject


def hold_rank(host: str) -> Callable[[Run], float]:
    """All threads of a rank of our trainer stand still while it trains."""

    def inject(run: Run) -> float:
        rank = run.last_rank(host)
        run.wait_for(lambda: run.state(host, rank).get("step", 0) > KNOWN_STEPS, "steps")
        return hold(run, host, rank, run.ranks[rank][1])

    return inject


def hold(run: Run, host: str, rank: int, pid: int) -> float:
    """Hold all threads of a rank while it trains; returns since when (time.monotonic())."""
    while True:
        began, threads = time.monotonic(), sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        for thread in threads:
            ptrace(PTRACE_ATTACH, thread)
            run.undo.callback(reap, thread)  # else it stays, and nothing removes its host
        time.sleep(HELD_STATE_SECONDS)
        if run.state(host, rank).get("phase") == "training":
            return began
        for thread in threads:  # it was about to evaluate or save, which may take longer
            reap(thread)
            ptrace(PTRACE_DETACH, thread)
        time.sleep(0.3)


def ptrace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace of {pid}")


def reap(thread: int) -> None:
    """Take note of a held thread's end: whoever holds it hears of it first, and nobody else does before."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread, os.WNOHANG | WALL)


def lose_power(host: str) -> Callable[[Run], float]:
    def inject(run: Run) -> float:
        nics = [name for name in os.listdir(f"/proc/{run.hosts[host]}/root/sys/class/net") if name != "lo"]
        run.undo.callback(boot, run, host)
        links = "".join(f"link set dev {nic} down\n" for nic in nics)
        command = ["nsenter", f"--net=/proc/{run.hosts[host]}/ns/net", "--", "ip", "-force", "-batch", "-"]
        at = time.monotonic()
        subprocess.run(command, input=links, text=True, check=True, capture_output=True, timeout=60)
        subprocess.run(["podman", "kill", run.container(host)], check=True, capture_output=True, timeout=60)
        return at

    return inject


def boot(run: Run, host: str) -> None:
    """Start a host that lost its power; its inventory stays as it was."""
    from containers import lab

    inventory = ROOT / "inventory" / run.lab / "hosts.yml"
    text, times = inventory.read_text(), inventory.stat()
    deadline = time.monotonic() + 30
    while is_alive(run.hosts[host]) and time.monotonic() < deadline:
        time.sleep(0.1)
    lab.up(run.lab, len(lab.labs()[run.lab]))
    inventory.write_text(text)
    os.utime(inventory, (times.st_atime, times.st_mtime))  # a newer one would ask for another deploy
    del run.hosts


def cut(one: str, other: str) -> Callable[[Run], float]:
    """Nothing passes between two hosts on the training network."""

    def inject(run: Run) -> float:
        rules = (("INPUT", "-s"), ("OUTPUT", "-d"))
        at = time.monotonic()
        for chain, side in rules:
            rule = (chain, side, run.address(other), "-j", "DROP")
            run.in_network(one, "iptables", "-w", "-A", *rule)
            run.undo.callback(run.in_network, one, "iptables", "-w", "-D", *rule)
        return at

    return inject


def lose_link(host: str) -> Callable[[Run], float]:
    """The network interface that carries the training goes down."""

    def inject(run: Run) -> float:
        nic = next(str(one["interface"]) for one in run.plan["hosts"] if one["host"] == host)
        at = time.monotonic()
        run.in_network(host, "ip", "link", "set", "dev", nic, "down")
        run.undo.callback(run.in_network, host, "ip", "link", "set", "dev", nic, "up")
        return at

    return inject


def starve(host: str) -> Callable[[Run], float]:
    """A rank asks for more and more memory, of which its container has 64 MiB left."""

    def inject(run: Run) -> float:
        pid = run.ranks[run.last_rank(host)][1]
        used, limit = memory_of(pid)
        limit.write_text(str(int(used.read_text()) + LEFT_BYTES))
        os.kill(pid, signal.SIGUSR2)
        return time.monotonic()

    return inject


def memory_of(pid: int) -> tuple[Path, Path]:
    """The files that say how many bytes the container of a process uses, and may use."""
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    if "memory" in groups:
        folder = Path("/sys/fs/cgroup/memory" + groups["memory"])
        return folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes"
    folder = Path("/sys/fs/cgroup" + groups[""])
    return folder / "memory.current", folder / "memory.max"


def press_ctrl_c(run: Run) -> float:
    at = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    return at


# -- the faults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and what must come of it."""

    what: str
    inject: Callable[[Run], float]
    said: str  # regular expression of the line after `muster | `; {rank}: the last rank of `host`
    host: str  # whose fault it is; of a pair: both. "": nobody's
    bar: float  # seconds
    rank: bool = True  # whether it is a rank's
    lost: str = ""  # the host that cannot be reached any more
    job: Mapping[str, object] = field(default_factory=lambda: STEPS)
    nodes: int = HOSTS
    status: str = "failed"
    key: str = ""  # of bench-faults' JSON, without _seconds
    short: bool = False  # in `make test`


STILL = r"rank {rank} on h2 failed: no progress.*; it stands at "
EARLY = "{}: its ranks ended with status 0 while those on h. went on"
FAULTS = {
    "kill": Fault(
        "a rank is killed (kill -9)", signal_rank("h2", signal.SIGKILL),
        "rank {rank} on h2 failed: killed by SIGKILL", "h2", 1.0, key="kill", short=True,
    ),
    "early_first": Fault(
        "the only rank of the first host returns (status 0) while the others take further steps",
        signal_rank("h1", signal.SIGUSR2), EARLY.format("h1"), "h1", 15.0, rank=False, job=LEAVING, short=True, nodes=2,
    ),
    "early_last": Fault(
        "the only rank of the last host returns (status 0) while the others take further steps",
        signal_rank("h3", signal.SIGUSR2), EARLY.format("h3"), "h3", 15.0, rank=False, job=LEAVING, short=True,
    ),
    "early_of_two": Fault(
        "one of the two ranks of a host returns (status 0) while the others take further steps",
        signal_rank("h2", signal.SIGUSR2), "rank {rank} on h2.*: it ended with status 0", "h2", 15.0, job=LEAVING,
        short=True, nodes=2,
    ),
    "torchrun": Fault(
        "torchrun itself is killed on a host", kill_above_ranks("h2", 1),
        "h2: torchrun was killed by SIGKILL", "h2", 10.0, rank=False, short=True, nodes=2,
    ),
    "keeper": Fault(
        "the keeper is killed on a host, and with it its container", kill_above_ranks("h2", 2),
        "h2: .*the container was killed by SIGKILL", "h2", 15.0, rank=False, short=True, nodes=2,
    ),
    "power_loss": Fault(
        "a host loses its power", lose_power("h2"),
        "h2: the host is lost", "h2", 15.0, rank=False, lost="h2", key="power_loss",
    ),
    "master_loss": Fault(
        "the host of rank 0 loses its power", lose_power("h1"),
        "h1: the host is lost", "h1", 15.0, rank=False, lost="h1", key="master_loss",
    ),
    "network_cut": Fault(
        "two of three hosts cannot reach each other", cut("h2", "h3"),
        "h2 and h3: do not hear each other", "h2 and h3", 15.0, rank=False, key="network_cut", short=True,
    ),
    "network_cut_master": Fault(
        "a host and the master cannot reach each other", cut("h1", "h3"),
        "h1 and h3: do not hear each other", "h1 and h3", 15.0, rank=False,
    ),
    "network_cut_two": Fault(
        "the only two hosts cannot reach each other", cut("h1", "h2"),
        "h1 and h2: do not hear each other", "h1 and h2", 15.0, rank=False, nodes=2,
    ),
    "link_down": Fault(
        "the training network's interface of a host goes down", lose_link("h2"),
        r"h2: its network interface \w+ is down", "h2", 15.0, rank=False, nodes=2, short=True,
    ),
    "hang_stopped": Fault(
        "a rank of our trainer is stopped (SIGSTOP)", signal_rank("h2", signal.SIGSTOP),
        r"rank {rank} on h2 failed: its process \d+ is stopped", "h2", 15.0, job=TRAINER, key="hang",
    ),
    "hang_held": Fault(
        "a rank of our trainer stands still, and no state says so", hold_rank("h2"),
        "rank {rank} on h2 failed: no progress", "h2", 15.0, job=TRAINER, key="hang",
    ),
    "hang_script": Fault(
        "a rank of a script that reports its progress sleeps in a step", stand_still("h2"),
        STILL + r".*faults\.py:\d+ stand_still", "h2", 15.0, job={**SCRIPT, "ARGS": "stuck"}, key="hang", short=True,
        nodes=2,
    ),
    "script_stopped": Fault(
        "a rank of a plain script is stopped (SIGSTOP)", signal_rank("h2", signal.SIGSTOP),
        r"rank {rank} on h2 failed: its process \d+ is stopped", "h2", 15.0, key="script_stopped", short=True,
    ),
    "out_of_memory": Fault(
        "a rank asks for more memory than its container has", starve("h2"),
        "rank {rank} on h2 failed: out of memory: .*limit .*GiB, peak .*GiB", "h2", 15.0,
        job={**SCRIPT, "ARGS": "eat"}, short=True, nodes=2,
    ),
    "ctrl_c": Fault(
        "Ctrl-C, and a script without handlers", press_ctrl_c,
        r"run \S+ stopped: Ctrl-C by ", "", 3.0, rank=False, status="stopped", key="ctrl_c",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Survived:
    """A fault after which the run goes on by itself, to its first step, and on which hosts."""

    what: str
    inject: Callable[[Run], float]
    hosts: tuple[str, ...]  # on which it goes on
    bar: float  # seconds
    lost: str = ""  # the host that cannot be reached any more
    nodes: int = HOSTS


SURVIVED = {
    "restart": Survived("a rank is killed (kill -9)", signal_rank("h2", signal.SIGKILL), ("h1", "h2", "h3"), 10.0),
    "shrink": Survived("a host loses its power", lose_power("h3"), ("h1", "h2"), 25.0, lost="h3"),
    "master_shrink": Survived("the host of rank 0 loses its power", lose_power("h1"), ("h2", "h3"), 30.0, lost="h1"),
    "master_of_two": Survived(
        "the host of rank 0 of two hosts loses its power while the run is in view", lose_power("h1"), ("h2",), 30.0,
        lost="h1", nodes=2,
    ),
}  # fmt: skip


#: Drills of slow hosts, and which one is slowed down.
SLOW_HOSTS = {"slow_host": "h2", "healthy": ""}


@dataclass(frozen=True)
class Seen:
    """What came of a fault."""

    ranks_seconds: float  # to the end of the last rank that can be reached; infinite: never
    line_seconds: float  # to the line that names host and cause
    line: str
    wrong: list[str]  # verdicts that name somebody else
    orphans: list[str]
    problems: list[str]  # what else is not as it must be

    @property
    def seconds(self) -> float:
        return max(self.ranks_seconds, self.line_seconds)

    def __str__(self) -> str:
        figures = f"{self.seconds:.2f} s (ranks {self.ranks_seconds:.2f}, line {self.line_seconds:.2f})"
        return "; ".join([f"{figures}: {self.line or 'no line'}", *self.wrong, *self.orphans, *self.problems])


def measure(lab: str, fault: Fault) -> Seen:
    """Put a fault into a run on a deployed lab of three hosts; they are as before at the end.

    Raises SystemExit when the run does not come so far that it trains.
    """
    run = Run(lab, fault.job, fault.nodes)
    problems = []
    try:
        run.wait_for(lambda: STEPPING.search(run.output), "training")
        watched = {rank: pid for rank, (host, pid) in run.ranks.items() if host != fault.lost}
        rank = run.last_rank(fault.host) if fault.rank else None
        at = fault.inject(run)
        ended = wait_for_ends(watched.values(), at + LIMIT_SECONDS)
        try:
            run.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            problems.append(f"make train goes on after {LIMIT_SECONDS} s")
    finally:
        run.end()
    if fault.lost:
        gathered = subprocess.run([FAB, "gather"], env=environment(lab, RUN=run.id), cwd=ROOT, capture_output=True,
                                  text=True, check=False, timeout=LIMIT_SECONDS)  # fmt: skip
        if gathered.returncode != 0:
            problems.append(f"gather ended with {gathered.returncode}: {gathered.stdout}{gathered.stderr}")
    said = re.compile(r"muster \| " + fault.said.replace("{rank}", str(rank)))
    after = [(when, line) for when, line in run.lines if when >= at]
    when, line = next(((when, line) for when, line in after if said.match(line)), (float("inf"), ""))
    verdicts = [line for _, line in after if (text := verdict_in(line)) and fault.status == "failed" and text]
    if verdicts[:1] != [line] and fault.status == "failed":
        problems.append(f"the first verdict is not the line: {verdicts[:1]}")
    problems += wrong_ends(run, fault)
    wrong = wrong_names(run, fault, rank)
    left = run.left()
    if wrong or problems or left or not line:
        problems.append(f"output:\n{run.output}")
    return Seen(ended - at, when - at, line, wrong, left, problems)


@dataclass(frozen=True)
class SeenOn:
    """How a run went on after a fault."""

    seconds: float  # to the first step of the next attempt
    orphans: list[str]
    problems: list[str]

    def __str__(self) -> str:
        return "; ".join([f"{self.seconds:.2f} s to the next step", *self.orphans, *self.problems])


def measure_survival(lab: str, fault: Survived) -> SeenOn:
    """Put a fault into a training run on a deployed lab of three hosts, let it go on, and stop it; the hosts are as
    before at the end. Raises SystemExit when the run does not come so far, or does not go on."""
    run, problems = Run(lab, SURVIVING, fault.nodes), []
    try:
        last = run.last_rank("h2")
        run.wait_for(lambda: run.ranks and run.state("h2", last).get("step", 0) > KNOWN_STEPS, "steps")
        before = max(rank.get("step", 0) for host in run.hosts for rank in run.ranks_of(host))
        at = fault.inject(run)
        stepped = run.wait_for(
            lambda: [when for when, line in run.lines if when > at and STEPPING.search(line)], "step"
        )
        there = fault.hosts[-1]
        run.wait_for(lambda: any(rank.get("step", 0) > before for rank in run.ranks_of(there)), "step beyond the fault")
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT_SECONDS)
    finally:
        run.end()
    if fault.lost:
        subprocess.run([FAB, "gather"], env=environment(lab, RUN=run.id), cwd=ROOT, capture_output=True, check=False,
                       timeout=LIMIT_SECONDS)  # fmt: skip
    summary = read_summary(run)
    if (summary.get("status"), summary.get("restarts")) != ("stopped", 1):
        problems.append(f"the summary says {summary.get('status')}, {summary.get('restarts')} restarts")
    with contextlib.suppress(OSError):
        lines = (ROOT / "runs" / run.id / "metrics.jsonl").read_text().splitlines()
        steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
        if steps != list(range(1, len(steps) + 1)) or len(steps) < before:
            problems.append(f"the metrics do not have each step once: {steps}")
    hosts = ", ".join(fault.hosts)
    if f"attempt 2 goes on from the newest checkpoint, on {hosts}" not in run.output:
        problems.append(f"it does not go on on {hosts}")
    left = run.left()
    if problems or left:
        problems.append(f"output:\n{run.output}")
    return SeenOn(stepped[0] - at, left, problems)


@dataclass(frozen=True)
class Slowed:
    """What was said of slow hosts in a run of two equal hosts, of which one may have been slowed down."""

    steps: int | None  # from the fault to the line that names the host; None: it was not named
    seconds: float | None
    line: str
    false_names: list[str]  # lines that name somebody without cause
    taken: int  # steps of the whole run
    orphans: list[str]
    problems: list[str]

    def __str__(self) -> str:
        named = f"named after {self.steps} steps, {self.seconds:.1f} s" if self.seconds is not None else "nobody named"
        false = [f"without cause: {line}" for line in self.false_names]
        rest = [*false, *self.orphans, *self.problems]
        return "; ".join([f"{named} ({self.taken} steps in all){': ' if self.line else ''}{self.line}", *rest])


def measure_slow(lab: str, host: str, job: Mapping[str, object] = EVEN) -> Slowed:
    """Halve a host's quota while a run of two hosts trains, lift it when the host was named, and stop the run when that
    is over. host: "" for none: then the run takes HEALTHY_STEPS. Raises SystemExit if it does not come so far."""
    run, problems = Run(lab, job, 2), []
    try:
        for name in run.hosts:
            run.undo.callback(limit, run, name, None)
            limit(run, name, EVEN_CPUS)
        wanted = KNOWN_STEPS if host else HEALTHY_STEPS
        run.wait_for(
            lambda: run.ranks_of("h1") and run.ranks_of("h1")[0].get("step", 0) > wanted, "steps", SAID_SECONDS
        )
        at, clock = time.monotonic(), time.time() - time.monotonic()
        if host:
            limit(run, host, EVEN_CPUS / 2)
            with contextlib.suppress(SystemExit):
                run.wait_for(lambda: said(run, at, SLOW.format(host)), "name", SAID_SECONDS)
                limit(run, host, None)
                run.wait_for(lambda: said(run, at, OVER.format(host)), "end of it", SAID_SECONDS)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT_SECONDS)
    finally:
        run.end()
    lines = (ROOT / "runs" / run.id / "metrics.jsonl").read_text().splitlines()
    times = [event["time"] for event in map(json.loads, lines) if event["event"] == "step"]  # by this machine's clock
    when, line = next(iter(said(run, at, SLOW.format(host)) if host else ()), (None, ""))
    steps = None if when is None else sum(at + clock < one <= when + clock for one in times)
    cause = [one for one in said(run, at, SLOW.format(host))[:1]] if host else []
    if host and not said(run, at, OVER.format(host)):
        problems.append("its end was not said")
    false = [text for moment, text in said(run, 0.0, SLOW.format(".*")) if (moment, text) not in cause]
    kept = [(one["host"], one["rank"]) for one in read_summary(run).get("slow") or []]
    if kept != [(host, None)] * len(cause) and not false:
        problems.append(f"the summary says {kept}")
    left = run.left()
    if problems or left:
        problems.append(f"output:\n{run.output}")
    return Slowed(steps, None if when is None else when - at, line, false, len(times), left, problems)


def said(run: Run, since: float, pattern: str) -> list[tuple[float, str]]:
    """The lines of the control machine since then that begin so, each with its moment."""
    begin = re.compile(r"muster \| " + pattern)
    return [(when, line) for when, line in list(run.lines) if when >= since and begin.match(line)]


def limit(run: Run, host: str, cpus: float | None) -> None:
    """Change a host's computing time, in cores; None: no limit."""
    options = lab_plan.quota_options(cpus, os.cpu_count() or 1)
    subprocess.run(["podman", "update", *options, run.container(host)], check=True, capture_output=True, timeout=60)


def wait_for_ends(pids: Collection[int], deadline: float) -> float:
    """When the last of these processes ended; infinite where one is there at the deadline."""
    left = set(pids)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if is_alive(pid)}
        for pid in set(pids) - left:
            reap(pid)
        time.sleep(LOOK_SECONDS)
    return float("inf") if left else time.monotonic()


def verdict_in(line: str) -> str:
    """What a line of the control machine says of who failed; empty for any other line."""
    text = line.removeprefix("muster | ")
    return "" if text == line or NO_VERDICT.match(text) or ": " not in text else text


def wrong_ends(run: Run, fault: Fault) -> list[str]:
    summary = read_summary(run)
    if summary.get("status") != fault.status:
        return [f"the summary says {summary.get('status')}: {summary.get('reason')}"]
    return []


def wrong_names(run: Run, fault: Fault, rank: int | None) -> list[str]:
    """Where the summary names another host or rank than the one with the fault."""
    summary = read_summary(run)
    named, meant = (summary.get("failed_host"), summary.get("failed_rank")), (fault.host or None, rank)
    return [] if named == meant else [f"the summary names {named}, not {meant}: {summary.get('reason')}"]


def read_summary(run: Run) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((ROOT / "runs" / run.id / "summary.json").read_text())
        return found
    return {}


@contextlib.contextmanager
def deployed_lab() -> Iterator[str]:
    """MUSTER_BENCH_LAB, or a lab of its own whose second host has two ranks."""
    if kept := os.environ.get("MUSTER_BENCH_LAB"):
        yield kept
        return
    with new_lab("bench-faults", HOSTS) as name:
        hosts = ROOT / "inventory" / name / "hosts.yml"
        hosts.write_text(hosts.read_text().replace("    h2:\n", "    h2:\n      nproc_per_node: 2\n"))
        fab(name, "deploy")
        yield name


def median_of(found: Collection[Seen]) -> float | None:
    """Seconds; None where most never ended, or were never named."""
    median = statistics.median(one.seconds for one in found)
    return None if median == float("inf") else round(median, 2)


def repeat(name: str, times: int, once: Callable[[], T]) -> list[T]:
    """What came of a fault, each time; printed."""
    found = []
    for turn in range(times):
        found.append(once())
        print(f"{name} {turn + 1} of {times}: {found[-1]}", flush=True)
    return found


def bench(times: int) -> None:
    """All faults of the bars; the last line is JSON."""
    seconds: dict[str, float | None] = {}
    bars: dict[str, float] = {}
    seen: list[Seen] = []
    with deployed_lab() as lab:
        for name, fault in FAULTS.items():
            if fault.key:
                found = repeat(name, times, partial(measure, lab, fault))
                seen += found
                key = f"{fault.key}_seconds"
                median, before = median_of(found), seconds.get(key, 0.0)
                # Of several kinds of hangs the worst.
                seconds[key] = None if median is None or before is None else max(median, before)
                bars[key] = fault.bar
        survived = []
        for name, survival in SURVIVED.items():
            found_on = repeat(name, times, partial(measure_survival, lab, survival))
            survived += found_on
            seconds[f"{name}_seconds"] = round(statistics.median(one.seconds for one in found_on), 2)
            bars[f"{name}_seconds"] = survival.bar
    close(
        {
            **seconds,
            "orphans": sum(len(one.orphans) for one in seen) + sum(len(one.orphans) for one in survived),
            "wrong_names": sum(len(one.wrong) for one in seen),
            "problems": sum(len(one.problems) for one in seen) + sum(len(one.problems) for one in survived),
            "bars": bars,
            "repeats": times,
        }
    )


def drill(name: str, times: int) -> int:
    """One fault, or their list; the exit status is 1 where something was not as it must be."""
    if name in SURVIVED:
        with deployed_lab() as lab:
            lived = repeat(name, times, partial(measure_survival, lab, SURVIVED[name]))
        seconds, bar = statistics.median(one.seconds for one in lived), SURVIVED[name].bar
        wrong = [one for one in lived if one.orphans or one.problems]
        close({"fault": name, "seconds": round(seconds, 2), "bar": bar, "repeats": times, "bad": len(wrong)})
        return int(bool(wrong) or seconds > bar)
    if name in SLOW_HOSTS:
        return drill_slow(name, times)
    if name not in FAULTS:
        if name:
            print(f"drill: there is no FAULT={name}; there are:")
        print("\n".join(f"{one:20} {fault.what} (<= {fault.bar:g} s)" for one, fault in FAULTS.items()))
        for one, survival in SURVIVED.items():
            print(f"{one:20} {survival.what}: to the first step of the next attempt (<= {survival.bar:g} s)")
        for one in SLOW_HOSTS:
            print(
                f"{one:20} {'a host gets half of its' if SLOW_HOSTS[one] else 'each host keeps its'} computing time: "
                f"{f'named within {NAMED_STEPS} steps' if SLOW_HOSTS[one] else 'nobody is named'}"
            )
        return 2 if name else 0
    with deployed_lab() as lab:
        found = repeat(name, times, partial(measure, lab, FAULTS[name]))
    bad = [one for one in found if one.wrong or one.orphans or one.problems or not one.line]
    median = median_of(found)
    close({"fault": name, "seconds": median, "bar": FAULTS[name].bar, "repeats": times, "bad": len(bad)})
    return int(bool(bad) or median is None or median > FAULTS[name].bar)


def drill_slow(name: str, times: int) -> int:
    """Runs with a slow host, or healthy ones; the last line is JSON."""
    host = SLOW_HOSTS[name]
    with even_lab() as lab:
        found = repeat(name, times, partial(measure_slow, lab, host))
    steps = [one.steps for one in found if one.steps is not None]
    named = sum(count <= NAMED_STEPS for count in steps)
    false = sum(len(one.false_names) for one in found)
    bad = sum(bool(one.orphans or one.problems) for one in found)
    close({
        "fault": name, "named": named, "steps": steps, "median_steps": statistics.median(steps) if steps else None,
        "false_names": false, "runs_with_false_names": sum(bool(one.false_names) for one in found),
        "steps_in_all": sum(one.taken for one in found), "bar": NAMED_STEPS, "repeats": times, "bad": bad,
    })  # fmt: skip
    return int(bool(false or bad) or named < (times if host else 0))


@contextlib.contextmanager
def even_lab() -> Iterator[str]:
    """MUSTER_BENCH_LAB, or a lab of its own of two equal hosts."""
    if kept := os.environ.get("MUSTER_BENCH_LAB"):
        yield kept
        return
    with new_lab("bench-slow", 2) as name:
        fab(name, "deploy")
        yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["bench", "drill"])
    command = parser.parse_args().command
    times = whole_number("REPEATS", os.environ.get("REPEATS") or ("5" if command == "bench" else "1"), 1)
    if command == "bench":
        bench(times)
        return 0
    return drill(os.environ.get("FAULT", ""), times)


if __name__ == "__main__":
    sys.exit(main())
