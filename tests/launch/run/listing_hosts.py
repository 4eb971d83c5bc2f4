"""Hosts whose doors list runs, for the tests of the commands that ask them: status, stop, logs, attach and gather."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch import files
from launch.cli import signals
from launch.hosts import clustermap
from launch.job import follow
from launch.job import plan as plans
from launch.run import ask_hosts, gather
from launch.run.gather import Gathered
from tests.launch.fake_hosts import Host, exit_words, plan, refusal
from tests.launch.samples import cluster

INVENTORY = Path("inventory/lab")
LOST = "sudo: a password is required"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONSOLE_WIDTH = 200


def entry(status: str = "running", **more: Any) -> dict[str, Any]:
    """How a run is on a host."""
    words = {"run": "some-run", "node_rank": 0, "owner": "ann@desk", "created": "2026-01-01T00:00:00+00:00"}
    document = plans.document(plan(1, 1))
    known = {"hosts": ["h1", "h2"], "script": None, "state": None, "exit": None, "gathered": None, "plan": document}
    return {**words, **known, "status": status, **more}


def has(host: Host, *entries: dict[str, Any], queue: list[dict[str, Any]] | None = None) -> None:
    """What a host's door lists."""

    def runs(options: dict[str, Any]) -> dict[str, Any]:
        found = [one for one in entries if options.get("run") in (None, one["run"])]
        return {"runs": found, "lease": None, "queue": queue or [], "time": time.time()}

    host.answers["runs"] = runs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host]) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(follow, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(clustermap, "read", lambda path, current: cluster(1, 1))
    monkeypatch.setattr(ask_hosts, "Machine", lambda target, known_hosts, connection: connection)
    monkeypatch.setattr(gather, "gather_host", lambda machine, *more: Gathered())
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


def console() -> Console:
    return Console(width=CONSOLE_WIDTH)


def lose(host: Host) -> None:
    """Sudo was lost there."""
    for verb in ("runs", "stop"):
        host.answers[verb] = refusal(LOST)


def named(said: str) -> bool:
    return f"no answer from 1 of 2 hosts:\n  host h2: {LOST}\n      fix: " in said


def ended(folder: Path, host: str, words: dict[str, Any]) -> None:
    files.write_json(folder / "logs" / host / "exit.json", words)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(run, host) of what is gathered; it brings a good end."""
    done: list[tuple[str, str]] = []

    def gather_host(machine: Host, made: plans.Plan, host_plan: plans.HostPlan, keep: int, *more: object) -> Gathered:
        done.append((made.run, host_plan.host))
        ended(files.runs_dir() / made.run, host_plan.host, exit_words())
        return Gathered()

    monkeypatch.setattr(gather, "gather_host", gather_host)
    return done
