"""Promise: status shows what the hosts say of their runs; a silent host is named, and nothing is said for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import clustermap
from launch.run import ask_hosts, status, stop
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, exit_words
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, console, entry, has, lose, named

hosts, _here = fake_hosts.hosts, listing_hosts.here


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


def test_a_host_that_was_lost_before_says_nothing_of_the_runs_end() -> None:
    exit_2 = exit_words("succeeded", attempt=2, hosts=["h2"])
    known = {"h1": entry("died"), "h2": entry("succeeded", exit=exit_2)}
    assert status.state_of("r", known).startswith("succeeded, ended unseen")


def test_a_run_that_ended_a_moment_ago_may_be_in_the_hands_of_its_view() -> None:
    known = {"h1": entry("succeeded", exit=exit_words("succeeded", time=1000.0))}
    watched = "succeeded a moment ago: who watches it gathers it, else `make gather RUN=r`"
    assert status.state_of("r", known, 1005.0) == watched
    assert status.state_of("r", known, 1100.0) == "succeeded, ended unseen: `make gather RUN=r`"


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


def test_status_says_nothing_of_the_runs_where_no_host_answered(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    for host in hosts.values():
        lose(host)
    assert status.status(INVENTORY, console()) == exits.UNREACHABLE
    out = capsys.readouterr().out
    assert "No host answered (0 of 2): what runs there is not known." in out and "Nothing runs" not in out


def test_status_says_how_often_a_run_was_restarted(hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    has(hosts["h1"])
    has(hosts["h2"])
    for run, restarts in (("a-run", 1), ("b-run", 2), ("c-run", 0)):
        known = {"status": "succeeded", "restarts": restarts, "missing_hosts": ["h2"]}
        files.write_json(files.runs_dir() / run / "summary.json", known)
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert "succeeded after 1 restart; not" in out and "after 2 restarts; not" in out and "succeeded; not" in out


def test_status_names_a_host_from_which_nothing_was_gathered(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"])
    has(hosts["h2"])
    files.write_json(files.runs_dir() / "a-run" / "summary.json", {"status": "stopped", "missing_hosts": ["h2"]})
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    assert "stopped; not gathered: h2" in capsys.readouterr().out


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
    names = ("run", "status", "restarts", "world_size", "test_accuracy", "images_per_second", "reason", "missing_hosts")
    for name in names:
        files.write_json(files.runs_dir() / f"with-{name}" / "summary.json", {"test_accuracy": 0.5, name: value})
    files.write_json(files.runs_dir() / "with-all" / "summary.json", dict.fromkeys(names, value))
    has(hosts["h1"], entry("failed", run="a-run", owner=value))
    has(hosts["h2"])
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert out.count("50.00%") == len(names) - 1 and all(f"with-{name}" in out for name in (*names, "all"))


@pytest.mark.slow
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
