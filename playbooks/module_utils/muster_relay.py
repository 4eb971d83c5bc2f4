"""How hosts pass the blobs of an image, or of a dataset, on to hosts: each takes them from one source, and serves
whoever comes next.

A blob travels in frames, each a piece of CHUNK_BYTES (the last one is shorter), compressed with zlib or bz2:
    offset, bytes of the compressed piece, HMAC-SHA256 over digest, offset and piece, and the piece itself
No bytes: the source is there, but has not got the piece itself yet. A host passes a frame on as it came, as soon as its
HMAC is right; the key is known to the hosts of one distribution alone. A blob gets its name (its SHA-256) when it is
whole and has that digest; until then it is `.DIGEST.part`, from whose end another attempt goes on. What becomes of the
blobs of a dataset then: muster_data.Tree.

The source is another host, or the control machine, which alone decides on it (launch/deploy/relay.py). Over standard
input it says
    {"source": {"name", "address", "port"}}, for itself the name alone, CONTROL;
    {"frame": bytes}, before each frame that a host has asked it for;
    {"ping": true}, so that something comes within ABSENT_SECONDS.
A host says
    {"listening": port, "why": null} or {"listening": null, "why": why not}, once;
    {"lacks": bytes of the blobs that are to come, "received": bytes that came}, every second;
    {"trouble": the source that failed, "why"}, after which it waits for another one;
    {"get": digest, "from": offset}, to the control machine as its source.
A host that connects to another one answers its challenge (a line of random hexadecimal digits) with
{"proof": HMAC-SHA256 of it}, then asks as the control machine is asked. Nobody can write. Every wait is bounded, or
ends with standard input. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator

try:
    import bz2
except ImportError:  # a Python that was built without it: the control machine is told (muster_distribution)
    bz2 = None  # type: ignore[assignment]

CONTROL = "control machine"  # no host has a name with a space
CHUNK_BYTES = 1 << 20
HEADER = struct.Struct(">QI32s")
BZ2_MAGIC = b"BZh"
FRAME_BYTES = CHUNK_BYTES + (1 << 16)  # at most: what does not compress becomes a little longer
RECENT_BYTES = 64 << 20  # of frames that are kept to be passed on without compressing them again
HOST_LEVEL = 1  # of zlib, for a frame that is not kept any more
SAMPLE_BYTES = 1 << 13  # of each quarter of a piece, by which is seen whether it shrinks: JPEG files do not
WORTHWHILE = 0.95  # of its bytes, which it has to lose
DIAL_SECONDS = 3.0  # a SYN that is sent again (after 1 s) still fits
SIGN_SECONDS = 2.0  # between two signs of a source that has nothing to send
SIGNLESS_SECONDS = 15.0  # without a sign, after which a source has failed
CALLER_SECONDS = 300.0  # how long a caller may be busy with what it has got: checking a part of gigabytes takes minutes
REPORT_SECONDS = 1.0
ABSENT_SECONDS = 60.0  # without a word from the control machine, after which it has gone
CALLERS = 64  # that are served at once
QUESTION_BYTES = 4096
ATTEMPTS = 3  # for a blob whose digest turns out to be wrong

Say = Callable[[Any], None]


class Refused(Exception):
    """What a source or a caller may not say, in words for the user."""


def pack(secret: bytes, digest: str, offset: int, data: bytes, level: int) -> bytes:
    """A frame."""
    piece = zlib.compress(data, level if shrinks(data) else 0)
    return HEADER.pack(offset, len(piece), _mac(secret, digest, offset, piece)) + piece


def shrinks(data: bytes) -> bool:
    """Whether compressing is worth its while."""
    sample = b"".join(data[at : at + SAMPLE_BYTES] for at in range(0, len(data), CHUNK_BYTES // 4))
    return len(zlib.compress(sample, 1)) < WORTHWHILE * len(sample)


def unpack(secret: bytes, digest: str, offset: int, length: int, frame: bytes) -> bytes:
    """The piece of a blob that a frame holds. Raises Refused unless it is the one at `offset`, of `length` bytes."""
    at, _, mac = HEADER.unpack_from(frame)
    piece = frame[HEADER.size :]
    if at != offset or not hmac.compare_digest(mac, _mac(secret, digest, offset, piece)):
        raise Refused("it sent something else than what it was asked for")
    opened = bz2.BZ2Decompressor() if bz2 and piece.startswith(BZ2_MAGIC) else zlib.decompressobj()
    data = opened.decompress(piece, length + 1)
    if len(data) != length:
        raise Refused("it sent a piece of another length")
    return data


def _mac(secret: bytes, digest: str, offset: int, piece: bytes) -> bytes:
    return hmac.new(secret, digest.encode() + offset.to_bytes(8, "big") + piece, hashlib.sha256).digest()


class Store:
    """Blobs on this host: what has arrived of each. sizes: digest -> bytes of all of them."""

    def __init__(self, pool: Path, sizes: dict[str, int], secret: bytes) -> None:
        self.pool, self.sizes, self.secret = pool, sizes, secret
        self._changed = threading.Condition()
        self._recent: collections.OrderedDict[tuple[str, int], bytes] = collections.OrderedDict()
        self._recent_bytes = 0
        self.arrived = {digest: self._on_disk(digest) for digest in sizes}
        self.missing = [digest for digest in sizes if not self.is_whole(digest)]

    def draft(self, digest: str) -> Path:
        return self.pool / f".{digest}.part"

    def lacks(self) -> int:
        """Bytes that are to come."""
        return sum(self.sizes[digest] - self.arrived[digest] for digest in self.missing)

    def is_whole(self, digest: str) -> bool:
        path = self.pool / digest
        return path.is_file() and path.stat().st_size == self.sizes[digest]

    def keep(self, digest: str, found: str) -> bool:
        """Take what has arrived, whose SHA-256 is `found`, for the blob; False where it is something else."""
        if found == digest:
            self.draft(digest).replace(self.pool / digest)
        return found == digest

    def _on_disk(self, digest: str) -> int:
        if self.is_whole(digest):
            return self.sizes[digest]
        begun = self.draft(digest).stat().st_size if self.draft(digest).is_file() else 0
        return min(begun, self.sizes[digest]) // CHUNK_BYTES * CHUNK_BYTES

    def note(self, digest: str, arrived: int, frame: bytes = b"") -> None:
        """So much of a blob is there now. frame: with which the last piece came."""
        with self._changed:
            if frame:
                self._recent[digest, HEADER.unpack_from(frame)[0]] = frame
                self._recent_bytes += len(frame)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])
            self.arrived[digest] = arrived
            self._changed.notify_all()

    def length(self, digest: str, offset: int) -> int:
        """Bytes of the piece that begins there."""
        return min(CHUNK_BYTES, self.sizes[digest] - offset)

    def frame(self, digest: str, offset: int, seconds: float) -> bytes | None:
        """The frame of a piece; None where it has not come within so many seconds. Raises OSError."""
        end = offset + self.length(digest, offset)
        with self._changed:
            if not self._changed.wait_for(lambda: self.arrived[digest] >= end, seconds):
                return None
            kept = self._recent.get((digest, offset))
        return kept or pack(self.secret, digest, offset, self.read(digest, offset, end - offset), HOST_LEVEL)

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """A piece of a blob that has arrived. Raises OSError."""
        for path in (self.draft(digest), self.pool / digest):  # in this order: it may be renamed meanwhile
            with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), length, offset)
        raise FileNotFoundError(errno.ENOENT, "it has gone", digest)


class Server:
    """Serves the blobs of a store on one own address, at the first free port of a range."""

    def __init__(self, store: Store, address: str, ports: range) -> None:
        self._store = store
        self._places = threading.BoundedSemaphore(CALLERS)
        self.port: int | None = None
        self.why: str | None = None  # there is no port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in ports:
            try:
                listener = socket.create_server((address, port), family=family, backlog=CALLERS)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self.why = os.strerror(error.errno or errno.EADDRNOTAVAIL)
                    return
            else:
                self.port = port
                threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
                return
        self.why = f"no port from {ports[0]} to {ports[-1]} is free"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # it has left again, or too many files are open
                time.sleep(0.1)
                continue
            if not self._places.acquire(blocking=False):
                caller.close()
                continue
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, caller.makefile("rb") as lines:
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                caller.settimeout(SIGNLESS_SECONDS)
                challenge = os.urandom(32).hex()
                caller.sendall(challenge.encode() + b"\n")
                if not hmac.compare_digest(_line(lines)["proof"], _proof(self._store.secret, challenge)):
                    return
                while True:
                    caller.settimeout(CALLER_SECONDS)
                    asked = _line(lines)
                    caller.settimeout(SIGNLESS_SECONDS)
                    self._send(caller, asked["get"], asked["from"])
        except (OSError, ValueError, TypeError, KeyError, Refused):
            pass  # it has left, or is a stranger
        finally:
            self._places.release()

    def _send(self, caller: socket.socket, digest: str, offset: int) -> None:
        if offset % CHUNK_BYTES:
            raise Refused("no piece begins there")
        while offset < self._store.sizes[digest]:
            frame = self._store.frame(digest, offset, SIGN_SECONDS)
            caller.sendall(frame or HEADER.pack(offset, 0, b""))
            offset += self._store.length(digest, offset) if frame else 0


def _line(lines: Any) -> dict[str, Any]:
    """The other end's next line. Raises ValueError where it says none."""
    return dict(json.loads(lines.readline(QUESTION_BYTES)))


def _proof(secret: bytes, challenge: str) -> str:
    return hmac.new(secret, b"muster relay " + challenge.encode(), hashlib.sha256).hexdigest()


class Peer:
    """Another host as a source. Everything raises OSError or Refused."""

    def __init__(self, address: str, port: int, own: str, secret: bytes) -> None:
        self._socket = socket.create_connection((address, port), DIAL_SECONDS, (own, 0))
        self._socket.settimeout(SIGNLESS_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")
        challenge = self._stream.readline(QUESTION_BYTES).decode("ascii", "replace").strip()
        self._tell({"proof": _proof(secret, challenge)})

    def frames(self, digest: str, offset: int, size: int) -> Iterator[bytes]:
        """The frames of a blob, from `offset` to its end."""
        self._tell({"get": digest, "from": offset})
        while offset < size:
            header = self._exactly(HEADER.size)
            length = HEADER.unpack(header)[1]
            if length > FRAME_BYTES:
                raise Refused("it sent something else than what it was asked for")
            if length:
                yield header + self._exactly(length)
                offset += CHUNK_BYTES

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # another thread may be reading
        self._socket.close()

    def _tell(self, words: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def _exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise Refused("it closed the connection")
        return data


class ControlMachine:
    """The control machine as a source. Where it has gone, standard input ends, and with it everything."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.sent: queue.Queue[bytes] = queue.Queue(8)

    def frames(self, digest: str, offset: int, size: int) -> Iterator[bytes]:
        """The frames of a blob, from `offset` to its end."""
        self._say({"get": digest, "from": offset})
        while offset < size:
            yield self.sent.get()
            offset += CHUNK_BYTES

    def close(self) -> None:
        """There is nothing to close."""


class Fetcher:
    """Gets the blobs that a store lacks from the sources that the control machine names."""

    def __init__(self, store: Store, own: str, say: Say) -> None:
        self._store, self._own, self._say = store, own, say
        self._named = threading.Condition()
        self._next: dict[str, Any] | None = None
        self._name = ""
        self._source: Peer | ControlMachine | None = None
        self.control = ControlMachine(say)
        self.received = 0  # bytes

    def take_from(self, source: dict[str, Any]) -> None:
        """Leave the source, if there is one, for another."""
        with self._named:
            self._next = source
            if self._source:
                self._source.close()
            self._named.notify()

    def run(self) -> None:
        """Get everything. Raises RuntimeError, in words for the user, where that is impossible."""
        for digest in self._store.missing:
            for _ in range(ATTEMPTS):
                try:
                    if self._get(digest):
                        break
                except OSError as error:
                    path = self._store.draft(digest)
                    raise RuntimeError(
                        f"cannot write {path}: {error.strerror}. Fix: see `df` and `ls -l` there"
                    ) from None
            else:
                again = f"it came {ATTEMPTS} times with the wrong digest: {digest}"
                raise RuntimeError(f"{again}. Fix: check the disks of this host and of the control machine")

    def _get(self, digest: str) -> bool:
        """Get a blob; returns whether it has its digest. Raises OSError where it cannot be written."""
        store, state = self._store, hashlib.sha256()
        offset, size = store.arrived[digest], store.sizes[digest]
        with os.fdopen(os.open(store.draft(digest), os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
            file.truncate(offset)
            while file.tell() < offset:
                state.update(file.read(min(CHUNK_BYTES, offset - file.tell())))
            while offset < size:
                for frame, data in self._pieces(digest, offset):
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    state.update(data)
                    offset += len(data)
                    store.note(digest, offset, frame)
        if store.keep(digest, state.hexdigest()):
            return True
        store.note(digest, 0)
        store.draft(digest).unlink()
        return False

    def _pieces(self, digest: str, offset: int) -> Iterator[tuple[bytes, bytes]]:
        """(frame, piece) of a blob, until its end or that of the source."""
        store = self._store
        try:
            for frame in self._open().frames(digest, offset, store.sizes[digest]):
                self.received += len(frame)
                piece = unpack(store.secret, digest, offset, store.length(digest, offset), frame)
                offset += len(piece)
                yield frame, piece
        except (OSError, EOFError, ValueError, Refused, zlib.error) as error:
            self._leave(error)

    def _open(self) -> Peer | ControlMachine:
        """The source, or the next one that is named. Raises as Peer does."""
        while True:
            with self._named:
                if self._next is None and self._source:
                    return self._source
                self._named.wait_for(lambda: self._next is not None)
                named, self._next, self._source = self._next or {}, None, None
                self._name = named["name"]
            source: Peer | ControlMachine = self.control
            if named["name"] != CONTROL:
                source = Peer(named["address"], named["port"], self._own, self._store.secret)
            with self._named:
                self._source = source
                if self._next is not None:  # it was named while this one was opened
                    source.close()

    def _leave(self, error: Exception) -> None:
        with self._named:
            if self._source:
                self._source.close()
            self._source = None
            if self._next is None:
                self._say({"trouble": self._name, "why": _words(error)})


def _words(error: Exception) -> str:
    """What ended a connection, for the user."""
    if isinstance(error, socket.timeout):
        return "no answer in time: it is overloaded, or a firewall drops the connection"
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else "the connection was cut"
    return str(error) if isinstance(error, Refused) else "it sent what cannot be read"


def run(store: Store, options: dict[str, Any], say: Say, whole: Callable[[], Any]) -> None:
    """Serve, and get what is missing, until standard input ends; call `whole` when everything is there.

    options: address (own), ports [first, last]. Never returns: the process ends, and where something failed it has said
    {"error": why}.
    """
    one_at_a_time = threading.Lock()

    def tell(words: dict[str, Any]) -> None:
        with one_at_a_time:
            say(words)

    server = Server(store, options["address"], range(options["ports"][0], options["ports"][1] + 1))
    fetcher = Fetcher(store, options["address"], tell)

    heard = [time.monotonic()]

    def report() -> None:
        while time.monotonic() - heard[0] < ABSENT_SECONDS:
            tell({"lacks": store.lacks(), "received": fetcher.received})
            time.sleep(REPORT_SECONDS)
        os._exit(1)

    def fetch() -> None:
        try:
            fetcher.run()
        except RuntimeError as error:
            tell({"error": str(error)})
            os._exit(1)
        tell({"lacks": 0, "received": fetcher.received})
        whole()

    tell({"listening": server.port, "why": server.why})
    for work in (report, fetch):
        threading.Thread(target=work, daemon=True).start()
    with open(0, "rb", closefd=False) as stream:
        for line in iter(stream.readline, b""):
            words = json.loads(line)
            if "frame" in words:
                frame = stream.read(words["frame"])
                heard[0] = float("inf")  # while it waits for the disk, nothing is heard
                fetcher.control.sent.put(frame)
            elif "source" in words:
                fetcher.take_from(words["source"])
            heard[0] = time.monotonic()
    os._exit(0)
