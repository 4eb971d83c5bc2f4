"""Promises of a view as a witness: its votes reach real keepers, whichever of two hosts is lost; and are asked for."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from keeper import WITNESSES
from keeper.host import write_document
from keeper.known import WITNESS
from launch.hosts.door import Frame
from launch.job.follow import Follower
from launch.job.witness import Witness
from tests.keeper import test_keeper
from tests.keeper.test_keeper import FAILS_ONCE, Run, wait_for
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, end, state
from tests.launch.job.test_follow import until

run = test_keeper.run
hosts = fake_hosts.hosts


def plan_of(run: Run, node: int = 0) -> dict[str, Any]:
    return run.document(node, "plan.json")


class View:
    """Carries states and answers, as the doors of two hosts do."""

    def __init__(self, run: Run, count: int) -> None:
        self.witness = Witness(plan_of(run))
        self._run, self._count, self._left = run, count, threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        while not self._left.wait(0.2):
            for node in range(self._count):
                if said := self.witness.answer(f"h{node + 1}", self._run.document(node, "state.json")):
                    folder = self._run.of(node) / "private" / WITNESSES
                    folder.mkdir(exist_ok=True)
                    write_document(folder / f"{self.witness.id}.json", said)

    def leave(self) -> None:
        self._left.set()
        self._thread.join()


@pytest.mark.slow
def test_of_two_hosts_the_master_may_be_lost_while_a_view_is_there(run: Run, tmp_path: Any) -> None:
    run.start(2, lambda node: ["-c", FAILS_ONCE, str(tmp_path / f"begun{node}")], restarts=3)
    view = View(run, 2)
    try:
        wait_for(lambda: run.events(1, "decider"))
        assert run.events(1, "decider")[0]["host"] == WITNESS + view.witness.id
        wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(2)))
        pid = run.pids(0)["0"]
        run.processes[0].kill()
        os.kill(pid, 9)
        assert run.processes[1].wait(60) == 0
    finally:
        view.leave()
    found = run.document(1, "exit.json")
    assert (found["status"], found["attempt"], found["hosts"]) == ("succeeded", 2, ["h2"])


@pytest.mark.slow
def test_a_run_that_is_not_started_again_asks_no_witness(run: Run) -> None:
    run.start(1, lambda node: ["-c", "import time; time.sleep(1)"])
    witness = Witness(plan_of(run))
    wait_for(lambda: "beat" in run.document(0, "state.json"))
    assert witness.answer("h1", run.document(0, "state.json")) is None
    assert run.statuses() == [0]


def test_each_state_of_a_host_is_answered_through_its_own_stream(hosts: dict[str, Host]) -> None:
    asked: list[str] = []

    class Answering(Witness):
        def __init__(self) -> None:
            self.id = "c0ffee"

        def answer(self, host: str, state: Any) -> dict[str, Any] | None:
            asked.append(host)
            return {"number": len(asked), "words": state} if "beat" in state else None

    with_beat = {name: Frame({"state": {"beat": name}}, b"") for name in hosts}
    views = [hosts[name].say(with_beat[name], state(), end()).view() for name in ("h1", "h2")]
    follower = Follower("some-run", views, None, witness=Answering())
    follower.start()
    until(lambda: not follower.waiting)
    assert sorted(asked) == ["h1", "h1", "h2", "h2"]
    for name in ("h1", "h2"):
        assert [words["words"]["beat"] for words in hosts[name].said] == [name]
        assert hosts[name].follows[0]["witness"] == "c0ffee"
