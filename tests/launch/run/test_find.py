"""Promise: which run is meant is found on the hosts; a plan that is not this run's own is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Refusal
from launch.job import plan as plans
from launch.run import ask_hosts, attach, fetch, logs, status, stop
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, end, plan
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, console, entry, has, lose, named

hosts, _here = fake_hosts.hosts, listing_hosts.here
gathers = listing_hosts.gathers


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


def test_a_run_of_another_version_is_not_guessed_at(hosts: dict[str, Host]) -> None:
    has(hosts["h1"], entry(plan={"schema": "muster.plan/3"}))
    with pytest.raises(Refusal, match=r"muster\.plan/3, not muster\.plan/6"):
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


@pytest.mark.parametrize("name", ["..", "../../x", "/tmp/x", "a/b", "", "-x", "x\n"])
def test_a_run_that_is_listed_under_no_plain_name_is_none(
    name: str, hosts: dict[str, Host], gathers: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("succeeded", run=name, plan=plans.document(plan(1, run=name))))
    assert ask_hosts.listed({"h1": {"runs": [entry(run=name), entry()]}}) == {"some-run": {"h1": entry()}}
    assert fetch.fetch(INVENTORY, "", "", console()) == exits.SUCCEEDED and gathers == []
    assert status.status(INVENTORY, console()) == exits.SUCCEEDED
    assert "ended unseen" not in capsys.readouterr().out and not files.runs_dir().exists()
