"""Heartbeats between the keepers of a run: one line of JSON a second to each other host, over TCP.

TCP, because the ports between hosts that Muster asks for are TCP. Every keeper listens, and sends over connections of
its own; one that is stuck is replaced, so that a network that comes back is noticed within seconds. A thread of its own
sends and receives: nothing that a slow disk holds up.

A line is `<HMAC-SHA256, hexadecimal> <JSON>`; the key is the run's own (keeper/__init__.py, private files), the JSON
{"run", "from", "to", "number", "words"}. A line of another run or sender, or with a wrong HMAC, ends its connection;
one whose number is not above the last one of its sender does not count.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import selectors
import socket
import threading
import time
from typing import Any, Callable, Mapping, Optional, Tuple

BEAT_SECONDS = 1.0
PAUSE_SECONDS = 0.05  # between two beats at least: where all hosts end at once, each has news with every word it hears
RETRY_SECONDS = 0.2  # between two attempts to connect
STUCK_SECONDS = 3.0  # for data to be acknowledged, and for a connection to be made
LONGEST_LINE = 1 << 20  # bytes
RECEIVE_BYTES = 262144  # at once
NUMBER_BITS = 40  # of a line's number: so many lines a start of a keeper may send
HUNG_SECONDS = 120.0  # without new words: whatever holds up this keeper (a disk), it keeps no run any more

Address = Tuple[str, int]


def signed(key: bytes, document: Mapping[str, Any]) -> bytes:
    """A line as it is sent."""
    body = json.dumps(document).encode()
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n"


def verified(key: bytes, line: bytes) -> Optional[Mapping[str, Any]]:
    """What a line says, if its HMAC is right."""
    code, _, body = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(code, hmac.new(key, body, hashlib.sha256).hexdigest().encode()):
        return None
    found = json.loads(body)
    return found if isinstance(found, dict) else None


class _Outgoing:
    """The connection over which one host is told how things stand."""

    def __init__(self, host: str, address: Address) -> None:
        self.host = host
        self.address = address
        self.socket: Optional[socket.socket] = None
        self.connected = False
        self.rest = b""  # of a line that was sent in part
        self.since = 0.0  # when the connection was begun, or last took data
        self.next_try = 0.0

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket, self.connected, self.rest = None, False, b""
        self.next_try = time.monotonic() + RETRY_SECONDS


class _Incoming:
    """A connection that another host has made."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rest = b""


class Beats:
    """Sends this host's words to all others and receives theirs, in a thread.

    run, me: the run's id and this host's name. own: where this host listens. others: where the others do, by name.
    heard(host, words), refused(host): called from the thread.
    """

    def __init__(
        self,
        run: str,
        me: str,
        key: bytes,
        own: Address,
        others: Mapping[str, Address],
        heard: Callable[[str, Any], None],
        refused: Callable[[str], None],
        starts: int = 1,
    ) -> None:
        """starts: how often this host's keeper was started, with now: its lines have numbers above all of before.

        Raises OSError where this host cannot listen.
        """
        self._run, self._me, self._key = run, me, key
        self._heard, self._refused = heard, refused
        self._words: Any = None
        self._number = (starts - 1) << NUMBER_BITS
        self._numbers = dict.fromkeys(others, 0)  # of the last line of each sender
        self._outgoing = [_Outgoing(host, address) for host, address in others.items()]
        self._listener = _listen(own)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._wake_reading, self._wake_writing = os.pipe()
        os.set_blocking(self._wake_reading, False)
        os.set_blocking(self._wake_writing, False)
        self._selector.register(self._wake_reading, selectors.EVENT_READ, self._woken)
        self._lock = threading.Lock()
        self._sent = self._due = self._told = 0.0
        self._ending = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="beats")
        self._thread.start()

    def tell(self, words: Any) -> None:
        """Send these words to all others now (PAUSE_SECONDS after the last time at the earliest), and each second.

        For HUNG_SECONDS: then the others shall take this host for lost.
        """
        with self._lock:
            self._words, self._due = words, self._sent + PAUSE_SECONDS
            self._told = time.monotonic()
        with contextlib.suppress(OSError):
            os.write(self._wake_writing, b"x")

    def close(self) -> None:
        """End all connections."""
        self._ending = True
        with contextlib.suppress(OSError):
            os.write(self._wake_writing, b"x")
        self._thread.join(STUCK_SECONDS)
        os.close(self._wake_writing)

    def _serve(self) -> None:
        while not self._ending:
            now = time.monotonic()
            for outgoing in self._outgoing:
                self._advance(outgoing, now)
            with self._lock:
                due, words = now >= self._due and self._words is not None, self._words
                if due:
                    self._sent, self._due = now, now + BEAT_SECONDS
            if due and now - self._told < HUNG_SECONDS:
                self._send_to_all(words, now)
            for chosen, _ in self._selector.select(self._pause()):
                chosen.data(chosen.fileobj)
        if self._words is not None:
            self._send_to_all(self._words, time.monotonic())  # what was told last may have waited
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_reading)

    def _pause(self) -> float | None:
        """Until something is due without an event; None: for as long as there is none."""
        waits = [RETRY_SECONDS for outgoing in self._outgoing if not outgoing.connected]
        with self._lock:
            waits += [] if self._words is None else [max(0.0, self._due - time.monotonic())]
        return min(waits, default=None)

    def _advance(self, outgoing: _Outgoing, now: float) -> None:
        """Make a connection where there is none; give up one that is stuck."""
        waits = outgoing.socket is not None and (not outgoing.connected or outgoing.rest)
        if waits and now - outgoing.since > STUCK_SECONDS:
            self._drop(outgoing)
        if outgoing.socket is None and now >= outgoing.next_try:
            self._connect(outgoing, now)

    def _connect(self, outgoing: _Outgoing, now: float) -> None:
        family = socket.AF_INET6 if ":" in outgoing.address[0] else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STUCK_SECONDS * 1000))
        outgoing.socket, outgoing.since = made, now
        code = made.connect_ex(outgoing.address)
        if code not in (0, errno.EINPROGRESS):
            self._failed(outgoing, code)
            return
        events = selectors.EVENT_WRITE
        self._selector.register(made, events, lambda _: self._writable(outgoing))

    def _writable(self, outgoing: _Outgoing) -> None:
        if outgoing.socket is None:
            return
        if not outgoing.connected:
            code = outgoing.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._failed(outgoing, code)
                return
            outgoing.connected, outgoing.since = True, time.monotonic()
            with self._lock:
                words = self._words
            if words is not None:
                outgoing.rest = self._line(outgoing.host, words)
        self._flush(outgoing)

    def _flush(self, outgoing: _Outgoing) -> None:
        """Send what is left; then only the end of the connection is of interest: nobody answers on it."""
        if outgoing.socket is None:
            return
        try:
            while outgoing.rest:
                sent = outgoing.socket.send(outgoing.rest)
                outgoing.rest, outgoing.since = outgoing.rest[sent:], time.monotonic()
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(outgoing, error.errno or 0)
            return
        wanted = selectors.EVENT_WRITE if outgoing.rest else selectors.EVENT_READ
        call = self._writable if outgoing.rest else self._ended
        self._selector.modify(outgoing.socket, wanted, lambda _: call(outgoing))

    def _ended(self, outgoing: _Outgoing) -> None:
        """The other side has closed the connection."""
        if outgoing.socket is None:
            return
        try:
            if outgoing.socket.recv(1):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(outgoing)

    def _failed(self, outgoing: _Outgoing, code: int) -> None:
        self._drop(outgoing)
        if code == errno.ECONNREFUSED:
            self._refused(outgoing.host)

    def _drop(self, outgoing: _Outgoing) -> None:
        if outgoing.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(outgoing.socket)
        outgoing.close()

    def _send_to_all(self, words: Any, now: float) -> None:
        for outgoing in self._outgoing:
            if outgoing.connected and not outgoing.rest:
                outgoing.rest, outgoing.since = self._line(outgoing.host, words), now
                self._flush(outgoing)

    def _line(self, host: str, words: Any) -> bytes:
        self._number += 1
        document = {"run": self._run, "from": self._me, "to": host, "number": self._number, "words": words}
        return signed(self._key, document)

    def _woken(self, _: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reading, 4096)

    def _accept(self, _: Any) -> None:
        with contextlib.suppress(OSError):
            connection, _address = self._listener.accept()
            connection.setblocking(False)
            incoming = _Incoming(connection)
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(incoming))

    def _read(self, incoming: _Incoming) -> None:
        try:
            data = incoming.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, incoming.rest = (incoming.rest + data).split(b"\n")
        if not data or not all(self._take(line) for line in lines) or len(incoming.rest) > LONGEST_LINE:
            self._selector.unregister(incoming.socket)
            incoming.socket.close()

    def _take(self, line: bytes) -> bool:
        """Hand on a line; whether it was one of this run."""
        try:
            document = verified(self._key, line)
            if document is None or document["run"] != self._run or document["to"] != self._me:
                return False
            host, number, words = document["from"], int(document["number"]), document["words"]
            if host not in self._numbers:
                return False
        except (ValueError, KeyError, TypeError):
            return False
        if number > self._numbers[host]:  # else an old connection brings what a newer one has overtaken
            self._numbers[host] = number
            self._heard(host, words)
        return True


def _listen(own: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(own)
        listener.listen(64)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
