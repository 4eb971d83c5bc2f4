"""Stands for torchrun and its rank on the hosts of benchmarks/scale.py: a process that reports a step each second.

python3 -P -m train.start.agent ... --node-rank N ...: with the arguments of the real one; one rank on each host.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

STEP_SECONDS = 1.0
EXIT_STOPPED = 75  # as train/start/hooks.py


def tell(words: dict[str, Any]) -> None:
    """Report to the keeper."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.sendto(json.dumps(words).encode(), os.environ["MUSTER_KEEPER"])


def rank_process(rank: int, agent: int) -> None:
    """Report steps and print lines, until SIGTERM or the agent's end."""
    pipe = os.open(f"{os.environ['MUSTER_PIPES']}/rank-{rank}", os.O_WRONLY)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_STOPPED))
    step = 0
    while os.getppid() == agent:
        step += 1
        tell({"rank": rank, "phase": "training", "step": step, "steps": 100000, "pid": os.getpid()})
        os.write(pipe, f"step {step}\n".encode())
        time.sleep(STEP_SECONDS)
    os._exit(1)


def main() -> int:
    """Start the rank; end it on SIGTERM, or with the keeper."""
    rank, keeper, agent = int(sys.argv[sys.argv.index("--node-rank") + 1]), os.getppid(), os.getpid()
    pid = os.fork()
    if pid == 0:
        rank_process(rank, agent)
    tell({"agent": "started", "pids": {rank: pid}})
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    while os.getppid() == keeper and not stopped:
        time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    return 128 + signal.SIGTERM if stopped else 1


if __name__ == "__main__":
    sys.exit(main())
