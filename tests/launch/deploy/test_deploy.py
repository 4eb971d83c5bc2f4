"""Promise: an image build that nobody waits for any more is ended with the deploy that began it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from containers import engine
from containers.engine import CommandFailed, ContainersError
from launch.cli.refusal import Refusal
from launch.deploy import deploy


def answer(**runs: str) -> dict[str, Any]:
    """What a host's door says of its runs: their names and how they stand."""
    return {"runs": [{"run": run, "owner": "ann@desk", "status": status} for run, status in runs.items()]}


def test_a_run_in_progress_is_not_torn_down() -> None:
    deploy.refuse_running([answer(), answer(old="died", older="succeeded"), RuntimeError("no Python there")])
    with pytest.raises(Refusal, match=r"run new of ann@desk is in progress\n.*make stop RUN=<id>.*YES=1"):
        deploy.refuse_running([answer(new="starting"), answer(new="running", old="failed")])


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
