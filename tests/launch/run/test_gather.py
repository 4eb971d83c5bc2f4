"""Promise: what comes from a host replaces no file of ours and leads to none of the user's."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import files
from launch.hosts import openssh
from launch.hosts.connection import Machine
from launch.hosts.inventory import Target
from launch.job import container, torchrun_logs
from launch.job.plan import HostPlan, Options, make_plan
from launch.run import gather
from tests.launch.samples import cluster

#: Takes ssh's place for rsync: drops the options and the host, and runs the command here as sshd would.
HERE = 'while [ "$1" != rsync ]; do shift; done; exec sh -c "$*"'


@pytest.fixture
def host_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostPlan:
    """The first host's part of a plan, its run's folder a folder of this machine."""
    monkeypatch.setattr(openssh, "rsync_shell", lambda *arguments: shlex.join(["sh", "-c", HERE, "ssh"]))
    monkeypatch.setattr(container, "finish", lambda *arguments: {"state": {}, "left": []})
    (first,) = make_plan(cluster(1), Options(script="main.py"), "run-1", 29500, "me", "now").hosts
    on_host = tmp_path / "on host"
    on_host.mkdir()
    return replace(first, run_dir=str(on_host))


def gathered(host_plan: HostPlan, folder: Path) -> None:
    machine: Any = SimpleNamespace(target=Target("h1", "192.0.2.1", user="me"), known_hosts=Path("known_hosts"))
    gather.gather(cast(Machine, machine), host_plan, folder)
    torchrun_logs.flatten(folder / "logs" / host_plan.host, host_plan.ranks)


def test_links_that_lead_outside_stay_on_the_host(host_plan: HostPlan, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("precious")
    on_host, folder = Path(host_plan.run_dir), tmp_path / "runs" / "run-1"
    files.write_json(folder / "plan.json", {"run": "run-1"})
    attempt = on_host / "logs" / "id" / "attempt_0" / "0"
    attempt.mkdir(parents=True)
    (attempt / "stdout.log").symlink_to(mine / "precious")
    (attempt / "stderr.log").write_text("an error\n")
    for name in ("summary.json", "plan.json", "curves.png", "failure.json"):
        (on_host / name).symlink_to(mine / "precious")
    (on_host / "checkpoints").symlink_to(mine)
    (on_host / "workload").mkdir()
    (on_host / "workload" / "epoch-3.pt").write_text("weights")
    (on_host / "workload" / "newest.pt").symlink_to("epoch-3.pt")
    (on_host / "workload" / "up").symlink_to("../../../mine/precious")
    gathered(host_plan, folder)
    files.write_json(folder / "summary.json", {"status": "succeeded"})
    assert (mine / "precious").read_text() == "precious" and [file.name for file in mine.iterdir()] == ["precious"]
    assert files.read_json(folder / "plan.json") == {"run": "run-1"}
    assert files.read_json(folder / "summary.json") == {"status": "succeeded"}
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    assert links == [folder / "workload" / "newest.pt"] and links[0].read_text() == "weights"
    assert [file.name for file in (folder / "logs" / "h1").iterdir()] == ["rank-0.err"]


def test_a_scripts_files_with_names_of_ours_do_not_come(host_plan: HostPlan, tmp_path: Path) -> None:
    on_host, folder = Path(host_plan.run_dir), tmp_path / "runs" / "run-1"
    files.write_json(folder / "plan.json", {"run": "run-1"})
    for name in ("plan.json", "summary.json", "metrics.jsonl"):
        (on_host / name).write_text("{}")
    gathered(host_plan, folder)
    assert files.read_json(folder / "plan.json") == {"run": "run-1"}
    assert not (folder / "summary.json").exists() and (folder / "metrics.jsonl").exists()
