"""Promise: gather brings what ended unseen, from all hosts that have it, and says what is missing."""

from __future__ import annotations

import pytest

from launch import files
from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.job import plan as plans
from launch.run import fetch
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, exit_words, plan
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, console, entry, has, lose

hosts, _here = fake_hosts.hosts, listing_hosts.here
gathers = listing_hosts.gathers


def test_one_run_without_a_plan_does_not_keep_the_others_from_being_gathered(
    hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("succeeded", run="z-run", plan={}), entry("succeeded", plan=plans.document(plan(1))))
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.REFUSED
    assert gathers == [("some-run", "h1")]
    assert "muster | not gathered: run z-run: no host that answered has its plan" in capsys.readouterr().out


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
    assert (
        "run going has not ended: `make attach RUN=going INVENTORY=inventory/lab` watches it" in capsys.readouterr().out
    )
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
