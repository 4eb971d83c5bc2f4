"""Promises about commands: none of them can hang Muster, and an interrupt cuts none off in the middle."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from containers import engine


def test_a_command_that_does_not_end_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COMMAND_SECONDS", 0.2)
    with pytest.raises(engine.CommandFailed, match=r"`sleep 300` .* 124:\nit did not end within"):
        engine.output(["sleep", "300"])


@pytest.mark.slow
def test_a_build_that_does_not_end_is_ended_and_its_last_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUILD_SECONDS", 0.5)
    with pytest.raises(engine.CommandFailed, match="step 1\nit did not end in time"):
        engine.follow(["sh", "-c", "echo step 1; exec sleep 300"])


@pytest.mark.slow
def test_a_build_ends_with_its_own_process_whatever_that_leaves_behind() -> None:
    began = time.monotonic()
    said: list[str] = []
    assert engine.follow(["sh", "-c", "sleep 60 & echo one; printf two"], said.append) == "one\ntwo"
    assert said == ["one", "two"]
    assert time.monotonic() - began < 30


def test_a_failed_build_tells_its_status_and_last_lines() -> None:
    with pytest.raises(engine.CommandFailed) as caught:
        engine.follow(["sh", "-c", "echo why; exit 3"])
    assert (caught.value.status, caught.value.tail) == (3, "why")


def test_a_lock_that_another_holds_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LOCK_SECONDS", 0.2)
    path = tmp_path / "lab.lock"
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(engine.ContainersError, match="waited in vain") as caught, engine.locked(path):
            pass
    assert str(path) in caught.value.where
    with engine.locked(path):
        pass


@pytest.mark.slow
def test_ctrl_c_lets_the_command_under_way_end(tmp_path: Path) -> None:
    under_way, ended = tmp_path / "under-way", tmp_path / "ended"
    script = f"touch {under_way}; sleep 1; touch {ended}"
    program = f"from containers import engine; engine.output(['sh', '-c', {script!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, process_group=0)
    deadline = time.monotonic() + 60
    while not under_way.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the process group
    process.wait(60)
    assert process.returncode != 0
    assert ended.exists()
