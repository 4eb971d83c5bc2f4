"""How commands print: Muster's own lines, phases with their time, and output whose reader has gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TextIO, cast

from rich.console import Console
from rich.status import Status


def say(text: str) -> None:
    """Print a line of Muster itself among the labelled lines of the ranks."""
    print(f"muster | {text}", flush=True)


def detail(console: Console, about: str = "") -> Callable[[str], None]:
    """What prints a line about the phase that is going on, after the words `about`."""
    return lambda text: console.print(f"    {about}{text}", style="dim", highlight=False)


class Phases:
    """Prints the phases of a long command and measures them: `seconds`, by the name of the phase."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, what: str, expected_seconds: float = 0.0) -> Iterator[None]:
        """One phase; `what` says what is done. With `expected_seconds` that is said too, and the progress is shown."""
        about = f" (about {expected_seconds:.0f} s)" if expected_seconds else ""
        self.console.print(f"[bold]==> {what}{about}[/bold]", highlight=False)
        begun = time.monotonic()
        try:
            with self._progress(begun, expected_seconds) if expected_seconds else contextlib.nullcontext():
                yield
        finally:
            self.seconds[name] = round(time.monotonic() - begun, 2)

    def say(self, text: str) -> None:
        """Print a line about the phase that is going on."""
        detail(self.console)(text)

    @contextmanager
    def _progress(self, begun: float, expected_seconds: float) -> Iterator[None]:
        """Show how long a phase has lasted: on a terminal each second in one line, else in a few lines."""
        ended = Event()
        lasted = Status("", console=self.console) if self.console.is_terminal else None
        interval_seconds = 1.0 if lasted else max(10.0, expected_seconds / 4)

        def report() -> None:
            while not ended.wait(interval_seconds):
                words = f"{time.monotonic() - begun:.0f} s of about {expected_seconds:.0f} s"
                if lasted:
                    lasted.update(words)
                else:
                    self.say(words)

        reporter = Thread(target=report, daemon=True)
        with lasted or contextlib.nullcontext():
            reporter.start()
            try:
                yield
            finally:
                ended.set()
                reporter.join()
        self.say(f"took {time.monotonic() - begun:.0f} s")


@contextmanager
def to_stderr() -> Iterator[None]:
    """What this process and the commands that it starts print goes to stderr meanwhile: stdout is for a document."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class PatientOutput:
    """A stream that can be written to when its reader has gone (`| head`, a closed terminal)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.unread = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._nobody_reads():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._nobody_reads():
            self._stream.flush()

    @contextmanager
    def _nobody_reads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.unread = True
            null = os.open(os.devnull, os.O_WRONLY)
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def patient_output() -> Iterator[None]:
    """Make stdout and stderr a PatientOutput: a run does not end because nobody reads its output any more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PatientOutput(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def nobody_reads() -> bool:
    """Whether the reader of stdout has gone. This is known only after something was written."""
    return bool(getattr(sys.stdout, "unread", False))
