"""`make bench-launch`: from `make train` to the first optimizer step on two lab hosts, against the same by hand.

By hand means two `ssh` commands at once, each with a `podman run` of the same image, `torchrun` and the same trainer,
or the same script of a user. The interface, address and port, which Muster has to find, are given to them. The two take
turns, RUNS times after one warm-up; the figures are medians. They include the quick check at the beginning of `make
train`, and for the script the look whether its image is what its folder holds, and is on all hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import close, environment, fab, lab
from keeper import PROJECT_DIR

RUNS = 5
LIMIT_SECONDS = 120
MARK = "first optimizer step"


@dataclass(frozen=True)
class Job:
    """The same work for both: variables of `make train`, and what torchrun starts."""

    variables: Mapping[str, object]
    words: Sequence[str]


TRAINER = Job({"ARGS": "--epochs 1"}, ["-m", "train", "--run-dir", "/tmp/run", "--epochs", "1"])
SCRIPT = Job({"WORKLOAD": "benchmarks/launch_job", "SCRIPT": "main.py"}, [f"{PROJECT_DIR}/main.py"])


def until_first_step(process: subprocess.Popen[str], begun: float) -> float:
    """Seconds from `begun` to the line that reports the first optimizer step.

    Raises:
        SystemExit: the process ended without that line, or it took more than LIMIT_SECONDS.
    """
    printed = []
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line)
        if MARK in line:
            return time.monotonic() - begun
        if time.monotonic() - begun > LIMIT_SECONDS:
            break
    raise SystemExit(f"benchmark: no `{MARK}` within {LIMIT_SECONDS} s:\n{''.join(printed)}")


def start(words: list[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command in its own process group; its output can be read from `stdout`."""
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **more
    )


def with_muster(name: str, job: Job) -> float:
    """Seconds of `make train NODES=2` until its first step; it is ended then."""
    begun = time.monotonic()
    process = start(["make", "-s", "train"], env=environment(name, NODES=2, **job.variables))
    try:
        return until_first_step(process, begun)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)


def by_hand(name: str, job: Job, image: str, port: int) -> float:
    """Seconds of ssh, podman run and torchrun until the first step; they are ended then."""
    cluster = json.loads((Path("build") / name / "cluster.json").read_text())
    hosts = cluster["hosts"][:2]
    logins = [
        [
            *("ssh", "-i", host["ssh"]["key_file"], "-o", f"UserKnownHostsFile={cluster['known_hosts']}"),
            f"{host['ssh']['user']}@{host['ssh']['address']}",
        ]
        for host in hosts
    ]
    commands = []
    for node_rank, host in enumerate(hosts):
        commands.append(
            [
                *("sudo", "podman", "run", "--rm", "--name", "by-hand", "--network", "host", "--ipc", "host"),
                *("--env", f"GLOO_SOCKET_IFNAME={host['interface']}", "--env", "OMP_NUM_THREADS=1"),
                *("--env", "PYTHONUNBUFFERED=1", image),
                *("python3", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node_rank)),
                *("--nproc-per-node", "1", "--master-addr", hosts[0]["address"], "--master-port", str(port)),
                *job.words,
            ]
        )
    begun = time.monotonic()
    processes = [start([*login, shlex.join(c)]) for login, c in zip(logins, commands, strict=True)]
    try:
        return until_first_step(processes[0], begun)
    finally:
        for login in logins:
            subprocess.run([*login, "sudo podman rm --force --time 2 by-hand"], capture_output=True, check=False)
        for process in processes:
            process.communicate(timeout=60)


def latest_image() -> str:
    """The id of the image of the latest run."""
    plan = max(Path("runs").glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
    return str(json.loads(plan.read_text())["image"])


def in_turns(name: str, what: str, job: Job) -> tuple[list[float], list[float]]:
    """Seconds of each turn with Muster, and by hand."""
    muster, hand = [], []
    for turn in range(RUNS + 1):
        ours = with_muster(name, job)
        theirs = by_hand(name, job, latest_image(), 29600 + turn)
        note = "" if turn else " (warm-up)"
        print(f"{what}, turn {turn}{note}: make train {ours:.2f} s, by hand {theirs:.2f} s", flush=True)
        if turn:
            muster.append(ours)
            hand.append(theirs)
    return muster, hand


def main() -> None:
    """Measure both, for the trainer and for a script, and print the medians."""
    figures: dict[str, Any] = {}
    with lab("bench-launch", 2) as name:
        fab(name, "deploy")
        for what, job, key in (("the trainer", TRAINER, ""), ("a script", SCRIPT, "script_")):
            muster, hand = in_turns(name, what, job)
            seconds, by_hand_seconds = statistics.median(muster), statistics.median(hand)
            figures[f"{key}seconds"] = round(seconds, 2)
            figures[f"{key}by_hand_seconds"] = round(by_hand_seconds, 2)
            figures[f"{key}ratio"] = round(seconds / by_hand_seconds, 3)
            figures[f"{key}pairwise_ratios"] = [round(a / b, 3) for a, b in zip(muster, hand, strict=True)]
    figures["reference"] = "ssh + podman run + torchrun by hand on the same two hosts, same image and job"
    close(figures)


if __name__ == "__main__":
    main()
