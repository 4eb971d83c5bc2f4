"""Promise: an image build that nobody waits for any more is ended with the deploy that began it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from containers import engine
from containers.engine import CommandFailed, ContainersError
from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.deploy import deploy
from launch.hosts.inventory import Inventory


def answer(**runs: str) -> dict[str, Any]:
    """What a host's door says of its runs: their names and how they stand."""
    return {"runs": [{"run": run, "owner": "ann@desk", "status": status} for run, status in runs.items()]}


def test_a_run_in_progress_is_not_torn_down() -> None:
    deploy.refuse_running([answer(), answer(old="died", older="succeeded"), RuntimeError("no Python there")])
    with pytest.raises(Refusal, match=r"run new of ann@desk is in progress\n.*make stop RUN=<id>.*YES=1"):
        deploy.refuse_running([answer(new="starting"), answer(new="running", old="failed")])


def test_an_archive_that_is_not_there_is_refused_before_any_login(tmp_path: Path) -> None:
    def with_base(setting: str) -> Inventory:
        return Inventory(tmp_path / "hosts.yml", (), "", setting)

    (tmp_path / "torch.tar").touch()
    for there in ("", "ghcr.io/team/torch:2.13", str(tmp_path / "torch.tar")):
        deploy.refuse_missing_archive(with_base(there))
    with pytest.raises(Refusal, match=r"base_image .*absent\.tar: the archive cannot be read: No such file") as refused:
        deploy.refuse_missing_archive(with_base(str(tmp_path / "absent.tar")))
    assert refused.value.status == exits.REFUSED


def test_datasets_are_not_torn_down_unasked() -> None:
    deploy.refuse_datasets([])
    with pytest.raises(Refusal, match=r"stl10 \(2\.0 GiB\)\n.*REMOVE=1.*YES=1"):
        deploy.refuse_datasets(["stl10 (2.0 GiB)"])


def test_the_dataset_brought_last_is_that_of_the_map() -> None:
    def known(**hosts: Any) -> Any:
        return SimpleNamespace(hosts={host: {"dataset": dataset, "place": place} for host, dataset in hosts.items()})

    place = {"folder": "/home/ann/muster", "private": "/run/user/1000/muster"}
    old, new = {"name": "a", "version": "1", "at": 1.0}, {"name": "b", "version": "2", "at": 2.0}
    assert deploy.dataset_dirs(known(h1=None)) == {"h1": None}
    folder = "/home/ann/muster/data/b/2"
    assert deploy.dataset_dirs(known(h1=old, h2=new, h3=None)) == {"h1": folder, "h2": folder, "h3": folder}


def test_a_build_ends_with_the_deploy_that_failed() -> None:
    begun, ended = threading.Event(), threading.Event()

    def build() -> Any:
        with pytest.raises(CommandFailed):
            engine.follow(["sh", "-c", "echo begun; exec sleep 600"], lambda line: begun.set())
        ended.set()
        raise ContainersError("ended", "here", "again")

    with pytest.raises(RuntimeError, match="a host failed"), deploy.image_build(build):
        assert begun.wait(60)
        raise RuntimeError("a host failed")
    assert ended.wait(60)
