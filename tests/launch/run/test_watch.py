"""Promises: the run lives on its hosts, the command that watches it is a window. Ctrl-C stops the run, nothing else
does; the cause of a failure comes first and with its name; no wait is endless; what ended is gathered, summed up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keeper import course
from launch import files
from launch.cli import exits, signals
from launch.hosts.door import Frame
from launch.job import follow
from launch.job.plan import document
from launch.run import gather, watch
from launch.run.gather import Gathered
from launch.run.train import display_of
from launch.run.watch import Watch
from tests.launch import fake_hosts
from tests.launch.fake_hosts import DROP, Host, cause, died, end, output, plan, refusal, state, when

hosts = fake_hosts.hosts
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(follow, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(gather, "gather_host", lambda machine, *more: Gathered({}, ()) if machine else None)
    # Whatever goes wrong in a test, its signals end no test session.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signals._received.first, signals._received.raised = None, False


def watched(*those: Host, **options: Any) -> int:
    """Watch a run on these hosts as a command does. options: of its plan."""
    made = plan(*(1 for _ in those), **options)
    with signals.interrupts_as_exceptions():
        return Watch(made, [host.view() for host in those], display_of(made), 20).run()


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/some-run/summary.json").read_text())
    return found


def event(name: str, after: float = 1.0, **words: Any) -> Frame:
    return output("events", 0, json.dumps({"event": name, "after": after, **words}).encode() + b"\n")


def come(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.05)


def test_a_run_that_succeeds_is_shown_gathered_and_summed_up(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts["h1"].say(output("rank-0", 0, b"a step\n"), end())
    hosts["h2"].say(output("rank-1", 0, b"last words"), end())
    assert watched(hosts["h1"], hosts["h2"]) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert "h1 rank 0 | a step\n" in out and "h2 rank 1 | last words\n" in out
    assert out.splitlines()[-1] == "muster | run some-run succeeded"
    assert (summary()["status"], summary()["missing_hosts"], summary()["cause"]) == ("succeeded", [], None)
    assert json.loads(Path("runs/some-run/plan.json").read_text())["run"] == "some-run"


def test_the_cause_comes_first_then_the_ranks_last_lines_and_consequences_stay_in_the_files(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    first = cause("h2", rank=1, reason="ValueError: no", lines=["epoch 3", "ValueError: no"], age=0.1)
    followed = cause("h1", rank=0, reason="Connection closed by peer", consequence=True)
    hosts["h1"].say(event("failed", **followed), end("failed", followed, first))
    hosts["h2"].say(event("failed", **first), end("failed", first))
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "muster | rank 1 on h2 failed: ValueError: no; the last lines of its output:",
        "h2 rank 1 | > epoch 3",
        "h2 rank 1 | > ValueError: no",
        "muster | the ranks of the run are being ended, on every host",
    ]
    assert lines[-1] == "muster | run some-run FAILED: rank 1 on h2: ValueError: no"
    assert not any("Connection closed" in line for line in lines)
    assert (summary()["failed_rank"], summary()["failed_host"], summary()["cause"]["kind"]) == (1, "h2", "rank")


def test_the_cause_is_told_while_other_hosts_still_run(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def told() -> bool:
        said.append(capsys.readouterr().out)
        return "rank 0 on h1 failed: killed by SIGKILL" in "".join(said)

    killed = cause("h1", rank=0)
    hosts["h1"].say(event("failed", **killed))
    hosts["h2"].say(state(rank_1={"phase": "saving"}))
    thread = when(told, lambda: [hosts[name].say(end("failed", killed)) for name in ("h1", "h2")])
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    thread.join()
    assert "failed: killed" not in capsys.readouterr().out  # and once


def test_a_lost_link_is_no_failure_and_is_said_once(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    hosts["h1"].say(*[DROP] * 20, output("rank-0", 0, b"a step\n"), end())
    assert watched(hosts["h1"]) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert out.count("h1: no view (the SSH connection was lost); the run goes on there") == 1
    assert out.count("h1: in view again") == 1


def test_one_host_that_ended_does_not_end_the_wait_for_one_that_goes_on(hosts: dict[str, Host]) -> None:
    hosts["h1"].say(end())
    hosts["h2"].say(*[state(rank_1={"step": number}) for number in range(5)])
    begun = time.monotonic()
    thread = when(lambda: time.monotonic() - begun > 0.5, lambda: hosts["h2"].say(end()))
    assert watched(hosts["h1"], hosts["h2"]) == exits.SUCCEEDED
    thread.join()


def test_a_host_that_stays_silent_after_the_others_ended_is_not_waited_for_without_end(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "LINK_SECONDS", 0.3)
    hosts["h1"].say(end())
    hosts["h2"].say(state(rank_1={"step": 1}))
    assert watched(hosts["h1"], hosts["h2"]) == exits.SUCCEEDED  # as h1's keeper knows of all hosts
    assert (summary()["status"], summary()["missing_hosts"]) == ("succeeded", ["h2"])
    out = capsys.readouterr().out
    assert "nothing was gathered from h2; `make gather RUN=some-run INVENTORY=inventory/lab`" in out
    assert out.splitlines()[-1] == "muster | run some-run succeeded; not gathered yet: h2"


def test_a_host_that_the_run_counts_as_lost_is_named_and_soon_not_waited_for(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in (follow, watch):
        monkeypatch.setattr(room, "SILENT_SECONDS", 0.1)
    lost = cause("h2", "host_lost", reason="no word from it for 10 s")
    hosts["h1"].say(event("failed", **lost), end("failed", lost))
    hosts["h2"].say(state(rank_1={"step": 1}), *[DROP] * 3)
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    assert capsys.readouterr().out.splitlines()[-1] == (
        "muster | run some-run FAILED: h2: the host is lost: no word from it for 10 s"
    )


def test_a_rank_that_only_lost_a_host_that_does_not_answer_is_not_blamed(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for room in (follow, watch):
        monkeypatch.setattr(room, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "CAUSE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "SILENCE_SETTLES_SECONDS", 0.1)
    closed = cause("h1", rank=0, reason="RuntimeError: Connection reset by peer", consequence=True)
    lost = cause("h2", "host_lost", reason="no word from it for 10 s")
    hosts["h2"].say(state(), *[DROP] * 200)
    first = event("failed", **closed)
    hosts["h1"].say(first)

    def later() -> None:
        time.sleep(0.7)  # the others are not sure yet
        hosts["h1"].say(output("events", len(first.data), event("failed", **lost).data), end("failed", closed, lost))

    thread = when(hosts["h1"].frames.empty, later)
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    thread.join()
    said = [line for line in capsys.readouterr().out.splitlines() if "no view" not in line]
    assert said[0] == "muster | h2: the host is lost: no word from it for 10 s"


def test_a_frozen_keeper_is_named_and_not_waited_for_without_end(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "KEEPER_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.3)
    lost = cause("h2", "host_lost", reason="no word from it for 10 s")
    hosts["h1"].say(event("failed", **lost), end("failed", lost))
    hosts["h2"].say(state(rank_1={"step": 1}))
    alive = threading.Event()

    def keep_alive() -> None:
        while not alive.wait(0.02):
            hosts["h2"].say(Frame({"alive": True}, b""))

    thread = threading.Thread(target=keep_alive)
    thread.start()
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    alive.set()
    thread.join()
    assert summary()["failed_host"] == "h2" and "its keeper says nothing any more" in summary()["reason"]


def test_while_every_keeper_is_frozen_that_is_said_now_and_then(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "KEEPER_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "WAITING_SECONDS", 0.1)
    monkeypatch.setattr(watch, "REPEAT_SECONDS", 0.3)
    hosts["h1"].say(state(rank_0={"step": 1}))
    said: list[str] = []
    stuck = r"muster \| no word from the keeper of h1 for \d+ s: stuck, or it cannot write; "
    fix = r"`make stop RUN=some-run INVENTORY=inventory/lab` ends the run\n"

    def told() -> bool:
        hosts["h1"].say(Frame({"alive": True}, b""))
        said.append(capsys.readouterr().out)
        return len(re.findall(stuck + fix, "".join(said))) >= 2

    thread = when(told, lambda: hosts["h1"].say(end()))
    assert watched(hosts["h1"]) == exits.SUCCEEDED
    thread.join()
    assert told()


def test_what_a_run_waits_for_is_said_again_when_it_changes_or_after_a_while(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Watch(plan(1), [], display_of(plan(1), True), 20)
    lines = [(0.0, "the keeper of h1: 6 s"), (5.0, "the keeper of h1: 11 s"), (10.0, "the ranks of h2"), (15.0, "")]
    lines += [(20.0, "the ranks of h2"), (79.0, "the ranks of h2"), (80.0, "the ranks of h2")]
    for now, line in lines:
        made._say_waiting(line, now)
    made._stopping = 81.0  # then every time
    made._say_waiting("the ranks of h2", 82.0)
    said = [line.removeprefix("muster | ") for line in capsys.readouterr().out.splitlines()]
    assert said == ["the keeper of h1: 6 s", *["the ranks of h2"] * 4]


def test_torchrun_is_not_shown_once_its_ranks_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Its complaints of the store come before the cause, and say nothing of it. They are in torchrun.log."""
    made = Watch(plan(1, 1), [], display_of(plan(1, 1), True), 20)
    for _ in range(2):
        for host in ("h1", "h2"):
            made._show(host, "torchrun", b"frame #0\n")
        made._show("h1", "rank-0", b"rank\n")
        made._take_event("h1", {"event": "ranks_ended"})
    made.display.show_parts(0.0)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [sum(words == [host, "|", "frame", "#0"] for words in said) for host in ("h1", "h2")] == [1, 2]
    assert said.count(["h1", "rank", "0", "|", "rank"]) == 2


def test_ctrl_c_names_a_keeper_that_does_not_answer_and_what_ends_its_run(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "KEEPER_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "WAITING_SECONDS", 0.1)
    monkeypatch.setattr(watch, "END_SECONDS_BEYOND_GRACE", -29.4)
    hosts["h1"].say(state(rank_0={"step": 1}))
    left = threading.Event()

    def be_alive() -> None:
        while not left.wait(0.02):
            hosts["h1"].say(Frame({"alive": True}, b""))

    threads = [
        threading.Thread(target=be_alive, daemon=True),
        when(lambda: hosts["h1"].follows, lambda: come(signal.SIGINT)),
    ]
    threads[0].start()
    assert watched(hosts["h1"]) == exits.INTERRUPTED
    left.set()
    for thread in threads:
        thread.join()
    out = capsys.readouterr().out
    assert re.search(r"waiting for the keeper of h1 \(silent for \d+ s\): \d s of 30 s", out)
    assert "no keeper answers on h1; `make stop RUN=some-run INVENTORY=inventory/lab` kills what is left" in out


def test_a_keeper_without_a_last_word_is_described_by_its_container(hosts: dict[str, Host]) -> None:
    hosts["h1"].say(died(OOMKilled=True, ExitCode=137))
    assert watched(hosts["h1"]) == exits.FAILED
    assert "out of memory" in summary()["reason"] and summary()["failed_host"] == "h1"


def stopping(host: Host) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A host whose run ends when it is asked to stop."""

    def stop(options: dict[str, Any]) -> dict[str, Any]:
        host.say(
            event("stop", by=options["by"], grace=30.0), end("stopped", stop={"by": options["by"], "killed": False})
        )
        return {"asked": True}

    return stop


@pytest.mark.parametrize("again", [(), (signal.SIGINT,), (signal.SIGTERM, signal.SIGHUP)])
def test_ctrl_c_stops_the_run_however_often_the_signal_comes(
    again: tuple[int, ...], hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    for host in (hosts["h1"], hosts["h2"]):
        host.answers["stop"] = stopping(host)
        host.say(output("rank-0", 0, b"a step\n"))
    thread = when(lambda: hosts["h1"].follows, lambda: come(signal.SIGINT, *again))
    assert watched(hosts["h1"], hosts["h2"]) == exits.INTERRUPTED
    thread.join()
    assert (summary()["status"], summary()["exit_status"]) == ("stopped", exits.INTERRUPTED)
    assert summary()["reason"].startswith("Ctrl-C by ")
    out = capsys.readouterr().out
    assert out.count("stopping the run; ranks have 30 s") == 1 and out.splitlines()[-1].startswith(
        "muster | run some-run stopped: Ctrl-C by "
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_and_a_killed_command_leave_the_run_alone(
    number: signal.Signals, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts["h1"].say(output("rank-0", 0, b"a step\n"))
    thread = when(lambda: hosts["h1"].follows, lambda: come(number, number))
    assert watched(hosts["h1"]) == 128 + number
    thread.join()
    assert hosts["h1"].verbs() == [] and not Path("runs/some-run/summary.json").exists()
    assert "run some-run goes on on its hosts; `make attach RUN=some-run INVENTORY" in capsys.readouterr().out


def test_a_signal_that_came_during_the_start_counts(hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["stop"] = stopping(hosts["h1"])
    made = plan(1)
    with signals.interrupts_as_exceptions():
        with signals.undisturbed():
            come(signal.SIGINT)
        assert Watch(made, [hosts["h1"].view()], display_of(made), 20).run() == exits.INTERRUPTED
    assert hosts["h1"].verbs() == ["stop"]


def test_one_host_that_takes_the_stop_is_enough(hosts: dict[str, Host]) -> None:
    def stop_both(options: dict[str, Any]) -> dict[str, Any]:
        for name in ("h1", "h2"):
            stopping(hosts[name])(options)
        return {"asked": True}

    hosts["h1"].answers["stop"] = OSError("no route to host")
    hosts["h2"].answers["stop"] = stop_both
    thread = when(lambda: hosts["h1"].follows and hosts["h2"].follows, lambda: come(signal.SIGINT))
    assert watched(hosts["h1"], hosts["h2"]) == exits.INTERRUPTED
    thread.join()
    assert summary()["status"] == "stopped"


def test_a_run_that_cannot_be_stopped_is_said_to_go_on(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts["h1"].answers["stop"] = refusal("sudo: a password is required")
    thread = when(lambda: hosts["h1"].follows, lambda: come(signal.SIGINT))
    assert watched(hosts["h1"]) == exits.INTERRUPTED
    thread.join()
    said = "it goes on: h1: sudo: a password is required; try `make stop RUN=some-run INVENTORY=inventory/lab`"
    assert said in capsys.readouterr().out and not Path("runs/some-run/summary.json").exists()


def test_ranks_that_a_stop_ends_are_not_its_cause(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "CAUSE_SECONDS", 0.5)
    monkeypatch.setattr(watch, "WAITING_SECONDS", 0.1)
    said: list[str] = []

    def waited() -> bool:
        said.append(capsys.readouterr().out)
        return "1 s of 30 s" in "".join(said)

    ended = cause("h1", rank=0, reason="killed by SIGTERM", consequence=True)
    stop = {"by": "make stop by me", "killed": False}
    hosts["h1"].say(event("failed", **ended), end("stopped", ended, stop=stop))
    hosts["h2"].say(event("stop", by="make stop by me", grace=30.0), state(rank_1={"phase": "saving", "step": 7}))
    thread = when(waited, lambda: hosts["h2"].say(end("stopped", stop=stop)))
    assert watched(hosts["h1"], hosts["h2"]) == exits.INTERRUPTED
    thread.join()
    assert "SIGTERM" not in "".join(said) + capsys.readouterr().out


def test_while_a_run_stops_it_is_said_now_and_then_whom_it_waits_for(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "WAITING_SECONDS", 0.1)
    said: list[str] = []

    def waited() -> bool:
        said.append(capsys.readouterr().out)
        waiting = r"waiting for h1 rank 0 \(saving, step 7\), h2 rank 1 \(running\): \d+ s of 30 s"
        return len(re.findall(waiting, "".join(said))) >= 2

    hosts["h1"].say(state(rank_0={"phase": "saving", "step": 7}))
    hosts["h2"].say(state(rank_1={}))
    stop = {"by": "me", "killed": False}
    threads = [
        when(lambda: hosts["h1"].follows and hosts["h2"].follows, lambda: come(signal.SIGINT)),
        when(waited, lambda: [hosts[name].say(end("stopped", stop=stop)) for name in ("h1", "h2")]),
    ]
    assert watched(hosts["h1"], hosts["h2"]) == exits.INTERRUPTED
    for thread in threads:
        thread.join()


def test_hosts_that_do_not_end_in_time_are_named_and_left(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "END_SECONDS_BEYOND_GRACE", -29.8)
    hosts["h1"].say(state(rank_0={"phase": "saving"}))
    hosts["h2"].answers["stop"] = stopping(hosts["h2"])
    thread = when(lambda: hosts["h1"].follows and hosts["h2"].follows, lambda: come(signal.SIGINT))
    assert watched(hosts["h1"], hosts["h2"]) == exits.INTERRUPTED
    thread.join()
    out = capsys.readouterr().out
    assert "run some-run has not ended on h1; `make attach RUN=some-run" in out and "`make gather RUN=some-run" in out


def test_a_stop_from_elsewhere_is_said_with_its_name(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    stopping(hosts["h1"])({"by": "make stop by ann@desk"})
    assert watched(hosts["h1"]) == exits.INTERRUPTED
    out = capsys.readouterr().out
    assert "muster | make stop by ann@desk: the run stops; ranks have 30 s to finish and save" in out
    assert out.splitlines()[-1] == "muster | run some-run stopped: make stop by ann@desk"


def test_a_full_disk_here_costs_the_run_nothing(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, document: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_json", full)
    hosts["h1"].say(end())
    assert watched(hosts["h1"]) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert "No space left on device; `make gather RUN=some-run" in out
    assert out.splitlines()[-1] == "muster | run some-run succeeded; not gathered yet: h1"


def test_a_host_that_cannot_be_gathered_is_missing_not_the_runs_result(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather_host(machine: Host, *more: Any) -> Gathered:
        if machine.name == "h2":
            raise RuntimeError("rsync ended with 11: No space left on device")
        return Gathered({"containers": [], "processes": [4711]}, ["old-run"], cleared=False)

    monkeypatch.setattr(gather, "gather_host", gather_host)
    hosts["h1"].say(end())
    hosts["h2"].say(end())
    assert watched(hosts["h1"], hosts["h2"]) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert "h2: could not gather: rsync ended with 11: No space left on device" in out
    assert "h1: left by the run: processes 4711" in out
    assert "h1: not all that the run left there could be cleared" in out
    assert "removed from the hosts, as KEEP_RUNS=20: old-run" in out
    assert summary()["missing_hosts"] == ["h2"]


LEAVING = """
from pathlib import Path
import pytest
from tests.launch import fake_hosts
from launch.cli import signals
from launch.run.train import display_of
from launch.run.watch import Watch
patch = pytest.MonkeyPatch()
(host, *_) = fake_hosts.hosts.__wrapped__(patch, Path(".")).values()
plan = fake_hosts.plan(1)
host.say(fake_hosts.output("rank-0", 0, b"a step\\n"))
signals.LATER_SECONDS = 0.0
with signals.interrupts_as_exceptions():
    Watch(plan, [host.view()], display_of(plan), 20).run()
"""


@pytest.mark.slow
def test_a_second_ctrl_c_says_what_will_happen_and_leaves() -> None:
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", LEAVING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    for said in ("a step", "stopping the run"):
        while said not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == exits.INTERRUPTED
    assert "muster: left; run some-run is being stopped by its hosts; `make attach RUN=some-run" in err


def test_a_run_that_goes_on_is_told_in_order_and_a_lost_host_is_not_waited_for(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(follow, "SILENT_SECONDS", 0.2)
    lost = cause("h1", "host_lost", reason="no word from it for 10 s")
    known: dict[str, Any] = {"attempt": 2, "hosts": ["h2", "h3"], "attempts": [{"number": 1}, {"number": 2}]}
    begins = event(
        "attempt", attempt=2, hosts=["h2", "h3"], master="h2", left_out={"h1": "no word from it for 10 s"}, because=lost
    )
    for name in ("h2", "h3"):
        failed = event("failed", attempt=1, **lost)
        hosts[name].say(output("events", 0, failed.data + begins.data), end(**known))
    for _ in range(200):
        hosts["h1"].say(DROP)
    assert watched(hosts["h1"], hosts["h2"], hosts["h3"]) == exits.SUCCEEDED
    said = [line for line in capsys.readouterr().out.splitlines() if "| h1: no view" not in line]
    assert said[0] == "muster | h1: the host is lost: no word from it for 10 s"
    assert said[1] == "muster | the ranks of the run are being ended, on every host"
    goes_on = "attempt 2 begins, on h2, h3; h1 is left out: no word from it for 10 s"
    assert said[2] == f"muster | {goes_on}" and sum(goes_on in line for line in said) == 1
    assert said[-1] == "muster | run some-run succeeded after 1 restart; not gathered yet: h1"
    assert (summary()["restarts"], summary()["missing_hosts"]) == (1, ["h1"])


def attempt_2(because: Any) -> Frame:
    return event("attempt", attempt=2, hosts=["h1", "h2"], master="h1", left_out={}, because=because)


@pytest.mark.slow
def test_a_keeper_that_is_started_again_is_said_and_how_it_ended_before_explains_nothing_later(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE_SETTLES_SECONDS", 0.1)
    gone = cause("h1", "host_lost", reason="its container has ended, and not because the run has")
    known: dict[str, Any] = {"attempt": 2, "hosts": ["h1", "h2"], "attempts": [{"number": 1}, {"number": 2}]}
    later = {name: cause(other, "host_lost", reason="no word") for name, other in (("h1", "h2"), ("h2", "h1"))}
    known_there = course.of_plan(document(plan(1, 1, max_restarts=3)), "h2", 0.0)
    hosts["h2"].say(state(course.beat(known_there, 0.0)))

    def others() -> None:
        time.sleep(0.3)
        hosts["h1"].say(died(ExitCode=137))
        first = event("failed", attempt=1, **gone).data
        begun = first + attempt_2(gone).data
        hosts["h2"].say(output("events", 0, begun))
        time.sleep(1.5)  # the second attempt has begun
        hosts["h1"].say(event("failed", attempt=2, **later["h1"]))
        hosts["h2"].say(output("events", len(begun), event("failed", 0.5, attempt=2, **later["h2"]).data))
        time.sleep(1.0)  # and the cause of its end is said
        for name in ("h1", "h2"):
            hosts[name].say(end("failed", later[name], **known))

    thread = when(hosts["h2"].frames.empty, others)
    assert watched(hosts["h1"], hosts["h2"], max_restarts=3) == exits.FAILED
    thread.join()
    said = [line.removeprefix("muster | ") for line in capsys.readouterr().out.splitlines()]
    assert "h1: its keeper was gone, and is started again; it waits for the next attempt" in said
    assert "attempt 2 begins, on h1, h2" in said
    assert "h1 and h2: do not hear each other on the training network, though both answer over SSH" in said
    assert hosts["h1"].verbs()[0] == "rejoin" and hosts["h2"].verbs()[0] == "private"


@pytest.mark.parametrize("known", [True, False])
def test_a_view_that_begins_late_has_the_last_lines_of_an_earlier_attempt_whichever_host_is_heard_first(
    known: bool, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare has heard that another attempt began and why, and nothing that the failed rank printed."""
    monkeypatch.setattr(watch, "HEARD_SECONDS", 60.0 if known else 0.05)
    failed = cause("h1", rank=0, reason="ValueError: no", lines=["ValueError: no"])
    without = {key: value for key, value in failed.items() if key not in ("lines", "age")}
    ends = end(attempt=2, hosts=["h1", "h2"], attempts=[{"number": 1}, {"number": 2}])
    hosts["h3"].say(attempt_2(without))

    def others() -> None:
        time.sleep(0.5)
        said = event("failed", attempt=1, **failed).data if known else b""
        hosts["h1"].say(output("events", 0, said + attempt_2(without).data), ends)
        for name in ("h2", "h3"):
            hosts[name].say(ends)

    thread = when(hosts["h3"].frames.empty, others)
    assert watched(hosts["h1"], hosts["h2"], hosts["h3"]) == exits.SUCCEEDED
    thread.join()
    lines = ["; the last lines of its output:", "h1 rank 0 | > ValueError: no"] if known else [""]
    assert capsys.readouterr().out.splitlines()[: len(lines) + 2] == [
        f"muster | rank 0 on h1 failed: ValueError: no{lines[0]}",
        *lines[1:],
        "muster | the ranks of the run are being ended, on every host",
        "muster | attempt 2 begins, on h1, h2",
    ]


def test_of_what_was_printed_before_a_view_began_nothing_is_held_back(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback of an earlier attempt, and what its rank has printed since then."""
    failed = cause("h1", rank=0, reason="ValueError: no", lines=["ValueError: no"])
    tail = b"Traceback (most recent call last):\nValueError: no\nthe second attempt\n"
    ends = end(attempt=2, hosts=["h1"], attempts=[{"number": 1}, {"number": 2}])
    events = output("events", 0, event("failed", attempt=1, **failed).data + attempt_2(failed).data)
    hosts["h1"].say(output("rank-0", 70, b""), output("rank-0", 70, tail), events, ends)
    made = plan(1)
    with signals.interrupts_as_exceptions():
        assert Watch(made, [hosts["h1"].view()], display_of(made), 20, 20).run() == exits.SUCCEEDED
    said = capsys.readouterr().out.splitlines()
    for line in ("Traceback (most recent call last):", "ValueError: no", "the second attempt", "> ValueError: no"):
        assert said.count(f"h1 rank 0 | {line}") == 1, said


def test_what_is_waited_for_between_two_attempts_is_said_once(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WAITING_SECONDS", 0.01)
    killed = cause("h2", rank=1)
    for host in (hosts["h1"], hosts["h2"]):
        host.say(event("failed", **killed))
        for silence in range(3, 12):
            missing = f"h3: no word from it for {silence} s; that may take 30 s at most"
            host.say(
                Frame({"state": {"status": "ended", "ranks": {}, "waiting": f"attempt 2 to begin: {missing}"}}, b"")
            )
    said: list[str] = []

    def waited() -> bool:
        said.append(capsys.readouterr().out)
        return "to begin" in "".join(said)

    def end_both() -> None:
        time.sleep(0.3)  # for thirty more looks
        for name in ("h1", "h2"):
            hosts[name].say(end("failed", killed))

    thread = when(waited, end_both)
    assert watched(hosts["h1"], hosts["h2"]) == exits.FAILED
    thread.join()
    found = re.findall(r"muster \| waiting for (.*)", "".join(said) + capsys.readouterr().out)
    assert len(found) == 1
    assert re.fullmatch(r"attempt 2 to begin: h3: no word from it for \d+ s; that may take 30 s at most", found[0])


def test_why_a_run_was_not_started_again_is_said(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    killed = cause("h1", rank=0)
    hosts["h1"].say(event("failed", **killed), end("failed", killed, given_up="it would end the same way again"))
    assert watched(hosts["h1"]) == exits.FAILED
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "muster | it was not started again: it would end the same way again"
    assert said[-1].startswith("muster | run some-run FAILED: ")


def test_a_slow_host_and_its_end_are_said_and_kept_in_the_summary(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"host": "h2", "rank": None, "step": 89, "times": 2.04, "seconds": 0.228, "others_seconds": 0.112}
    begun = json.dumps({"event": "slow", "attempt": 1, **slow, "reason": "a CPU quota", "over": False}) + "\n"
    over = json.dumps({"event": "slow", "attempt": 1, **slow, "step": 120, "reason": "", "over": True}) + "\n"
    hosts["h1"].say(end())
    hosts["h2"].say(output("events", 0, (begun + over).encode()), end())
    assert watched(hosts["h1"], hosts["h2"]) == exits.SUCCEEDED
    lines = [line for line in capsys.readouterr().out.splitlines() if "slow" in line]
    assert lines == [
        "muster | h2 is slow: its steps take 2.0 times as long as the others', 228 : 112 ms (step 89): a CPU quota",
        "muster | h2 is no longer slow (step 120)",
    ]
    assert summary()["slow"] == [{"attempt": 1, **slow, "reason": "a CPU quota", "until": 120}]
