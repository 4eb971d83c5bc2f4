"""The control machine as a door sees it: frames to it, requests of it, and whether it is still there."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any, Mapping, Optional

from keeper.host import POLL_SECONDS, Words

MARK = "muster:"


class Caller:
    """The control machine: frames to it, and whether it is still there. EOFError: it has gone."""

    def __init__(self, speaks: bool) -> None:
        """speaks: what comes on standard input is for the verb; else only its end means something."""
        self._in, self._out, self._speaks = 0, 1, speaks
        self._said = b""  # while nothing was asked
        self.sent = time.monotonic()  # when the last frame went
        os.set_blocking(self._out, False)
        self._write(b"\n")  # ends what a shell's profile has printed

    def send(self, words: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame. Waits while the caller reads slowly."""
        header = {**words, "bytes": len(data)} if "stream" in words else words
        self._write(f"{MARK}{json.dumps(header)}\n".encode())
        self._write(data)
        self.sent = time.monotonic()

    def hear(self, seconds: float) -> Words:
        """The next request. Raises TimeoutError where none comes, and EOFError as soon as the caller has gone."""
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):  # nothing comes after a request before it is answered
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the control machine has said nothing for {seconds:.0f} s")
            if not (more := os.read(self._in, 1 << 16)):
                raise EOFError
            line += more
        heard: Words = json.loads(line)
        return heard

    def wait(self, seconds: float) -> None:
        """Wait. Raises EOFError as soon as the caller has gone."""
        deadline = time.monotonic() + seconds
        while select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := os.read(self._in, 1 << 16)):
                raise EOFError
            self._said += more

    def last_said(self) -> Optional[Words]:
        """The last message that came whole while this waited, once; None: there is no new one."""
        whole, _, self._said = self._said.rpartition(b"\n")
        last: Optional[Words] = json.loads(whole.rpartition(b"\n")[2]) if whole else None
        return last

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._out, rest) :]
            except BlockingIOError:
                select.select([], [self._out], [], POLL_SECONDS)
                if not self._speaks:
                    self.wait(0)
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError from None
