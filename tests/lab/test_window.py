"""Promise: a control machine is a window on a run. The run outlives it, and another one may watch and gather it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.away import another_clone
from tests.lab.conftest import FAB, WORKLOAD, Lab, wait_for
from tests.lab.test_endings import read_until

pytestmark = pytest.mark.lab

TICKS = 75  # of ticks.py, a fifth of a second each
ALL_TICKS = [f"tick {number}" for number in range(TICKS)]
JOB: dict[str, Any] = {"WORKLOAD": WORKLOAD, "SCRIPT": "ticks.py", "ARGS": TICKS, "NODES": 2}


def in_clone(lab: Lab, clone: Path, task: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """A command of another control machine."""
    return subprocess.run(
        [FAB, task], cwd=clone, env=lab.environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, timeout=300, check=False,
    )  # fmt: skip


def ticks(folder: Path, host: str) -> list[str]:
    """The lines of the host's first rank, as gathered."""
    return sorted((folder / "logs" / host).glob("rank-*.log"))[0].read_text().splitlines()


def run_of(printed: str) -> str:
    """The id of the run that a command has started."""
    found = re.search(r"muster \| run (\S+):", printed)
    assert found, printed
    return found[1]


def test_a_run_outlives_a_killed_control_machine_and_another_one_attaches(lab: Lab, tmp_path: Path) -> None:
    process = lab.start("train", **JOB)
    run = run_of(read_until(process, "tick 5"))
    process.kill()
    clone = another_clone(tmp_path, lab.name)
    time.sleep(2)
    assert len(lab.containers()) == 2, "the run has ended with its control machine"

    attached = in_clone(lab, clone, "attach", RUN=run)
    assert attached.returncode == 0 and f"tick {TICKS - 1}" in attached.stdout, attached.stdout
    assert all(ticks(clone / "runs" / run, host) == ALL_TICKS for host in ("h1", "h2"))

    here = lab.fab("gather")  # of the first one: it started the run, and has nothing of it yet
    assert here.returncode == 0 and f"run {run} succeeded" in here.stdout, here.stdout
    assert ticks(Path("runs") / run, "h2") == ALL_TICKS
    again = lab.fab("gather")
    assert again.returncode == 0 and run not in again.stdout, again.stdout  # it may find older runs on a kept lab


@pytest.mark.long
def test_a_run_that_ended_unseen_is_named_and_gathered_by_another_machine(lab: Lab, tmp_path: Path) -> None:
    started = lab.fab("train", **JOB, DETACH=1)
    assert started.returncode == 0 and "goes on on its hosts" in started.stdout, started.stdout
    run, clone = run_of(started.stdout), another_clone(tmp_path, lab.name)
    early = in_clone(lab, clone, "gather", RUN=run)
    assert early.returncode == 2 and "has not ended" in early.stdout, early.stdout
    wait_for(lambda: f"make gather RUN={run}" in in_clone(lab, clone, "status").stdout, "the end of the run", 120)
    gathered = in_clone(lab, clone, "gather")
    assert gathered.returncode == 0, gathered.stdout
    assert ticks(clone / "runs" / run, "h2") == ALL_TICKS
    assert lab.containers() == []
