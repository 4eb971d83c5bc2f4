"""What a check makes of the hosts' answers: verdicts, what stops a run, what is left out and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch.cli.refusal import Refusal
from launch.health import check
from launch.health.check import Seen
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.hosts import clustermap
from launch.hosts.hostcall import Answer
from launch.network.links import Link
from tests.launch.samples import cluster

IMAGE = "ab" * 32


def answer(**facts: Any) -> Answer:
    known: dict[str, Any] = {"images": {"localhost/muster/train:latest": IMAGE}, "runs": []}
    return Answer(known | facts, None, [], None, 0.01, 0.05)


def seen(*answers: Answer | BaseException, links: list[Link] | None = None) -> Seen:
    return Seen({f"h{number}": one for number, one in enumerate(answers, 1)}, links or [])


def link(mbits: float) -> Link:
    return Link("h1", "h2", mbits, 0.1, 1500, None)


def test_errors_refuse_a_run_all_at_once_and_warnings_are_told() -> None:
    warning = Verdict("load", "host h1", WARNING, "busy", "end it")
    unknown = Verdict("xid", "host h1", INCOMPLETE, "log not readable")
    assert check.refuse_errors([warning, unknown, Verdict("disk", "host h1", HEALTHY, "fine")]) == [
        "warning: host h1: busy; fix: end it",
        "incomplete: host h1: log not readable",
    ]
    errors = [
        Verdict("reach", "h1 -> h2", ERROR, "cut off", "plug it in"),
        Verdict("gpus", "host h3", ERROR, "MIG", "x"),
    ]
    with pytest.raises(Refusal) as caught:
        check.refuse_errors([warning, *errors])
    assert [problem.where for problem in caught.value.problems] == ["h1 -> h2", "host h3"]
    assert check.refuse_errors(errors, leave_out=("reach", "gpus")) == []


@pytest.mark.parametrize(
    ("first", "second", "verdicts", "wanted"),
    [
        (answer(), answer(), [], None),
        (answer(runs=[{"run": "r", "state": "exited"}]), answer(), [], None),
        (answer(), answer(runs=[{"run": "r", "state": "running"}]), [], "a run is in progress on h2"),
        (answer(), TimeoutError("late"), [], "fix the errors above first"),
        (answer(), answer(), [Verdict("reach", "h1 -> h2", ERROR, "cut", "")], "fix the errors above first"),
        (answer(), answer(images={}), [], "h2 lack the training image"),
    ],
)
def test_ranks_are_started_only_where_they_can_run(
    first: Answer, second: Answer | BaseException, verdicts: list[Verdict], wanted: str | None
) -> None:
    known = cluster(1, 1)
    said = check._stands_in_the_way(known, known.hosts, seen(first, second), verdicts)
    assert (said is None) if wanted is None else wanted in str(said)


@pytest.mark.parametrize(
    ("seconds", "slowest", "level"),
    [
        (1.6, 940.0, HEALTHY),  # 895 Mbit/s of bus bandwidth
        (4.0, 940.0, WARNING),  # 358
        (4.0, 20_000.0, HEALTHY),  # the processors are the limit there
        (4.0, 0.0, HEALTHY),  # nothing measured to hold it against
    ],
)
def test_an_all_reduce_is_held_against_the_slowest_link(seconds: float, slowest: float, level: str) -> None:
    size = 128 * 2**20
    sizes = [{"bytes": 2**20, "seconds": 9.0, "bus_bytes_per_second": 1.0}]
    sizes.append({"bytes": size, "seconds": seconds, "bus_bytes_per_second": size / seconds * 4 / 3})
    (verdict,) = check.judge_all_reduce(sizes, [link(slowest)] if slowest else [])
    assert verdict.level == level and "128 MiB" in verdict.what
    assert check.judge_all_reduce([], [])[0].level == INCOMPLETE


def test_gpus_that_the_user_ruled_out_are_not_asked_for() -> None:
    (host,) = cluster(1).hosts
    broken = {"gpus": [], "gpu_problem": "driver mismatch"}
    assert check.asked_of(host, answer(), None).gpus is None  # a host without GPUs: whatever it has by now
    assert check.asked_of(replace(host, facts=broken), answer(), None).gpus == []  # `gpus: []` past a broken driver
    assert check.asked_of(replace(host, gpus=[1]), answer(), 5).gpus == [1]
    asked = check.asked_of(host, answer(), 5)
    assert (asked.clock_offset, asked.clock_uncertainty, asked.checkpoint_bytes) == (0.01, 0.05, 5)


def test_a_host_that_did_not_answer_is_incomplete() -> None:
    known = cluster(1, 1)
    (verdict,) = check.host_verdicts(known.hosts[1:], seen(answer(), TimeoutError("no answer within 30 s")), None)
    assert (verdict.where, verdict.level) == ("host h2", INCOMPLETE) and "no answer within 30 s" in verdict.what


def test_the_odd_image_is_named() -> None:
    known = cluster(1, 1, 1)
    images = {"localhost/muster/train:latest": "cd" * 32}
    hosts = seen(answer(), answer(images=images), answer())
    inside = check._inside(known, known.hosts, hosts)
    assert [one and one["image"] for one in inside.values()] == [IMAGE, "cd" * 32, IMAGE]


def test_checkpoints_are_three_numbers_for_each_gradient() -> None:
    assert check.checkpoint_bytes({"gradient_bytes": 100}) == 300
    assert check.checkpoint_bytes({}) is None


class Host:
    """A machine of which Podman says what runs there."""

    def __init__(self, name: str, containers: str | OSError) -> None:
        self.name, self.containers = name, containers

    def root(self, command: str) -> Any:
        if isinstance(self.containers, OSError):
            raise self.containers
        assert "--filter label=muster.run" in command
        return SimpleNamespace(stdout=self.containers)


@pytest.mark.parametrize("containers", ["4f1d\n", ""])
def test_links_are_not_loaded_while_a_run_is_in_progress(monkeypatch: pytest.MonkeyPatch, containers: str) -> None:
    asked = []

    def look(hosts: Any, machines: Any, seconds: int, full: bool, say: Any) -> Seen:
        asked.append(seconds)
        busy = [{"run": "r", "state": "running", "owner": "ann", "age_seconds": 5, "container": "c"}] * bool(containers)
        return seen(answer(), answer(runs=busy), links=[link(940.0)])

    known = cluster(1, 1)
    monkeypatch.setattr(check, "look", look)
    monkeypatch.setattr(check, "host_verdicts", lambda *rest: [])
    monkeypatch.setattr(check, "same", lambda *rest: check.Sameness({}, []))
    monkeypatch.setattr(check, "all_reduce", lambda *rest: check.Summed(None, [], {}))
    machines: Any = [Host("h1", OSError("gone")), Host("h2", containers)]
    found = check.examine(known, known.hosts, machines, None, Console(quiet=True))
    told = [verdict["what"] for verdict in found["verdicts"] if verdict["check"] == "bandwidth"]
    assert bool(asked[0]) is not bool(containers)
    assert any("a run is in progress on h2" in what for what in told) is bool(containers)


def test_a_fix_names_the_inventory() -> None:
    (verdict,) = check.named([Verdict("runs", "host h1", ERROR, "x", "`make stop RUN=r` ends it")], cluster(1))
    assert verdict.fix == f"`make stop RUN=r INVENTORY={cluster(1).inventory}` ends it"


def test_forecast_is_yes_or_no() -> None:
    assert check.wants_forecast("1") and not check.wants_forecast("0")
    with pytest.raises(Refusal, match="FORECAST=maybe"):
        check.wants_forecast("maybe")


def test_wrong_arguments_of_the_trainer_are_refused_before_any_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustermap, "read", lambda path: cluster(2, 2))
    monkeypatch.setattr(check, "machines", lambda *arguments: pytest.fail("a host was asked"))
    for args, said in (("--batch-size 3", "each of the 4 ranks"), ("--seed 1'2", "No closing quotation")):
        with pytest.raises(Refusal, match=said):
            check.check(check.Request(Path("inventory/lab"), args=args), Console())
