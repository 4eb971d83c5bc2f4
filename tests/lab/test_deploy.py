"""Promises: a deploy disturbs neither a run nor another deploy, from whatever machine these are; it sends the image
once, and hosts pass it on to hosts, past one whose port is blocked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from containers.workload_image import reference_of
from tests.lab.conftest import WORKLOAD, Lab, wait_for

pytestmark = pytest.mark.lab


def test_a_deploy_beside_a_run_measures_nothing_and_of_two_deploys_the_second_is_refused(lab: Lab) -> None:
    run = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="idle.py", NODES=2)
    wait_for(lambda: len(lab.keepers()) == 2, "two containers")

    def word() -> str:
        """Of who deploys to h1, or did so last: it stays there."""
        return lab.on("h1", "cat /run/muster/.deploy/lease", check=False)

    earlier = word()
    first = lab.start("deploy")
    wait_for(lambda: word() not in ("", earlier), "the first deploy's word on h1")
    os.killpg(first.pid, signal.SIGSTOP)  # else it may have ended when the second one comes
    try:
        second = lab.fab("deploy")
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0 and re.search(r"run \S+ of \S+ is not disturbed", said), said
    assert second.returncode == 2 and "host h1: a deploy of " in second.stdout, second.stdout
    assert "TASK" not in second.stdout  # refused before anything was done

    measuring = lab.fab("deploy", MEASURE=1)
    assert measuring.returncode == 2 and "measuring the links would disturb it" in measuring.stdout, measuring.stdout
    assert len(lab.containers()) == 2

    [name] = set(re.findall(r"run (\S+) of \S+ is not disturbed", said))
    stopped = lab.fab("stop", RUN=name, GRACE=1)
    assert stopped.returncode == 0, stopped.stdout
    run.communicate(timeout=300)


def test_a_host_whose_port_is_blocked_is_passed_by(lab: Lab, tmp_path: Path) -> None:
    """What h1's process of the SSH user answers is dropped; the test of the links is root's. h2 gets a new image."""
    (tmp_path / "main.py").write_text(f"print('{tmp_path}')\n")
    lab.on(
        "h1",
        "nft add table inet test; nft add chain inet test out '{ type filter hook output priority 0; }'; "
        "nft add rule inet test out meta skuid muster tcp sport 29400-29415 drop",
    )
    try:
        done = lab.fab("train", WORKLOAD=tmp_path, SCRIPT="main.py", NODES=2)
    finally:
        lab.on("h1", "nft delete table inet test")
        subprocess.run(["podman", "rmi", "--force", reference_of(tmp_path)], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "h2 takes layers from the control machine, as h1 cannot be used: no answer" in done.stdout, done.stdout
