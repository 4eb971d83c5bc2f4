"""Promise: how a run ended is written down also where the disk is full, which is why many a run ends."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from keeper.documents import RESERVED_BYTES, RESERVED_FILES, Documents


def rooms(folder: Path) -> list[Path]:
    """The files that keep room."""
    return sorted(folder.glob(".room-*"))


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk on which nothing fits while there are so many of these files; half of a line fits."""
    needed, write = [RESERVED_FILES], os.write

    def short(file: int, data: bytes) -> int:
        if len(rooms(tmp_path)) < needed[0]:
            return write(file, data)
        if half := write(file, data[: len(data) // 2]):
            return half
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keeper.documents.os.write", short)
    return needed


def test_room_is_really_taken(tmp_path: Path) -> None:
    Documents(tmp_path).reserve()
    assert [path.stat().st_blocks * 512 >= RESERVED_BYTES for path in rooms(tmp_path)] == [True] * RESERVED_FILES


def test_an_event_for_which_the_disk_has_no_room_takes_what_was_kept(tmp_path: Path, full: list[int]) -> None:
    documents = Documents(tmp_path)
    documents.reserve()
    for number in range(10):
        documents.note({"event": number})
    assert lines(tmp_path) == [{"event": number} for number in range(10)]
    assert len(rooms(tmp_path)) == RESERVED_FILES - 1


def test_events_leave_room_for_the_end_and_no_half_lines(tmp_path: Path, full: list[int]) -> None:
    full[0] = 0  # the disk is full whatever is given up
    documents = Documents(tmp_path)
    documents.reserve()
    for number in range(10):
        documents.note({"event": number})
    assert lines(tmp_path) == [] and len(rooms(tmp_path)) == 1
    full[0] = 1
    documents.release()
    documents.note({"event": "exit"})
    assert lines(tmp_path) == [{"event": "exit"}] and rooms(tmp_path) == []


def test_a_promise_for_which_there_is_no_room_is_gone(tmp_path: Path, full: list[int]) -> None:
    documents = Documents(tmp_path)
    full[0] = RESERVED_FILES + 1  # there is room
    documents.reserve()
    documents.keep("promises.json", {"votes": 1})
    full[0] = RESERVED_FILES
    documents.keep("promises.json", {"votes": 2})
    assert documents.read("promises.json") == {"votes": 2} and len(rooms(tmp_path)) == RESERVED_FILES - 1
    full[0] = 0  # the disk is full whatever is given up
    documents.keep("promises.json", {"votes": 3})
    assert not list(tmp_path.glob("*promises*")) and len(rooms(tmp_path)) == 1


def test_a_document_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    documents = Documents(tmp_path)
    documents.write("state.json", {"step": 1})
    (tmp_path / ".state.json.draft").mkdir()  # it cannot be written now
    documents.write("state.json", {"step": 2})
    assert documents.read("state.json") == {"step": 1} and documents.read("exit.json") == {}
