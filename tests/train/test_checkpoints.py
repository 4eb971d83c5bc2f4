"""Promises of checkpoints.files, prune and whole_files: whole or absent, verified when read, nothing left behind."""

import errno
import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoints_disk import largest_file
from train import whole_files
from train.checkpoints import files, prune
from train.checkpoints.files import CheckpointError
from train.whole_files import Draft, clear_drafts

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(1000.0)},
    "position": {"epoch": 1, "batch": 0, "step": 7},
    "config": {"lr": 0.1},
}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = files.write(tmp_path, 7, STATE)
    for state in (files.load(tmp_path, 7), files.load_path(path)):
        assert state["model"]["w"].equal(STATE["model"]["w"])
        assert state["position"] == STATE["position"]
    assert files.saved_steps(tmp_path) == [7]


def test_the_file_is_one_that_torch_load_reads(tmp_path: Path) -> None:
    path = files.write(tmp_path, 7, STATE)
    assert torch.load(path, weights_only=True)["model"]["w"].equal(STATE["model"]["w"])


def test_the_manifest_holds_size_hash_and_metric(tmp_path: Path) -> None:
    path = files.write(tmp_path, 7, STATE, 0.5)
    manifest = json.loads((tmp_path / "step-7.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["bytes"] == path.stat().st_size
    assert (manifest["step"], manifest["metric"]) == (7, 0.5)


def test_a_metric_that_is_no_number_is_none(tmp_path: Path) -> None:
    files.write(tmp_path, 7, STATE, float("nan"))
    assert files.verify(tmp_path, 7)["metric"] is None


def test_checkpoints_of_the_schema_before_are_read(tmp_path: Path) -> None:
    files.write(tmp_path, 7, STATE)
    manifest = json.loads((tmp_path / "step-7.json").read_text()) | {"schema": 1}
    del manifest["metric"]
    (tmp_path / "step-7.json").write_text(json.dumps(manifest))
    assert files.load(tmp_path, 7)["position"]["step"] == 7


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_who_may_read_it_is_said_by_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    """On a host the keeper's door gives the files to whoever gathers them."""
    before = os.umask(umask)
    try:
        path = files.write(tmp_path / "deep" / "checkpoints", 7, STATE)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == path.with_suffix(".json").stat().st_mode & 0o777 == mode


def test_an_evaluation_is_added_to_the_manifest(tmp_path: Path) -> None:
    path = files.write(tmp_path, 7, STATE)
    before = files.manifest(tmp_path, 7)
    files.add_evaluation(tmp_path, 7, 0.75, {"samples": 4})
    assert files.verify(tmp_path, 7) == before | {"metric": 0.75, "evaluation": {"samples": 4}}
    files.add_evaluation(tmp_path, 7, float("nan"), {"samples": 4})
    assert files.manifest(tmp_path, 7)["metric"] is None and path.exists()
    files.remove(tmp_path, 7)  # by another host of a shared folder
    files.add_evaluation(tmp_path, 7, 0.5, {"samples": 4})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "writable"), (errno.EROFS, "writable"), (errno.ENOSPC, "; make room,")]
)
def test_advice_about_a_checkpoint_that_cannot_be_written_fits_the_reason(
    number: int, advice: str, tmp_path: Path
) -> None:
    said = str(files.cannot_write(tmp_path / "step-1.pt", OSError(number, os.strerror(number))))
    assert advice in said and ("make room" in said) == (number == errno.ENOSPC)
    assert "or choose another folder with --run-dir" in said


@pytest.mark.parametrize("where", [0, 100, -100])
def test_a_flipped_bit_is_refused(tmp_path: Path, where: int) -> None:
    path = files.write(tmp_path, 7, STATE)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="altered"):
        files.load(tmp_path, 7)


def test_a_torn_checkpoint_is_refused_and_others_are_named(tmp_path: Path) -> None:
    files.write(tmp_path, 6, STATE)
    path = files.write(tmp_path, 7, STATE)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"torn.*other checkpoints there: \[6\]"):
        files.load(tmp_path, 7)


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    path = files.write(tmp_path, 7, STATE)
    path.with_suffix(".json").unlink()
    assert files.saved_steps(tmp_path) == []
    with pytest.raises(CheckpointError, match="no checkpoint"):
        files.load(tmp_path, 7)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 2, "step": 8}', "\x00"])
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    files.write(tmp_path, 7, STATE)
    (tmp_path / "step-7.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"step-7\.json"):
        files.load(tmp_path, 7)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def test_pickled_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write(tmp_path, 7, {"model": Payload()})  # with a manifest that matches
    with pytest.raises(CheckpointError, match="more than tensors") as refused:
        files.load(tmp_path, 7)
    assert not (tmp_path / "owned").exists()
    said = str(refused.value)
    assert "GLOBAL posix.system" in said and "this trainer did not write it" in said
    assert not any(advice in said for advice in ("weights_only", "likely succeed", "add_safe_globals", "trust"))


def test_a_full_disk_is_reported_and_leaves_the_older_one(tmp_path: Path) -> None:
    files.write(tmp_path, 7, STATE)
    before = names(tmp_path)
    with largest_file(1000), pytest.raises(CheckpointError, match=r"cannot write.*step-8.*make room"):
        files.write(tmp_path, 8, STATE)
    assert names(tmp_path) == before
    assert files.load(tmp_path, 7)["position"]["step"] == 7


@pytest.mark.parametrize(
    "disk",
    [
        "as it is",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("refuses direct writes", "takes a part", "has no direct writes")
        ),
    ],
)
def test_a_large_file_is_whole_whatever_the_disk_makes_of_direct_writes(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, write = os.urandom(2 * whole_files.WRITE_BYTES + 12345), os.write

    def odd(descriptor: int, data: memoryview) -> int:
        if whole_files.is_direct(descriptor) and (disk == "refuses direct writes" or len(data) % 512):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data[: len(data) // 2 + 100] if disk == "takes a part" else data)

    if disk == "has no direct writes":
        monkeypatch.setattr(whole_files, "set_direct", lambda descriptor, direct: None)
    elif disk != "as it is":
        monkeypatch.setattr(os, "write", odd)
    with Draft(tmp_path / "large") as draft:
        for begin in range(0, len(content), 100_001):  # pieces that do not fit the buffer
            draft.write(content[begin : begin + 100_001])
        draft.write(b"")
        draft.commit()
    assert (tmp_path / "large").read_bytes() == content
    assert draft.sha256() == hashlib.sha256(content).hexdigest() and draft.bytes == len(content)


@pytest.mark.slow
def test_a_forked_process_does_not_write_into_this_ones_file(tmp_path: Path) -> None:
    whole_files.write_file(tmp_path / "before", b"leaves its buffer for the next file")
    fork = multiprocessing.get_context("fork")
    parent_wrote, child_wrote = fork.Event(), fork.Event()

    def write_meanwhile() -> None:
        assert parent_wrote.wait(60)
        with Draft(tmp_path / "child") as draft:
            draft.write(b"of the child")
            child_wrote.set()

    child = fork.Process(target=write_meanwhile)
    child.start()
    with Draft(tmp_path / "parent") as draft:
        draft.write(b"of the parent")
        parent_wrote.set()
        assert child_wrote.wait(60)
        draft.commit()
    child.join(60)
    assert child.exitcode == 0
    assert (tmp_path / "parent").read_bytes() == b"of the parent"


def test_drafts_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    (tmp_path / ".step-6.pt.0123abcd.tmp").write_bytes(b"torn")
    with Draft(tmp_path / "step-7.pt") as alive:
        clear_drafts(tmp_path)
        assert names(tmp_path) == [alive.draft.name]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("metrics", "keep", "written", "stay"),
    [
        ({8: None, 9: None, 10: None, 11: None}, 2, 11, {10, 11}),
        ({8: 0.9, 9: 0.5, 10: None, 11: 0.7}, 2, 11, {8, 10, 11}),  # the best one too
        ({8: 0.9, 9: 0.9, 10: 0.1}, 1, 10, {9, 10}),  # the newest of equals
        ({8: None, 20: None, 30: None}, 1, 8, {8, 30}),  # what is known to be intact
        ({8: None, 9: None}, 0, 9, {9}),  # at least one
    ],
)
def test_the_newest_the_best_and_the_written_one_stay(
    metrics: dict[int, float | None], keep: int, written: int, stay: set[int]
) -> None:
    assert prune.to_keep(metrics, keep, written) == stay


def test_the_best_is_known_from_the_manifests(tmp_path: Path) -> None:
    for step, metric in ((1, 0.2), (2, 0.8), (3, 0.4), (4, None)):
        files.write(tmp_path, step, STATE, metric)
    prune.prune(tmp_path, 1, 4)
    assert names(tmp_path) == ["step-2.json", "step-2.pt", "step-4.json", "step-4.pt"]


def test_a_disk_that_fills_up_between_file_and_manifest_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, document: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_json", full)
    with pytest.raises(CheckpointError, match="No space left"):
        files.write(tmp_path, 8, STATE)
    assert names(tmp_path) == []


def test_in_a_shared_folder_no_file_gets_another_hosts_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one has put its file in place and not yet its manifest when the other one comes."""
    made, in_place, go_on = files.write_manifest, threading.Event(), threading.Event()

    def write_manifest(*arguments: Any) -> None:
        if threading.current_thread() is slow:
            in_place.set()
            go_on.wait(60)
        made(*arguments)

    monkeypatch.setattr(files, "write_manifest", write_manifest)
    slow, other = (
        threading.Thread(target=files.write, args=(tmp_path, 7, {"model": {"w": torch.full((size,), 1.0)}}))
        for size in (1000, 2000)
    )
    slow.start()
    assert in_place.wait(60)
    other.start()
    other.join(0.5)  # it ends in this time, or waits for the slow one
    go_on.set()
    slow.join()
    other.join()
    assert len(files.load(tmp_path, 7)["model"]["w"]) == 2000
    assert names(tmp_path) == ["step-7.json", "step-7.pt"]


def test_a_file_whose_writer_was_killed_before_the_manifest_goes_with_the_next(tmp_path: Path) -> None:
    files.write(tmp_path, 3, STATE).with_suffix(".json").unlink()
    files.write(tmp_path, 4, STATE)
    prune.prune(tmp_path, 2, 4)
    assert names(tmp_path) == ["step-4.json", "step-4.pt"]


def test_checkpoints_that_a_run_went_back_behind_no_longer_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        files.write(tmp_path, step, STATE)
    prune.set_aside(tmp_path, 1)
    assert files.saved_steps(tmp_path) == [1]
    assert {"left-step-2.pt", "left-step-3.json"} <= set(names(tmp_path))
