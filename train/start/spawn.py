"""--spawn N: N ranks on this machine without torchrun, each a process of torch.multiprocessing.

The parent trains nothing: it keeps the store in which the ranks meet (on loopback), passes signals on, reports why
ranks failed, the cause last, and ends with the cause's status. No process outlives it, however it ends.
"""

import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing import _prctl_pr_set_pdeathsig, start_processes  # type: ignore[attr-defined]

from keeper.causes import exception_line, is_consequence, last_traceback, signal_name
from train.start.group import end_at_once
from train.start.memory import HUGE_PAGES

SPAWN_GRACE_SECONDS = 30.0  # between the first failure and SIGKILL for the other ranks, as torchrun's
RANK_POLL_SECONDS = 0.2
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def spawn(
    main: Callable[..., int], arguments: tuple[Any, ...], count: int, grace_seconds: float = SPAWN_GRACE_SECONDS
) -> int:
    """Calls main(*arguments) in `count` processes, as ranks of one host; it returns the rank's exit status.

    main: a function that a fresh interpreter can import. It finds its place in torchrun's variables, with
    --init env://. Returns 0, or the status of the rank that failed first, not counting those that only lost another:
    128 + n where signal n killed it. When one has failed the others get SIGTERM and, `grace_seconds` later, SIGKILL.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="muster-spawn-") as folder:
        with environment(shared_variables(count, port)):
            ranks = start_processes(
                entry, (Path(folder), grace_seconds, main, arguments), nprocs=count, join=False, start_method="spawn"
            ).processes
        try:
            ends = watch(ranks, grace_seconds)
        finally:
            for process in ranks:
                end(process)
            del store
        return report(ends, Path(folder))


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
    if "GLIBC_TUNABLES" not in os.environ:
        variables["GLIBC_TUNABLES"] = HUGE_PAGES
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


def entry(rank: int, folder: Path, grace_seconds: float, main: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """A rank's first function. `folder`: where it leaves the traceback of an exception."""
    _prctl_pr_set_pdeathsig(0)  # torch's SIGINT comes once per thread of the parent: outlive_no_parent sends one
    os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the parent alone, which passes it on once
    threading.Thread(target=outlive_no_parent, args=(grace_seconds,), daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    status = 1
    try:
        status = main(*arguments)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            traceback_file(folder, rank).write_text(text, encoding="utf-8")
        except OSError:  # a full disk, or the parent is dead
            print(f"rank {rank} failed:\n{text}", file=sys.stderr)
        leave_nothing()
        end_at_once(1)
    leave_nothing()
    sys.exit(status)


def traceback_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


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


def watch(ranks: list[BaseProcess], grace_seconds: float) -> list[tuple[int, int]]:
    """Waits for all ranks. Returns (rank, exit code) of those that did not end with status 0, in the order of their
    ends; without those that have not ended in time, which the caller ends."""
    running, limit, asked = list(ranks), float("inf"), False
    ends = list[tuple[int, int]]()

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
                end(process)
                if not process.exitcode:
                    continue
                ends.append((ranks.index(process), process.exitcode))
                if len(ends) == 1:
                    limit = time.monotonic() + grace_seconds
                    if not asked:  # else they are about to end by themselves
                        pass_on(signal.SIGTERM, None)
    return ends


@dataclass(frozen=True)
class Failure:
    rank: int
    exitcode: int
    trace: str  # of an exception, else empty

    @property
    def exception(self) -> str:
        return exception_line(last_traceback(self.trace)) or f"killed by {signal_name(self.exitcode)}"

    @property
    def is_consequence(self) -> bool:
        """Whether it only lost another rank, or ended as it was asked to."""
        return is_consequence(self.exception, self.exitcode)


def report(ends: list[tuple[int, int]], folder: Path) -> int:
    """Says on stderr why ranks failed, the cause last, and returns its status; 0 if none did. Those that only lost
    another rank get one line. A rank that returned a status has said itself why."""
    failures = []
    for rank, exitcode in ends:
        file = traceback_file(folder, rank)
        failures.append(Failure(rank, exitcode, file.read_text(encoding="utf-8") if file.exists() else ""))
    failures.sort(key=lambda failure: failure.is_consequence)  # stable: the first to end stays the first of its kind
    for failure in reversed(failures):
        if failure.is_consequence and failure is not failures[0]:
            if failure.trace:
                print(f"rank {failure.rank} failed after another rank: {failure.exception}", file=sys.stderr)
        elif failure.trace or (failure.exitcode < 0 and not failure.is_consequence):
            print(f"rank {failure.rank} failed: {failure.trace or failure.exception}", file=sys.stderr)
    return status_of(failures[0].exitcode) if failures else 0


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
