"""Promise: from the first interrupt on, a run is stopped, gathered and summed up, however often the signal comes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch import files
from launch.cli import exits, output, signals
from launch.hosts.connection import Machine
from launch.job import container, outcome
from launch.job.plan import HostPlan, Options, make_plan
from launch.run import gather, lifecycle
from tests.launch.samples import cluster

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    for name in ("start", "stream_output", "wait", "stop", "finish"):
        monkeypatch.setattr(container, name, partial(on_host, name))
    monkeypatch.setattr(gather, "rsync", lambda *arguments: None)
    # Whatever goes wrong in a test, its signals end no test session.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


def come_twice(sent: threading.Event | None = None) -> None:
    """SIGTERM to this process, twice, as `timeout make train` has it. In another thread: sets `sent` at its end."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    if sent:
        sent.set()


def on_host(name: str, host: Host, *arguments: Any, **words: Any) -> Any:
    """What launch.job.container does, done by the host of a test."""
    return getattr(host, name)(*arguments, **words)


class Host:
    """A host whose container lasts until it is stopped."""

    def __init__(
        self,
        name: str,
        while_starting: Callable[[], None] = lambda: None,
        while_running: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.target = SimpleNamespace(port=22, key_file=None, proxy_command=None, user="me", address=name)
        self.known_hosts = Path("known_hosts")
        self.steps: list[str] = []
        self._while_starting = while_starting
        self._while_running = while_running
        self._over = threading.Event()

    def start(self, host_plan: HostPlan) -> None:
        self._while_starting()
        self.steps.append("started")

    def through_drops(self, work: Callable[[], Any]) -> Any:
        return work()

    def stream_output(self, host_plan: HostPlan, out: Any) -> None:
        out.write("[rank0]:a step\n")

    def wait(self, host_plan: HostPlan) -> int:
        self._while_running()
        self._over.wait(300)
        return outcome.TERMINATED

    def stop(self, run: str, why: str, seconds: int | None = None) -> None:
        self.steps.append("stopped")
        time.sleep(0.2)
        self._over.set()

    def finish(self, host_plan: HostPlan) -> dict[str, Any]:
        self.steps.append("gathered")
        return {"state": {}, "left": []}


def job(*hosts: Host) -> lifecycle.Run:
    plan = make_plan(cluster(*(1 for _ in hosts)), Options(), "some-run", 29500, "me", "now")
    return lifecycle.Run(plan, cast(list[Machine], list(hosts)))


def test_a_signal_that_comes_again_does_not_leave_the_run_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = threading.Event()
    hosts, say = [Host("h1", while_running=partial(come_twice, sent)), Host("h2")], output.say

    def say_and_come_again(text: str) -> None:
        say(text)
        if text.startswith("stopping"):
            come_twice()

    monkeypatch.setattr(lifecycle, "say", say_and_come_again)
    with signals.interrupts_as_exceptions():
        status = job(*hosts).run()
        assert sent.wait(300)
    assert status == exits.INTERRUPTED
    assert [host.steps for host in hosts] == [["started", "stopped", "gathered"]] * 2
    assert json.loads(Path("runs/some-run/summary.json").read_text())["status"] == "stopped"
    assert "run some-run stopped: Ctrl-C" in capsys.readouterr().out


def test_a_container_that_is_being_made_when_the_signal_comes_is_stopped_too() -> None:
    sent = threading.Event()

    def last_until_it_has_come() -> None:
        assert sent.wait(300)

    hosts = [Host("h1", while_starting=partial(come_twice, sent)), Host("h2", while_starting=last_until_it_has_come)]
    with signals.interrupts_as_exceptions():
        assert job(*hosts).run() == exits.INTERRUPTED
    assert [host.steps for host in hosts] == [["started", "stopped", "gathered"]] * 2


def test_what_is_said_of_a_host_that_could_not_be_stopped_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = threading.Event()
    host = Host("h1", while_running=partial(come_twice, sent))

    def stop(run: str, why: str, seconds: int) -> None:
        host._over.set()
        raise RuntimeError("sudo: a password is required")

    monkeypatch.setattr(host, "stop", stop)
    with signals.interrupts_as_exceptions():
        job(host).run()
        assert sent.wait(300)
    said = "h1: could not stop: sudo: a password is required; `make stop RUN=some-run INVENTORY=inventory/lab` when it"
    assert said in capsys.readouterr().out
