"""Promise: a control machine is a window on a run. The run outlives it, and another one may watch and gather it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.away import another_clone
from tests.lab.conftest import FAB, Lab, wait_for
from tests.lab.test_endings import read_until

pytestmark = pytest.mark.lab

TICKS = 50  # of ticks.py, a fifth of a second each


def in_clone(lab: Lab, clone: Path, task: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """A command of another control machine."""
    return subprocess.run(
        [FAB, task], cwd=clone, env=lab.environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, timeout=300, check=False,
    )  # fmt: skip


def ticks(folder: Path, host: str) -> list[str]:
    """The lines of the host's first rank, as gathered."""
    return sorted((folder / "logs" / host).glob("rank-*.log"))[0].read_text().splitlines()


@pytest.mark.parametrize("how", ["kill", "detach"])
def test_a_run_without_its_control_machine_is_watched_and_gathered_by_another(
    lab: Lab, how: str, tmp_path: Path
) -> None:
    process = lab.start(
        "train",
        WORKLOAD="tests/lab/test_jobs",
        SCRIPT="ticks.py",
        NODES=2,
        **({"DETACH": 1} if how == "detach" else {}),
    )
    if how == "kill":
        printed = read_until(process, "tick 5")
        process.kill()
    else:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and "goes on on its hosts" in printed, printed
    found = re.search(r"muster \| run (\S+):", printed)
    assert found, printed
    run = found[1]
    clone = another_clone(tmp_path, lab.name)
    time.sleep(2)
    assert len(lab.containers()) == 2, "the run has ended with its control machine"

    early = in_clone(lab, clone, "gather", RUN=run)
    assert early.returncode == 2 and "has not ended" in early.stdout, early.stdout
    attached = in_clone(lab, clone, "attach", RUN=run)
    assert attached.returncode == 0 and f"tick {TICKS - 1}" in attached.stdout, attached.stdout
    for host in ("h1", "h2"):
        assert ticks(clone / "runs" / run, host) == [f"tick {number}" for number in range(TICKS)]

    here = lab.fab("gather")  # of the first one: it started the run, and has nothing of it yet
    assert here.returncode == 0 and f"run {run} succeeded" in here.stdout, here.stdout
    assert ticks(Path("runs") / run, "h2") == [f"tick {number}" for number in range(TICKS)]
    again = lab.fab("gather")
    assert again.returncode == 0 and run not in again.stdout, again.stdout  # it may find older runs on a kept lab


def test_a_run_that_ended_unseen_is_named_and_gathered_by_another_machine(lab: Lab, tmp_path: Path) -> None:
    started = lab.fab("train", WORKLOAD="tests/lab/test_jobs", SCRIPT="ticks.py", NODES=2, DETACH=1)
    found = re.search(r"muster \| run (\S+):", started.stdout)
    assert found, started.stdout
    run, clone = found[1], another_clone(tmp_path, lab.name)
    wait_for(lambda: f"make gather RUN={run}" in in_clone(lab, clone, "status").stdout, "the end of the run", 120)
    gathered = in_clone(lab, clone, "gather")
    assert gathered.returncode == 0, gathered.stdout
    assert ticks(clone / "runs" / run, "h2") == [f"tick {number}" for number in range(TICKS)]
    assert lab.containers() == []
