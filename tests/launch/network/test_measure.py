"""Promise: what hosts say of their links becomes one link for each ordered pair, whoever stayed silent."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from launch.deploy import detect
from launch.hosts.hostcall import Answer
from launch.network import choose, measure
from launch.network.links import Link
from launch.network.measure import NetworkAddresses

HOSTS = ["h1", "h2", "h3"]
NETWORKS = [NetworkAddresses("data", {host: f"10.0.0.{host[1]}" for host in HOSTS}, dict.fromkeys(HOSTS, 1500))]


def entry(source: str, target: str, **more: Any) -> dict[str, Any]:
    known = {"network": 0, "source": source, "target": target, "mbits": 940.0, "rtt_ms": 0.2}
    return known | {"path_mtu": 1500, "error": None} | more


def answer(*links: dict[str, Any]) -> Answer:
    return Answer(None, None, list(links), None, 0.0, 0.0)


def test_every_ordered_pair_is_there_once_and_silence_has_a_reason() -> None:
    answers: dict[str, Answer | BaseException] = {
        "h1": answer(entry("h1", "h2"), entry("h2", "h1", mbits=94.0)),
        "h2": answer(),
        "h3": TimeoutError("no answer within 30 s"),
    }
    measured = measure.links(HOSTS, NETWORKS, answers)["data"]
    assert [(link.source, link.target) for link in measured] == [(a, b) for a in HOSTS for b in HOSTS if a != b]
    known = {(link.source, link.target): link for link in measured}
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
    known = {(link.source, link.target): link for link in measure.links(HOSTS, NETWORKS, answers)["data"]}
    for pair in (("h1", "h3"), ("h3", "h1")):
        link = known[pair]
        assert link == Link(*pair, None, 0.2, 1500, None, {"h3": "iperf3 is missing"})
        assert Link(**json.loads(json.dumps(dataclasses.asdict(link)))) == link  # as maps and records keep it
    assert not known["h1", "h2"].problems and known["h2", "h3"].error == "stalls"


def test_each_host_is_asked_for_its_own_pairs_and_both_ends_agree() -> None:
    networks = [
        *NETWORKS,
        NetworkAddresses("mgmt", {host: f"10.1.0.{host[1]}" for host in HOSTS}, {"h1": 9000, "h2": 1500, "h3": 1500}),
    ]
    asked = measure.options(HOSTS, networks, 1)
    assert len({one["meeting"]["token"] for one in asked.values()}) == 1
    assert measure.options(HOSTS, NETWORKS, 1)["h1"]["meeting"]["token"] != asked["h1"]["meeting"]["token"]
    assert asked["h1"]["meeting"]["addresses"] == ["10.0.0.1", "10.1.0.1"]
    for host, one in asked.items():
        assert [pair["network"] for pair in one["links"]["pairs"]] == [0, 0, 1, 1]
        for pair in one["links"]["pairs"]:
            name = networks[pair["network"]].name
            (other,) = (
                p for p in asked[pair["peer"]]["links"]["pairs"] if (p["network"], p["peer"]) == (pair["network"], host)
            )
            assert (other["own"], other["theirs"], other["mtus"]) == (pair["theirs"], pair["own"], pair["mtus"]), name
            assert other["calls"] != pair["calls"]


def many(count: int) -> tuple[list[str], NetworkAddresses]:
    hosts = [f"h{n}" for n in range(count)]
    addresses = {host: f"10.0.{n >> 8}.{n & 255}" for n, host in enumerate(hosts)}
    return hosts, NetworkAddresses("data", addresses, dict.fromkeys(hosts, 1500))


@pytest.mark.parametrize("count", [64, 65, 256])
def test_of_many_hosts_a_sample_costs_each_one_the_same_and_the_first_one_meets_all(count: int) -> None:
    hosts, network = many(count)
    asked = measure.options(hosts, [network], 0, sample=True)
    own = {host: {pair["peer"] for pair in one["links"]["pairs"]} for host, one in asked.items()}
    assert all(0 < len(peers) <= measure.SAMPLED_ROUNDS for peers in own.values())
    assert all(host in own[peer] for host, peers in own.items() for peer in peers)
    first, *others = hosts
    assert asked[first]["reach"] == {host: [network.addresses[host]] for host in others}
    assert all(asked[host]["reach"] == {first: [network.addresses[first]]} for host in others)
    pairs = measure.asked_pairs(asked)
    assert {(first, host) for host in others} | {(host, first) for host in others} <= set(pairs)
    assert len(set(pairs)) == len(pairs) <= (measure.SAMPLED_ROUNDS + 2) * count
    assert measure.expected_seconds(count, 1, 0, sample=True) < 5


@pytest.mark.slow
@pytest.mark.parametrize("count", [64, 256])
def test_no_host_is_told_of_pairs_that_are_not_its_own(count: int) -> None:
    hosts, network = many(count)
    for host, one in measure.options(hosts, [network], 1).items():
        assert [pair["own"] for pair in one["links"]["pairs"]] == [network.addresses[host]] * (count - 1)


def test_of_a_sample_no_more_is_said_than_was_asked() -> None:
    hosts, network = many(20)
    asked = measure.options(hosts, [network], 0, sample=True)
    pairs = measure.asked_pairs(asked)
    measured = {pair for pair in pairs if pair[1] in {p["peer"] for p in asked[pair[0]]["links"]["pairs"]}}

    def said(host: str) -> Answer:
        tried = [
            {"peer": peer, "address": network.addresses[peer], "ok": peer != "h9", "milliseconds": 0.1, "error": "no"}
            for peer in asked[host]["reach"]
        ]
        mine = [pair["peer"] for pair in asked[host]["links"]["pairs"] if pair["calls"]]
        ways = [way for peer in mine for way in ((host, peer), (peer, host))]
        return Answer(None, tried, [entry(*way, mbits=None) for way in ways], None, 0.0, 0.0)

    answers: dict[str, Answer | BaseException] = {host: said(host) for host in hosts}
    answers["h5"] = TimeoutError("gone")
    found = {(one.source, one.target): one for one in measure.links(hosts, [network], answers, pairs)["data"]}
    assert list(found) == pairs
    for pair, link in found.items():
        if pair == ("h0", "h9") and pair not in measured:
            assert link.error == "h0 does not reach h9 at 10.0.0.9: no"
        elif pair not in measured and pair[0] != "h5":
            assert (link.error, link.rtt_ms, link.path_mtu) == (None, None, None)
        elif "h5" not in pair:
            assert (link.error, link.rtt_ms, link.path_mtu) == (None, 0.2, 1500)
        elif pair == ("h5", "h0"):
            assert "h5 did not answer: gone" in str(link.error) or link.error is None


@pytest.mark.parametrize("count", [2, 5, 8])
def test_hosts_come_to_their_pairs_in_an_order_that_holds_nobody_up(count: int) -> None:
    """Played through: as long as pairs are left, some two hosts are both at their pair with each other."""
    hosts = [f"h{n}" for n in range(count)]
    network = NetworkAddresses("data", dict.fromkeys(hosts, "10.0.0.1"), dict.fromkeys(hosts, 1500))
    left = {
        host: [p["peer"] for p in one["links"]["pairs"]] for host, one in measure.options(hosts, [network], 0).items()
    }
    rounds = 0
    while any(left.values()):
        ready = [host for host, peers in left.items() if peers and left[peers[0]][:1] == [host]]
        assert ready
        for host in ready:
            left[host].pop(0)
        rounds += 1
    assert rounds == count - 1 + count % 2


def known_map(path: Path, **more: Any) -> Path:
    links = [{"source": "h1", "target": "h2", "mbits": 940.0, "rtt_ms": 0.1, "path_mtu": 1500, "error": None}]
    document = {
        "measured_at": "2026-11-21T10:00:00+00:00",
        "measured_key": "key",
        "measured": {"links": {"data": links}, "speeds": {"data": [940.0]}, "failures": {}, "busy": []},
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
    known = detect.recall(known_map(tmp_path / "cluster.json", **change), key, now)
    assert (known is not None) == reused
    beside_a_run = detect.recall(known_map(tmp_path / "cluster.json", **change), key, now, however_old=True)
    assert (beside_a_run is not None) == (key == "key" and not change)
    assert detect.recall(tmp_path / "none.json", key, now) is None


def test_broken_links_are_measured_again(tmp_path: Path) -> None:
    broken = {"source": "h1", "target": "h2", "mbits": None, "rtt_ms": None, "path_mtu": None, "error": "stalls"}
    path = known_map(
        tmp_path / "cluster.json",
        measured={"links": {"data": [broken]}, "speeds": {"data": [0.0]}, "failures": {}, "busy": []},
    )
    now = datetime.datetime.fromisoformat("2026-11-21T10:30:00+00:00")
    assert detect.recall(path, "key", now) is None


def test_links_that_failed_once_and_then_worked_are_measured_again(tmp_path: Path) -> None:
    path = known_map(tmp_path / "cluster.json")
    now = datetime.datetime.fromisoformat("2026-11-21T10:30:00+00:00")
    assert detect.recall(path, "key", now) is not None
    measured = json.loads(path.read_text())["measured"] | {"failures": {"data": ["h1 -> h2: stalls"]}}
    assert detect.recall(known_map(path, measured=measured), "key", now) is None


def test_the_better_of_two_measurements_of_a_pair_counts() -> None:
    def links(*mbits: float | None) -> dict[str, list[Link]]:
        return {"data": [Link("h1", f"h{n}", m, 0.1, 1500, None if m else "stalls") for n, m in enumerate(mbits, 2)]}

    both = choose.Measurements().with_round(links(3000.0, 9000.0, None)).with_round(links(7000.0, 8000.0, 10.0))
    assert [link.mbits for link in both.links["data"]] == [7000.0, 9000.0, 10.0]
    assert (
        both.speeds == {"data": [0.0, 10.0]}
        and both.failures == {"data": ["stalls"]}
        and both.links["data"][2].error is None
    )


def test_a_host_whose_processors_were_busy_is_named() -> None:
    answers: dict[str, Answer | BaseException] = {
        host: Answer(None, None, [], busy, 0.0, 0.0) for host, busy in (("h1", 0.97), ("h2", 0.4), ("h3", None))
    }
    assert measure.busy(answers | {"h4": TimeoutError("no answer")}) == ["h1"]
