"""Promise: a run's folder on a host is its SSH user's alone; of old runs' folders the newest stay, and those in use."""

from __future__ import annotations

import json
import os
import pwd
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.hosts.connection import Machine
from launch.job import container, plan
from launch.job.plan import HostPlan, Options, make_plan
from tests.launch.samples import cluster

Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a shell command with a Podman that knows one container, which mounts run-1 and runs-3 for ever."""
    fake = tmp_path / "bin" / "podman"
    fake.parent.mkdir()
    mounted = json.dumps([{"Binds": ["/var/lib/muster/runs/run-1:/muster/run", "/x/run-3:/muster/resume:ro"]}])
    fake.write_text(f"#!/bin/sh\ncase $1 in ps) echo c0ffee ;; inspect) echo '{mounted}' ;; esac\n")
    fake.chmod(0o755)

    def run(command: str, **environment: str) -> str:
        search = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}"} | environment
        return subprocess.run(["sh", "-c", command], env=search, check=True, capture_output=True, text=True).stdout

    return run


def runs(folder: Path, count: int) -> list[Path]:
    """Folders of runs, the oldest first, each with a file."""
    made = []
    for number in range(count):
        made.append(folder / f"run-{number}")
        (made[-1] / "checkpoints").mkdir(parents=True)
        (made[-1] / "checkpoints" / "step-1.pt").write_text("")
        os.utime(made[-1], (number, number))
    return made


def test_the_newest_runs_stay_and_those_that_a_container_uses(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "runs"
    runs(folder, 8)
    (folder / "a-file").write_text("")
    assert shell(container.prune_command(str(folder), keep=2)) == ""
    wanted = {"run-1", "run-3", "run-6", "run-7", "a-file"}
    deadline = time.monotonic() + 300
    while {path.name for path in folder.iterdir()} != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert {path.name for path in folder.iterdir()} == wanted


def test_without_an_answer_of_the_engine_nothing_is_removed(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "runs"
    runs(folder, 3)
    (tmp_path / "bin" / "podman").write_text("#!/bin/sh\nexit 1\n")
    shell(container.prune_command(str(folder), keep=1).replace("setsid ", "").removesuffix("& }") + "; wait; }")
    assert len(list(folder.iterdir())) == 3


def host_plan(folder: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None = None) -> HostPlan:
    monkeypatch.setattr(plan, "HOST_RUNS_DIR", str(folder))
    (first,) = make_plan(cluster(1), Options(resume=resume), "run-9", 29500, "me", "now").hosts
    return first


def machine(shell: Shell, **environment: str) -> Machine:
    def root(command: str, timeout: float) -> Any:
        return SimpleNamespace(exited=0, stdout=shell(command, **environment), stderr="")

    def answer(command: str, timeout: float) -> str:
        return str(root(command, timeout).stdout)

    return cast(Machine, SimpleNamespace(root=root, answer=answer))


def test_a_runs_folder_is_closed_to_others_and_the_one_that_it_continues_counts_as_new(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, *_) = runs(tmp_path / "runs", 2)
    made = host_plan(tmp_path / "runs", monkeypatch, resume=old.name)
    container.start(machine(shell), made)
    assert stat.S_IMODE(Path(made.run_dir).stat().st_mode) == 0o700
    assert time.time() - old.stat().st_mtime < 60


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user, which needs root")
def test_what_a_run_left_is_given_to_the_ssh_user_and_to_nobody_else(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = host_plan(tmp_path / "runs", monkeypatch)
    victim = tmp_path / "victim"
    victim.write_text("")
    container.start(machine(shell), made)
    secret = Path(made.run_dir) / "secret.pt"
    secret.write_text("weights")
    secret.chmod(0)
    (Path(made.run_dir) / "link").symlink_to(victim)
    container.finish(machine(shell, SUDO_USER="nobody"), made)
    assert secret.stat().st_uid == pwd.getpwnam("nobody").pw_uid != victim.stat().st_uid
    assert stat.S_IMODE(secret.stat().st_mode) == 0o400
    assert stat.S_IMODE(Path(made.run_dir).stat().st_mode) == 0o700
