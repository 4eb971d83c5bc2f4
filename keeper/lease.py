"""A host's lease: who has it may run ranks there, one run at a time. What waits for it: queue.py.

The lease is the file `lease` of the lease's folder. Held means: a process has a lock on its first byte. The kernel
frees the lock with the process, however that ends, so nothing is ever left to clear away; the file itself stays, with
the words of its last holder.

The lock is an open file description lock (Linux 3.15), not flock: with F_OFD_GETLK the kernel says whether somebody has
it, without taking it. With flock one can only try, and whoever looks would hold the lease for a moment and make a real
`take` fail. These locks work across a bind mount into a container, as the file is the same one; unlike POSIX record
locks they belong to the open file, so that another open and close of it in the holder's process does not free them.
Like flock they are kept by a child that inherits the descriptor: it is opened close-on-exec.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from typing import Any

#: <fcntl.h> on Linux; Python has these names since 3.9.
_GET, _SET = 36, 37
_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid

#: The bytes of the file that are locked: the first one for the lease, the second one as soon as the holder's words are
#: in the file. Until then the words are an earlier holder's.
_LEASE, _WORDS = 0, 1

WORDS_SECONDS = 1.0  # how long a holder may take to write its words; then it is somebody unknown


class Busy(Exception):
    """Somebody else has the lease; `holder`: its words, as `holder` returns them."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self.holder = holder
        super().__init__(f"run {holder['run']} of {holder['owner']} has the lease")


class Lease:
    """A lease that this process has until `release`, the end of the `with` block or its own end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Give the lease back; once more does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


def take(folder: str, words: dict[str, Any]) -> Lease:
    """Take the lease of this host, at once or not at all.

    `words`: {"run", "owner", ...}, what others are told; "time" (unix seconds) is added where it is missing.
    Raises Busy when somebody has it, and OSError when the folder cannot be used.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(file_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not lock(fd, _LEASE):
            found = holder(folder)
            if found is not None:
                raise Busy(found)
        # In place: another file under this name would be another lease.
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"time": time.time(), **words}).encode(), 0)
        lock(fd, _WORDS)
    except BaseException:
        os.close(fd)
        raise
    return Lease(fd)


def holder(folder: str) -> dict[str, Any] | None:
    """Who has the lease: the words that it gave to `take`, and "seconds": how long ago that was. None: nobody has it.

    Takes no lock, so it never keeps a `take` from succeeding. A holder that has not written its words is run "?".
    """
    try:
        fd = os.open(file_of(folder), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        begun = time.monotonic()
        while is_locked(fd, _LEASE):
            words = _words(fd) if is_locked(fd, _WORDS) else None
            if words is not None:
                return {**words, "seconds": max(0.0, time.time() - words["time"])}
            if time.monotonic() > begun + WORDS_SECONDS:
                return {"run": "?", "owner": "?", "time": time.time(), "seconds": 0.0}
            time.sleep(0.001)
        return None
    finally:
        os.close(fd)


def file_of(folder: str) -> str:
    """The lease in the folder of leases."""
    return os.path.join(folder, "lease")


def lock(fd: int, byte: int) -> bool:
    """Try to lock one byte of an open file until it is closed; whether that succeeded."""
    try:
        fcntl.fcntl(fd, _SET, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Whether another open file has a lock on this byte. Asks only; `fd` may be open for reading alone."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    found: int = struct.unpack(_FLOCK, fcntl.fcntl(fd, _GET, asked))[0]
    return found != fcntl.F_UNLCK


def _words(fd: int) -> dict[str, Any] | None:
    """The words in the file; None while they are being written."""
    try:
        found: dict[str, Any] = json.loads(os.pread(fd, 1 << 16, 0))
    except ValueError:
        return None
    return found
