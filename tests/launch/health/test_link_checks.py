"""Promise: a broken, slow, late or odd pair is named with figures; what most pairs of a host share is said once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from launch.health import link_checks
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


def told(found: Iterable[Verdict]) -> list[tuple[str, str, str]]:
    """What is not healthy: check, where, level."""
    return [(v.check, v.where, v.level) for v in found if v.level != HEALTHY]


H3 = names(3)
H4 = names(4)
AB, BA = ("h1", "h2"), ("h2", "h1")

CASES: dict[str, tuple[list[Link], list[tuple[str, str, str]]]] = {
    "one slow pair": (links(H3, {AB: 300}), [("bandwidth", "h1 -> h2", WARNING)]),
    "just above half": (links(H3, {AB: 480}), []),
    "both directions are one line": (links(H4, {AB: 300, BA: 310}), [("bandwidth", "h1 <-> h2", WARNING)]),
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
    "two hosts that do not talk": (links(names(2), error={AB: "x", BA: "x"}), [("reach", "h1 <-> h2", ERROR)]),
    "a dead host": (
        links(H4, error=dict.fromkeys(of("h2", 4, 0), "timed out")),
        [("reach", "host h2", ERROR)],
    ),
    "nothing works": (links(H3, error=dict.fromkeys(pairs_of(H3), "x")), [("reach", "cluster", ERROR)]),
    "a late pair": (links(H3, rtt={AB: 3.0, BA: 2.5}), [("latency", "h1 <-> h2", WARNING)]),
    "ten times nearly nothing is nothing": (links(H3, rtt=dict.fromkeys(pairs_of(H3), 0.02) | {AB: 0.3}), []),
    "a late host": (links(H4, rtt=of("h4", 4, 9.0)), [("latency", "host h4", WARNING)]),
    "not a LAN": (links(H3, rtt=dict.fromkeys(pairs_of(H3), 30.0)), [("latency", "cluster", WARNING)]),
    "quick form": (links(H3, usual=None), []),
    "quick form with a late pair": (
        links(H3, rtt={AB: 6.0}, usual=None),
        [("latency", "h1 -> h2", WARNING)],
    ),
    "a smaller path": (links(H3, mtu={AB: 1400, BA: 1400}), [("mtu", "h1 <-> h2", WARNING)]),
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
    assert told(found) == wanted
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
    assert told(found) == [("bandwidth", where, INCOMPLETE)]
    (lost,) = [v for v in found if v.level == INCOMPLETE]
    assert lost.what == what and "make deploy" in lost.fix and "apt-get install iperf3" in lost.fix
    (fine,) = [v for v in found if v.level == HEALTHY]
    assert "round trip 0.20 ms" in fine.what and ("941 Mbit/s" in fine.what) == (lacking == ["h3"])


def test_an_iperf3_that_fails_is_not_to_be_installed_again() -> None:
    (lost,) = [v for v in link_checks.verdicts(without_iperf(3, ["h2"], "iperf3 fails (x)")) if v.level == INCOMPLETE]
    assert lost.where == "host h2" and "iperf3 -s" in lost.fix and "install" not in lost.fix


def test_a_slow_pair_is_told_with_its_figure_the_median_and_the_other_direction() -> None:
    (slow,) = [v for v in link_checks.verdicts(links(H3, {AB: 300})) if v.level == WARNING]
    assert "300 Mbit/s" in slow.what and "median is 941 Mbit/s" in slow.what and "direction has 941" in slow.what


def test_a_host_slow_one_way_is_told_so() -> None:
    (sends,) = [v for v in link_checks.verdicts(links(H3, of("h2", 3, 94, into=False))) if v.level == WARNING]
    assert sends.what.startswith("sends at 94 Mbit/s") and "receiving is in order" in sends.what
    (gets,) = [v for v in link_checks.verdicts(links(H3, of("h2", 3, 94, out=False))) if v.level == WARNING]
    assert gets.what.startswith("receives at 94 Mbit/s") and "sending is in order" in gets.what


def test_a_healthy_matrix_has_one_line_of_figures() -> None:
    (only,) = link_checks.verdicts(links(H3, {AB: 939}))
    assert (only.level, only.where) == (HEALTHY, "cluster")
    assert only.what == (
        "6 pairs, slowest h1 -> h2 939 Mbit/s, median 941 Mbit/s, round trip 0.20 ms, path MTU 1500 bytes"
    )


def test_the_healthy_line_leaves_out_what_is_not_in_order() -> None:
    found = link_checks.verdicts(links(H3, {AB: 100}))
    assert [v.what for v in found if v.level == HEALTHY] == ["6 pairs, round trip 0.20 ms, path MTU 1500 bytes"]


def test_the_nics_label_tells_a_badly_negotiated_link() -> None:
    labels = dict.fromkeys(H3, 1000)
    (cluster,) = [v for v in link_checks.verdicts(links(H3, usual=94), labels) if v.level == WARNING]
    assert cluster.where == "cluster" and "94 Mbit/s measured on NICs labelled 1 Gbit/s" in cluster.what
    assert cluster.fix.startswith("negotiated 100 Mbit/s?")
    (pair,) = [v for v in link_checks.verdicts(links(names(2), usual=94), labels) if v.level == WARNING]
    assert pair.where == "h1 <-> h2"
    (host,) = [v for v in link_checks.verdicts(links(H3, of("h3", 3, 94)), labels) if v.level == WARNING]
    assert host.where == "host h3" and "labelled 1 Gbit/s" in host.what and "negotiated 100 Mbit/s?" in host.fix


@pytest.mark.parametrize(
    ("usual", "speeds"),
    [(941, {"h1": 1000}), (94, {"h1": 100, "h2": 1000, "h3": 1000}), (94, {"h1": None}), (30000, {"h1": 100000})],
)
def test_a_link_that_fills_its_label_or_has_none_is_in_order(usual: float, speeds: dict[str, int | None]) -> None:
    found = link_checks.verdicts(links(names(2), usual=usual), speeds)
    assert told(found) == []


def test_slow_hosts_that_are_half_of_all_are_told_by_their_labels() -> None:
    """No median can tell which half is slow."""
    slow = of("h3", 4, 94) | of("h4", 4, 94)
    found = link_checks.verdicts(links(H4, slow), dict.fromkeys(H4, 1000))
    assert sorted(told(found)) == [("bandwidth", "host h3", WARNING), ("bandwidth", "host h4", WARNING)]


def test_mtus_that_differ_are_told_once_and_not_as_small_paths() -> None:
    path = {p: 9000 for p in pairs_of(H3) if "h3" not in p}
    found = link_checks.verdicts(links(H3, mtu=path), mtus={"h1": 9000, "h2": 9000, "h3": 1500})
    assert [v.what for v in found if v.level == WARNING] == ["the NICs' MTUs differ: 9000 on h1, h2; 1500 on h3 bytes"]


def test_paths_below_the_nics_mtu_are_told_of_pair_host_or_cluster() -> None:
    mtus = dict.fromkeys(H4, 9000)
    whole = dict.fromkeys(pairs_of(H4), 9000)
    one = link_checks.verdicts(links(H4, mtu=whole | {AB: 1500}), mtus=mtus)
    assert told(one) == [("mtu", "h1 -> h2", WARNING)]
    host = link_checks.verdicts(links(H4, mtu=whole | dict.fromkeys(of("h2", 4, 0), 1500)), mtus=mtus)
    assert told(host) == [("mtu", "host h2", WARNING)]
    assert [v.what for v in host if v.check == "mtu"] == [
        "packets of at most 1500 bytes get through h2 -> h1, h2 -> h3, h2 -> h4, h1 -> h2, h3 -> h2, h4 -> h2; "
        "the NICs' MTU is 9000 on h2, h1, h3, h4 bytes"
    ]
    assert "bytes get through h1 -> h2; the NICs' MTU is 9000 on h1, h2 bytes" in next(
        v.what for v in one if v.check == "mtu"
    )
    assert told(link_checks.verdicts(links(H4), mtus=mtus)) == [("mtu", "cluster", WARNING)]


def test_a_black_hole_is_fixed_by_the_mtu_and_a_closed_port_by_the_firewall() -> None:
    hole = link_checks.verdicts(links(H3, error={AB: "MTU black hole: nothing larger than 1400 bytes arrives"}))
    closed = link_checks.verdicts(links(H3, error={AB: "10.78.0.12:29400: connection refused"}))
    assert "ip link set" in hole[0].fix and "firewalls" in closed[0].fix


# Who is to blame, with random figures


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
    assert told(link_checks.verdicts(given_links)) == [("bandwidth", f"host {culprit}", WARNING)]
    assert link_checks.slow(given_links).blame.hosts == {culprit: how}


@given(st.integers(2, 12), st.floats(1, 90000), st.randoms(use_true_random=False))
def test_where_nothing_is_slow_nothing_is_named(n: int, usual: float, noise: object) -> None:
    scattered = [
        Link(*p, usual * noise.uniform(0.8, 1.2), noise.uniform(0.1, 0.4), 1500, None)  # type: ignore[attr-defined]
        for p in pairs_of(names(n))
    ]
    assert told(link_checks.verdicts(scattered)) == []


@given(st.integers(5, 12), st.data())
def test_some_slow_pairs_without_a_common_host_are_named_one_by_one(n: int, data: st.DataObject) -> None:
    hosts = data.draw(st.permutations(names(n)))
    chosen = [(hosts[i], hosts[i + 1]) for i in range(0, data.draw(st.integers(2, n)) - 1, 2)]
    found = link_checks.verdicts(links(names(n), dict.fromkeys(chosen, 100.0)))
    assert {where for _, where, _ in told(found)} == {f"{a} -> {b}" for a, b in chosen}


def test_very_many_pairs_are_counted_and_the_slowest_named() -> None:
    hosts = names(32)
    slow = {(hosts[i], hosts[i + 1]): 100.0 + i for i in range(0, 32, 2)}
    *named, rest = [v for v in link_checks.verdicts(links(hosts, slow)) if v.level == WARNING]
    assert [v.where for v in named] == [f"{a} -> {b}" for a, b in list(slow)[: link_checks.TOLD_PAIRS]]
    assert rest.where == "cluster" and rest.what.startswith("6 more pairs likewise: h21 -> h22,")


@given(st.integers(2, 9), st.data())
def test_every_bad_pair_is_told_exactly_once(n: int, data: st.DataObject) -> None:
    every = pairs_of(names(n))
    tested = data.draw(st.lists(st.sampled_from(every), unique=True))
    bad = data.draw(st.lists(st.sampled_from(tested), unique=True)) if tested else []
    found = link_checks.blame(bad, tested)
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
    found = link_checks.blame(bad, pairs_of(H5))
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
    assert wanted and set(link_checks.slow(links(hosts, mbits)).pairs) == wanted


# Tables


def shown(table: Table, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str) -> dict[str, list[str]]:
    """A printed table's rows by their first cell."""
    rows = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in text.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


def test_a_matrix_shows_figures_marks_and_words() -> None:
    given_links = links(H3, {AB: 94}, error={("h3", "h1"): "refused"})[:-1]
    text = shown(link_checks.bandwidth_table(given_links, H3))
    assert "Mbit/s" in text
    assert cells(text) == {"h1": ["-", "94*", "941"], "h2": ["941", "-", "941"], "h3": ["broken", "?", "-"]}


def test_fast_links_are_shown_in_gbits_and_a_slow_one_stays_readable() -> None:
    text = shown(link_checks.bandwidth_table(links(H3, {AB: 94}, usual=23512), H3))
    assert "Gbit/s" in text and cells(text)["h1"] == ["-", "0.094*", "23.5"]


def test_round_trips_are_shown_and_late_ones_marked() -> None:
    text = shown(link_checks.latency_table(links(H3, rtt={AB: 12.3, BA: 0.04}), H3))
    assert cells(text)["h1"] == ["-", "12*", "0.20"] and cells(text)["h2"][0] == "0.04"


def test_many_hosts_are_summed_up_and_a_slow_one_does_not_fill_every_row() -> None:
    hosts = names(32)
    slow = of("h7", 32, 94)
    given_links = links(hosts, slow | {("h1", "h9"): 700}, error={("h2", "h3"): "refused"})
    table = cells(shown(link_checks.bandwidth_table(given_links, hosts)))
    assert len(table) == 32
    assert table["h1"][0] == "700 to h9" and table["h1"][4] == "h7"
    assert table["h7"][0].startswith("94*") and table["h7"][2] == "94"
    assert table["h2"][3:] == ["1", "h3 (broken)"]
    assert len(cells(shown(link_checks.latency_table(given_links, hosts)))) == 32


def test_a_silent_host_has_a_row_of_its_own() -> None:
    given_links = links(H3, error=dict.fromkeys(of("h3", 3, 0), "timed out"))
    assert cells(shown(link_checks.bandwidth_table(given_links, H3)))["h3"] == ["broken", "broken", "-"]
    hosts = names(13)
    dead = links(hosts, error=dict.fromkeys(of("h13", 13, 0), "timed out"))
    assert cells(shown(link_checks.bandwidth_table(dead, hosts)))["h13"][:4] == ["?", "?", "?", "24"]


@pytest.mark.parametrize(
    ("mbits", "wanted"),
    [(0.84, "0.8 Mbit/s"), (94.4, "94 Mbit/s"), (941, "941 Mbit/s"), (2350, "2.35 Gbit/s"), (23512, "23.5 Gbit/s")],
)
def test_rates_read_well(mbits: float, wanted: str) -> None:
    assert link_checks.rate(mbits) == wanted
