"""The doors of hosts: one call of keeper/door.py over a channel of a host's SSH connection. What it says: there.

The sources travel on standard input. Uses Paramiko's channel itself: Invoke would keep all output, and join it again
for each piece that comes. Bytes are passed on as they come, and never more than one frame is held.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from launch.files import ROOT
from launch.hosts import ssh
from launch.hosts.connection import ANSWER_SECONDS, Machine

MARK = b"muster:"
RECEIVE_BYTES = 262144  # at once
SEND_SECONDS = 30  # for a host to take what is sent to it
CLOSE_SECONDS = 5  # for the exit status and the last words, when the output has ended
WORDS_BYTES = 4096  # of standard error that are kept

#: Reads `muster:<bytes of the sources> <bytes of the options>` and these, both compressed JSON, and not a byte more;
#: sudo's password may stand before. Finds the modules among the sources.
_LOADER = """
import importlib.machinery, json, os, sys, zlib
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit("the question ended too early")
        data += more
    return data
line = b""
while not (line.startswith(b"muster:") and line.endswith(b"\\n")):
    line = take(1) if line.endswith(b"\\n") else line + take(1)
sources, options = (json.loads(zlib.decompress(take(int(size)))) for size in line[7:].split())
class Finder:
    def find_spec(self, name, path, target=None):
        if name in sources:
            return importlib.machinery.ModuleSpec(name, self, is_package="." not in name)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(sources[module.__name__], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
from keeper.door import main
sys.exit(main(options))
"""


class DoorError(RuntimeError):
    """A host's own words why it did not do what was asked; `words`: all that its last frame says."""

    def __init__(self, why: str, words: Mapping[str, Any]) -> None:
        self.words = dict(words)
        super().__init__(why)


@dataclass(frozen=True)
class Frame:
    """A piece of a door's answer."""

    words: dict[str, Any]
    data: bytes


class Call:
    """A command that runs as root on a host and speaks in frames, until `close` or the end of the `with` block."""

    def __init__(self, machine: Machine, command: str, question: bytes) -> None:
        """question: what the command reads first.

        Raises paramiko.SSHException, EOFError, OSError (TimeoutError among them) when the host does not take it.
        """
        self._name = machine.name
        self._buffer = bytearray()
        self._complaints = b""  # the end of standard error
        self._ignored = b""  # the last line that is none of ours
        self._channel = machine.open_session()
        try:
            self._channel.settimeout(SEND_SECONDS)
            self._channel.exec_command(ssh.sudo_prefix(machine.target) + command)
            password = machine.target.sudo_password
            self._send((f"{password}\n".encode() if password else b"") + question)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether what is sent may still arrive."""
        return not self._channel.closed

    def send(self, words: Mapping[str, Any], data: bytes = b"") -> None:
        """Send something more, and bytes that follow it. Raises TimeoutError when the host does not take it."""
        self._send(json.dumps(words).encode() + b"\n" + data)

    def frames(self, idle_timeout: float | None) -> Iterator[Frame]:
        """All frames until the verb has ended.

        Raises DoorError with the host's own words when the verb, or what should start it, failed; TimeoutError when
        nothing has come for `idle_timeout` seconds (None: no limit); EOFError when the connection dies, or at `close`.
        """
        self._channel.settimeout(idle_timeout)
        try:
            while (line := self._line()) is not None:
                if not line.startswith(MARK):
                    self._ignored = line.strip() or self._ignored
                    continue
                words = json.loads(line[len(MARK) :])
                if "error" in words:
                    raise DoorError(words["error"], words)
                yield Frame(words, self._bytes(words.get("bytes", 0)))
        except TimeoutError:
            raise TimeoutError(f"{self._name}: nothing came within {idle_timeout:g} s") from None
        self._refuse_bad_end()

    def close(self) -> None:
        """Hang up. The process on the host sees it by the end of its standard input, and ends."""
        with contextlib.suppress(EOFError, OSError):  # the connection has ended
            self._channel.close()

    def _send(self, data: bytes) -> None:
        try:
            self._channel.sendall(data)
        except TimeoutError:
            raise
        except OSError:  # it has ended: why is what `frames` finds
            if not self._channel.closed:
                raise

    def _line(self) -> bytes | None:
        """The next line; None at the end."""
        begin = 0
        while (end := self._buffer.find(b"\n", begin)) < 0:
            begin = len(self._buffer)
            if not self._receive():
                return None
        return self._cut(end + 1)

    def _bytes(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._receive():
                raise EOFError(f"{self._name}: the SSH connection was lost")
        return self._cut(size)

    def _cut(self, size: int) -> bytes:
        data = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return data

    def _receive(self) -> bool:
        """Take what has come, or wait for it; False at the end."""
        data = self._channel.recv(RECEIVE_BYTES)
        self._buffer += data
        while self._channel.recv_stderr_ready():  # unread it would hold up the rest
            self._take_complaint()
        return bool(data)

    def _take_complaint(self) -> bool:
        data = self._channel.recv_stderr(RECEIVE_BYTES)
        self._complaints = (self._complaints + data)[-WORDS_BYTES:]
        return bool(data)

    def _refuse_bad_end(self) -> None:
        """Raises what `frames` says, where the output has not ended as it should."""
        if not self._channel.status_event.wait(CLOSE_SECONDS) or self._channel.exit_status < 0:
            raise EOFError(f"{self._name}: the SSH connection was lost")
        if self._channel.exit_status == 0:
            return
        self._channel.settimeout(CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            while self._take_complaint():
                pass
        said = (self._complaints.strip() or self._buffer.strip() or self._ignored).decode(errors="replace").splitlines()
        status = f"exit status {self._channel.exit_status} without a word"
        raise DoorError(said[-1].strip() if said else status, {})


class Door(Call):
    """One call of a host's door."""

    def __init__(self, machine: Machine, verb: str, options: Mapping[str, Any]) -> None:
        """Raises as Call does."""
        super().__init__(machine, command(machine.target.python), question(verb, options))


def ask(machine: Machine, verb: str, options: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
    """What the last frame of a verb's answer says.

    Raises DoorError (a RuntimeError) with the host's own words when it fails, TimeoutError after `timeout` seconds, and
    as Door does when the connection does not hold.
    """
    deadline = time.monotonic() + timeout
    words: dict[str, Any] | None = None
    with Door(machine, verb, options) as door:
        for frame in door.frames(timeout):
            words = frame.words
            if time.monotonic() > deadline:
                raise TimeoutError(f"{machine.name}: no answer within {timeout:g} s")
    if words is None:
        raise DoorError("it ended without an answer", {})
    return words


def command(python: str) -> str:
    """The shell command that runs a door on what `question` gives it.

    -I: nothing of the user's folders is imported. -S: nor is what is installed there, which only takes time.
    """
    return shlex.join([python, "-I", "-S", "-c", _LOADER])


def question(verb: str, options: Mapping[str, Any]) -> bytes:
    """What that command reads: the sources, and what is asked."""
    asked = zlib.compress(json.dumps({**options, "verb": verb}).encode())
    sources = _packed_sources()
    return MARK + f"{len(sources)} {len(asked)}\n".encode() + sources + asked


@functools.cache
def _packed_sources() -> bytes:
    files = sorted((ROOT / "keeper").glob("*.py"))
    names = {file: "keeper" if file.stem == "__init__" else f"keeper.{file.stem}" for file in files}
    return zlib.compress(json.dumps({names[file]: file.read_text(encoding="utf-8") for file in files}).encode(), 9)
