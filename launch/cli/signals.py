"""What Ctrl-C, SIGTERM and SIGHUP do: they end a command in order, and do not disturb its end once that has begun.

A command that watches a run asks which of them came: Ctrl-C stops the run, the others only end the watching.

One request to end arrives as several signals, because make sends on what its process group has already received. The
first signal ends the command. Those that follow belong to the same request, except a Ctrl-C that comes some time later.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from launch.cli import exits

LATER_SECONDS = 2.0  # a Ctrl-C so long after the first signal is a second request
FLUSH_SECONDS = 1.0  # for the last message to reach a slow reader

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Received:
    """The signals that a command has received."""

    first: float | None = None  # time.monotonic() of the first one
    number: int = 0  # of the first one
    raised: bool = False  # whether KeyboardInterrupt was raised for it

    def take(self, number: int) -> bool:
        """Note a signal. Returns whether it is a second request: LATER_SECONDS after the first signal a Ctrl-C, and
        after a Ctrl-C a SIGTERM too."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.number = now, number
        asks = number == signal.SIGINT or (number == signal.SIGTERM and self.number == signal.SIGINT)
        return asks and now - self.first > LATER_SECONDS

    def interrupt(self) -> NoReturn:
        self.raised = True
        raise KeyboardInterrupt


_received = _Received()


def first_signal() -> int:
    """The number of the signal that came first; 0: none has come."""
    return _received.number if _received.first is not None else 0


@contextmanager
def interrupts_as_exceptions() -> Iterator[None]:
    """The first of these signals raises KeyboardInterrupt, and so does a later Ctrl-C. All others are ignored.

    After an interrupt all signals stay ignored: the process is about to end, and its last message has to be printed.
    """
    _received.first, _received.raised = None, False

    def interrupt(number: int, frame: Any) -> None:
        if _received.take(number) or not _received.raised:
            _received.interrupt()

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        _restore(dict.fromkeys(_ENDING, signal.SIG_IGN) if _received.raised else before)


@contextmanager
def undisturbed(last_message: str = "", then_interrupt: bool = False) -> Iterator[None]:
    """Signals do not interrupt what is done here. Each of its steps has to have a time limit of its own.

    Args:
        last_message: for a user who does not want to wait: a later Ctrl-C prints it and ends the process. Without it,
            a later Ctrl-C is ignored too.
        then_interrupt: if the first signal came meanwhile, KeyboardInterrupt is raised at the end.
    """

    def hold(number: int, frame: Any) -> None:
        if _received.take(number) and last_message:
            os.write(2, f"{last_message}\n".encode())  # not print: the signal may have come in the middle of one
            os._exit(exits.INTERRUPTED)

    before = {number: signal.signal(number, hold) for number in _ENDING}
    try:
        yield
    finally:
        _restore(before)
    if then_interrupt and not _received.raised:
        raise_held()


def raise_held() -> None:
    """Raise KeyboardInterrupt for a signal that has come, if one has."""
    if _received.first is not None:
        _received.interrupt()


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def exit_now(message: str) -> NoReturn:
    """Print a last message and end the process, without waiting for threads that wait for a host or a reader."""

    def show() -> None:
        sys.stdout.flush()
        print(message, file=sys.stderr, flush=True)

    printer = threading.Thread(target=show, daemon=True)
    printer.start()
    printer.join(FLUSH_SECONDS)
    atexit._run_exitfuncs()  # sys.exit would wait for threads first
    os._exit(exits.INTERRUPTED)
