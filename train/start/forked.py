"""Ranks of our trainer that are forked from the agent, which has torch loaded, and need not load it a second time.

torchrun loads torch, and then so does each rank that it starts: by hand, half of the time to the first step goes there.
Here the agent forks its ranks once it has imported torchrun. They import what else takes long, while the agents of the
hosts meet, and wait; torchrun's order to start a process then goes to one of them, with its arguments, environment and
files for output. To torchrun it is a process like those that it starts itself: a child of the agent, with a session of
its own, that ends as Python ends.

What makes it safe: at the fork there is no thread but OpenBLAS's, which ends them before a fork by itself, no CUDA
context, no process group and no OpenMP region before it; no code of the trainer has run, so none has seen an
environment without RANK. What has read its environment by then finds the same in the ranks'. Not for users' scripts,
which may set variables before they import torch, nor for Horovod's ranks.

Imports torch only in functions: the agent imports it when there are no signals to miss.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from typing import Any, NoReturn

MODULE = "train"  # whose ranks are forked
PRELOADED = ("torchvision", "torch.distributed.nn.functional")  # the rest of the trainer's imports takes 0.1 s
WAIT_POLL_SECONDS = 0.02


class Rank:
    """A process that waits to become a rank; as much of subprocess.Popen as torchrun uses."""

    def __init__(self, pid: int, order: int) -> None:
        self.pid = pid
        self.order = order  # descriptor on which it waits for its order
        self.started = False
        self.returncode: int | None = None

    def start(self, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
        words = {"arguments": arguments, "environment": environment, "stdout": stdout, "stderr": stderr}
        with open(self.order, "wb") as order, suppress(BrokenPipeError):  # it has ended: poll says how
            order.write(json.dumps(words).encode())
        self.started = True

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Without a limit as torch 2.11 and 2.12 wait for a process that they have killed."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= limit:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(WAIT_POLL_SECONDS)
        return code


class Handler:
    """A forked rank as torchrun handles the processes of its ranks: torch's SubprocessHandler."""

    def __init__(self, rank: Rank) -> None:
        self.proc = rank

    def close(self, death_sig: signal.Signals | None = None) -> None:
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def wanted(options: Namespace) -> int:
    """How many ranks to fork for these options of torchrun: all of this host's, or none."""
    ours = options.module and options.training_script == MODULE
    plain = not (options.no_python or options.run_path or options.numa_binding)
    own_ways = any("horovod" in word or word.startswith("--spawn") for word in options.training_script_args)
    settled = "OMP_NUM_THREADS" in os.environ and "PYTHON_EXEC" not in os.environ  # torchrun would set or read them
    if not (ours and plain and settled and options.nproc_per_node.isdigit()) or own_ways:
        return 0
    return int(options.nproc_per_node)


def fork(count: int) -> list[Rank]:
    """Processes that wait. In each of them this does not return: SystemExit is raised when its rank has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # nobody looks for garbage in it again, which would also copy its pages
    ranks: list[Rank] = []
    agent = os.getpid()
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (writing, *(rank.order for rank in ranks)):
                os.close(descriptor)
            be_a_rank(reading, agent)
        os.close(reading)
        ranks.append(Rank(pid, writing))
    return ranks


def be_a_rank(reading: int, agent: int) -> NoReturn:
    """The rest of a forked process's life."""
    born = time.monotonic()
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    os.setsid()
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)  # the agent has ended before that
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    for name in PRELOADED:
        with suppress(ImportError):  # the trainer itself will say so
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    with open(reading, "rb") as order:
        text = order.read()
    if not text:
        os._exit(1)  # the agent has ended without an order
    _prctl_pr_set_pdeathsig(0)
    words = json.loads(text)
    redirect(words["stdout"], words["stderr"])
    os.environ.clear()
    os.environ.update(words["environment"])
    sys.argv = [MODULE, *words["arguments"]]
    try:
        runpy.run_module(MODULE, {"STARTED": born}, "__main__", alter_sys=True)
    except Exception as error:  # shown here, the traceback does not begin with the agent's lines
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    sys.exit()


def redirect(stdout: str, stderr: str) -> None:
    """Output to these files, unbuffered as with python -u; where the name of one is empty it stays where it is."""
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)
    sys.stdout, sys.stderr = unbuffered(sys.stdout, 1), unbuffered(sys.stderr, 2)


def unbuffered(stream: Any, descriptor: int) -> io.TextIOWrapper:
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)
