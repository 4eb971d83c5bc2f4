"""What a view of a run prints: the ranks' output, labelled, Muster's own lines, and on a terminal how the run stands.

Output is handled in pieces as it arrives, never line by line: a script may print tens of thousands of lines a second.
Whoever prints waits for the terminal; nothing is kept in memory meanwhile.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

PART_SECONDS = 1.0  # a line without an end is shown so long after its last piece
PART_BYTES = 65536  # or when it is longer than this

_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)  # ANSI; a host keeps its colour
_REDRAWN = re.compile(rb"\r+\n?")  # a progress bar draws its line anew after each of these
_CLEAR = "\r\x1b[2K"


def label(host: str, stream: str) -> str:
    """Who says something: `h2 rank 1`, or `h2` for torchrun's own words."""
    kind, _, rank = stream.partition("rank-")
    return f"{host} rank {rank}" if not kind and rank else host


@dataclass
class Part:
    """The begin of a line whose end has not come yet."""

    data: bytes = b""
    since: float = 0.0
    cut: bool = False  # what came before it was shown as a line of its own


def whole_lines(part: Part, data: bytes, now: float) -> bytes:
    """The lines that are complete with `data`, without the last newline; what is left waits in `part`. Pure but for it.

    A line that is drawn anew (a progress bar) is a line each time.
    """
    if not part.data:
        data = data.lstrip(b"\r")
        if part.cut and data.startswith(b"\n"):
            data = data[1:]
        part.cut = part.cut and not data
        part.since = now
    data = part.data + data
    held = b"\r" if data.endswith(b"\r") else b""  # the newline that belongs to it may be in the next piece
    if b"\r" in data:
        data = _REDRAWN.sub(b"\n", data[: len(data) - len(held)])
    lines, found, rest = data.rpartition(b"\n")
    part.data = rest + held
    if found:
        part.since = now
    if len(part.data) > PART_BYTES:
        lines, found, part.data, part.cut = data, b"\n", b"", True
    return lines + found


class Display:
    """Prints under one lock, so that hosts do not write into each other's lines."""

    def __init__(self, hosts: Sequence[str], longest_label: int, terminal: bool | None = None) -> None:
        """terminal: with colours, and with the line of `status`; None: if it is one."""
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._lock = threading.RLock()
        self._width = longest_label
        self._codes = {host: _COLOURS[i % len(_COLOURS)] for i, host in enumerate(hosts)}
        self._parts: dict[tuple[str, str], Part] = {}
        self._status = ""

    def show(self, host: str, stream: str, data: bytes) -> None:
        """Print a piece of a stream's output."""
        with self._lock:
            part = self._parts.setdefault((host, stream), Part())
            if lines := whole_lines(part, data, time.monotonic()):
                self._print_lines(host, stream, lines)

    def show_parts(self, age_seconds: float = PART_SECONDS) -> None:
        """Print the lines whose end has not come for so long."""
        now = time.monotonic()
        with self._lock:
            for (host, stream), part in self._parts.items():
                if part.data and now - part.since >= age_seconds:
                    lines, part.data, part.cut = part.data.rstrip(b"\r") + b"\n", b"", True
                    self._print_lines(host, stream, lines)

    def say(self, text: str) -> None:
        """Print a line of Muster itself."""
        with self._lock:
            self._write(f"muster | {text}\n")

    def line(self, host: str, stream: str, text: str) -> None:
        """Print a line of a stream as it is."""
        with self._lock:
            self._write(f"{self.prefix(host, stream)}{text}\n")

    def status(self, text: str) -> None:
        """How the run stands, in the last line of a terminal; elsewhere nothing."""
        if self._terminal:
            with self._lock:
                if text != self._status:
                    self._status = text
                    self._write("")

    def prefix(self, host: str, stream: str) -> str:
        """What stands before each line of a stream."""
        head = label(host, stream).ljust(self._width)
        return f"\x1b[{self._codes.get(host, 0)}m{head}\x1b[0m | " if self._terminal else f"{head} | "

    def _print_lines(self, host: str, stream: str, lines: bytes) -> None:
        before = self.prefix(host, stream)
        text = lines[:-1].decode(errors="replace")
        self._write(before + text.replace("\n", "\n" + before) + "\n")

    def _write(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            text = f"{_CLEAR}{text}{self._status[:width]}"
        sys.stdout.write(text)
        sys.stdout.flush()
