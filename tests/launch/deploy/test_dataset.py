"""Promises: a folder's files are read once while they stay as they are; parts hold what is lacking, each file once, and
give its bytes at any offset; what cannot be sent is refused at once, by name."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli.refusal import Refusal
from launch.deploy import dataset
from launch.deploy.dataset import Dataset, File, numbers_of, ranges

OLD_NS = 1_700_000_000_000_000_000


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, ns=(OLD_NS, OLD_NS))


def read(folder: Path, verify: bool = False) -> Dataset:
    return dataset.read(folder, folder.parent / "seen", verify, lambda text: None)


def test_a_manifest_names_all_files_and_empty_folders_and_the_same_files_have_the_same_version(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, {"b/x": b"1", "a b": b"22", "é": b""})
        (tmp_path / name / "empty").mkdir()
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    sha = [hashlib.sha256(data).hexdigest() for data in (b"22", b"1", b"")]
    assert one.manifest.decode() == f"2 {sha[0]} a b\n1 {sha[1]} b/x\n0 - empty/\n0 {sha[2]} é\n"
    assert one.version == two.version == hashlib.sha256(one.manifest).hexdigest()[:16]


def test_a_file_is_read_again_only_if_its_size_or_time_changed_or_all_are_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder, {"a": b"old", "b": b"old"})
    first = read(folder)
    write(folder, {"a": b"new"})  # same size, same time
    assert read(folder).version == first.version
    assert read(folder, verify=True).version != first.version
    write(folder, {"a": b"newer"})
    assert read(folder).files[0].size == 5


def test_what_changed_just_now_is_read_again_the_next_time(tmp_path: Path) -> None:
    """It may change once more within the grain of the file system's clock."""
    folder = tmp_path / "data"
    write(folder, {"a": b"old"})
    os.utime(folder / "a")
    now = (folder / "a").stat().st_mtime_ns
    first = read(folder)
    (folder / "a").write_bytes(b"new")
    os.utime(folder / "a", ns=(now, now))
    assert read(folder).version != first.version


def test_names_that_are_no_utf_8_come_through(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder, {os.fsdecode(b"\xff.bin"): b"x"})
    assert read(folder).files == read(folder).files
    assert read(folder).manifest.endswith(b" \xff.bin\n")


def test_links_are_followed_and_what_cannot_be_sent_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(tmp_path, {"elsewhere/x": b"1"})
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert [file.path for file in read(folder).files] == [b"link/x"]
    (folder / "link" / "up").symlink_to(folder)
    (folder / "nowhere").symlink_to(tmp_path / "nothing")
    write(folder, {"line\nbreak": b""})
    with socket.socket(socket.AF_UNIX) as special:
        special.bind(os.path.relpath(folder / "s"))
        with pytest.raises(Refusal) as refused:
            read(folder)
    whats = {problem.what for problem in refused.value.problems}
    assert whats == {
        *("is a link to a folder that it lies in", "is a link to what is not there"),
        *("has a line break in its name", "is neither a file nor a folder"),
    }


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="no file in this folder"):
        read(tmp_path)


def test_a_file_that_changes_while_it_is_sent_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder, {"a": b"12345"})
    found = read(folder)
    parts = found.parts([0])
    [digest] = parts
    piece = found.reader(parts)
    assert piece(digest, 1, 3) == b"234"
    os.utime(folder / "a")
    with pytest.raises(RuntimeError, match="has changed while it was sent"):
        piece(digest, 0, 5)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    write(folder, {"a": b"12345"})
    walk = dataset._walk

    def then_changed(folder: Path) -> Any:
        found = walk(folder)
        os.utime(folder / "a")
        return found

    monkeypatch.setattr(dataset, "_walk", then_changed)
    with pytest.raises(Refusal, match="has changed while it was read"):
        read(folder)


@pytest.mark.parametrize("seed", range(30))
def test_parts_hold_each_lacking_file_once_and_give_its_bytes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(dataset, "SMALL_BYTES", 40)
    monkeypatch.setattr(dataset, "PART_BYTES", 100)
    monkeypatch.setattr(dataset, "PART_FILES", 7)
    contents = [draw.randbytes(draw.choice([1, 5, 30, 40, 41, 99])) for _ in range(draw.randint(1, 6))]
    write(tmp_path / "data", {f"{number:03}": draw.choice(contents) for number in range(60)})
    found = read(tmp_path / "data")
    lacking = sorted(draw.sample(range(60), draw.randint(1, 60)))
    parts = found.parts(lacking)
    numbers = [number for part in parts.values() for place in part.places for number in numbers_of(place)]
    assert sorted(numbers) == lacking
    piece = found.reader(parts)
    for digest, part in parts.items():
        for place in part.places:
            files = [found.files[number] for number in numbers_of(place)]
            whole = b"".join((tmp_path / "data" / os.fsdecode(file.path)).read_bytes() for file in files)
            assert len(whole) == part.size and (len(files) == 1 or (part.size <= 100 and len(files) <= 7))
            assert b"".join(piece(digest, at, min(13, part.size - at)) for at in range(0, part.size, 13)) == whole


@pytest.mark.parametrize("seed", range(10))
def test_ranges_are_what_they_were_made_of(seed: int) -> None:
    numbers = sorted(random.Random(seed).sample(range(50), 20))
    assert list(numbers_of(ranges(numbers))) == numbers
    assert all(last + 1 < first for (_, last), (first, _) in zip(ranges(numbers), ranges(numbers)[1:], strict=False))


def test_a_million_files_take_little_memory_for_each() -> None:
    file = File(b"train/n01440764/n01440764_10026.JPEG", 110_000, OLD_NS, "ab" * 32)
    assert sys.getsizeof(file) < 100
