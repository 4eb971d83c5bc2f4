"""Promises: a start's ticket lives as long as its door, and every host tells each start who comes before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keeper import lease, queue
from keeper.engines import ROOTS
from tests.conftest import ROOT
from tests.processes import GUARD_SECONDS

#: The verb as the door runs it, without the door: requests on standard input, frames as lines.
VERB = """
import json, sys
from keeper import queue
from keeper.engines import ROOTS
queue.queue(json.loads(sys.argv[1]), 0, lambda words: print(json.dumps(words), flush=True))
"""


class Start:
    """A start's ticket on one host, held by a process of its own."""

    def __init__(self, host: Path, run: str, **more: Any) -> None:
        options = {"run": run, "owner": f"{run}@laptop", "root": str(host), **more}
        command = [sys.executable, "-S", "-c", VERB, json.dumps(options)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.proposed = int(self.frame()["proposed"])

    def send(self, **words: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def frame(self) -> dict[str, Any]:
        assert self.process.stdout
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def place(self) -> tuple[int, list[tuple[str, str]], str | None]:
        words = self.frame()
        ahead = [(one["run"], one["state"]) for one in words["ahead"]]
        return words["place"], ahead, (words["lease"] or {}).get("run")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    started: list[Start] = []

    def make(run: str, **more: Any) -> Start:
        started.append(Start(tmp_path, run, **more))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.wait()


def folder(host: Path) -> str:
    return f"{host}{ROOTS.lease}"


def runs(host: Path) -> list[tuple[str, str]]:
    return [(one["run"], one["state"]) for one in queue.waiting(folder(host))]


@pytest.mark.slow
def test_who_comes_later_stands_behind_and_hears_what_those_ahead_do(
    tmp_path: Path, start: Callable[..., Start]
) -> None:
    a = start("a", wait=True)
    a.send(commit=a.proposed)
    assert a.place() == (1, [], None)
    b = start("b")
    assert b.proposed > a.proposed
    b.send(commit=b.proposed)
    assert b.place() == (2, [("a", "waits")], None)
    a.send(starts=True)
    assert b.place() == (2, [("a", "starts")], None)
    with lease.take(folder(tmp_path), {"run": "a", "owner": "o"}):
        assert b.place() == (2, [("a", "starts")], "a")
        assert a.place() == (1, [], "a")
        a.process.communicate()
        assert b.place() == (1, [], "a") and runs(tmp_path) == [("b", "undecided")]
    assert b.place() == (1, [], None)


@pytest.mark.slow
def test_a_ticket_that_is_not_committed_counts_with_its_proposal(tmp_path: Path, start: Callable[..., Start]) -> None:
    early, late = start("z"), start("a")
    late.send(commit=late.proposed)
    assert late.place() == (2, [("z", "undecided")], None)
    early.send(commit=late.proposed + 5)
    assert late.place() == (1, [], None) and early.place() == (2, [("a", "undecided")], None)
    assert start("c").proposed == late.proposed + 6


def test_equal_numbers_are_ordered_by_run(start: Callable[..., Start]) -> None:
    b, a = start("b"), start("a")
    b.send(commit=7)
    assert b.place() == (2, [("a", "undecided")], None)
    a.send(commit=7)
    assert a.place() == (1, [], None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "end of input"])
def test_a_start_whose_process_dies_frees_its_place(tmp_path: Path, start: Callable[..., Start], how: str) -> None:
    a, b = start("a", wait=True), start("b", wait=True)
    a.send(commit=1)
    assert a.place()[0] == 1
    b.send(commit=2)
    assert b.place()[:2] == (2, [("a", "waits")])
    if how == "kill":
        a.process.kill()
    else:
        a.process.communicate()
    assert b.place() == (1, [], None)
    assert a.process.wait(GUARD_SECONDS) is not None
    assert runs(tmp_path) == [("b", "waits")]
    assert len(list(Path(folder(tmp_path), "queue").glob("ticket-*"))) == 1, "the file of a dead start is removed"


def test_a_caller_that_falls_silent_loses_its_place_and_pings_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "CALLER_SILENT_SECONDS", 0.3)
    ours, its = os.pipe()
    os.write(its, b'{"ping": 1}\n')
    frames: list[dict[str, Any]] = []
    try:
        with pytest.raises(TimeoutError, match="said nothing"):
            queue.queue({"run": "a", "owner": "o", "root": str(tmp_path)}, ours, frames.append)
    finally:
        os.close(ours)
        os.close(its)
    assert frames == [{"proposed": 1}, {"alive": True}] and runs(tmp_path) == []


def test_a_host_where_nobody_has_waited_yet_has_an_empty_queue(tmp_path: Path) -> None:
    assert queue.waiting(str(tmp_path / "never made")) == []


def test_what_waits_is_told_with_owner_and_time(tmp_path: Path, start: Callable[..., Start]) -> None:
    start("a", wait=True).send(commit=1)
    (found,) = queue.waiting(folder(tmp_path))
    assert (found["run"], found["owner"]) == ("a", "a@laptop") and 0 <= found["since"] < 60


@pytest.mark.slow
def test_many_that_come_at_once_get_different_numbers(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", VERB]
    options = [json.dumps({"run": f"r{i}", "owner": "o", "root": str(tmp_path)}) for i in range(12)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen([*command, words], cwd=ROOT, text=True, **pipes) for words in options]  # type: ignore[call-overload]
    numbers = [json.loads(one.stdout.readline())["proposed"] for one in started]
    for one in started:
        one.communicate()
    assert sorted(numbers) == list(range(1, 13)) and runs(tmp_path) == []
