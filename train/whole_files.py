"""Files that are whole or absent: written under a temporary name, hashed on the way, synced, then renamed."""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

WRITE_BYTES = 1 << 24  # that are handed to the kernel at once; with fewer a training beside it loses more time
DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux
#: Buffers of drafts that are gone: to touch new memory takes longer than to write.
_spare = list[npt.NDArray[np.uint8]]()


class Draft:
    """A file that is being written, e.g. by `torch.save`. It takes its final name in `commit`; else it is removed.

    The name is this draft's own, so that two hosts may write to one shared folder; the lock held on it shows
    `clear_drafts` that its writer is alive. An error of the disk is kept for `commit`: raised inside `write`
    it would pass through torch's C++ writer.

    What is large goes to the disk past the page cache, where the file system can: that is left to the files that are
    read again and again, and the kernel has less to do beside a training.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the folder does not exist or cannot be written to."""
        self.path = path
        self.draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        self.descriptor = open_locked(self.draft)
        self.hash = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None
        self.buffer = _spare.pop() if _spare else new_buffer()
        self.buffered = 0

    def write(self, data: bytes | memoryview) -> int:
        piece = memoryview(data).cast("B")
        self.bytes += len(piece)
        while piece and self.error is None:
            part, piece = piece[: WRITE_BYTES - self.buffered], piece[WRITE_BYTES - self.buffered :]
            end = self.buffered + len(part)
            np.copyto(self.buffer[self.buffered : end], np.frombuffer(part, np.uint8))  # without the GIL
            self.buffered = end
            if end == WRITE_BYTES:
                self._write_buffer(direct=True)
        return memoryview(data).nbytes

    def _write_buffer(self, direct: bool) -> None:
        data, self.buffered = self.buffer.data[: self.buffered], 0
        self.hash.update(data)
        set_direct(self.descriptor, direct)
        self.error = write_all(self.descriptor, data)

    def sha256(self) -> str:
        """Of all that was written until now, in hexadecimal."""
        if self.buffered and self.error is None:
            self._write_buffer(direct=False)
        return self.hash.hexdigest()

    def flush(self) -> None:
        """`sync` does it; torch.save wants the method."""

    def sync(self) -> None:
        """Its content is on the disk. Raises OSError, also those of earlier writes."""
        self.sha256()
        if self.error is not None:
            raise self.error
        os.fsync(self.descriptor)

    def commit(self) -> None:
        """Makes it durable under its final name. Raises OSError, also those of earlier writes."""
        self.sync()
        self.draft.replace(self.path)
        sync_folder(self.path.parent)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.draft.unlink(missing_ok=True)  # gone already if committed
        os.close(self.descriptor)
        if not _spare:
            _spare.append(self.buffer)


def new_buffer() -> npt.NDArray[np.uint8]:
    """Whole pages, as direct writes need them; private, or ranks that are forked with a spare one would share it."""
    return np.frombuffer(mmap.mmap(-1, WRITE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def open_locked(draft: Path) -> int:
    """A new file, open for writing, its lock held. Again where `clear_drafts` came between open and lock. Its
    permissions are those of the umask; on a host the door hands a run's files to who gathers them (keeper/door.py)."""
    while True:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: then `clear_drafts` cannot lock it either, and leaves it
            return descriptor
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """What is done to `path` and the files that belong to it inside, no other process does meanwhile, of this host or
    of another one that shares the folder; where the file system has no locks it may. Raises OSError.
    """
    lock = path.with_name(f".{path.name}.lock.tmp")
    descriptor = open_locked(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview) -> OSError | None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(descriptor):
                return error
            set_direct(descriptor, False)  # this disk wants other sizes, or the last write took a part of its bytes
    return None


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


def set_direct(descriptor: int, direct: bool) -> None:
    """Whether writes pass the page cache by. No-op where the file system cannot do that."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | DIRECT if direct else flags & ~DIRECT)


def write_file(path: Path, data: bytes) -> None:
    """A small file, whole or absent. Raises OSError."""
    with Draft(path) as draft:
        draft.write(data)
        draft.commit()


def write_json(path: Path, document: dict[str, Any]) -> None:
    """One indented JSON object, whole or absent. Raises OSError."""
    write_file(path, (json.dumps(document, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_drafts(folder: Path) -> None:
    """Removes what killed writers left: drafts whose lock no process holds."""
    for draft in [*folder.glob(".step-*.tmp"), *folder.glob(".member-*.tmp")]:
        try:
            descriptor = os.open(draft, os.O_WRONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink(missing_ok=True)
        except OSError:  # locked: being written by another process
            pass
        finally:
            os.close(descriptor)
