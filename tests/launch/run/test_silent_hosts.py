"""Promise: a host that cannot say what runs on it is named, with the exit status of a host that was not reached."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch import files
from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.hosts import clustermap, ssh
from launch.hosts.inventory import Target
from launch.job import readiness
from launch.run import ask_hosts, logs, status, stop
from tests.launch.samples import cluster

INVENTORY = Path("inventory/lab")
LOST = "sudo: a password is required"


class Host:
    """h1 runs some-run; on h2 sudo was lost."""

    commands: list[str] = []  # noqa: RUF012
    exit_status = 0  # -1: the SSH connection was lost

    def __init__(self, target: Any, known_hosts: Path, connection: Any) -> None:
        self.name = target.name
        self.target = Target(target.name, "192.0.2.1")

    def answer(self, command: str, timeout: float = 0) -> str:
        if self.name == "h2":
            raise RuntimeError(LOST)
        self.commands.append(command)
        return json.dumps([{"Id": "c0ffee", "Labels": {"muster.run": "some-run"}}]) if "ps --all" in command else ""

    def root(self, command: str, timeout: float | None = None, out: Any = None) -> Any:
        out.write("muster-pid=4242\n[rank0]:a step\n")
        return SimpleNamespace(exited=self.exit_status)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(clustermap, "read", lambda path, current: cluster(1, 1))
    monkeypatch.setattr(ssh, "connect", lambda target, known_hosts: None)
    monkeypatch.setattr(ask_hosts, "Machine", Host)
    monkeypatch.setattr(logs, "Machine", Host)
    monkeypatch.setattr(Host, "commands", [])


def named(said: str) -> bool:
    return f"no answer from 1 of 2 hosts:\n  host h2: {LOST}\n      fix: " in said


def test_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert stop.stop(INVENTORY, "some-run", Console(width=200)) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert out == "Stopped run some-run on h1.\nRun some-run may go on where there was no answer.\n" and named(err)
    assert any("podman stop" in command for command in Host.commands)


def test_stop_of_a_run_that_no_host_that_answered_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert stop.stop(INVENTORY, "other-run", Console(width=200)) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "Stopped" not in out and named(err)


def test_stop_without_run_does_not_speak_for_the_silent_host(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refusal, match="on the hosts that answered now: some-run") as refused:
        stop.stop(INVENTORY, "", Console())
    assert refused.value.status == exits.UNREACHABLE and named(capsys.readouterr().err)


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.status(INVENTORY, Console(width=200)) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "some-run" in out and "h1" in out and named(err)


def test_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.logs(INVENTORY, "some-run", Console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert out == "h1 rank 0 | a step\n" and named(err)


def test_a_live_view_whose_connection_is_lost_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "exit_status", -1)
    assert logs.logs(INVENTORY, "some-run", Console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert out == "h1 rank 0 | a step\n" and "host h1: the SSH connection was lost" in err


def test_readiness() -> None:
    hosts = cluster(1, 1).hosts
    machines: Any = [Host(host, Path(), None) for host in hosts[1:]]
    with pytest.raises(Refusal, match=f"host h2: did not answer: {LOST}") as refused:
        readiness.check(machines, hosts[1:], "ab" * 32)
    assert refused.value.status == exits.UNREACHABLE
