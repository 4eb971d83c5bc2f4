"""Processes that a test started, or their children."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GUARD_SECONDS = 300.0  # no promise: what hangs fails the test, and a busy machine does not


class Forked:
    """`python -P -m MODULE ARGUMENT ...`, forked from the tests' process when that has loaded torchrun, which each
    process takes two seconds for. It sees these environment variables alone, and has one thread for torch.
    """

    def __init__(self, module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        importlib.import_module("torch.distributed.run")
        self._outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - as long as this
        words = (module, arguments, cwd, environment, self._outputs)
        self._process = multiprocessing.get_context("fork").Process(target=_become, args=words)
        self._process.start()
        atexit.register(self._process.kill)  # what a failed test leaves would be waited for
        self.pid = self._process.pid or 0

    def wait(self) -> int:
        """Its exit status."""
        assert self.has_ended(GUARD_SECONDS), f"process {self.pid} does not end: {self.errors()}"
        return int(self._process.exitcode or 0)

    def has_ended(self, within: float = 0.0) -> bool:
        """Whether it has ended, or ends within so many seconds."""
        self._process.join(within)
        return self._process.exitcode is not None

    def send_signal(self, number: signal.Signals) -> None:
        if not self.has_ended():
            os.kill(self.pid, number)

    def out(self) -> str:
        """What it and its children have printed."""
        return _text(self._outputs[0])

    def errors(self) -> str:
        return _text(self._outputs[1])

    def lines(self, number: int) -> list[str]:
        """The first lines that are printed, once there are so many."""
        deadline = time.monotonic() + GUARD_SECONDS
        while len(lines := self.out().splitlines(keepends=True)) < number or not lines[number - 1].endswith("\n"):
            assert not self.has_ended(), f"it ended early: {self.errors()}"
            assert time.monotonic() < deadline, lines
            time.sleep(0.02)
        return lines[:number]


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode()  # at no offset that its writers share


def _become(
    module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], outputs: Sequence[IO[bytes]]
) -> None:
    import torch

    from train.start import forked

    torch.set_num_threads(1)  # others that were started before the fork are not there
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, file in enumerate(outputs, 1):
        os.dup2(file.fileno(), descriptor)
    forked.redirect("", "")
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def running(pid: int | str) -> bool:
    """One that has ended but was not yet waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the second: it was waited for between opening and reading
        return False
