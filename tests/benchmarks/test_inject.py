"""Promise: what a drill holds is let go when it ends; else neither its container nor its host ever could."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.inject import PTRACE_ATTACH, ptrace, reap_held
from tests.conftest import cannot_run
from tests.processes import GUARD_SECONDS


def test_a_held_process_is_gone_once_it_was_killed_however_early_it_was_looked_at() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout
        pid = int(shell.stdout.readline())
        try:
            ptrace(PTRACE_ATTACH, pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            cannot_run(f"nobody may hold a process: {error}")
        run: Any = SimpleNamespace(held={pid})
        time.sleep(0.1)
        reap_held(run)  # hears that it stands still
        assert run.held == {pid}
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GUARD_SECONDS
        while run.held and time.monotonic() < deadline:
            reap_held(run)
            time.sleep(0.01)
    assert not run.held and not Path(f"/proc/{pid}").exists()
