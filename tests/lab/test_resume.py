"""Promise: a run that was stopped has saved where it was, on its hosts, and a new run goes on from there."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.lab.conftest import SMALL, Lab, summary_of

pytestmark = pytest.mark.lab


def test_a_stopped_run_goes_on_from_where_it_was_saved(lab: Lab) -> None:
    process = lab.start("train", NODES=2, ARGS=f"--epochs 200 {SMALL}")
    assert process.stdout is not None
    printed = ""
    while "epoch 1/200  loss" not in printed:
        line = process.stdout.readline()
        assert line, f"it ended early:\n{printed}"
        printed += line
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    printed += rest
    folder, summary = summary_of(printed)
    assert (process.returncode, summary["status"]) == (130, "stopped"), printed
    assert summary["reason"].startswith("Ctrl-C by ")
    assert f"make train RESUME={folder.name} INVENTORY={lab.inventory}" in printed
    saved = max(int(path.stem.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*.json"))

    done = lab.fab("train", NODES=2, RESUME="last", ARGS="--epochs 3")
    assert done.returncode == 0, done.stdout
    assert f"continuing run {folder.name}" in done.stdout and f"going on from step-{saved}.pt" in done.stdout
    steps = [int(step) for step in re.findall(r"step-(\d+)\.pt", lab.on("h2", f"ls {run_dir_of(done.stdout)}"))]
    assert steps and min(steps) >= saved
    for run in (folder.name, summary_of(done.stdout)[0].name):
        assert lab.on("h2", f"stat -c %U /var/lib/muster/runs/{run}/checkpoints") == "muster"  # the SSH user


def run_dir_of(output: str) -> str:
    return f"/var/lib/muster/runs/{summary_of(output)[0].name}/checkpoints"


def test_an_unknown_run_is_refused_before_any_host_is_touched(lab: Lab) -> None:
    done = lab.fab("train", RESUME="20200101-000000-0000")
    assert done.returncode == 2 and "there is no run 20200101-000000-0000 in runs/" in done.stdout, done.stdout
