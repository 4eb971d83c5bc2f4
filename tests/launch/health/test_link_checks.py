"""Promise: a broken, slow, far or unequal pair is named with figures; what most pairs of a host share is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.health import link_checks, link_statistics
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.network.links import Link

Speed = Callable[[str, str], float]


def names(n: int) -> list[str]:
    return [f"h{i + 1}" for i in range(n)]


def pairs_of(hosts: Iterable[str]) -> list[tuple[str, str]]:
    own = list(hosts)
    return [(a, b) for a in own for b in own if a != b]


def links(
    hosts: Iterable[str],
    mbits: dict[tuple[str, str], float] | None = None,
    rtt: dict[tuple[str, str], float] | None = None,
    mtu: dict[tuple[str, str], int] | None = None,
    error: dict[tuple[str, str], str] | None = None,
    usual: float | None = 941.0,
) -> list[Link]:
    """All pairs alike (941 Mbit/s, 0.2 ms, 1500 bytes) but for those given."""
    mbits, rtt, mtu, error = mbits or {}, rtt or {}, mtu or {}, error or {}
    return [
        Link(*p, None, None, None, error[p])
        if p in error
        else Link(*p, mbits.get(p, usual), rtt.get(p, 0.2), mtu.get(p, 1500), None)
        for p in pairs_of(hosts)
    ]


def of(host: str, n: int, value: float, out: bool = True, into: bool = True) -> dict[tuple[str, str], float]:
    """The same value for the pairs that one of n hosts sends or receives on."""
    return {p: value for p in pairs_of(names(n)) if (out and p[0] == host) or (into and p[1] == host)}


def reported(found: Iterable[Verdict]) -> list[tuple[str, str, str]]:
    """What is not healthy: check, where, level."""
    return [(v.check, v.where, v.level) for v in found if v.level != HEALTHY]


H3 = names(3)
H4 = names(4)
AB, BA = ("h1", "h2"), ("h2", "h1")

CASES: dict[str, tuple[list[Link], list[tuple[str, str, str]]]] = {
    "one slow pair": (links(H3, {AB: 300}), [("bandwidth", "h1 -> h2", WARNING)]),
    "just above half": (links(H3, {AB: 480}), []),
    "both directions are one line": (links(H4, {AB: 300, BA: 310}), [("bandwidth", "h1 -> h2, h2 -> h1", WARNING)]),
    "two hosts, one slower": (links(names(2), {AB: 600}), []),
    "two hosts, one below half": (links(names(2), {AB: 450}), [("bandwidth", "h1 -> h2", WARNING)]),
    "two hosts, both slow: nothing to compare with": (links(names(2), usual=94), []),
    "a slow host of three": (links(H3, of("h3", 3, 94)), [("bandwidth", "host h3", WARNING)]),
    "a host that sends slowly": (links(H3, of("h2", 3, 94, into=False)), [("bandwidth", "host h2", WARNING)]),
    "a slow host and another slow pair": (
        links(names(5), of("h5", 5, 94) | {AB: 200}),
        [("bandwidth", "host h5", WARNING), ("bandwidth", "h1 -> h2", WARNING)],
    ),
    "one thin uplink between two switches": (
        links(H4, {p: 90.0 for p in pairs_of(H4) if (p[0] in H4[:2]) != (p[1] in H4[:2])}),
        [("bandwidth", "cluster", WARNING)],
    ),
    "one broken direction": (links(H3, error={AB: "refused"}), [("reach", "h1 -> h2", ERROR)]),
    "two hosts that do not talk": (links(names(2), error={AB: "x", BA: "x"}), [("reach", "h1 -> h2, h2 -> h1", ERROR)]),
    "a dead host": (
        links(H4, error=dict.fromkeys(of("h2", 4, 0), "timed out")),
        [("reach", "host h2", ERROR)],
    ),
    "nothing works": (links(H3, error=dict.fromkeys(pairs_of(H3), "x")), [("reach", "cluster", ERROR)]),
    "a pair with high latency": (links(H3, rtt={AB: 3.0, BA: 2.5}), [("latency", "h1 -> h2, h2 -> h1", WARNING)]),
    "ten times nearly nothing is nothing": (links(H3, rtt=dict.fromkeys(pairs_of(H3), 0.02) | {AB: 0.3}), []),
    "a host with high latency": (links(H4, rtt=of("h4", 4, 9.0)), [("latency", "host h4", WARNING)]),
    "not a LAN": (links(H3, rtt=dict.fromkeys(pairs_of(H3), 30.0)), [("latency", "cluster", WARNING)]),
    "quick form": (links(H3, usual=None), []),
    "quick form with a pair with high latency": (
        links(H3, rtt={AB: 6.0}, usual=None),
        [("latency", "h1 -> h2", WARNING)],
    ),
    "a smaller path": (links(H3, mtu={AB: 1400, BA: 1400}), [("mtu", "h1 -> h2, h2 -> h1", WARNING)]),
    "a pair never measured": (links(H3)[:-1], [("links", "cluster", INCOMPLETE)]),
    "a pair without bandwidth among others": (
        [*links(H3)[:-1], Link("h3", "h2", None, 0.2, 1500, None)],
        [("links", "cluster", INCOMPLETE)],
    ),
    "no links": ([], []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_and_nothing_else(case: str) -> None:
    given_links, wanted = CASES[case]
    found = link_checks.verdicts(given_links)
    assert reported(found) == wanted
    assert all(v.fix for v in found if v.level != HEALTHY)


def without_iperf(n: int, lacking: list[str], why: str = "iperf3 is missing") -> list[Link]:
    """All pairs of n hosts, measured but for those of the hosts that lack iperf3."""
    found = []
    for link in links(names(n)):
        problems = {host: why for host in (link.source, link.target) if host in lacking}
        found.append(replace(link, mbits=None, problems=problems) if problems else link)
    return found


@pytest.mark.parametrize(
    ("n", "lacking", "where", "what"),
    [
        (3, ["h3"], "host h3", "iperf3 is missing on h3: the bandwidth of 4 of 6 pairs was not measured"),
        (2, ["h2"], "host h2", "iperf3 is missing on h2: the bandwidth of 2 of 2 pairs was not measured"),
        (3, ["h1", "h3"], "cluster", "iperf3 is missing on h1, h3: the bandwidth of 6 of 6 pairs was not measured"),
    ],
)
def test_a_host_without_iperf3_is_named_once_and_its_pairs_count_as_working(
    n: int, lacking: list[str], where: str, what: str
) -> None:
    found = link_checks.verdicts(without_iperf(n, lacking))
    assert reported(found) == [("bandwidth", where, INCOMPLETE)]
    (lost,) = [v for v in found if v.level == INCOMPLETE]
    assert lost.what == what and "make deploy" in lost.fix and "apt-get install iperf3" in lost.fix
    (fine,) = [v for v in found if v.level == HEALTHY]
    assert "round trip 0.20 ms" in fine.what and ("0.941 Gbit/s" in fine.what) == (lacking == ["h3"])


def test_an_iperf3_that_fails_is_not_to_be_installed_again() -> None:
    (lost,) = [v for v in link_checks.verdicts(without_iperf(3, ["h2"], "iperf3 fails (x)")) if v.level == INCOMPLETE]
    assert lost.where == "host h2" and "iperf3 -s" in lost.fix and "install" not in lost.fix


def test_a_slow_pair_is_reported_with_both_directions_and_the_median() -> None:
    (slow,) = [v for v in link_checks.verdicts(links(H3, {AB: 300})) if v.level == WARNING]
    assert slow.what == "h1 -> h2 0.3 Gbit/s, h2 -> h1 0.941 Gbit/s, the median is 0.941 Gbit/s"


def test_a_host_slow_in_one_direction_is_reported_with_it() -> None:
    (sends,) = [v for v in link_checks.verdicts(links(H3, of("h2", 3, 94, into=False))) if v.level == WARNING]
    assert sends.what.startswith("h2 -> others 0.094 Gbit/s,") and "other direction is in order" in sends.what
    (gets,) = [v for v in link_checks.verdicts(links(H3, of("h2", 3, 94, out=False))) if v.level == WARNING]
    assert gets.what.startswith("others -> h2 0.094 Gbit/s,") and "other direction is in order" in gets.what


def test_a_healthy_matrix_has_one_line_of_figures() -> None:
    (only,) = link_checks.verdicts(links(H3, {AB: 939}))
    assert (only.level, only.where) == (HEALTHY, "cluster")
    assert only.what == (
        "6 pairs, slowest h1 -> h2 0.939 Gbit/s, median 0.941 Gbit/s, round trip 0.20 ms, path MTU 1500 bytes"
    )


def test_the_healthy_line_leaves_out_what_is_not_in_order() -> None:
    found = link_checks.verdicts(links(H3, {AB: 100}))
    assert [v.what for v in found if v.level == HEALTHY] == ["6 pairs, round trip 0.20 ms, path MTU 1500 bytes"]


def test_the_nics_label_shows_a_badly_negotiated_link() -> None:
    labels = dict.fromkeys(H3, 1000)
    (cluster,) = [v for v in link_checks.verdicts(links(H3, usual=94), labels) if v.level == WARNING]
    assert cluster.where == "cluster" and "0.094 Gbit/s measured on NICs labelled 1 Gbit/s" in cluster.what
    assert cluster.fix.startswith("negotiated 0.1 Gbit/s?")
    (pair,) = [v for v in link_checks.verdicts(links(names(2), usual=94), labels) if v.level == WARNING]
    assert pair.where == "h1 -> h2, h2 -> h1"
    (host,) = [v for v in link_checks.verdicts(links(H3, of("h3", 3, 94)), labels) if v.level == WARNING]
    assert host.where == "host h3" and "labelled 1 Gbit/s" in host.what and "negotiated 0.1 Gbit/s?" in host.fix


@pytest.mark.parametrize(
    ("usual", "speeds"),
    [(941, {"h1": 1000}), (94, {"h1": 100, "h2": 1000, "h3": 1000}), (94, {"h1": None}), (30000, {"h1": 100000})],
)
def test_a_link_that_fills_its_label_or_has_none_is_in_order(usual: float, speeds: dict[str, int | None]) -> None:
    found = link_checks.verdicts(links(names(2), usual=usual), speeds)
    assert reported(found) == []


def test_slow_hosts_that_are_half_of_all_are_found_by_their_labels() -> None:
    """No median can tell which half is slow."""
    slow = of("h3", 4, 94) | of("h4", 4, 94)
    found = link_checks.verdicts(links(H4, slow), dict.fromkeys(H4, 1000))
    assert sorted(reported(found)) == [("bandwidth", "host h3", WARNING), ("bandwidth", "host h4", WARNING)]


def test_mtus_that_differ_are_reported_once_and_not_as_small_paths() -> None:
    path = {p: 9000 for p in pairs_of(H3) if "h3" not in p}
    found = link_checks.verdicts(links(H3, mtu=path), mtus={"h1": 9000, "h2": 9000, "h3": 1500})
    assert [v.what for v in found if v.level == WARNING] == [
        "the NICs' MTUs differ: 9000 bytes on h1, h2; 1500 bytes on h3"
    ]


def test_paths_below_the_nics_mtu_are_reported_of_pair_host_or_cluster() -> None:
    mtus = dict.fromkeys(H4, 9000)
    whole = dict.fromkeys(pairs_of(H4), 9000)
    one = link_checks.verdicts(links(H4, mtu=whole | {AB: 1500}), mtus=mtus)
    assert reported(one) == [("mtu", "h1 -> h2", WARNING)]
    host = link_checks.verdicts(links(H4, mtu=whole | dict.fromkeys(of("h2", 4, 0), 1500)), mtus=mtus)
    assert reported(host) == [("mtu", "host h2", WARNING)]
    (what,) = [v.what for v in one if v.level == WARNING]
    assert what == "packets of at most 1500 bytes get through h1 -> h2; the NICs' MTU is 9000 bytes on h1, h2"
    assert reported(link_checks.verdicts(links(H4), mtus=mtus)) == [("mtu", "cluster", WARNING)]


def test_a_black_hole_is_fixed_by_the_mtu_and_a_closed_port_by_the_firewall() -> None:
    hole = link_checks.verdicts(links(H3, error={AB: "MTU black hole: nothing larger than 1400 bytes arrives"}))
    closed = link_checks.verdicts(links(H3, error={AB: "10.78.0.12:29400: connection refused"}))
    assert "ip link set" in hole[0].fix and "firewalls" in closed[0].fix


# Which host explains bad pairs, with random figures


@st.composite
def one_slow_host(draw: st.DrawFn) -> tuple[list[str], str, str, list[Link]]:
    """Hosts of which one is slow, sending, receiving or both; all figures scatter by 15 %."""
    hosts = names(draw(st.integers(3, 12)))
    culprit = draw(st.sampled_from(hosts))
    how = draw(st.sampled_from(("both", "sending", "receiving")))
    usual = draw(st.floats(50, 90000))
    factor = draw(st.floats(0.01, 0.35))
    noise = draw(st.randoms(use_true_random=False))
    slow = of(culprit, len(hosts), 0, out=how != "receiving", into=how != "sending")
    mbits = {p: usual * noise.uniform(0.85, 1.15) * (factor if p in slow else 1) for p in pairs_of(hosts)}
    order = pairs_of(hosts)
    noise.shuffle(order)
    return hosts, culprit, how, [Link(*p, mbits[p], 0.2, 1500, None) for p in order]


@given(one_slow_host())
def test_one_slow_host_is_named_once_and_no_pair_is(case: tuple[list[str], str, str, list[Link]]) -> None:
    _, culprit, how, given_links = case
    assert reported(link_checks.verdicts(given_links)) == [("bandwidth", f"host {culprit}", WARNING)]
    assert link_statistics.slow(link_statistics.bandwidths(given_links)).blame.hosts == {culprit: how}


@given(st.integers(2, 12), st.floats(1, 90000), st.randoms(use_true_random=False))
def test_where_nothing_is_slow_nothing_is_named(n: int, usual: float, noise: object) -> None:
    scattered = [
        Link(*p, usual * noise.uniform(0.8, 1.2), noise.uniform(0.1, 0.4), 1500, None)  # type: ignore[attr-defined]
        for p in pairs_of(names(n))
    ]
    assert reported(link_checks.verdicts(scattered)) == []


@given(st.integers(5, 12), st.data())
def test_some_slow_pairs_without_a_common_host_are_named_one_by_one(n: int, data: st.DataObject) -> None:
    hosts = data.draw(st.permutations(names(n)))
    chosen = [(hosts[i], hosts[i + 1]) for i in range(0, data.draw(st.integers(2, n)) - 1, 2)]
    found = link_checks.verdicts(links(names(n), dict.fromkeys(chosen, 100.0)))
    assert {where for _, where, _ in reported(found)} == {f"{a} -> {b}" for a, b in chosen}


def test_very_many_pairs_are_counted_and_the_slowest_named() -> None:
    hosts = names(32)
    slow = {(hosts[i], hosts[i + 1]): 100.0 + i for i in range(0, 32, 2)}
    *named, rest = [v for v in link_checks.verdicts(links(hosts, slow)) if v.level == WARNING]
    assert [v.where for v in named] == [f"{a} -> {b}" for a, b in list(slow)[: link_checks.REPORTED_PAIRS]]
    assert rest.where == "cluster" and rest.what.startswith("6 more pairs likewise: h21 -> h22,")


@given(st.integers(2, 9), st.data())
def test_every_bad_pair_is_explained_by_a_host_or_left_over(n: int, data: st.DataObject) -> None:
    every = pairs_of(names(n))
    tested = data.draw(st.lists(st.sampled_from(every), unique=True))
    bad = data.draw(st.lists(st.sampled_from(tested), unique=True)) if tested else []
    found = link_statistics.blame(bad, tested)
    explained = [pair for pairs in found.explained.values() for pair in pairs]
    assert sorted([*explained, *found.pairs]) == sorted(bad)
    assert all(host in pair for host, pairs in found.explained.items() for pair in pairs)
    assert set(found.hosts) == set(found.explained)


H5 = names(5)
SENT = [("h1", host) for host in H5[1:]]


@pytest.mark.parametrize(
    ("bad", "hosts", "left"),
    [
        (SENT[:2], {}, SENT[:2]),  # half of its pairs are not most of them
        (SENT[:3], {"h1": "sending"}, []),
        ([*SENT, ("h2", "h1")], {"h1": "sending"}, [("h2", "h1")]),
        ([*SENT, ("h2", "h1"), ("h3", "h1")], {"h1": "both"}, []),
        # What h1 explains is no evidence for or against h2: two of its other three pairs are most of them.
        ([*of("h1", 5, 0), ("h2", "h3"), ("h2", "h4")], {"h1": "both", "h2": "sending"}, []),
        ([("h1", "h2"), ("h2", "h1")], {}, [("h1", "h2"), ("h2", "h1")]),
    ],
)
def test_a_host_is_to_blame_for_most_of_its_pairs(
    bad: list[tuple[str, str]], hosts: dict[str, str], left: list[tuple[str, str]]
) -> None:
    found = link_statistics.blame(bad, pairs_of(H5))
    assert (found.hosts, found.pairs) == (hosts, left)


def test_the_slow_pairs_are_those_that_a_plain_count_finds() -> None:
    """Against the definition, spelled out: below half of the median of the hosts' medians."""
    hosts = names(6)
    mbits = {p: 300.0 + (i * 7919) % 1400 for i, p in enumerate(pairs_of(hosts))}
    medians = []
    for host in hosts:
        own = sorted(v for p, v in mbits.items() if host in p)
        medians.append(own[len(own) // 2])
    usual = sorted(medians)[len(medians) // 2]
    wanted = {p for p, v in mbits.items() if v < usual / 2 or v < min(usual, mbits[p[1], p[0]] / 2)}
    assert wanted and set(link_statistics.slow(link_statistics.bandwidths(links(hosts, mbits))).pairs) == wanted


@pytest.mark.slow
def test_the_pairs_of_256_hosts_are_compared_in_linear_time() -> None:
    """65,280 pairs: work that grows with the square of their number would take many minutes."""
    hosts = names(256)
    slow = of("h7", 256, 94.0) | {("h1", "h9"): 100.0}
    silent = dict.fromkeys(of("h200", 256, 0), "timed out")
    small = dict.fromkeys(of("h9", 256, 0), 1400)
    found = link_checks.verdicts(links(hosts, slow, rtt=of("h11", 256, 9.0), mtu=small, error=silent))
    assert reported(found) == [
        ("reach", "host h200", ERROR),
        ("bandwidth", "host h7", WARNING),
        ("bandwidth", "h1 -> h9", WARNING),
        ("latency", "host h11", WARNING),
        ("mtu", "host h9", WARNING),
    ]


def test_many_slow_hosts_of_256_are_named_each_once() -> None:
    hosts = names(256)
    culprits = hosts[:40]
    bad = [pair for pair in pairs_of(hosts) if pair[0] in culprits]
    found = link_statistics.blame(bad, pairs_of(hosts))
    assert found.hosts == dict.fromkeys(culprits, "sending") and found.pairs == []


@pytest.mark.parametrize(
    ("why", "fix"),
    [("no port from 29400 to 29415 is free", "end what listens"), ("Cannot assign requested address", "let TCP pass")],
)
def test_only_a_host_whose_ports_are_taken_is_told_to_end_what_listens_there(why: str, fix: str) -> None:
    assert fix in link_checks._reach_fix(f"h1 does not reach h2 at 192.0.2.2: h2 cannot listen on 192.0.2.2: {why}")
