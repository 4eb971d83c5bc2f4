"""Promise: logs shows a run's output from the hosts while it runs, and from here when it is gathered."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Problem, Refusal
from launch.hosts import ssh
from launch.run import logs
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, cause, end, output, when
from tests.launch.run import listing_hosts
from tests.launch.run.listing_hosts import INVENTORY, console, entry, has, lose

hosts, _here = fake_hosts.hosts, listing_hosts.here


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


def test_a_live_view_says_why_and_where_a_run_goes_on(
    hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    because = cause("h2", rank=1)
    begins = {"event": "attempt", "attempt": 2, "hosts": ["h1"], "left_out": {"h2": "gone"}, "because": because}
    for name in ("h1", "h2"):
        has(hosts[name], entry())
        hosts[name].say(output("events", 0, json.dumps(begins).encode() + b"\n"), end())
    assert logs.logs(INVENTORY, "some-run", "", console()) == exits.SUCCEEDED
    assert capsys.readouterr().out.splitlines()[1:] == [
        "muster | rank 1 on h2: killed by SIGKILL",
        "muster | attempt 2 begins, on h1; h2 is left out: gone",
    ]


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


def test_what_comes_after_a_traceback_is_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = "before\nTraceback (most recent call last):\n  File x\nE: no\nanother attempt\nthe end\n"
    for rank in (0, 1):
        path = files.runs_dir() / "some-run" / "logs" / "h1" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said)
    (files.runs_dir() / "some-run" / "summary.json").write_text("{}")
    assert logs.logs(INVENTORY, "some-run", "", console()) == exits.SUCCEEDED
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"h1 rank {rank} | {line}" for rank in (0, 1) for line in said.splitlines()]


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
