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

DRAFTS = ".step-*.tmp"
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


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def one_life(folder: Path, delay: float, must_write: bool) -> tuple[list[tuple[str, int]], bool]:
    """Forks a worker and kills it `delay` seconds after it has resumed, or the next time that it writes after that.

    Returns what it printed, and whether it was writing.
    """
    left = set(folder.glob(DRAFTS))
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
    stop(pid)
    while not (draft := set(folder.glob(DRAFTS)) - left) and must_write:
        os.kill(pid, signal.SIGCONT)
        select.select([], [], [], 0.002)
        stop(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while piece := os.read(reading, 4096):
        printed += piece
    os.close(reading)
    return [(line.split()[0], int(line.split()[1])) for line in printed.decode().splitlines()], bool(draft)


def main() -> None:
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    durable = 0
    report = {"resumes": 0, "torn": 0, "lost": 0, "killed_while_writing": 0, "drafts_left": 0}
    for number in range(times):
        printed, was_writing = one_life(folder, moments.uniform(0, 0.06), must_write=number % 2 == 0)
        for what, step in printed:
            report["torn"] += what == "torn"
            report["resumes"] += what == "resumed"
            report["lost"] += what == "resumed" and step < durable
            durable = max(durable, step) if what == "durable" else durable
        report["killed_while_writing"] += was_writing
    report["drafts_left"] = len(list(folder.glob(DRAFTS)))
    print(json.dumps(report | {"steps": durable}))


if __name__ == "__main__":
    main()
