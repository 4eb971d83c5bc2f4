"""--spawn N: N ranks on this machine without torchrun, each a process of torch.multiprocessing.

The parent trains nothing: it keeps the store in which the ranks meet (on loopback), passes signals on, and ends
with the status of the first rank that failed. No process outlives it, however it ends.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import _prctl_pr_set_pdeathsig, start_processes  # type: ignore[attr-defined]

SPAWN_GRACE_SECONDS = 30.0  # between the first failure and SIGKILL for the other ranks, as torchrun's
RANK_POLL_SECONDS = 0.2
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def spawn(
    main: Callable[..., int], arguments: tuple[Any, ...], count: int, grace_seconds: float = SPAWN_GRACE_SECONDS
) -> int:
    """Calls main(*arguments) in `count` processes, as ranks of one host; it returns the rank's exit status.

    main: a function that a fresh interpreter can import. It finds its place in torchrun's variables, with
    --init env://. Returns 0, or the status of the first rank that failed: 128 + n where signal n killed it. The others
    then get SIGTERM and, `grace_seconds` later, SIGKILL.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with environment(shared_variables(count, port)):
        ranks = start_processes(
            entry, (grace_seconds, main, arguments), nprocs=count, join=False, start_method="spawn"
        ).processes
    try:
        return watch(ranks, grace_seconds)
    finally:
        for process in ranks:
            end(process)
        del store


def shared_variables(count: int, port: int) -> dict[str, str]:
    """The variables that the ranks' interpreters start with; those that the user has set stay."""
    variables = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: no rank starts one
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    if "GLOO_SOCKET_IFNAME" not in os.environ and Path("/sys/class/net/lo").exists():
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def entry(rank: int, grace_seconds: float, main: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """A rank's first function."""
    _prctl_pr_set_pdeathsig(0)  # torch's SIGINT comes once per thread of the parent: outlive_no_parent sends one
    os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the parent alone, which passes it on once
    threading.Thread(target=outlive_no_parent, args=(grace_seconds,), daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    status = 1
    try:
        status = main(*arguments)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:
        print(f"rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
    leave_nothing()
    sys.exit(status)


def leave_nothing() -> None:
    """Ends what this rank has started, and itself, if the parent, whose task that is, is dead."""
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os.killpg(0, signal.SIGKILL)


def outlive_no_parent(grace_seconds: float) -> None:
    """When the parent has died: SIGINT, as its Ctrl-C; what has not ended `grace_seconds` later is killed."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(grace_seconds)
        os.killpg(0, signal.SIGKILL)


def watch(ranks: list[BaseProcess], grace_seconds: float) -> int:
    """Waits for all ranks. Returns the status of the first that failed, else 0."""
    running, status, limit, asked = list(ranks), 0, float("inf"), False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        for process in running:
            send(process, number)

    with handling(pass_on):
        while running and time.monotonic() < limit:
            connection.wait([process.sentinel for process in running], timeout=RANK_POLL_SECONDS)
            # Not by the sentinels alone: what a rank has forked keeps its sentinel open.
            for process in [process for process in running if not process.is_alive()]:
                running.remove(process)
                failure = status_of(process.exitcode or 0)
                end(process)
                if failure and not status:
                    status, limit = failure, time.monotonic() + grace_seconds
                    if not asked:  # else they are about to end by themselves
                        pass_on(signal.SIGTERM, None)
    return status  # the caller ends what is left


def status_of(exitcode: int) -> int:
    """As a shell says it: 128 + n for signal n."""
    return exitcode if exitcode >= 0 else 128 - exitcode


def send(process: BaseProcess, number: int) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(process: BaseProcess) -> None:
    """Kills the rank and whatever it started and left behind."""
    if process.is_alive():
        process.kill()
        process.join()
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
