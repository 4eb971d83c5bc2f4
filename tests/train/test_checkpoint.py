"""Promises of train.checkpoint: whole or absent, verified when read, nothing left behind."""

import hashlib
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from train import checkpoint

STATE = {
    "weights": {"w": torch.arange(1000.0)},
    "position": {"epoch": 1, "batch": 0, "step": 7},
    "config": {"lr": 0.1},
}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write more, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 7, STATE)
    state = checkpoint.load(tmp_path, 7)
    assert state["weights"]["w"].equal(STATE["weights"]["w"])  # type: ignore[index]
    assert state["position"] == STATE["position"]
    assert checkpoint.saved_steps(tmp_path) == [7]


def test_manifest_tells_size_and_hash(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE)
    manifest = json.loads((tmp_path / "step-7.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["bytes"] == path.stat().st_size


def test_others_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = checkpoint.save(tmp_path / "deep" / "checkpoints", 7, STATE)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == path.with_suffix(".json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("where", [0, 100, -100])
def test_a_flipped_bit_is_refused(tmp_path: Path, where: int) -> None:
    path = checkpoint.save(tmp_path, 7, STATE)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="altered"):
        checkpoint.load(tmp_path, 7)


def test_a_torn_checkpoint_is_refused_and_others_are_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 6, STATE)
    path = checkpoint.save(tmp_path, 7, STATE)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match=r"torn.*other checkpoints there: \[6\]"):
        checkpoint.load(tmp_path, 7)


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, STATE)
    path.with_suffix(".json").unlink()
    assert checkpoint.saved_steps(tmp_path) == []
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path, 7)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def test_pickled_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, 7, {"weights": Payload()})  # with a manifest that matches
    with pytest.raises(checkpoint.CheckpointError, match="more than tensors"):
        checkpoint.load(tmp_path, 7)
    assert not (tmp_path / "owned").exists()


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        checkpoint.save(tmp_path, step, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-10.json",
        "step-10.pt",
        "step-11.json",
        "step-11.pt",
    ]


def test_a_full_disk_is_told_and_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 7, STATE)
    before = sorted(p.name for p in tmp_path.iterdir())
    with largest_file(1000), pytest.raises(checkpoint.CheckpointError, match=r"cannot write.*step-8.*make room"):
        checkpoint.save(tmp_path, 8, STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert checkpoint.load(tmp_path, 7)["position"]["step"] == 7
