"""Promise: when a hang is suspected, NCCL's flight recorder is asked too, where there is one, and holds up nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keeper.stuck import _ask_nccl


def test_nccls_flight_recorder_is_asked_through_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog makes <prefix><rank>.pipe and reads it; the prefix is in launch/job/plan.py."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "nccl-"))
    for rank in (2, 3):
        os.mkfifo(tmp_path / f"nccl-{rank}.pipe")
    reader = os.open(tmp_path / "nccl-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    for rank in (1, 2, 3):  # without a pipe, with one that nobody reads, with one that is read
        _ask_nccl(rank)
    assert os.read(reader, 16) == b"1\n"
    os.close(reader)


def test_without_nccl_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", raising=False)
    _ask_nccl(0)
