"""Promise: a playbook that hangs is ended with all its processes, and refused in one message."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.deploy import playbook


def test_a_playbook_that_hangs_is_ended_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playbook, "PLAYBOOK_SECONDS", 0.5)
    pid = tmp_path / "pid"
    with pytest.raises(Refusal, match=r"had not ended after 0\.5 s") as refused:
        playbook.run_bounded(["sh", "-c", f"sleep 60 & echo $! > '{pid}'; wait"], os.environ)
    assert refused.value.status == exits.DEPLOY_FAILED
    child = Path("/proc") / pid.read_text().strip() / "status"
    for _ in range(100):  # the kernel takes a moment to clear it away
        if not child.exists() or "State:\tZ" in child.read_text():
            return
        time.sleep(0.05)
    subprocess.run(["kill", child.parent.name], check=False)
    pytest.fail("a process of the playbook is left")
