"""Promises: what is printed is kept up to the limit, and read by offset, exactly, while it is written."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keeper import output
from keeper.output import Reader, Writer
from tests.conftest import ROOT

HEAD, SEGMENT, LIMIT = 50, 20, 110  # bytes: three segments are kept

PIECES = st.lists(st.binary(max_size=70), max_size=30)
#: Bytes to write, or how many to read.
STEPS = st.lists(st.one_of(st.binary(min_size=1, max_size=90), st.integers(1, 60)), max_size=60)


@contextmanager
def new_folder() -> Iterator[Path]:
    """For examples of Hypothesis, which share a test's tmp_path."""
    made = Path(tempfile.mkdtemp())
    yield made / "output"
    while _writers:
        _writers.pop().close()
    shutil.rmtree(made)


_writers: list[Writer] = []  # that `small` has made


def small(folder: Path) -> Writer:
    _writers.append(Writer(folder, "rank-0", HEAD, SEGMENT, LIMIT))
    return _writers[-1]


def kept(total: int) -> list[tuple[int, int]]:
    """The parts of a stream of `total` bytes that its files should have."""
    if total <= HEAD:
        return [(0, total)]
    last = (total - HEAD - 1) // SEGMENT  # the last segment's number
    return [(0, HEAD), (HEAD + max(0, last - 2) * SEGMENT, total)]


def read_all(reader: Reader, offset: int = 0, limit: int = 1000) -> list[tuple[int, bytes]]:
    pieces: list[tuple[int, bytes]] = []
    while True:
        begin, data = reader.read("rank-0", offset, limit)
        if not data:
            return pieces
        pieces.append((begin, data))
        offset = begin + len(data)


@given(PIECES)
def test_all_is_read_as_it_was_written_but_for_what_the_limit_drops(pieces: list[bytes]) -> None:
    with new_folder() as folder:
        writer, whole = small(folder), b"".join(pieces)
        for piece in pieces:
            writer.append(piece)
            assert sum(file.stat().st_size for file in folder.iterdir()) <= LIMIT
        assert writer.end == Reader(folder).end("rank-0") == len(whole)
        expected = b"".join(whole[begin:end] for begin, end in kept(len(whole)))
        found = read_all(Reader(folder))
        assert b"".join(data for _, data in found) == expected
        assert all(whole[begin : begin + len(data)] == data for begin, data in found)


@given(STEPS)
def test_a_reader_by_offset_gets_every_byte_that_is_still_there_while_the_writer_rotates(
    steps: list[bytes | int],
) -> None:
    with new_folder() as folder:
        writer, reader, whole, offset = small(folder), Reader(folder), b"", 0
        for step in steps:
            if isinstance(step, bytes):
                writer.append(step)
                whole += step
                continue
            begin, data = reader.read("rank-0", offset, step)
            there = [at for first, end in kept(len(whole)) for at in range(max(first, offset), end)]
            assert begin == (there[0] if there else offset) and data == whole[begin : begin + len(data)]
            assert len(data) <= step and (data != b"") == (there != [])
            offset = begin + len(data)


#: Writes numbered lines as fast as it can.
WRITES = """
import sys
from pathlib import Path
from keeper.output import Writer
writer = Writer(Path(sys.argv[1]), "rank-0", 50000, 20000, 110000)
for number in range(0, 100000, 10):
    writer.append(b"".join(b"%09d\\n" % n for n in range(number, number + 10)))
"""


@pytest.mark.slow
def test_a_reader_beside_a_writing_process_gets_what_stands_at_each_offset_to_the_end(tmp_path: Path) -> None:
    """A line has ten bytes, and its number is its offset divided by ten."""
    process = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], cwd=ROOT)
    reader, offset, read = Reader(tmp_path), 0, 0
    while True:
        ended = process.poll() is not None
        begin, data = reader.read("rank-0", offset, 5000)
        lines = b"".join(b"%09d\n" % number for number in range(begin // 10, (begin + len(data)) // 10 + 1))
        assert begin >= offset and data == lines[begin % 10 :][: len(data)]
        read, offset = read + len(data), begin + len(data)
        if ended and not data:
            break
    assert process.returncode == 0 and offset == 1_000_000 and read >= 50_000


def test_a_list_of_files_that_lacks_one_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What readdir returns of files that are made meanwhile is not in order."""
    small(tmp_path).append(bytes(range(100)))
    lists = iter([{"rank-0": [0, 90]}])
    real = Reader.files
    monkeypatch.setattr(Reader, "files", lambda self: next(lists, None) or real(self))
    assert Reader(tmp_path).read("rank-0", 50, 100) == (50, bytes(range(50, 70)))


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    writer = small(tmp_path / "output")
    writer.append(b"x" * 200)
    assert (tmp_path / "output").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "output").iterdir()} == {0o600}


@pytest.mark.slow
@given(PIECES, PIECES)
def test_a_writer_goes_on_behind_what_is_there(before: list[bytes], after: list[bytes]) -> None:
    with new_folder() as folder, new_folder() as other:
        for pieces in (before, after):
            writer = small(folder)
            for piece in pieces:
                writer.append(piece)
            writer.close()
        small(other).append(b"".join(before + after))
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
            file.name: file.read_bytes() for file in other.iterdir()
        }


@given(st.lists(st.text("ab\n", max_size=30), max_size=12), st.integers(0, 8))
def test_the_offset_of_the_last_lines_is_where_they_begin(pieces: list[str], count: int) -> None:
    text = "".join(pieces)[:HEAD].encode()
    with new_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "BLOCK_BYTES", 7)
        small(folder).append(text)
        lines = text.splitlines(keepends=True)
        assert Reader(folder).offset_of_last_lines("rank-0", count) == sum(
            map(len, lines[: max(0, len(lines) - count)])
        )


@given(st.integers(0, 300), st.integers(0, 100), st.integers(1, 40))
@example(134, 43, 1)  # a block that ends just behind what was dropped
def test_the_last_lines_of_which_some_are_dropped_begin_behind_what_is_dropped(
    total: int, count: int, size: int
) -> None:
    """Lines of `size` bytes; what is kept of the end may begin within one."""
    with new_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "BLOCK_BYTES", 7)
        text = ((b"x" * (size - 1) + b"\n") * 300)[:total]
        small(folder).append(text)
        lines = text.splitlines(keepends=True)
        wanted = sum(map(len, lines[: max(0, len(lines) - count)]))
        first = kept(total)[-1][0]
        behind_the_gap = first if first > HEAD else 0
        assert Reader(folder).offset_of_last_lines("rank-0", count) == max(wanted, behind_the_gap)


def test_the_last_lines_are_in_memory_and_a_bar_is_its_last_form(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "rank-0")
    writer.append("früher\n".encode() * 20_000)
    writer.append(b"\r10%\r20%\r30%\nTraceback\r\n  caf\xe9\nKeyError: 1")
    assert writer.last_lines(5) == ["früher", "30%", "Traceback", "  caf�", "KeyError: 1"]
    assert writer.last_lines(0) == []
    assert set(writer.last_lines(100_000)[:-4]) == {"früher"}  # the first one, which is cut, is not there


def test_a_full_disk_is_said_once_a_call_and_what_is_lost_is_said_in_its_place(tmp_path: Path) -> None:
    writer = small(tmp_path)
    writer.append(b"one\n")
    writer.close()
    (tmp_path / "rank-0.log").rename(tmp_path / "kept")
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    for lost in (b"two\n", b"three\n"):
        with pytest.raises(OSError) as raised:
            writer.append(lost)
        assert raised.value.errno == errno.ENOSPC
    assert writer.last_lines(3) == ["one", "two", "three"]
    assert writer.end == 4
    writer.close()
    (tmp_path / "kept").rename(tmp_path / "rank-0.log")
    writer.append(b"four\n")
    text = b"".join(data for _, data in read_all(Reader(tmp_path)))
    assert text == (
        b"one\n\nmuster: output is missing here, it could not be written: "
        + os.strerror(errno.ENOSPC).encode()
        + b"\nfour\n"
    )


@given(PIECES)
def test_gathered_files_make_one_file_with_a_line_in_the_place_of_what_was_dropped(pieces: list[bytes]) -> None:
    with new_folder() as folder:
        for piece in pieces:
            small(folder).append(piece)
        whole, into = b"".join(pieces), io.BytesIO()
        dropped = output.assemble(folder, "rank-0", into)
        parts = [whole[begin:end] for begin, end in kept(len(whole))]
        assert dropped == len(whole) - sum(map(len, parts))
        if dropped:
            line = f"muster: {dropped} bytes of output are left out here, more than is kept of one stream\n".encode()
            parts.insert(1, (b"" if parts[0].endswith(b"\n") else b"\n") + line)
        assert into.getvalue() == b"".join(parts)


def test_links_and_pipes_that_a_script_left_there_are_no_output(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "rank-1.log")
    reader = Reader(tmp_path)
    assert reader.files() == {} and reader.read("rank-0", 0, 10) == (0, b"") and reader.end("rank-1") == 0
    for name in ("rank-0.log", "rank-1.log"):
        with pytest.raises(FileNotFoundError):
            output.read_file(tmp_path / name, 0, 10)


def test_a_folder_that_is_not_there_yet_is_an_empty_stream(tmp_path: Path) -> None:
    assert Reader(tmp_path / "output").read("rank-0", 7, 10) == (7, b"")
