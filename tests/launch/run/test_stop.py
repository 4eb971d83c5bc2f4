"""Promise: stop ends a run wherever it goes on, and claims nothing of a host that does not answer."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.hosts.door import Frame
from launch.job import follow
from launch.run import stop
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, died, end, refusal, state, when
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, LOST, console, entry, has, lose, named

hosts, _here = fake_hosts.hosts, listing_hosts.here


def ends_when_asked(*those: Host) -> None:
    """Any of these hosts ends the run on all of them."""

    def ask(options: dict[str, Any]) -> dict[str, Any]:
        for host in those:
            host.say(end("stopped", stop={"by": options["by"], "killed": False}))
        return {"asked": True}

    for host in those:
        host.answers["stop"] = ask


def test_stop_asks_waits_and_leaves_the_gathering_to_who_watches(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("h1", "h2"):
        has(hosts[name], entry())
    ends_when_asked(hosts["h1"], hosts["h2"])
    assert stop.stop(INVENTORY, "some-run", console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert out.startswith("Stopped run some-run on h1, h2.\n") and "`make gather RUN=some-run INVENTORY" in out
    asked = dict(hosts["h1"].asked)["stop"]
    assert asked["by"].startswith("make stop by ") and asked["grace"] is None
    assert "seal" not in hosts["h1"].verbs() and "drop" not in hosts["h1"].verbs()  # a script's files stay


def test_stop_says_whom_it_waits_for(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stop, "WAITING_SECONDS", 0.1)
    has(hosts["h1"], entry())
    hosts["h1"].say(state(rank_0={"phase": "saving"}))
    said: list[str] = []

    def twice() -> bool:
        said.append(capsys.readouterr().out)
        return len(re.findall(r"Waiting for h1 rank 0 \(saving\): \d+ s of 30 s", "".join(said))) >= 2

    thread = when(twice, lambda: hosts["h1"].say(end("stopped")))
    assert stop.stop(INVENTORY, "some-run", console()) == exits.SUCCEEDED
    thread.join()


def frozen(host: Host, ended: threading.Event) -> threading.Thread:
    """A host whose keeper says nothing after its first state: its door says that it is alive until the run ends."""
    host.say(state(rank_0={"step": 1}))

    def be_alive() -> None:
        while not ended.wait(0.02):
            host.say(Frame({"alive": True}, b""))
        host.say(died(ExitCode=137))

    thread = threading.Thread(target=be_alive, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_stop_kills_the_container_of_a_keeper_that_does_not_answer_and_no_other(
    fails: bool, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("END_SECONDS_BEYOND_GRACE", -28.0), ("OVER_SECONDS", 0.2 if fails else 60.0)):
        monkeypatch.setattr(stop, name, value)
    monkeypatch.setattr(follow, "KEEPER_SILENT_SECONDS", 1.0)
    for name in ("h1", "h2"):
        has(hosts[name], entry())
    killed, writing = threading.Event(), threading.Event()

    def kill(options: dict[str, Any]) -> dict[str, Any]:
        if not options.get("kill"):
            return {"asked": True}
        if fails:
            raise refusal("`podman rm`: device or resource busy")
        killed.set()
        return {"asked": True, "killed": ["muster-some-run-1"]}

    def write() -> None:
        while not writing.wait(0.05):
            hosts["h1"].say(state(rank_0={"phase": "saving"}))

    hosts["h2"].answers["stop"] = kill
    threads = [frozen(hosts["h2"], killed), threading.Thread(target=write, daemon=True)]
    threads[1].start()
    assert stop.stop(INVENTORY, "some-run", console()) == exits.UNREACHABLE
    for event in (killed, writing):
        event.set()
    for thread in threads:
        thread.join()
    out = capsys.readouterr().out
    assert [options.get("kill") for verb, options in hosts["h1"].asked if verb == "stop"] == [None]
    if fails:
        assert "h2: its keeper did not answer; its container could not be killed: `podman rm`: device" in out
        assert "Run some-run may go on on h1, h2." in out
    else:
        assert "h2: its keeper did not answer; its container was killed\nStopped run some-run on h2." in out
        assert "Run some-run may go on on h1." in out


def test_stop_takes_another_grace_than_the_runs(hosts: dict[str, Host]) -> None:
    has(hosts["h1"], entry())
    ends_when_asked(hosts["h1"])
    assert stop.stop(INVENTORY, "some-run", console(), "3") == exits.SUCCEEDED
    assert dict(hosts["h1"].asked)["stop"]["grace"] == 3.0
    with pytest.raises(Refusal, match="GRACE=soon is not a whole number"):
        stop.stop(INVENTORY, "some-run", console(), "soon")


def test_stop_does_not_claim_what_a_silent_host_did(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    has(hosts["h1"], entry())
    lose(hosts["h2"])
    ends_when_asked(hosts["h1"])
    assert stop.stop(INVENTORY, "some-run", console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "Stopped run some-run on h1.\n" in out and "Run some-run may go on on h2." in out and named(err)


def test_a_host_that_refuses_to_stop_is_no_success(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    has(hosts["h1"], entry())
    hosts["h1"].answers["stop"] = refusal(LOST)
    assert stop.stop(INVENTORY, "some-run", console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "Stopped" not in out and LOST in err


def test_stop_of_what_does_not_run_is_refused(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    has(hosts["h1"], entry("failed"))
    with pytest.raises(Refusal, match=r"no host runs some-run; it has ended \(failed\)(.|\n)*make gather RUN=some-run"):
        stop.stop(INVENTORY, "some-run", console())
    has(hosts["h1"], entry("failed", gathered={"by": "me", "time": 0}))
    with pytest.raises(Refusal, match=r"it has ended \(failed\)(.|\n)*`make logs RUN=some-run`"):
        stop.stop(INVENTORY, "some-run", console())
    lose(hosts["h2"])
    with pytest.raises(Refusal, match="no host that answered runs other-run") as refused:
        stop.stop(INVENTORY, "other-run", console())
    assert refused.value.status == exits.UNREACHABLE and named(capsys.readouterr().err)


def test_stop_clears_a_leftover_that_no_host_knows_by_its_label(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts["h2"].answers["drop"] = lambda options: {"dropped": True, "documents": {}}
    assert stop.stop(INVENTORY, "dead-run", console()) == exits.SUCCEEDED
    assert capsys.readouterr().out == "Removed what was left of run dead-run on h2.\n"
    assert dict(hosts["h1"].asked)["drop"] == {"run": "dead-run"}
    has(hosts["h1"], entry("failed"))
    with pytest.raises(Refusal, match="it has ended"):  # its results are not thrown away
        stop.stop(INVENTORY, "some-run", console())
    assert hosts["h1"].verbs().count("drop") == 1
