"""Promise: any control machine can watch a run to its end."""

from __future__ import annotations

import pytest

from launch import files
from launch.cli import exits, signals
from launch.run import attach
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, end, output
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, console, entry, has

hosts, _here = fake_hosts.hosts, listing_hosts.here


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


def test_attach_to_a_run_that_is_gathered_only_says_so(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    has(hosts["h1"], entry("failed", gathered={"by": "me", "time": 0}))
    summary = {"status": "failed", "exit_status": 1, "missing_hosts": []}
    files.write_json(files.runs_dir() / "some-run" / "summary.json", summary)
    assert attach.attach(INVENTORY, "some-run", "", "", console()) == exits.FAILED
    assert "has ended (failed) and is gathered: runs/some-run" in capsys.readouterr().out
