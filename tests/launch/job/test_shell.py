"""Promise: nothing that a user or a run's name says becomes a command of a host's shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.hosts.inventory import Target
from launch.job import readiness, resume
from launch.job.resume import Earlier
from tests.launch.samples import cluster

#: What ends a word, a string or a command, or begins another one; and the command that must not be run.
PIECES = st.lists(st.sampled_from(["touch owned", *"\"'`$;&|<>(){}\\\n #!*?~-/ab", "$(", "\\'", "%s"]), max_size=8)
TEXTS = PIECES.map("".join)


class HereAsAHost:
    """A machine whose shell is this one's, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, "h1"
        self.target = Target("h1", "192.0.2.1", python=sys.executable)
        (folder / "podman").write_text("#!/bin/sh\nexit 0\n")
        (folder / "podman").chmod(0o755)

    def answer(self, command: str) -> str:
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=path, capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return HereAsAHost(tmp_path_factory.mktemp("host"))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data_dir=TEXTS.map("/{}".format), run=TEXTS)
def test_a_folder_or_a_run_of_any_name_is_only_looked_for(host: Any, data_dir: str, run: str) -> None:
    earlier = Earlier(run, "main.py", (), ("h1",))
    found = readiness.ask(host, "ab" * 32, data_dir, resume=resume.has_checkpoint_command(earlier, cluster(1).hosts[0]))
    assert found.has_image and sorted(path.name for path in host.folder.iterdir()) == ["podman"]


@pytest.mark.slow
def test_what_is_looked_for_is_found(host: Any, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s $(touch owned); "data"'
    odd.mkdir()
    odd.chmod(0o755)
    assert readiness.ask(host, "ab" * 32, str(odd)).data_dir == ("readable" if os.geteuid() == 0 else "closed")
    odd.chmod(0o700)
    assert readiness.ask(host, "ab" * 32, str(odd)).data_dir == "closed"
    assert readiness.ask(host, "ab" * 32, f"{odd}/none").data_dir == ""
