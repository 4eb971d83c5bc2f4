"""What is done to a run on a lab: faults, for real. Most give time.monotonic() of the fault; `run.undo` undoes them.

A host that loses its power first loses all links (killing it alone would send a FIN to everybody), and is booted again
at the end; what it has of the run is then gathered, and must be cleared. A rank that stands still without being stopped
is held by ptrace: no look at its state tells, and nothing of it answers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.run import ROOT, Run, is_alive
from containers import lab_plan

KNOWN_STEPS = 60  # before a silence: of the first ones it is not known how long they take
HELD_STATE_SECONDS = 2.5  # for the keeper to write down what a held rank said last
LEFT_BYTES = 2**26  # of memory for a container that has nearly none
PTRACE_ATTACH, PTRACE_DETACH, WALL = 16, 17, 0x40000000  # of sys/ptrace.h and sys/wait.h


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
            pid = parent(pid)
        kill(pid)
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
        run.held.update(threads)
        run.undo.callback(reap_held, run)
        time.sleep(HELD_STATE_SECONDS)
        if run.state(host, rank).get("phase") == "training":
            return began
        reap_held(run)
        for thread in threads:  # it was about to evaluate or save, which may take longer
            ptrace(PTRACE_DETACH, thread)
        run.held.clear()
        time.sleep(0.3)


def ptrace(request: int, pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace of {pid}")


def reap_held(run: Run) -> None:
    """Take note of the ends of held threads: whoever holds one hears of it first. Until then it stays, and neither its
    container nor its host can end."""
    for thread in list(run.held):
        try:
            found, status = os.waitpid(thread, os.WNOHANG | WALL)
        except ChildProcessError:
            run.held.discard(thread)
            continue
        if found and not os.WIFSTOPPED(status):
            run.held.discard(thread)


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


def stop_container(host: str) -> Callable[[Run], float]:
    """`podman stop` on a host, or `docker stop`: SIGTERM to the keeper, and SIGKILL after the run's grace."""

    def inject(run: Run) -> float:
        at = time.monotonic()
        engine = run.engine(host)
        run.on_host(host, "sh", "-c", f"{engine} stop $({engine} ps --quiet --filter label=muster.run={run.id})")
        return at

    return inject


def come_back(host: str, other: str) -> Callable[[Run], float]:
    """A host loses its power and is booted again while the others go on; when its keeper is back, a rank of another
    one is killed."""

    def inject(run: Run) -> float:
        with ExitStack() as booted, run.undone_by(booted):
            lose_power(host)(run)
            run.wait_for(lambda: "attempt 2 begins" in run.output, "attempt without the host")
        run.wait_for(lambda: f"{host}: its keeper was gone, and is started again" in run.output, "keeper that is back")
        run.wait_for(lambda: run.output.count("first optimizer step") == 2, "step without it")
        kill(next(pid for where, pid in run.living_ranks().values() if where == other))
        return time.monotonic()

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


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def give_time(run: Run, host: str, cpus: float | None) -> None:
    """Let a host have so many cores' time; None: all that its cores give."""
    options = lab_plan.quota_options(cpus, len(os.sched_getaffinity(0)))
    subprocess.run(["podman", "update", *options, run.container(host)], capture_output=True, check=True, timeout=60)


#: Takes all of a container's memory until the rank is gone: group's processes, pid of the rank.
GREEDY = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
taken = []
while os.path.exists("/proc/" + sys.argv[2]) and " Z " not in open("/proc/" + sys.argv[2] + "/stat").read():
    taken.append(b"x" * 2**22)
    time.sleep(0.002)
"""


def exhaust(pid: int) -> None:
    """Something else in a rank's container takes its memory, and the kernel kills the rank for it."""
    used, limit = memory_of(pid)
    before = limit.read_text()
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    limit.write_text(str(int(used.read_text()) + LEFT_BYTES))
    try:
        words = [sys.executable, "-c", GREEDY, str(limit.with_name("cgroup.procs")), str(pid)]
        subprocess.run(words, capture_output=True, check=False, timeout=60)
    finally:
        limit.write_text(before.strip())
