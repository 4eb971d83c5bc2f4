"""A folder of this machine as a dataset: its files, their manifest, and the parts in which they travel.

Files of an earlier reading with the same size and time of change are not read again (rsync's rule). What a manifest and
a part are: playbooks/module_utils/muster_data.py. No host is known here; data.py brings a dataset to hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launch.cli.refusal import Problem, Refusal, refuse
from launch.cli.units import size
from launch.files import write_whole

VERSION_DIGITS = 16  # as muster_data has it
READ_BYTES = 1 << 20  # read at once
SMALL_BYTES = 1 << 20  # a larger file travels alone
PART_BYTES = 8 << 20  # of small files together, at most
PART_FILES = 4096
BATCH = 1000  # files whose reading is under way at once
PROGRESS_SECONDS = 10.0  # between two reports
FRESH_NS = 2_000_000_000  # a file that changed so shortly before it was read may change again without a trace
PROBLEMS_NAMED = 5  # files that a message names
CHANGED_FIX = "let nobody write to the folder meanwhile, and run the same command again"

Ranges = list[list[int]]


@dataclass(frozen=True, slots=True)
class File:
    """One file, or a folder with nothing in it, whose path ends with a slash. path: bytes, relative; sha256: of its
    content, "-" for a folder."""

    path: bytes
    size: int
    changed: int  # ns
    sha256: str


@dataclass(frozen=True)
class Part:
    """What travels: the files of each place, one after another; of several places all have the same content."""

    size: int
    places: list[Ranges]  # line numbers, the first and the last of those that follow each other


@dataclass(frozen=True)
class Dataset:
    """The files of a folder, sorted by path."""

    folder: Path
    files: Sequence[File]

    @cached_property
    def manifest(self) -> bytes:
        return b"".join(b"%d %s %s\n" % (file.size, file.sha256.encode(), file.path) for file in self.files)

    @cached_property
    def version(self) -> str:
        return hashlib.sha256(self.manifest).hexdigest()[:VERSION_DIGITS]

    @property
    def packed_manifest(self) -> bytes:
        return zlib.compress(self.manifest, 1)  # of its digests nothing shrinks

    @property
    def total(self) -> int:
        return sum(file.size for file in self.files)

    def __str__(self) -> str:
        return f"{sum(file.sha256 != '-' for file in self.files)} files, {size(self.total)}"

    def parts(self, lacking: Iterable[int]) -> dict[str, Part]:
        """digest -> part, of the files with these line numbers, ascending. Pure."""
        found: dict[str, Part] = {}
        for numbers in _grouped(self.files, lacking):
            digests = [self.files[number].sha256 for number in numbers]
            digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
            place = ranges(numbers)
            if digest in found:
                found[digest].places.append(place)
            else:
                found[digest] = Part(sum(self.files[number].size for number in numbers), [place])
        return found

    def reader(self, parts: dict[str, Part]) -> Callable[[str, int, int], bytes]:
        """A function of digest, offset and length that gives a piece of a part. It raises RuntimeError where a file is
        no longer the one that was read."""

        def read(digest: str, offset: int, length: int) -> bytes:
            data, at = bytearray(), 0
            for number in numbers_of(parts[digest].places[0]):
                file = self.files[number]
                begin = max(offset - at, 0)
                if begin < file.size:
                    data += self._piece(file, begin, min(file.size - begin, length - len(data)))
                at += file.size
                if len(data) == length:
                    break
            return bytes(data)

        return read

    def _piece(self, file: File, offset: int, length: int) -> bytes:
        path = self.folder / os.fsdecode(file.path)
        try:
            with path.open("rb", buffering=0) as opened:
                found = os.fstat(opened.fileno())
                if (found.st_size, found.st_mtime_ns) == (file.size, file.changed):
                    data = os.pread(opened.fileno(), length, offset)
                    if len(data) == length:
                        return data
        except OSError as error:
            raise RuntimeError(f"{path} cannot be read any more: {error.strerror}") from None
        raise RuntimeError(f"{path} has changed while it was sent: {CHANGED_FIX}")


def ranges(numbers: Iterable[int]) -> Ranges:
    """Ascending numbers as pairs of the first and last of those that follow each other. Pure."""
    found: Ranges = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def numbers_of(found: Ranges) -> Iterator[int]:
    """What `ranges` was made of. Pure."""
    return (number for first, last in found for number in range(first, last + 1))


def _grouped(files: Sequence[File], lacking: Iterable[int]) -> Iterator[list[int]]:
    """The numbers of the files of each part: large ones alone, small ones with those that follow. Pure."""
    small: list[int] = []
    held = 0
    for number in lacking:
        if files[number].size > SMALL_BYTES:
            yield [number]
            continue
        if small and (held + files[number].size > PART_BYTES or len(small) == PART_FILES):
            yield small
            small, held = [], 0
        small.append(number)
        held += files[number].size
    if small:
        yield small


def read(folder: Path, seen_file: Path, verify: bool, say: Callable[[str], None]) -> Dataset:
    """The dataset in a folder. Links are followed.

    seen_file: what was read before; kept also where this is interrupted. verify: read all files again.

    Raises Refusal for what cannot be sent (all of it at once), and for files that change meanwhile.
    """
    found = _walk(folder)
    known = {} if verify else _read_seen(seen_file)
    files: dict[bytes, File] = {}
    to_read: list[tuple[bytes, os.stat_result]] = []
    for path, state in found.items():
        before = known.get(path)
        if state is None:
            files[path] = File(path, 0, 0, "-")
        elif before and (before.size, before.changed) == (state.st_size, state.st_mtime_ns):
            files[path] = before
        else:
            to_read.append((path, state))
    begun = said = time.monotonic()
    total, done = sum(state.st_size for _, state in to_read), 0
    try:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            try:
                for some in (to_read[at : at + BATCH] for at in range(0, len(to_read), BATCH)):
                    for file in pool.map(lambda one: _read_file(folder, *one), some):
                        files[file.path] = file
                        done += file.size
                        if time.monotonic() - said > PROGRESS_SECONDS:
                            said = time.monotonic()
                            say(f"{size(done)} of {size(total)} read, in {said - begun:.0f} s")
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        _write_seen(seen_file, files)
    return Dataset(folder, [files[path] for path in sorted(files)])


def _read_file(folder: Path, path: bytes, expected: os.stat_result) -> File:
    """Raises Refusal for a file that changes meanwhile or cannot be read."""
    full, state = folder / os.fsdecode(path), hashlib.sha256()
    try:
        with full.open("rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                state.update(block)
            now = os.fstat(file.fileno())
    except OSError as error:
        raise refuse(str(full), f"cannot be read: {error.strerror}", "make it readable, and try again") from None
    if (now.st_size, now.st_mtime_ns) != (expected.st_size, expected.st_mtime_ns):
        raise refuse(str(full), "has changed while it was read", CHANGED_FIX)
    return File(path, now.st_size, now.st_mtime_ns, state.hexdigest())


def _walk(folder: Path) -> dict[bytes, os.stat_result | None]:
    """All files by relative path, and None for folders with nothing in them. Raises Refusal for what cannot be sent."""
    found: dict[bytes, os.stat_result | None] = {}
    problems: list[Problem] = []
    root = os.fsencode(folder)
    waiting: list[tuple[bytes, tuple[tuple[int, int], ...]]] = [(b"", ())]
    while waiting:
        relative, above = waiting.pop()
        path = os.path.join(root, relative)
        try:
            here = os.stat(path)
            if (here.st_dev, here.st_ino) in above:
                problems.append(_problem(path, "is a link to a folder that it lies in", "remove the link"))
                continue
            entries = list(os.scandir(path))
        except OSError as error:
            problems.append(_problem(path, f"cannot be read: {error.strerror}", "make it readable"))
            continue
        if relative and not entries:
            found[relative + b"/"] = None
        for entry in entries:
            at = os.path.join(relative, entry.name)
            if why := _look_at(entry, at, found):
                problems.append(_problem(entry.path, *why))
            elif entry.is_dir():
                waiting.append((at, (*above, (here.st_dev, here.st_ino))))
    if problems:
        more = len(problems) - PROBLEMS_NAMED
        last = [Problem(str(folder), f"{more} more like these", "as above")] if more > 0 else []
        raise Refusal([*problems[:PROBLEMS_NAMED], *last])
    if not found:
        raise refuse(str(folder), "there is no file in this folder", "name the folder of a dataset: SRC=...")
    return found


def _look_at(
    entry: os.DirEntry[bytes], path: bytes, found: dict[bytes, os.stat_result | None]
) -> tuple[str, str] | None:
    """Take a file up into `found`; returns (why not, fix)."""
    if b"\n" in path:
        return "has a line break in its name", "rename it"
    try:
        state = entry.stat()
    except OSError as error:
        broken = entry.is_symlink()
        fix = "remove the link" if broken else "make it readable"
        return ("is a link to what is not there" if broken else f"cannot be read: {error.strerror}"), fix
    if stat.S_ISDIR(state.st_mode):
        return None
    if not stat.S_ISREG(state.st_mode):
        return "is neither a file nor a folder", "remove it, or name another folder"
    if not os.access(entry.path, os.R_OK):
        return "cannot be read: permission denied", "make it readable"
    found[path] = state
    return None


def _problem(path: bytes, what: str, fix: str) -> Problem:
    return Problem(path.decode(errors="backslashreplace"), what, fix)


def _read_seen(path: Path) -> dict[bytes, File]:
    """What `_write_seen` has written; nothing where there is none."""
    seen: dict[bytes, File] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().encode("latin-1").split(b"\n")[:-1]:
            length, changed, digest, name = line.split(b" ", 3)
            seen[name] = File(name, int(length), int(changed), digest.decode())
    return seen


def _write_seen(path: Path, files: dict[bytes, File]) -> None:
    """Each file that was read, with its size and time of change; not what may change again within the clock's grain."""
    newest = time.time_ns() - FRESH_NS
    old = (file for file in files.values() if file.sha256 != "-" and file.changed < newest)
    lines = (b"%d %d %s %s\n" % (file.size, file.changed, file.sha256.encode(), file.path) for file in old)
    write_whole(path, b"".join(lines).decode("latin-1"))  # names need not be UTF-8
