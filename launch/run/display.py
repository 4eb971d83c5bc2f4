"""What a view of a run prints: the ranks' output, labelled, Muster's own lines, and on a terminal how the run stands.

Output is handled in pieces as it arrives, never line by line: a script may print tens of thousands of lines a second.
Whoever prints waits for the terminal; nothing is kept in memory meanwhile. Only on a terminal, and only few lines at a
time, are compared: what several ranks say at once is one line there.
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
FOLD_SECONDS = 0.2  # so long lines wait on a terminal for equal ones of other ranks
FOLDED_LINES = 100  # that wait at most

_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93)  # ANSI; a host keeps its colour
_OVERDRAWN = re.compile(rb"[^\r\n]*\r+(?=[^\r\n])")  # what a progress bar has drawn anew
_NEWLINE = re.compile(rb"\r+\n")
TRACEBACK = b"Traceback (most recent call last):"
#: So long a traceback waits: if the run fails, the cause comes first, and what only follows from it is left out.
HOLD_SECONDS = 2.0
HELD_BYTES = 65536  # of one stream at most
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

    Of a line that is drawn anew (a progress bar) the last form counts.
    """
    if not part.data:
        data = data.lstrip(b"\r")
        if part.cut and data.startswith(b"\n"):
            data = data[1:]
        part.cut = part.cut and not data
        part.since = now
    data = part.data + data
    if b"\r" in data:  # one at the end stays: the newline that belongs to it may be in the next piece
        data = _OVERDRAWN.sub(b"", _NEWLINE.sub(b"\n", data))
    lines, found, part.data = data.rpartition(b"\n")
    if found:
        part.since = now
    if len(part.data) > PART_BYTES:
        lines, found, part.data, part.cut = data, b"\n", b"", True
    return lines + found


def folded(sources: Sequence[tuple[str, str]]) -> str:
    """Who says the same: `h1 rank 0, h2 rank 1-3`. sources: (host, stream). Pure."""
    ranks: dict[str, list[int]] = {}
    for host, stream in sources:
        _, _, rank = label(host, stream).rpartition(" rank ")
        ranks.setdefault(host, []).extend([int(rank)] if rank.isdigit() else [])
    return ", ".join(f"{host} rank {_ranges(sorted(own))}" if own else host for host, own in ranks.items())


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


class Folder:
    """Lines that wait for equal ones of other streams. The lines of each stream keep their order."""

    def __init__(self) -> None:
        self.since = 0.0  # when the first one came
        self._lines: list[tuple[str, list[tuple[str, str]]]] = []  # a line, and who said it
        self._places: dict[str, list[int]] = {}  # of a line among these
        self._last: dict[tuple[str, str], int] = {}  # the place of a stream's last line

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, source: tuple[str, str], line: str, now: float) -> None:
        """Add a line that `source`, (host, stream), said."""
        if not self._lines:
            self.since = now
        after = self._last.get(source, -1)
        place = next((place for place in self._places.get(line, ()) if place > after), None)
        if place is None:
            place = len(self._lines)
            self._lines.append((line, []))
            self._places.setdefault(line, []).append(place)
        self._lines[place][1].append(source)
        self._last[source] = place

    def take(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """All lines, in order, with who said each."""
        lines = self._lines
        self._lines, self._places, self._last = [], {}, {}
        return lines


class Display:
    """Prints under one lock, so that hosts do not write into each other's lines."""

    def __init__(self, hosts: Sequence[str], longest_label: int, terminal: bool | None = None) -> None:
        """terminal: with colours, and with the line of `status`; None: if it is one."""
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._lock = threading.RLock()
        self._width = longest_label
        self._codes = {host: _COLOURS[i % len(_COLOURS)] for i, host in enumerate(hosts)}
        self._parts: dict[tuple[str, str], Part] = {}
        self._folder = Folder()
        self._status = ""
        self._held: dict[tuple[str, str], Part] = {}  # tracebacks that wait for the cause
        self._failing = self._told = False

    @property
    def is_live(self) -> bool:
        """Whether it shows the line of `status`."""
        return self._terminal

    def show(self, host: str, stream: str, data: bytes) -> None:
        """Print a piece of a stream's output."""
        with self._lock:
            now = time.monotonic()
            part = self._parts.setdefault((host, stream), Part())
            lines = whole_lines(part, data, now)
            if lines := self._without_held((host, stream), lines, now):
                self._print_lines(host, stream, lines)

    def show_earlier(self, host: str, stream: str, data: bytes) -> None:
        """Print output of before there was a view: tracebacks in it do not wait for a cause, which may be long past."""
        with self._lock:
            if lines := whole_lines(self._parts.setdefault((host, stream), Part()), data, time.monotonic()):
                self._print_lines(host, stream, lines)

    def show_parts(self, age_seconds: float = PART_SECONDS) -> None:
        """Print the lines whose end has not come for so long, and those that have waited for equal ones."""
        now = time.monotonic()
        with self._lock:
            for (host, stream), part in self._parts.items():
                if part.data and now - part.since >= age_seconds:
                    lines, part.data, part.cut = part.data.rstrip(b"\r") + b"\n", b"", True
                    self._print_lines(host, stream, lines)
            for source in [one for one, held in self._held.items() if now - held.since >= HOLD_SECONDS]:
                if not self._failing:
                    self._print_lines(*source, self._held.pop(source).data)
            if self._folder and now - self._folder.since >= min(age_seconds, FOLD_SECONDS):
                self._unfold()

    def failing(self) -> None:
        """The run fails: tracebacks wait until its cause is told."""
        self._failing = True

    def told(self) -> None:
        """The cause is told, with that rank's last lines: the tracebacks of the others stay in the files."""
        with self._lock:
            self._told = True
            for held in self._held.values():
                held.data = b""

    def begin_again(self) -> None:
        """The cause is past: what ranks say now is of another attempt."""
        with self._lock:
            self.release()
            self._failing = self._told = False

    def release(self) -> None:
        """Print the tracebacks that still wait: there will be no cause."""
        with self._lock:
            for (host, stream), held in self._held.items():
                if held.data:
                    self._print_lines(host, stream, held.data)
            self._held.clear()

    def say(self, text: str) -> None:
        """Print a line of Muster itself."""
        with self._lock:
            self._unfold()
            self._write(f"muster | {text}\n")

    def lines(self, host: str, stream: str, texts: Sequence[str]) -> None:
        """Print lines of a stream as they are, with nothing between them."""
        with self._lock:
            self._unfold()
            self._write("".join(f"{self.prefix(host, stream)}{text}\n" for text in texts))

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

    def _without_held(self, source: tuple[str, str], lines: bytes, now: float) -> bytes:
        """The lines that may be shown now: a traceback, and what comes after it, waits, or is left out."""
        held = self._held.get(source)
        if held is None:
            begin = lines.find(TRACEBACK)
            if begin < 0:
                return lines
            begin = lines.rfind(b"\n", 0, begin) + 1
            lines, held = lines[:begin], Part(lines[begin:], now)
        else:
            lines, held.data = b"", held.data + lines
        self._held[source] = held
        if self._told:
            held.data = b""
        elif len(held.data) > HELD_BYTES:
            return lines + self._held.pop(source).data
        return lines

    def _print_lines(self, host: str, stream: str, lines: bytes) -> None:
        before, text = self.prefix(host, stream), lines[:-1].decode(errors="replace")
        few = self._terminal and lines.count(b"\n") <= FOLDED_LINES
        if few:
            for line in text.split("\n"):
                self._folder.add((host, stream), line, time.monotonic())
        if not few or len(self._folder) > FOLDED_LINES:
            self._unfold()
        if not few:
            self._write(before + text.replace("\n", "\n" + before) + "\n")

    def _unfold(self) -> None:
        """Print the lines that wait for equal ones."""
        said = [
            f"{self.prefix(*sources[0]) if len(sources) == 1 else f'{folded(sources)} | '}{line}\n"
            for line, sources in self._folder.take()
        ]
        if said:
            self._write("".join(said))

    def _write(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            text = f"{_CLEAR}{text}{self._status[:width]}"
        sys.stdout.write(text)
        sys.stdout.flush()
