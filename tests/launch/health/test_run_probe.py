"""Promise: a probe on the hosts ends with its document or with the root cause, and leaves nothing there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keeper.placement import placed
from launch.cli import exits, signals
from launch.cli.refusal import Refusal
from launch.health import run_probe as probe
from launch.job import follow
from launch.job.outcome import HostEnd
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, cause, end, exit_words, ports, refusal
from tests.launch.samples import cluster

hosts = fake_hosts.hosts
DOCUMENT = {"schema": probe.SCHEMA, "all_reduce": None}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "turn", lambda *arguments: contextlib.nullcontext())


def good(host: str) -> HostEnd:
    return HostEnd(host, exit_words())


def failed(host: str, *causes: Any, **more: Any) -> HostEnd:
    return HostEnd(host, exit_words("failed", *causes, **more))


def test_the_first_hosts_document_is_the_answer() -> None:
    assert probe.document_of(DOCUMENT, [good("h1"), good("h2")], 60) == DOCUMENT


def test_the_root_cause_is_named_not_what_followed_from_it() -> None:
    lost = cause("h1", rank=0, reason="connection reset by peer", consequence=True, age=1.0)
    wrong = cause("h2", rank=1, reason="WrongValue: 3 of 4 sums of an all-reduce are wrong")
    with pytest.raises(Refusal, match=r"host h2: the probe failed: rank 1 on h2: .*sums of an all-reduce") as refused:
        probe.document_of({}, [failed("h1", lost, wrong), failed("h2", wrong)], 60)
    assert refused.value.status == exits.FAILED


def test_wrong_arguments_are_refused_as_such() -> None:
    said = cause("h1", rank=0, reason="exit status 2: train: --model resnet: torchvision has no such model")
    ended = failed("h1", said, failures=[{"rank": 0, "exitcode": exits.REFUSED}])
    with pytest.raises(Refusal, match="ARGS: --model resnet: torchvision has no such model") as refused:
        probe.document_of({}, [ended], 60)
    assert refused.value.status == exits.REFUSED


def test_a_host_that_does_not_end_in_time_is_named() -> None:
    with pytest.raises(Refusal, match=r"host h2: the probe had not ended after 60 s"):
        probe.document_of(DOCUMENT, [good("h1"), HostEnd("h2", ended=False)], 60)


def test_a_probe_that_ends_without_a_word_is_no_timeout() -> None:
    with pytest.raises(Refusal, match=r"the first host: the probe ended without its document"):
        probe.document_of({}, [good("h1"), good("h2")], 60)


def test_a_host_that_is_gone_is_named() -> None:
    with pytest.raises(Refusal, match=r"host h2: .*no answer over SSH"):
        probe.document_of(DOCUMENT, [good("h1"), HostEnd("h2", answers=False, ended=False)], 60)


def run(*those: Host) -> dict[str, Any]:
    machines: Any = list(those)
    some = cluster(*(1 for _ in those))
    return probe.run(some, some.hosts, machines, ["--seconds", "1"], ports(len(those)))


def test_a_probe_is_started_followed_and_removed_on_all_hosts(hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["drop"] = lambda options: {"documents": {name: DOCUMENT for name in options["files"]}}
    for name in ("h1", "h2"):
        hosts[name].say(end())
    assert run(hosts["h1"], hosts["h2"]) == DOCUMENT
    for number, name in enumerate(("h1", "h2")):
        (_, started), _, (_, dropped) = hosts[name].asked
        assert hosts[name].verbs() == ["start", "go", "drop"] and hosts[name].follows[0]["streams"] == "events"
        plan = started["plan"]
        agent = placed(plan, [one["host"] for one in plan["hosts"]], 1, 2)[number].agent
        assert agent[4:6] == ["--direct", str(number)] and agent[-3:] == ["train.forecast.probe", "--seconds", "1"]
        assert dropped == {"run": started["plan"]["run"], "files": [probe.DOCUMENT]}


def test_a_host_that_falls_silent_is_not_waited_for_after_the_others_have_ended(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in (follow, probe):
        monkeypatch.setattr(room, "SILENT_SECONDS", 0.05)
    lost = cause("h2", "host_lost", reason="no word from it for 10 s")
    hosts["h1"].say(end("failed", lost))
    hosts["h2"].say(fake_hosts.state(rank_1={}))
    hosts["h2"].answers["drop"] = OSError("no route to host")
    with pytest.raises(Refusal, match="h2: the host is lost"):
        run(hosts["h1"], hosts["h2"])


def test_a_probe_that_does_not_start_is_refused_with_the_reason(hosts: dict[str, Host]) -> None:
    hosts["h2"].answers["start"] = refusal("podman: no space left on device")
    with pytest.raises(Refusal, match="host h2: its container did not start: podman: no space left"):
        run(hosts["h1"], hosts["h2"])
    assert hosts["h1"].verbs()[:2] == ["start", "drop"]


@pytest.fixture
def signals_end_no_session() -> Iterator[None]:
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ending}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


@pytest.mark.usefixtures("signals_end_no_session")
def test_a_probe_that_is_interrupted_twice_is_cleared_away_on_every_host(hosts: dict[str, Host]) -> None:
    def start(options: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        return {"started": "c0ffee"}

    hosts["h1"].answers["start"] = start
    with pytest.raises(KeyboardInterrupt), signals.interrupts_as_exceptions():
        run(hosts["h1"], hosts["h2"])
    assert [hosts[name].verbs() for name in ("h1", "h2")] == [["start", "go", "drop"]] * 2
    assert Path("known_hosts") == hosts["h1"].known_hosts
