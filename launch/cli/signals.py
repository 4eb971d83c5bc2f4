"""What Ctrl-C, SIGTERM and SIGHUP do: end a command in order, and not disturb that ending.

One wish to end comes as several signals: make hands on what its process group has got already. The first one ends a
command; what comes after it is that same wish, but for a Ctrl-C that comes later.
"""

from __future__ import annotations

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

LATER_SECONDS = 2.0  # after the first signal; a Ctrl-C from then on is a second wish
FLUSH_SECONDS = 1.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Came:
    """What has come of these signals since a command began."""

    first: float | None = None
    raised: bool = False  # KeyboardInterrupt, for the first one

    def take(self, number: int) -> bool:
        """Note a signal; whether it is a Ctrl-C so late after the first one that it is a second wish."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        return number == signal.SIGINT and now - self.first > LATER_SECONDS

    def interrupt(self) -> NoReturn:
        self.raised = True
        raise KeyboardInterrupt


_came = _Came()


@contextmanager
def interrupts_as_exceptions() -> Iterator[None]:
    """The first of these signals raises KeyboardInterrupt, and so does a later Ctrl-C; once one has, the rest is lost.

    After an interrupt the signals stay ignored: the process is about to end, and nothing may take its last words away.
    """
    _came.first, _came.raised = None, False

    def interrupt(number: int, frame: Any) -> None:
        later = _came.take(number)
        if later or not _came.raised:
            _came.interrupt()

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        _restore(dict.fromkeys(_ENDING, signal.SIG_IGN) if _came.raised else before)


@contextmanager
def undisturbed(words: str = "", then_interrupt: bool = False) -> Iterator[None]:
    """What is done here is not cut short by a signal; each step of it is bounded.

    Args:
        words: the last words of a user who does not want to wait: a later Ctrl-C says them and ends the process.
            Without words there is no such way out.
        then_interrupt: an interrupt that came meanwhile, and is the first one, is raised at the end.
    """

    def hold(number: int, frame: Any) -> None:
        if _came.take(number) and words:
            os.write(2, f"{words}\n".encode())  # not print: the signal may have come in the middle of one
            os._exit(exits.INTERRUPTED)

    before = {number: signal.signal(number, hold) for number in _ENDING}
    try:
        yield
    finally:
        _restore(before)
    if then_interrupt and _came.first is not None and not _came.raised:
        _came.interrupt()


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def leave(words: str) -> NoReturn:
    """End the process now, with its last words: threads that wait for a host, or for a reader, are not waited for."""

    def say() -> None:
        sys.stdout.flush()
        print(words, file=sys.stderr, flush=True)

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    speaker.join(FLUSH_SECONDS)
    os._exit(exits.INTERRUPTED)
