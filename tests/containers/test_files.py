"""Promises about what this room writes: it is there whole or not at all, and a lock is held by one process."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from containers import files
from containers.engine import ContainersError


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    files.write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole(path, "new \ud800")
    assert path.read_text() == "old"
    files.write_whole(path, "new")
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["new"]


def test_a_drafted_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / ".wheels-of-a-killed-call").mkdir()
    with pytest.raises(ValueError, match="pip"), files.drafted(tmp_path / "wheels-1") as draft:
        (draft / "half").touch()
        raise ValueError("pip")
    assert list(tmp_path.iterdir()) == []
    with files.drafted(tmp_path / "wheels-1") as draft:
        (draft / "whole").touch()
        assert not (tmp_path / "wheels-1").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["wheels-1", "whole"]


def test_a_temporary_folder_takes_the_place_of_those_that_killed_calls_left(tmp_path: Path) -> None:
    (tmp_path / "export-1" / "blobs").mkdir(parents=True)
    with files.scratch(tmp_path, "export-") as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_holds_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.2)
    path = tmp_path / "lab.lock"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ContainersError, match="has held a lock") as caught, files.locked(path):
            pass
    assert str(path) in caught.value.where
    with files.locked(path):
        pass
