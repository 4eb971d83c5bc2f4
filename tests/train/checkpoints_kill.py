"""Run by test_checkpoints_writer.py: writers forked from one interpreter, each resumes, writes and is killed.

python -m tests.train.checkpoints_kill FOLDER TIMES; prints one line of JSON.
"""

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

import torch

from train.checkpoints import Writer, load, newest_common
from train.start.group import Place

SIZE = 300_000  # numbers in a state; all are the step's own


def work(folder: Path, pipe: int) -> None:
    """Prints "resumed <n>", then "durable <n>" after each checkpoint, until it is killed."""
    torch.set_num_threads(1)
    step, _ = newest_common(folder, Place())
    step = step or 0
    if step:
        state = load(folder, step)
        if state["position"]["step"] != step or not state["model"]["w"].eq(step).all():
            os.write(pipe, b"torn 0\n")
    os.write(pipe, f"resumed {step}\n".encode())
    writer = Writer(folder)
    weights = torch.zeros(SIZE)
    while True:
        step += 1
        writer.save(step, {"model": {"w": weights.fill_(step)}, "position": {"step": step}})
        weights.fill_(-1)  # the training goes on
        writer.wait()
        os.write(pipe, f"durable {step}\n".encode())


def one_life(folder: Path, delay: float) -> list[tuple[str, int]]:
    """Forks a worker and kills it `delay` seconds after it has resumed. Returns what it printed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            work(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    printed = b""
    while b"resumed" not in printed:
        piece = os.read(reading, 4096)
        if not piece:
            raise SystemExit("the worker ended before it had resumed")
        printed += piece
    select.select([], [], [], delay)  # the moment of the kill is what is tried here
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while piece := os.read(reading, 4096):
        printed += piece
    os.close(reading)
    return [(line.split()[0], int(line.split()[1])) for line in printed.decode().splitlines()]


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    durable = 0
    report = {"resumes": 0, "torn": 0, "lost": 0, "killed_while_writing": 0, "drafts_left": 0}
    for _ in range(times):
        for what, step in one_life(folder, moments.uniform(0, 0.06)):
            report["torn"] += what == "torn"
            report["resumes"] += what == "resumed"
            report["lost"] += what == "resumed" and step < durable
            durable = max(durable, step) if what == "durable" else durable
        report["killed_while_writing"] += any(folder.glob(".step-*.tmp"))
    report["drafts_left"] = len(list(folder.glob(".step-*.tmp")))
    print(json.dumps(report | {"steps": durable}))


if __name__ == "__main__":
    main()
