"""Promise: a live view can be left at once, and leaves nothing behind but the run; what is not there is said so."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Problem, Refusal
from launch.hosts import clustermap, ssh
from launch.run import logs as viewing
from tests.launch.samples import cluster

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Host:
    """A host with a container of some-run that prints a line and lasts until `over` is set."""

    containers: list[dict[str, Any]] = []  # noqa: RUF012
    commands: list[str] = []  # noqa: RUF012
    shown, over = threading.Event(), threading.Event()

    def __init__(self, target: Any, known_hosts: Path, connection: Any) -> None:
        self.name = target.name

    def root(self, command: str, timeout: float | None = None, out: Any = None) -> Any:
        self.commands.append(command)
        if "podman logs" in command:
            out.write("muster-pid=4242\n[rank0]:a step\n")
            self.shown.set()
            self.over.wait(300)
            out.write("[rank0]:the end\n")
        return SimpleNamespace(stdout="", exited=0)

    def answer(self, command: str, timeout: float = 0) -> str:
        return json.dumps(self.containers)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(clustermap, "read", lambda path, current: cluster(1))
    monkeypatch.setattr(ssh, "connect", lambda target, known_hosts: None)
    monkeypatch.setattr(viewing, "Machine", Host)
    monkeypatch.setattr(Host, "commands", [])
    monkeypatch.setattr(Host, "containers", [{"Id": "c0ffee", "Labels": {"muster.run": "some-run"}}])
    monkeypatch.setattr(Host, "shown", threading.Event())
    monkeypatch.setattr(Host, "over", threading.Event())
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    Host.over.set()
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


def logs(run: str) -> int:
    return viewing.logs(Path("inventory/lab"), run, Console())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_live_view_is_left_at_once_and_the_run_goes_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def come_twice() -> None:
        Host.shown.wait(300)
        os.kill(os.getpid(), number)
        time.sleep(0.02)
        os.kill(os.getpid(), number)

    for one in ENDING:  # whatever goes wrong here, these signals end no test session; the fixture puts them back
        signal.signal(one, signal.SIG_IGN)
    sender = threading.Thread(target=come_twice)
    sender.start()
    left = "left the view; run some-run goes on, `make stop RUN=some-run` ends it"
    try:
        with pytest.raises(KeyboardInterrupt, match=left), signals.interrupts_as_exceptions():
            logs("some-run")
    finally:
        sender.join()
    assert capsys.readouterr().out == "h1 rank 0 | a step\n"
    assert "c0ffee /proc/4242/cmdline && kill 4242" in Host.commands[-1]


def test_a_live_view_that_is_watched_to_the_end_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Host.over.set()
    assert logs("some-run") == exits.SUCCEEDED
    assert capsys.readouterr().out == "h1 rank 0 | a step\nh1 rank 0 | the end\n"


def test_a_view_ends_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewing, "nobody_reads", Host.shown.is_set)
    began = time.monotonic()
    assert logs("some-run") == exits.SUCCEEDED
    assert time.monotonic() - began < 300


def test_what_there_is_of_a_run_that_nobody_followed_to_its_end_is_said() -> None:
    folder = Path("runs/old-run/logs")
    folder.mkdir(parents=True)
    with pytest.raises(Refusal, match="see runs/old-run for what there is") as refused:
        logs("old-run")
    assert "there is no run" not in str(refused.value)
    (folder / "h1.log").write_text("[rank0]:a step\n")
    with pytest.raises(Refusal, match=r"no host has a container of run old-run(.|\n)*in runs/old-run/logs"):
        logs("old-run")
    with pytest.raises(Refusal, match=r"there is no run nil, here or on the hosts(.|\n)*newest here: old-run"):
        logs("nil")


def test_a_host_that_does_not_answer_is_not_spoken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(target: Any, known_hosts: Path) -> None:
        raise ssh.Unreachable(Problem("host h1", "no SSH connection", "look"))

    monkeypatch.setattr(ssh, "connect", connect)
    with pytest.raises(Refusal, match="there is no run nil, here or on the hosts that answered") as refused:
        logs("nil")
    assert refused.value.status == exits.UNREACHABLE
