"""Promise: status, stop, logs, attach and gather read the truth on the hosts; a host that cannot say what runs on it is
named, and nothing is said for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Problem, Refusal
from launch.hosts import clustermap, ssh
from launch.hosts.door import Frame
from launch.job import follow, readiness
from launch.job import plan as plans
from launch.run import ask_hosts, attach, fetch, gather, logs, status, stop
from launch.run.gather import Gathered
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, died, end, exit_words, output, plan, refusal, state
from tests.launch.samples import cluster

hosts = fake_hosts.hosts
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
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host]) -> Iterator[None]:
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


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_shows_how_far_a_run_is_who_waits_and_what_ended_unseen(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {"0": {"phase": "training", "step": 512, "steps": 2000, "epoch": 3, "epochs": 90}}
    going = {"status": "running", "ranks": ranks}
    unseen = entry("failed", run="old-run", exit=exit_words("failed"), hosts=["h1"])
    seen = entry("succeeded", run="seen-run", gathered={"by": "me", "time": 0})
    ticket = {"run": "new-run", "owner": "bob@desk", "since": 125.0, "state": "waits"}
    has(hosts["h1"], entry(state=going), unseen, seen, queue=[ticket])
    has(hosts["h2"], entry(state={"status": "running", "ranks": {}}), queue=[ticket])
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert "epoch 3/90, step 512/2000, training" in out and "ann@desk" in out and "h1, h2" in out
    assert "failed, ended unseen: `make gather RUN=old-run INVENTORY=inventory/lab`" in out and "seen-run" not in out
    assert "Waiting: run new-run of bob@desk for h1, h2, 2 min so far" in out


def test_a_run_without_a_last_word_of_its_keeper_died() -> None:
    assert status.state_of("r", {"h1": entry("died"), "h2": entry("failed")}).startswith("died, ended unseen")
    assert status.state_of("r", {"h1": entry("died"), "h2": entry("starting")}) == "starting on h2; ended on h1"


def test_a_summary_says_where_it_failed_and_a_waiting_start_how_it_is_taken_back(hosts: dict[str, Host]) -> None:
    failed = {"reason": "killed by SIGKILL", "failed_host": "h2", "failed_rank": 1}
    assert status._why(failed) == "rank 1 on h2: killed by SIGKILL"
    assert (
        status._why({"reason": "make stop by me", "failed_host": None}) == "make stop by me" and status._why({}) == ""
    )
    ticket = {"run": "waiting-run", "owner": "eve@desk", "since": 11.0, "state": "waits"}
    has(hosts["h1"], entry(), queue=[ticket])
    with pytest.raises(Refusal, match=r"Waiting: run waiting-run of eve@desk for h1, .*: Ctrl-C where it was started"):
        stop.stop(INVENTORY, "waiting-run", console())


def test_status_names_a_silent_host(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    has(hosts["h1"], entry())
    lose(hosts["h2"])
    assert status.status(INVENTORY, console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "some-run" in out and named(err)


def test_status_shows_a_reason_as_it_is(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are markup to rich; gloo's own messages begin with a path in brackets."""
    has(hosts["h1"])
    has(hosts["h2"])
    reason = "RuntimeError: [/gloo/pair.cc:553] Connection closed by peer"
    files.write_json(files.runs_dir() / "a-run" / "summary.json", {"run": "a-run", "reason": reason})
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    assert "[/gloo/pair.cc:553]" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0.93", [1], {"x": 1}, True, float("nan"), float("inf"), 10**400, "[/red]"])
def test_status_survives_whatever_a_summary_holds(
    value: Any, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("run", "status", "world_size", "test_accuracy", "images_per_second", "reason")
    for name in names:
        files.write_json(files.runs_dir() / f"with-{name}" / "summary.json", {"test_accuracy": 0.5, name: value})
    files.write_json(files.runs_dir() / "with-all" / "summary.json", dict.fromkeys(names, value))
    has(hosts["h1"], entry("failed", run="a-run", owner=value))
    has(hosts["h2"])
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert out.count("50.00%") == 5 and all(f"with-{name}" in out for name in (*names, "all"))


def test_a_machine_that_deployed_nothing_takes_the_hosts_from_the_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_map(path: Path, current: bool) -> Any:
        raise Refusal([Problem("cluster.json", "there is no cluster map", "deploy")])

    monkeypatch.setattr(clustermap, "read", no_map)
    file = tmp_path / "hosts.yml"
    with pytest.raises(Refusal, match="no cluster map"):
        ask_hosts.known(file)
    file.write_text("all:\n  hosts:\n    h1:\n      ansible_host: 192.0.2.1\n")
    known = ask_hosts.known(file)
    assert [(target.name, target.address) for target in known.targets] == [("h1", "192.0.2.1")]
    assert known.known_hosts == tmp_path / "known_hosts"


# -- stop -------------------------------------------------------------------------------------------------------------


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
        return "".join(said).count("Waiting for h1 rank 0 (saving): 0 s of 30 s") >= 2

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


def test_a_command_without_run_says_what_runs_and_does_not_speak_for_the_silent_host(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry(), entry("succeeded", run="old-run"))
    lose(hosts["h2"])
    for command in (
        lambda: stop.stop(INVENTORY, "", console()),
        lambda: logs.logs(INVENTORY, "", "", console()),
        lambda: attach.attach(INVENTORY, "", "", "", console()),
    ):
        with pytest.raises(Refusal, match="on the hosts that answered now: some-run") as refused:
            command()
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


# -- logs -------------------------------------------------------------------------------------------------------------


def when(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_live_view_is_left_at_once_and_the_run_goes_on(
    number: signal.Signals, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry())
    hosts["h1"].say(output("rank-0", 0, b"a step\n"))

    def come_twice() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.02)
        os.kill(os.getpid(), number)

    seen: list[str] = []

    def shown() -> bool:
        seen.append(capsys.readouterr().out)
        return "h1 rank 0 | a step" in "".join(seen)

    thread = when(shown, come_twice)
    left = "left the view; run some-run goes on, `make stop RUN=some-run` ends it"
    with pytest.raises(KeyboardInterrupt, match=left), signals.interrupts_as_exceptions():
        logs.logs(INVENTORY, "some-run", "", console())
    thread.join()
    assert set(hosts["h1"].verbs()) == {"runs"}  # it asked for no end
    assert hosts["h1"].follows[0]["tail"] is None  # from the first byte


def test_a_live_view_that_is_watched_to_the_end_is_whole(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("h1", "h2")):
        has(hosts[name], entry())
        hosts[name].say(output(f"rank-{number}", 0, b"a step\nthe end"), end())
    assert logs.logs(INVENTORY, "some-run", "", console()) == exits.SUCCEEDED
    told, *lines = capsys.readouterr().out.splitlines()
    assert told.startswith("muster | run some-run of ") and "Ctrl-C only leaves the view" in told
    assert sorted(lines) == [f"h{rank + 1} rank {rank} | {text}" for rank in (0, 1) for text in ("a step", "the end")]


def test_a_view_ends_when_nobody_reads_it(hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    has(hosts["h1"], entry())
    hosts["h1"].say(output("rank-0", 0, b"a step\n"))
    monkeypatch.setattr(logs, "nobody_reads", lambda: bool(hosts["h1"].follows))
    assert logs.logs(INVENTORY, "some-run", "", console()) in (exits.SUCCEEDED, exits.UNREACHABLE)


def test_a_live_view_of_a_host_that_is_away_is_no_success(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = ssh.connect

    def h2_is_away(target: Any, known_hosts: Path) -> Any:
        if target.name == "h2":
            raise ssh.Unreachable(Problem("host h2", "no SSH connection", "look"))
        return connect(target, known_hosts)

    monkeypatch.setattr(ssh, "connect", h2_is_away)
    has(hosts["h1"], entry())
    hosts["h1"].say(output("rank-0", 0, b"a step\n"), end())
    assert logs.logs(INVENTORY, "some-run", "", console()) == exits.UNREACHABLE
    out, err = capsys.readouterr()
    assert "h1 rank 0 | a step\n" in out and "host h2: no SSH connection" in err


def test_the_output_of_a_gathered_run_is_printed_from_here(capsys: pytest.CaptureFixture[str]) -> None:
    folder = files.runs_dir() / "old-run"
    for host, name, text in (
        ("h2", "rank-10", "ten"),
        ("h2", "rank-2", "two"),
        ("h1", "rank-0", "a\nb"),
        ("h1", "torchrun", "t"),
    ):
        (folder / "logs" / host).mkdir(parents=True, exist_ok=True)
        (folder / "logs" / host / f"{name}.log").write_text(text)
    files.write_json(folder / "summary.json", {"status": "succeeded"})
    assert logs.logs(INVENTORY, "old-run", "", console()) == exits.SUCCEEDED
    said = ["h1 | t", "h1 rank 0 | a", "h1 rank 0 | b", "h2 rank 2 | two", "h2 rank 10 | ten"]
    assert capsys.readouterr().out.splitlines() == said


def test_the_output_of_a_run_on_this_machine_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    folder = files.runs_dir() / "old-local"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.out").write_text("said\n")
    (folder / "logs" / "rank-0.err").write_text("complained\n")
    files.write_json(folder / "summary.json", {"status": "succeeded"})
    assert logs.logs(INVENTORY, "old-local", "", console()) == exits.SUCCEEDED
    assert capsys.readouterr().out.splitlines() == ["rank-0 | complained", "rank-0 | said"]


def test_a_run_that_is_nowhere_is_refused(hosts: dict[str, Host]) -> None:
    (files.runs_dir() / "old-run").mkdir(parents=True)
    with pytest.raises(Refusal, match=r"no host has a run nil(.|\n)*the newest here: old-run"):
        logs.logs(INVENTORY, "nil", "", console())
    lose(hosts["h2"])
    with pytest.raises(Refusal, match="no host that answered has a run nil") as refused:
        logs.logs(INVENTORY, "nil", "", console())
    assert refused.value.status == exits.UNREACHABLE


# -- attach and gather ------------------------------------------------------------------------------------------------


def test_any_control_machine_can_attach_with_the_plan_of_a_host(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("h1", "h2")):
        has(hosts[name], entry())
        hosts[name].say(output(f"rank-{number}", 900, b"step 99\n"), end())
    with signals.interrupts_as_exceptions():
        assert attach.attach(INVENTORY, "some-run", "", "", console()) == exits.SUCCEEDED
    lines = capsys.readouterr().out.splitlines()
    assert "Ctrl-C stops the run; closing the terminal, or `kill`, only leaves the view" in lines[1]
    assert hosts["h1"].follows[0]["tail"] == attach.EARLIER_LINES and "h1 rank 0 | step 99" in lines
    assert lines[-1] == "muster | run some-run succeeded"
    assert files.read_json(files.runs_dir() / "some-run" / "plan.json")["run"] == "some-run"
    assert files.read_json(files.runs_dir() / "some-run" / "summary.json")["status"] == "succeeded"


def test_a_host_that_has_nothing_of_the_run_any_more_is_not_waited_for(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry())
    hosts["h1"].say(end())
    with signals.interrupts_as_exceptions():
        assert attach.attach(INVENTORY, "some-run", "", "", console()) == exits.FAILED
    assert hosts["h2"].follows == []
    assert capsys.readouterr().out.splitlines()[-1] == "muster | run some-run FAILED: h2: the container is gone"


def test_a_run_of_another_version_is_not_guessed_at(hosts: dict[str, Host]) -> None:
    has(hosts["h1"], entry(plan={"schema": "muster.plan/3"}))
    with pytest.raises(Refusal, match=r"muster\.plan/3, not muster\.plan/4"):
        attach.attach(INVENTORY, "some-run", "", "", console())


def test_a_plan_that_a_script_wrote_over_on_one_host_keeps_nobody_away(hosts: dict[str, Host]) -> None:
    good = plans.document(plan(1, 1))
    has(hosts["h1"], entry(plan={**good, "run": "../../x"}))
    has(hosts["h2"], entry(plan=good))
    for name in ("h1", "h2"):
        hosts[name].say(end())
    with signals.interrupts_as_exceptions():
        assert attach.attach(INVENTORY, "some-run", "", "", console()) == exits.SUCCEEDED
    assert [path.name for path in files.ROOT.iterdir()] == ["runs"]
    assert [path.name for path in files.runs_dir().iterdir()] == ["some-run"]


@pytest.mark.parametrize("wrong", [{"run": "../../x"}, {"owner": "somebody else"}, {"schema": "muster.plan/3"}])
def test_a_plan_that_is_not_this_runs_own_is_refused(
    wrong: dict[str, Any], hosts: dict[str, Host], gathers: list[tuple[str, str]], tmp_path: Path
) -> None:
    has(hosts["h1"], entry("succeeded", plan={**plans.document(plan(1, 1)), **wrong}))
    for command in (
        lambda: fetch.fetch(INVENTORY, "some-run", "", console()),
        lambda: attach.attach(INVENTORY, "some-run", "", "", console()),
    ):
        with pytest.raises(Refusal, match="run some-run: "):
            command()
    assert gathers == [] and list(tmp_path.iterdir()) == []


def test_one_run_without_a_plan_does_not_keep_the_others_from_being_gathered(
    hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("succeeded", run="z-run", plan={}), entry("succeeded", plan=plans.document(plan(1))))
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.REFUSED
    assert gathers == [("some-run", "h1")]
    assert "muster | not gathered: run z-run: no host that answered has its plan" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["..", "../../x", "/tmp/x", "a/b", "", "-x", "x\n"])
def test_a_run_that_is_listed_under_no_plain_name_is_none(
    name: str, hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("succeeded", run=name, plan=plans.document(plan(1, run=name))))
    assert ask_hosts.listed({"h1": {"runs": [entry(run=name), entry()]}}) == {"some-run": {"h1": entry()}}
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.SUCCEEDED and gathers == []
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    assert "ended unseen" not in capsys.readouterr().out and not files.runs_dir().exists()


def test_attach_to_a_run_that_is_gathered_only_says_so(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("failed", gathered={"by": "me", "time": 0}))
    summary = {"status": "failed", "exit_status": 1, "missing_hosts": []}
    files.write_json(files.runs_dir() / "some-run" / "summary.json", summary)
    assert attach.attach(INVENTORY, "some-run", "", "", console()) == exits.FAILED
    assert "has ended (failed) and is gathered: runs/some-run" in capsys.readouterr().out


def ended(folder: Path, host: str, words: dict[str, Any]) -> None:
    files.write_json(folder / "logs" / host / "exit.json", words)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(run, host) of what is gathered; it brings a good end."""
    done: list[tuple[str, str]] = []

    def gather_host(
        machine: Host, made: plans.Plan, host_plan: plans.HostPlan, keep: int, after_first: object
    ) -> Gathered:
        done.append((made.run, host_plan.host))
        ended(files.runs_dir() / made.run, host_plan.host, exit_words())
        return Gathered()

    monkeypatch.setattr(gather, "gather_host", gather_host)
    return done


def test_a_run_that_ended_unseen_is_gathered_from_all_that_have_it(
    hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("h1", "h2"):
        has(hosts[name], entry("succeeded", exit=exit_words()))
    assert fetch.fetch(INVENTORY, "some-run", "", console()) == exits.SUCCEEDED
    assert sorted(gathers) == [("some-run", "h1"), ("some-run", "h2")]
    assert capsys.readouterr().out.splitlines()[-1] == "muster | run some-run succeeded"
    assert files.read_json(files.runs_dir() / "some-run" / "summary.json")["missing_hosts"] == []


def test_without_run_all_ended_runs_are_gathered_that_nobody_has(
    hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {"by": "me", "time": 0}
    has(hosts["h1"], entry("succeeded"), entry("running", run="going"), entry("failed", run="seen", gathered=seen))
    has(hosts["h2"], entry("succeeded"), entry("succeeded", run="going"))
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.SUCCEEDED
    assert sorted(gathers) == [("some-run", "h1"), ("some-run", "h2")]
    assert "run going has not ended: `make attach RUN=going` watches it" in capsys.readouterr().out
    has(hosts["h1"])
    has(hosts["h2"])
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.SUCCEEDED
    assert capsys.readouterr().out.splitlines()[-1].endswith("are gathered")


def test_a_host_that_is_away_is_missing_and_fetched_later(
    hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("succeeded"))
    lose(hosts["h2"])
    assert fetch.fetch(INVENTORY, "some-run", "", console()) == exits.UNREACHABLE
    summary = files.read_json(files.runs_dir() / "some-run" / "summary.json")
    assert (summary["status"], summary["missing_hosts"]) == ("succeeded", ["h2"])
    assert capsys.readouterr().out.splitlines()[-1] == "muster | run some-run succeeded; not gathered yet: h2"
    has(hosts["h2"], entry("succeeded"))
    assert fetch.fetch(INVENTORY, "some-run", "", console()) == exits.SUCCEEDED
    summary = files.read_json(files.runs_dir() / "some-run" / "summary.json")
    assert (summary["status"], summary["missing_hosts"]) == ("succeeded", [])


def test_a_run_that_goes_on_is_not_gathered(hosts: dict[str, Host], gathers: list[tuple[str, str]]) -> None:
    has(hosts["h1"], entry("succeeded"))
    has(hosts["h2"], entry("running"))
    with pytest.raises(Refusal, match=r"run some-run has not ended on h2(.|\n)*make stop RUN=some-run"):
        fetch.fetch(INVENTORY, "some-run", "", console())
    assert gathers == []


def test_readiness_names_a_silent_host() -> None:
    def answer(command: str, timeout: float = 0) -> str:
        raise RuntimeError(LOST)

    silent: Any = SimpleNamespace(name="h2", target=SimpleNamespace(python="python3"), answer=answer)
    known = cluster(1, 1).hosts[1:]
    with pytest.raises(Refusal, match=f"host h2: did not answer: {LOST}") as refused:
        readiness.check([silent], known, "ab" * 32)
    assert refused.value.status == exits.UNREACHABLE
