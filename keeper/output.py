"""What a rank, or torchrun, has printed: kept in files with a size limit, and read by byte offset while it is written.

A stream is one sequence of bytes, counted from 0. Its first part is in `<stream>.log`, its last part in segments
`<stream>.log.<offset of the first byte, 16 digits>`; between them the oldest segments are removed, so that a stream
takes LIMIT_BYTES at most. The keeper writes; the door and the control machine read. Neither waits for the other.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional, Tuple

HEAD_BYTES = 33554432  # 32 MiB: the first part
SEGMENT_BYTES = 16777216  # 16 MiB: each file of the last part
LIMIT_BYTES = 268435456  # 256 MiB: all files of a stream
REMEMBERED_BYTES = 65536  # of the end, in memory
BLOCK_BYTES = 262144  # read at once

_NAME = re.compile(r"(.+)\.log(?:\.(\d{16}))?")


class Writer:
    """Appends to one stream. Goes on after the last byte where the stream exists. For one thread."""

    def __init__(
        self,
        folder: Path,
        stream: str,
        head_bytes: int = HEAD_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """Makes the folder (0700). Raises OSError. The sizes of a stream never change."""
        assert head_bytes + segment_bytes <= limit_bytes
        self._folder, self._stream = folder, stream
        self._head, self._segment = head_bytes, segment_bytes
        self._segments = (limit_bytes - head_bytes) // segment_bytes  # that are kept
        self._file: Optional[int] = None
        self._start = 0  # of the open file
        self._lost = ""  # why bytes before the next ones are missing
        self._remembered = bytearray()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.end = Reader(folder).end(stream)  # offset of the next byte

    def append(self, data: bytes) -> None:
        """Write at once, unbuffered. Raises OSError (a full disk) when not all of `data` could be written.

        What could not be written is lost, and does not count in offsets; a line says so once writing succeeds again.
        It is in memory all the same.
        """
        self._remembered += data[-REMEMBERED_BYTES:]
        if len(self._remembered) > 2 * REMEMBERED_BYTES:
            del self._remembered[:-REMEMBERED_BYTES]
        if self._lost:
            data = f"\nmuster: output is missing here, it could not be written: {self._lost}\n".encode() + data
        rest = memoryview(data)
        try:
            while rest:
                file, room = self._open()
                written = os.write(file, rest[:room])
                self.end += written
                rest = rest[written:]
        except OSError as error:
            self._lost = error.strerror or str(error)
            raise
        self._lost = ""

    def last_lines(self, count: int) -> List[str]:
        """The last lines, of the last REMEMBERED_BYTES; of one that was drawn over (a progress bar), its last form."""
        kept = bytes(self._remembered[-REMEMBERED_BYTES:])
        lines = kept.decode(errors="replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        if len(kept) == REMEMBERED_BYTES and len(lines) > 1:
            del lines[0]  # its beginning is not here
        return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:]] if count > 0 else []

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> Tuple[int, int]:
        """The file that takes the next byte, and how many bytes fit into it."""
        start, size = 0, self._head
        if self.end >= self._head:
            start, size = self._head + (self.end - self._head) // self._segment * self._segment, self._segment
        if self._file is None or self._start != start:
            self.close()
            path = self._folder / file_name(self._stream, start)
            if start and not path.exists():
                self._make_room()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._start = start
        return self._file, start + size - self.end

    def _make_room(self) -> None:
        """Remove the oldest segments, so that one more may be written."""
        segments = [start for start in Reader(self._folder).files().get(self._stream, []) if start]
        for start in segments[: max(0, len(segments) + 1 - self._segments)]:
            (self._folder / file_name(self._stream, start)).unlink()


class Reader:
    """Reads the streams of a folder, which may not be there yet, while they are written. Follows no symbolic links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> Dict[str, List[int]]:
        """The streams there are, and the offsets where their files begin, ascending."""
        found: Dict[str, List[int]] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    parts = _NAME.fullmatch(entry.name)
                    if parts and entry.is_file(follow_symlinks=False):
                        found.setdefault(parts[1], []).append(int(parts[2] or 0))
        except FileNotFoundError:
            pass
        return {stream: sorted(found[stream]) for stream in sorted(found)}

    def read(self, stream: str, offset: int, limit: int) -> Tuple[int, bytes]:
        """(where the data begins, at most `limit` bytes). It begins later than asked where what was asked is dropped.

        No bytes: there are none yet. Fewer than `limit` do not mean that there are no more.
        """
        seen = -1
        while True:
            starts = self.files().get(stream, [])
            here = [start for start in starts if start <= offset]
            if here:
                data = self._read(stream, here[-1], offset - here[-1], limit)
                if data:
                    return offset, data
            later = [start for start in starts if start > offset]
            if not later:
                return offset, b""
            # A list made while files are created may lack one that is older than the last it has; the next list has it.
            if later[0] == seen:
                return seen, self._read(stream, seen, 0, limit) or b""
            seen = later[0]

    def end(self, stream: str) -> int:
        """The offset behind the last byte; 0 where there is none."""
        while True:
            starts = self.files().get(stream)
            if not starts:
                return 0
            try:
                return starts[-1] + os.lstat(self._folder / file_name(stream, starts[-1])).st_size
            except FileNotFoundError:  # dropped just now: there are newer ones
                continue

    def offset_of_last_lines(self, stream: str, count: int) -> int:
        """Where the last `count` lines begin; later where what is before them is dropped. A part of a line is one."""
        end = self.end(stream)
        if count <= 0:
            return end
        block_end = end - 1  # the newline that ends the last line begins none
        while block_end > 0:
            block_start = max(0, block_end - BLOCK_BYTES)
            begin, data = self._up_to(stream, block_start, block_end)
            newlines = data.count(b"\n")
            if newlines >= count:
                at = len(data)
                for _ in range(count):
                    at = data.rindex(b"\n", 0, at)
                return begin + at + 1
            if begin > block_start:
                return begin
            count -= newlines
            block_end = block_start
        return 0

    def _up_to(self, stream: str, start: int, end: int) -> Tuple[int, bytes]:
        """(where it begins, all bytes from there to `end`): from `start`, or from behind the last gap after it."""
        begin, data, at = start, b"", start
        while at < end:
            found, more = self.read(stream, at, end - at)
            if found >= end or not more:
                return end, b""
            if found > at:
                begin, data = found, b""
            data += more[: end - found]
            at = found + len(more)
        return begin, data

    def _read(self, stream: str, start: int, skip: int, limit: int) -> bytes:
        """Bytes of one file; none where it is dropped, or is no file."""
        try:
            return read_file(self._folder / file_name(stream, start), skip, limit)
        except FileNotFoundError:
            return b""


def read_file(path: Path, offset: int, limit: int) -> bytes:
    """At most `limit` bytes of a file of a run. Raises FileNotFoundError, also for what is no plain file.

    A script can write into its run's folder: no symbolic link is followed, and no pipe is waited for.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "no plain file", str(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no plain file", str(path))
        return os.pread(file, limit, offset)
    finally:
        os.close(file)


def assemble(folder: Path, stream: str, into: BinaryIO) -> int:
    """Write all that a folder has of a stream, in one piece; how many bytes were dropped. For gathered files.

    One line stands in the place of what was dropped.
    """
    reader, offset, dropped, ended_line = Reader(folder), 0, 0, True
    while True:
        begin, data = reader.read(stream, offset, BLOCK_BYTES)
        if begin > offset:
            dropped += begin - offset
            line = f"muster: {begin - offset} bytes of output are left out here, more than is kept of one stream\n"
            into.write((b"" if ended_line else b"\n") + line.encode())
        if not data:
            return dropped
        into.write(data)
        offset, ended_line = begin + len(data), data.endswith(b"\n")


def file_name(stream: str, start: int) -> str:
    """The name of the file of a stream that begins with its byte number `start`."""
    return f"{stream}.log.{start:016d}" if start else f"{stream}.log"
