"""Promise: a probe on the hosts ends with its document or with the root cause, and leaves nothing there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.cli import exits, signals
from launch.cli.refusal import Refusal
from launch.health import run_probe as probe
from launch.health.run_probe import Left
from launch.job.plan import Options, make_plan
from tests.launch.samples import cluster

DOCUMENT = {"schema": probe.SCHEMA, "all_reduce": None}


def failure(host: str, exception: str, exitcode: int = 1, consequence: bool = False, time: float = 1.0) -> Left:
    entry = {"rank": 0, "exitcode": exitcode, "signal": None, "exception": exception, "time": time}
    return Left({"host": host, "failures": [entry | {"consequence": consequence}]}, {}, {})


def left(document: dict[str, Any] | None = None) -> Left:
    return Left({}, document or {}, {})


def test_the_first_hosts_document_is_the_answer() -> None:
    assert probe.document_of({"h1": left(DOCUMENT), "h2": left()}, {"h1": 0, "h2": 0}, 60) == DOCUMENT


def test_the_root_cause_is_named_not_what_followed_from_it() -> None:
    lost = failure("h1", "connection reset by peer", consequence=True)
    wrong = failure("h2", "WrongValue: rank 1 on h2: 3 of 4 sums of an all-reduce are wrong", time=2.0)
    with pytest.raises(Refusal, match=r"host h2: the probe failed.*sums of an all-reduce are wrong") as refused:
        probe.document_of({"h1": lost, "h2": wrong}, {"h1": 1, "h2": 1}, 60)
    assert refused.value.status == exits.FAILED


def test_wrong_arguments_are_refused_as_such() -> None:
    said = failure("h1", "exit status 2: train: --model resnet: torchvision has no such model", exits.REFUSED)
    with pytest.raises(Refusal, match="ARGS: --model resnet: torchvision has no such model") as refused:
        probe.document_of({"h1": said}, {"h1": 1}, 60)
    assert refused.value.status == exits.REFUSED


def test_a_host_that_does_not_end_in_time_is_named() -> None:
    with pytest.raises(Refusal, match=r"host h2: the probe had not ended after 60 s"):
        probe.document_of({"h1": left(), "h2": left()}, {"h1": 0}, 60)


def test_a_probe_that_ends_without_a_word_is_no_timeout() -> None:
    with pytest.raises(Refusal, match=r"the first host: the probe ended without its document"):
        probe.document_of({"h1": left(), "h2": left()}, {"h1": 0, "h2": 0}, 60)


def test_a_host_that_is_gone_is_named() -> None:
    with pytest.raises(Refusal, match=r"host h2: .*no answer over SSH"):
        probe.document_of({"h1": left()}, {"h1": 0, "h2": -1}, 60)


def test_clearing_away_prints_what_there_was_and_removes_it(tmp_path: Path) -> None:
    host_plan = make_plan(cluster(1), Options(module="train.forecast.probe"), "some-run", 29500, "me", "now").hosts[0]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "probe.json").write_text(json.dumps(DOCUMENT, indent=2))
    command = probe.clear_command(host_plan).replace(host_plan.run_dir, str(folder)).replace("podman", "false")
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert probe.parse_left(said) == Left({}, DOCUMENT, {})
    assert not folder.exists()


def test_half_a_document_is_none() -> None:
    assert probe.parse_left('failure=\nprobe={"schema": "mus\nstate={"OOMKilled": true}\n') == Left(
        {}, {}, {"OOMKilled": True}
    )


def test_a_probe_that_is_interrupted_twice_is_cleared_away_on_every_host() -> None:
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ending}  # they end no test session
    done: list[str] = []

    class Host:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, command: str) -> str:
            done.append(f"{self.name} cleared")
            return ""

        def root(self, command: str, timeout: float | None = None) -> Any:
            for _ in range(2 if self.name == "h1" else 0):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
            time.sleep(0.3)
            done.append(f"{self.name} started")
            return SimpleNamespace(stdout="", exited=0)

    hosts: list[Any] = [Host("h1"), Host("h2")]
    some = cluster(1, 1)
    try:
        with pytest.raises(KeyboardInterrupt), signals.interrupts_as_exceptions():
            probe.run(some, some.hosts, hosts, port=29500)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert sorted(done[:2]) == ["h1 started", "h2 started"]
    assert sorted(done[2:]) == ["h1 cleared", "h2 cleared"]
