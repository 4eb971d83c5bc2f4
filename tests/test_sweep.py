"""Promises of the sweep: what a killed session left is found and ended; a living session's is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import sweep


def start(session: int) -> subprocess.Popen[bytes]:
    """A process as a test of that session would have started it."""
    return subprocess.Popen(["sleep", "300"], env=os.environ | {sweep.SESSION: str(session)})


@pytest.fixture
def dead() -> int:
    """The pid of a process that no longer lives."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    return process.pid


@pytest.fixture
def processes(dead: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One of a dead session, one of this one."""
    started = [start(dead), start(int(os.environ[sweep.SESSION]))]
    yield started
    for process in started:
        process.kill()
        process.wait(60)


@pytest.mark.slow
def test_processes_of_a_dead_session_are_found_and_no_others(processes: list[subprocess.Popen[bytes]]) -> None:
    orphan, mine = processes
    found = sweep._orphans()
    assert found[orphan.pid] == "sleep 300 "
    assert mine.pid not in found
    assert os.getpid() not in found


@pytest.mark.slow
def test_an_orphan_is_ended(processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    orphan, mine = processes
    mark = sweep._orphans()
    monkeypatch.setattr(sweep, "_orphans", lambda: {orphan.pid: mark[orphan.pid]} if orphan.poll() is None else {})
    assert list(sweep._end_processes()) == [f"process {orphan.pid}: sleep 300 "]
    assert orphan.wait(60) != 0
    assert mine.poll() is None


def test_labs_of_dead_sessions_are_orphans_and_users_labs_never(dead: int) -> None:
    assert sweep._is_orphan(f"pytest-{dead}")
    assert sweep._is_orphan(f"pytest-a{dead}")
    assert not sweep._is_orphan(sweep.lab_name())
    assert not sweep._is_orphan(sweep.lab_name("b"))
    assert not any(map(sweep._is_orphan, ("lab", "rack", f"t{dead}", "pytest-mine")))
