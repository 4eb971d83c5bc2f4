"""Promise: whatever goes wrong while a run starts, all hosts run it or none, and ports of others are left alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.away import another_clone
from keeper import MASTER_PORTS
from launch.hosts.clustermap import REACH_PORTS
from tests.lab.conftest import SMALL, WORKLOAD, Lab, summary_of, wait_for
from tests.lab.test_endings import read_until

pytestmark = pytest.mark.lab

SLOW_ENGINE = r"""
real=$(command -v ENGINE) && mv "$real" "$real.real"
printf '#!/bin/sh\ncase "$1" in run) sleep 6;; esac\nexec "%s.real" "$@"\n' "$real" > "$real" && chmod +x "$real"
"""
SESSIONS = "grep -l '^sshd: muster' /proc/[0-9]*/cmdline | cut -d/ -f3"
LISTEN = """
import socket, sys, time
held = [socket.create_server(("", port)) for port in range(int(sys.argv[1]), int(sys.argv[2]) + 1)]
print(len(held), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def slow_to_start(lab: Lab, host: str) -> Iterator[None]:
    """A host whose engine takes its time to start a container."""
    lab.on(host, SLOW_ENGINE.replace("ENGINE", lab.engine(host).name))
    try:
        yield
    finally:
        lab.on(host, f'real=$(command -v {lab.engine(host).name}) && mv "$real.real" "$real"')


@contextlib.contextmanager
def held(lab: Lab, host: str, first: int, last: int) -> Iterator[None]:
    """Somebody else's program listens on these ports of a host."""
    lab.on(host, f"nohup python3 -c '{LISTEN}' {first} {last} > /tmp/held 2>&1 & echo $! > /tmp/held.pid")
    try:
        wait_for(lambda: lab.on(host, "cat /tmp/held"), "the ports")
        yield
    finally:
        lab.on(host, "kill $(cat /tmp/held.pid); rm -f /tmp/held /tmp/held.pid")


def is_starting(lab: Lab, host: str) -> bool:
    """Whether the slow Podman of a host is at work."""
    return lab.on(host, "grep -lsa 'podman.run\\|docker.run' /proc/[0-9]*/cmdline | head -n 1", check=False) != ""


def test_ctrl_c_while_a_host_starts_ends_all(lab: Lab) -> None:
    with slow_to_start(lab, "h2"):
        process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="idle.py", NODES=2)
        printed = read_until(process, "muster | run ")
        wait_for(lambda: is_starting(lab, "h2"), "the start on h2")
        os.killpg(process.pid, signal.SIGINT)
        printed += process.communicate(timeout=120)[0]
    assert process.returncode == 130, printed
    assert lab.containers() == []


def test_a_connection_that_drops_while_a_host_starts_leaves_nothing_running(lab: Lab) -> None:
    with slow_to_start(lab, "h2"):
        process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="idle.py", NODES=2)
        printed = read_until(process, "muster | run ")
        wait_for(lambda: is_starting(lab, "h2"), "the start on h2")
        lab.on("h2", f"kill $({SESSIONS}) 2>/dev/null; true")
        printed += process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "host h2: its container did not start" in printed, printed
    assert "no host was left running" in printed, printed
    wait_for(lambda: lab.containers() == [], "the end of what had been started", 30)
    for host in ("h1", "h2"):
        assert lab.on(host, "ls /run/muster") == ""  # neither key nor secrets


def from_another_machine(lab: Lab, folder: Path) -> Lab:
    """The deployed lab as another control machine knows it, whose clone comes to `folder`."""
    clone = another_clone(folder, lab.name)
    cluster = Path("build") / lab.name / "cluster.json"
    (clone / cluster.parent).mkdir(parents=True)
    shutil.copy2(cluster, clone / cluster)
    return replace(lab, clone=clone)


def test_of_two_starts_at_the_same_moment_one_runs_and_the_other_is_told_of_it(lab: Lab, tmp_path: Path) -> None:
    people = {"ann": lab, "eve": from_another_machine(lab, tmp_path)}
    before = lab.runs()
    started = {
        who: one.start("train", SUDO_USER=who, NODES=2, ARGS=f"--epochs 1 {SMALL}") for who, one in people.items()
    }
    said = {who: process.communicate(timeout=300)[0] for who, process in started.items()}
    ends = {process.returncode: who for who, process in started.items()}
    assert sorted(ends) == [0, 2], said
    found = re.search(r"muster \| run (\S+):", said[ends[0]])
    assert found, said
    assert f"run {found[1]} of {ends[0]}@" in said[ends[2]] and "muster: refused" in said[ends[2]], said
    clone = people["eve"].clone
    assert clone is not None
    made = (lab.runs() - before) | set((clone / "runs").glob("*"))
    assert made == {Path("runs") / found[1] if ends[0] == "ann" else clone / "runs" / found[1]}
    summary = json.loads((made.pop() / "summary.json").read_text())
    assert (summary["status"], summary["missing_hosts"]) == ("succeeded", []), summary


def test_ports_that_others_hold_are_left_to_them(lab: Lab) -> None:
    with held(lab, "h1", MASTER_PORTS[0], MASTER_PORTS[0] + 1), held(lab, "h2", REACH_PORTS[0], REACH_PORTS[1] - 2):
        done = lab.train("ticks.py", "1", NODES=2)
        assert done.returncode == 0, done.stdout
        plan = json.loads((summary_of(done.stdout)[0] / "plan.json").read_text())
        assert plan["master_port"] > MASTER_PORTS[0] + 1
        assert plan["hosts"][1]["keeper_port"] >= REACH_PORTS[1] - 1
        with held(lab, "h2", REACH_PORTS[1], REACH_PORTS[1]):
            before = lab.runs()
            refused = lab.train("ticks.py", "1", NODES=2)
    assert refused.returncode == 2 and "host h2: of its ports" in refused.stdout, refused.stdout
    assert 'held by "python3",pid=' in refused.stdout and "VLAN" not in refused.stdout, refused.stdout
    assert lab.runs() == before
