"""Promise: what hosts say of their links becomes one link for each ordered pair, whoever stayed silent."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import detect
from launch.hosts import hostcall
from launch.hosts.hostcall import Answer
from launch.network import choose, measure
from launch.network.links import Link
from launch.network.measure import Field

HOSTS = ["h1", "h2", "h3"]
FIELDS = [Field("data", {host: f"10.0.0.{host[1]}" for host in HOSTS}, dict.fromkeys(HOSTS, 1500))]


def entry(source: str, target: str, **more: Any) -> dict[str, Any]:
    known = {"network": 0, "source": source, "target": target, "mbits": 940.0, "rtt_ms": 0.2}
    return known | {"path_mtu": 1500, "error": None} | more


def answer(*links: dict[str, Any]) -> Answer:
    return Answer(None, list(links), 0.0, 0.0)


def test_every_ordered_pair_is_there_once_and_silence_has_a_reason() -> None:
    answers: dict[str, Answer | BaseException] = {
        "h1": answer(entry("h1", "h2"), entry("h2", "h1", mbits=94.0)),
        "h2": answer(),
        "h3": TimeoutError("no answer within 30 s"),
    }
    found = measure.links(HOSTS, FIELDS, answers)["data"]
    assert [(link.source, link.target) for link in found] == [(a, b) for a in HOSTS for b in HOSTS if a != b]
    known = {(link.source, link.target): link for link in found}
    assert known["h2", "h1"].mbits == 94.0 and known["h2", "h1"].error is None
    for pair in known:
        if "h3" in pair:
            assert known[pair].error == "h3 did not answer: no answer within 30 s"


def test_a_pair_on_which_a_host_cannot_measure_works_and_names_it_in_memory_alone() -> None:
    lacks = {"mbits": None, "problems": {"h3": "iperf3 is missing"}}
    answers: dict[str, Answer | BaseException] = {
        "h1": answer(entry("h1", "h2", problems={}), entry("h2", "h1"), entry("h1", "h3", **lacks)),
        "h2": answer(entry("h2", "h3", **lacks, error="stalls")),
        "h3": answer(entry("h3", "h1", **lacks)),
    }
    known = {(link.source, link.target): link for link in measure.links(HOSTS, FIELDS, answers)["data"]}
    for pair in (("h1", "h3"), ("h3", "h1")):
        link = known[pair]
        assert link == Link(*pair, None, 0.2, 1500, None, {"h3": "iperf3 is missing"})
        assert Link(**json.loads(json.dumps(dataclasses.asdict(link)))) == link  # as maps and records keep it
    assert not known["h1", "h2"].problems and known["h2", "h3"].error == "stalls"


def test_all_hosts_are_asked_the_same_but_for_their_names() -> None:
    asked = measure.options(HOSTS, FIELDS, 1)
    assert [one.pop("name") for one in asked.values()] == HOSTS
    assert asked["h1"] == asked["h2"] == asked["h3"]
    assert measure.options(HOSTS, FIELDS, 1)["h1"]["token"] != asked["h1"]["token"]


def test_a_hosts_own_python_runs_what_a_call_sends() -> None:
    """The command of one SSH call, run here as the host's shell would: no file of ours is on its path."""
    words = hostcall.command(sys.executable, {"survey": None, "links": None})
    assert len(words) < 100_000  # the kernel takes 128 KiB for one word of a command
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=60, check=True, cwd="/")
    line = done.stdout.splitlines()[-1]
    assert line.startswith(hostcall.MARK)
    found = json.loads(line.removeprefix(hostcall.MARK))
    assert found["survey"] is None and 0 <= found["ended"] - found["began"] < 60


class Connection:
    """A machine that says what it is told to."""

    class target:
        python = "python3"

    def __init__(self, stdout: str, stderr: str = "", exited: int = 0) -> None:
        self.answer = type("Result", (), {"stdout": stdout, "stderr": stderr, "exited": exited})

    def root(self, command: str, timeout: float) -> Any:
        return self.answer


def test_an_answer_is_found_behind_what_a_shell_prints() -> None:
    said = {"began": 100.0, "ended": 101.0, "survey": {"cpus": 2}, "links": []}
    machine: Any = Connection(f"Welcome!\n{hostcall.MARK}{json.dumps(said)}\n")
    found = hostcall.ask(machine, {}, 1)
    assert found.survey == {"cpus": 2} and found.clock_offset < -1e9  # 1970 there
    silent: Any = Connection("", "Traceback\nImportError: no module", 1)
    with pytest.raises(RuntimeError, match="ImportError: no module"):
        hostcall.ask(silent, {}, 1)


def known_map(path: Path, **more: Any) -> Path:
    links = [{"source": "h1", "target": "h2", "mbits": 940.0, "rtt_ms": 0.1, "path_mtu": 1500, "error": None}]
    document = {
        "measured_at": "2026-11-21T10:00:00+00:00",
        "measured_key": "key",
        "measured": {"links": {"data": links}, "speeds": {"data": [940.0]}, "hot": []},
    }
    path.write_text(json.dumps(document | more))
    return path


@pytest.mark.parametrize(
    ("key", "hours", "change", "reused"),
    [
        ("key", 1.0, {}, True),
        ("another", 1.0, {}, False),
        ("key", 13.0, {}, False),
        ("key", -1.0, {}, False),
        ("key", 1.0, {"measured": {"links": {"data": [{"source": "h1"}]}}}, False),
        ("key", 1.0, {"measured_at": "yesterday"}, False),
    ],
)
def test_figures_are_taken_from_the_last_map_only_where_they_hold(
    tmp_path: Path, key: str, hours: float, change: dict[str, Any], reused: bool
) -> None:
    now = datetime.datetime.fromisoformat("2026-11-21T10:00:00+00:00") + datetime.timedelta(hours=hours)
    found = detect.recall(known_map(tmp_path / "cluster.json", **change), key, now)
    assert (found is not None) == reused
    assert detect.recall(tmp_path / "none.json", key, now) is None


def test_broken_links_are_measured_again(tmp_path: Path) -> None:
    broken = {"source": "h1", "target": "h2", "mbits": None, "rtt_ms": None, "path_mtu": None, "error": "stalls"}
    path = known_map(
        tmp_path / "cluster.json", measured={"links": {"data": [broken]}, "speeds": {"data": [0.0]}, "hot": []}
    )
    now = datetime.datetime.fromisoformat("2026-11-21T10:30:00+00:00")
    assert detect.recall(path, "key", now) is None


def test_the_better_of_two_measurements_of_a_pair_counts() -> None:
    def links(*mbits: float | None) -> dict[str, list[Link]]:
        return {"data": [Link("h1", f"h{n}", m, 0.1, 1500, None if m else "stalls") for n, m in enumerate(mbits, 2)]}

    both = choose.Measurements().with_round(links(3000.0, 9000.0, None)).with_round(links(7000.0, 8000.0, 10.0))
    assert [link.mbits for link in both.links["data"]] == [7000.0, 9000.0, 10.0]
    assert both.speeds == {"data": [3000.0, 10.0]} and both.links["data"][2].error is None
