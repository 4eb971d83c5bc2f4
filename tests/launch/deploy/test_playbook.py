"""Promise: a playbook that hangs is ended with all its processes, and refused in one message."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.deploy import playbook
from tests.processes import GUARD_SECONDS


def test_a_playbook_that_hangs_is_ended_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"

    class Popen(subprocess.Popen[bytes]):
        """Is waited for when its child has begun."""

        def wait(self, timeout: float | None = None) -> int:
            while not (pid.exists() and pid.read_text()):
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(playbook, "PLAYBOOK_SECONDS", 0.5)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(Refusal, match=r"had not ended after 0\.5 s") as refused:
        playbook.run_bounded(["sh", "-c", f"sleep 600 & echo $! > '{pid}'; wait"], os.environ)
    assert refused.value.status == exits.DEPLOY_FAILED
    child = Path("/proc") / pid.read_text().strip() / "status"
    deadline = time.monotonic() + GUARD_SECONDS  # the kernel takes a moment to clear it away
    while time.monotonic() < deadline:
        if not child.exists() or "State:\tZ" in child.read_text():
            return
        time.sleep(0.05)
    os.kill(int(child.parent.name), signal.SIGKILL)
    pytest.fail("a process of the playbook is left")
