"""What the measured links say: the tables of all pairs, and which pairs and hosts are broken, slow, late or odd.

Pure: measures nothing and prints nothing. A pair is compared with `typical`, the median over hosts of each host's own
median: unlike the median of all pairs it does not sink when one host of three is slow, for that host is in four of the
six pairs. What most pairs of one host have in common is said of the host, once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low

from rich.table import Table
from rich.text import Text

from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.network.links import Link

Pair = tuple[str, str]

#: A pair is slow below this part of the typical bandwidth, or of its own other direction.
SLOW = 0.5
#: A pair is late above this multiple of the typical round trip, but not below the floor; and always above LATE_MS.
LATE, LATE_FLOOR_MS, LATE_MS = 10.0, 0.5, 5.0
#: Pairs told one by one for one check; the others are counted.
TOLD_PAIRS = 10
#: With more hosts than this a terminal shows each host's extremes rather than all pairs.
MATRIX_HOSTS = 12
#: Rates in Mbit/s at which Ethernet links are made; a link a little below one of them was negotiated so.
RATES = (10, 100, 1000, 2500, 5000, 10000, 25000, 40000, 50000, 100000, 200000, 400000)

_REACH_FIX = (
    "let TCP pass between them on the training network, both ways (the README lists the ports): look at firewalls, "
    "VLAN and cable; then `make deploy` tests again and may choose another network"
)
_MTU_FIX = (
    "give the NICs and every switch port between them the same MTU, or lower the NICs' to what gets through: "
    "ip link set dev <interface> mtu <bytes>"
)
_IPERF_FIX = "`make deploy` installs it, or `apt-get install iperf3` there; then check again"
_IPERF_FAILS_FIX = "run `iperf3 -s` there to see what is wrong with it; then check again"
_LATENCY_FIX = "look for a detour (VPN, router, wireless), power saving of the NIC, or other traffic on the way"


@dataclass(frozen=True)
class Blame:
    """Pairs that have something in common with most pairs of one host, and the pairs left over."""

    hosts: dict[str, str]  # host -> "both", "sending" or "receiving"
    explained: dict[str, list[Pair]]  # host -> the bad pairs that are told by naming it
    pairs: list[Pair]  # the other bad pairs, in order


@dataclass(frozen=True)
class Slow:
    """Slow pairs and what explains them."""

    typical: float | None  # Mbit/s; None: nothing was measured
    pairs: list[Pair]  # all slow pairs
    groups: list[list[str]]  # sets of hosts that are fast among themselves and slow between; else empty
    blame: Blame


# Figures


def rate(mbits: float) -> str:
    """A bandwidth in 10^6 bit/s with its unit, three digits."""
    if mbits >= 9995:
        return f"{mbits / 1000:.1f} Gbit/s"
    if mbits >= 1500:
        return f"{mbits / 1000:.2f} Gbit/s"
    return f"{mbits:.0f} Mbit/s" if mbits >= 9.95 else f"{mbits:.1f} Mbit/s"


def milliseconds(value: float) -> str:
    """A time in ms with its unit, two digits or more."""
    return f"{number(value)} ms"


def number(value: float) -> str:
    """A positive figure with two significant digits or more, without an exponent."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def label_of(mbits: float) -> str:
    """A NIC's label in 10^6 bit/s with its unit: `1 Gbit/s`."""
    return f"{mbits / 1000:g} Gbit/s" if mbits >= 1000 else f"{mbits:g} Mbit/s"


def unit(usual: float) -> tuple[str, float]:
    """The unit in which a table's bandwidths read well, given the typical one: its name and its Mbit/s."""
    return ("Gbit/s", 1000.0) if usual >= 2000 else ("Mbit/s", 1.0)


def cell(mbits: float, scale: float) -> str:
    """A bandwidth as a table's bare figure, in units of `scale` Mbit/s."""
    value = mbits / scale
    if scale == 1:
        return number(value)
    return f"{value:.3f}" if value < 0.0995 else f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def typical(values: Mapping[Pair, float], middle: Callable[[Iterable[float]], float]) -> float | None:
    """The median over hosts of the median of each host's pairs; None without values.

    `middle` decides between two: median_high for bandwidth, median_low for round trips, so that with two hosts the
    better direction is the one to compare with.
    """
    hosts: dict[str, list[float]] = {}
    for pair, value in values.items():
        for host in pair:
            hosts.setdefault(host, []).append(value)
    return middle([middle(own) for own in hosts.values()]) if hosts else None


def bandwidths(links: Iterable[Link]) -> dict[Pair, float]:
    """Mbit/s of the pairs that work and were measured."""
    return {(k.source, k.target): k.mbits for k in links if k.error is None and k.mbits is not None}


def round_trips(links: Iterable[Link]) -> dict[Pair, float]:
    """Milliseconds of the pairs that work and were measured."""
    return {(k.source, k.target): k.rtt_ms for k in links if k.error is None and k.rtt_ms is not None}


# Who is to blame


def blame(bad: Collection[Pair], tested: Collection[Pair]) -> Blame:
    """Tell bad pairs by their hosts where most pairs of a host are bad.

    A host is named for sending or receiving when more than half of the pairs tested in that direction are bad, with two
    other hosts at least; for both when that holds of all its pairs and of at least half of each direction. The host
    that explains most comes first, and what it explains counts for no other.
    """
    left = {pair for pair in tested if pair in set(bad)}
    untold = set(tested)
    sends: dict[str, list[Pair]] = {host: [] for pair in tested for host in pair}
    gets: dict[str, list[Pair]] = {host: [] for host in sends}
    for pair in tested:
        sends[pair[0]].append(pair)
        gets[pair[1]].append(pair)
    named: dict[str, str] = {}
    explained: dict[str, list[Pair]] = {}
    while left:
        best: tuple[int, float] = (0, 0.0)
        choice: tuple[str, str, list[Pair]] | None = None
        for host in sends:
            out, into = ([pair for pair in own[host] if pair in untold] for own in (sends, gets))
            halves = all(own and 2 * sum(pair in left for pair in own) >= len(own) for own in (out, into))
            for how, own in (("both", out + into), ("sending", out), ("receiving", into)):
                count = sum(pair in left for pair in own)
                partners = {other(pair, host) for pair in own if pair in left}
                if len(partners) < 2 or 2 * count <= len(own) or (how == "both" and not halves):
                    continue
                if (count, count / len(own)) > best:
                    best, choice = (count, count / len(own)), (host, how, own)
        if choice is None:
            break
        host, how, own = choice
        named[host] = "both" if host in named else how
        explained.setdefault(host, []).extend(pair for pair in own if pair in left)
        left.difference_update(own)
        untold.difference_update(own)
    return Blame(named, explained, [pair for pair in tested if pair in left])


def groups(values: Mapping[Pair, float]) -> list[list[str]]:
    """Sets of two hosts or more that are fast among themselves and slow to all others, as behind one thin uplink.

    Fast is at least half of the fastest pair. Empty unless all pairs were measured and every one fits.
    """
    hosts = list(dict.fromkeys(host for pair in values for host in pair))
    if len(values) != len(hosts) * (len(hosts) - 1) or len(hosts) < 4:
        return []
    limit = SLOW * max(values.values())
    fast = {host: frozenset(h for h in hosts if h == host or values[host, h] >= limit) for host in hosts}
    sets = list(dict.fromkeys(fast[host] for host in hosts))
    fits = len(sets) > 1 and sum(map(len, sets)) == len(hosts) and all(len(s) > 1 for s in sets)
    return [[h for h in hosts if h in s] for s in sets] if fits else []


def slow(links: Sequence[Link]) -> Slow:
    """The pairs below half of the typical bandwidth or of their own other direction, and what they have in common."""
    values = bandwidths(links)
    usual = typical(values, median_high)
    if usual is None:
        return Slow(None, [], [], Blame({}, {}, []))
    parts = groups(values)
    if parts:
        of = {host: index for index, hosts in enumerate(parts) for host in hosts}
        between = [pair for pair in values if of[pair[0]] != of[pair[1]]]
        return Slow(usual, between, parts, Blame({}, {}, []))
    below = [
        pair
        for pair, value in values.items()
        if value < SLOW * usual or value < min(usual, SLOW * values.get((pair[1], pair[0]), 0.0))
    ]
    return Slow(usual, below, [], blame(below, values))


def late(links: Sequence[Link]) -> list[Pair]:
    """The pairs whose round trip is far above the typical one, or long for a local network."""
    values = round_trips(links)
    usual = typical(values, median_low) or 0.0
    return [pair for pair, ms in values.items() if ms > LATE_MS or (ms > LATE * usual and ms > LATE_FLOOR_MS)]


# Verdicts


def verdicts(
    links: Sequence[Link],
    speeds: Mapping[str, int | None] | None = None,
    mtus: Mapping[str, int | None] | None = None,
) -> list[Verdict]:
    """What is to be said of all pairs; one healthy line with the figures of what is in order.

    speeds: by host the label of its training NIC in Mbit/s, None where it is unknown or not to be believed.
    mtus: by host the MTU of that NIC in bytes.
    Links without bandwidths (the quick form) are judged by error, round trip and MTU alone. Empty for no links.
    """
    if not links:
        return []
    speeds, mtus = speeds or {}, mtus or {}
    reach = _reach(links)
    bandwidth = _bandwidth(links, speeds)
    latency = _latency(links)
    mtu = _mtu(links, mtus)
    figures = _figures(links, not bandwidth, not latency, not mtu)
    fine = [Verdict("links", "cluster", HEALTHY, figures)] if figures else []
    return [
        *shortened(reach),
        *_unable(links),
        *_missing(links),
        *shortened(bandwidth),
        *shortened(latency),
        *shortened(mtu),
        *fine,
    ]


def shortened(found: list[Verdict]) -> list[Verdict]:
    """One check's verdicts, of those on pairs the first few and how many more there are."""
    pairs = [v for v in found if " -> " in v.where or " <-> " in v.where]
    if len(pairs) <= TOLD_PAIRS:
        return found
    more = pairs[TOLD_PAIRS:]
    what = f"{len(more)} more pairs likewise: {_some([v.where for v in more])}; the heat map in report.html shows all"
    last = Verdict(more[0].check, "cluster", more[0].level, what, more[0].fix and "as above")
    return [*(v for v in found if v not in set(more)), last]


def _figures(links: Sequence[Link], bandwidth: bool, latency: bool, mtu: bool) -> str:
    """The healthy line: of each thing that is in order, its figures."""
    works = [link for link in links if link.error is None]
    values, trips = bandwidths(links), round_trips(links)
    paths = [link.path_mtu for link in works if link.path_mtu is not None]
    parts = [f"{len(works)} pairs" if len(works) == len(links) else f"{len(works)} of {len(links)} pairs work"]
    if bandwidth and values:
        slowest, usual = min(values, key=values.__getitem__), typical(values, median_high)
        parts.append(f"slowest {arrow(slowest)} {rate(values[slowest])}, median {rate(usual or 0)}")
    if latency and trips:
        longest = max(trips, key=trips.__getitem__)
        usual = typical(trips, median_low) or 0.0
        same = number(usual) == number(trips[longest])
        more = "" if same else f" (longest {arrow(longest)} {milliseconds(trips[longest])})"
        parts.append(f"round trip {milliseconds(usual)}{more}")
    if mtu and paths:
        parts.append(f"path MTU {_span(paths)}")
    return ", ".join(parts) if len(parts) > 1 else ""


def arrow(pair: Pair) -> str:
    """`h1 -> h2`."""
    return f"{pair[0]} -> {pair[1]}"


def both_ways(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs with each one's other direction beside it, where that is among them."""
    seen: dict[frozenset[str], list[Pair]] = {}
    for pair in pairs:
        seen.setdefault(frozenset(pair), []).append(pair)
    return list(seen.values())


def where_of(ways: Sequence[Pair]) -> str:
    """`h1 -> h2`, or `h1 <-> h2` for both directions."""
    return arrow(ways[0]) if len(ways) == 1 else f"{ways[0][0]} <-> {ways[0][1]}"


def _reach(links: Sequence[Link]) -> list[Verdict]:
    errors = {(link.source, link.target): link.error for link in links if link.error is not None}
    tested = [(link.source, link.target) for link in links]
    if not errors:
        return []
    if len(errors) == len(tested) > 2:
        first = next(iter(errors))
        what = f"no pair of hosts works on this network; {arrow(first)}: {errors[first]}"
        return [Verdict("reach", "cluster", ERROR, what, _reach_fix(errors[first]))]
    told = blame(errors, tested)
    found = []
    for host, how in told.hosts.items():
        own = told.explained[host]
        reasons = dict.fromkeys(errors[pair] or "" for pair in own)
        words = {"both": "does not talk with", "sending": "does not reach", "receiving": "is not reached by"}[how]
        peers = dict.fromkeys(other(pair, host) for pair in own)
        more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        what = f"{words} {_some(list(peers))}: {next(iter(reasons))}{more}"
        found.append(Verdict("reach", f"host {host}", ERROR, what, _reach_fix(*reasons)))
    for ways in both_ways(told.pairs):
        reasons = dict.fromkeys(errors[pair] or "" for pair in ways)
        works = (ways[0][1], ways[0][0]) in tested and len(ways) == 1
        what = "; ".join(reasons) + ("; the other direction works" if works else "")
        found.append(Verdict("reach", where_of(ways), ERROR, what, _reach_fix(*reasons)))
    return found


def _reach_fix(*reasons: str | None) -> str:
    about_size = any(word in (reason or "").lower() for reason in reasons for word in ("mtu", "black hole"))
    return _MTU_FIX if about_size else _REACH_FIX


def _unable(links: Sequence[Link]) -> list[Verdict]:
    """The hosts that could not measure bandwidth, those with the same reason in one line."""
    lost = [link for link in links if link.problems and link.error is None]
    hosts: dict[str, dict[str, None]] = {}
    for link in lost:
        for host, why in link.problems.items():
            hosts.setdefault(why, {}).setdefault(host)
    found = []
    for why, own in hosts.items():
        count = sum(any(link.problems.get(host) == why for host in own) for link in lost)
        what = f"{why} on {_some(list(own))}: the bandwidth of {count} of {len(links)} pairs was not measured"
        where = f"host {next(iter(own))}" if len(own) == 1 else "cluster"
        found.append(
            Verdict("bandwidth", where, INCOMPLETE, what, _IPERF_FIX if "missing" in why else _IPERF_FAILS_FIX)
        )
    return found


def _missing(links: Sequence[Link]) -> list[Verdict]:
    """Pairs of which nothing is known, and pairs without bandwidth where others have one."""
    hosts = list(dict.fromkeys(host for link in links for host in (link.source, link.target)))
    there = {(link.source, link.target): link for link in links}
    gone = [(a, b) for a in hosts for b in hosts if a != b and (a, b) not in there]
    if any(link.mbits is not None for link in links):
        gone += [
            pair for pair, link in there.items() if link.error is None and link.mbits is None and not link.problems
        ]
    if not gone:
        return []
    what = f"{len(gone)} of {len(hosts) * (len(hosts) - 1)} pairs were not measured: {_some([arrow(p) for p in gone])}"
    return [Verdict("links", "cluster", INCOMPLETE, what, "run `make check` again, with all hosts up and idle")]


def _bandwidth(links: Sequence[Link], speeds: Mapping[str, int | None]) -> list[Verdict]:
    values, found = bandwidths(links), slow(links)
    if found.typical is None:
        return []
    against = f"the median is {rate(found.typical)}"
    result = []
    if found.groups:
        names = " | ".join(", ".join(hosts) for hosts in found.groups)
        between = median([values[pair] for pair in found.pairs])
        among = median([value for pair, value in values.items() if pair not in set(found.pairs)])
        what = f"{rate(among)} within each of the groups {names}, but {rate(between)} between them"
        fix = "look at the link between their switches; or train on the hosts of one group"
        result.append(Verdict("bandwidth", "cluster", WARNING, what, fix))
    for host, how in found.blame.hosts.items():
        own = found.blame.explained[host]
        sent, got = ([values[pair] for pair in own if pair[end] == host] for end in (0, 1))
        words = [f"sends at {rate(median(sent))}" if sent else "", f"receives at {rate(median(got))}" if got else ""]
        only = {"both": "", "sending": ", receiving is in order", "receiving": ", sending is in order"}[how]
        label = speeds.get(host)
        labelled = f"; its NIC is labelled {label_of(label)}" if label else ""
        what = f"{' and '.join(filter(None, words))}, {against}{only}{labelled}"
        result.append(Verdict("bandwidth", f"host {host}", WARNING, what, _host_fix(host, how, sent + got, label)))
    for ways in both_ways(sorted(found.blame.pairs, key=values.__getitem__)):
        what = f"{' and '.join(rate(values[pair]) for pair in ways)}, {against}"
        back = values.get((ways[0][1], ways[0][0]))
        if len(ways) == 1 and back is not None:
            what += f"; the other direction has {rate(back)}"
        fix = f"look at cables, switch ports and other traffic between {ways[0][0]} and {ways[0][1]}"
        result.append(Verdict("bandwidth", where_of(ways), WARNING, what, fix))
    return result + _below_label(values, speeds, set(found.pairs))


def _host_fix(host: str, how: str, values: Sequence[float], label: int | None) -> str:
    step = negotiated(median(values), label)
    if step:
        return f"{step} Look at {host}'s cable, its switch port and `ethtool <interface>`"
    if how == "both":
        return (
            f"look at {host}'s cable, switch port, NIC and its speed and duplex (`ethtool <interface>`), other traffic"
        )
    return (
        f"one direction alone: look at {host}'s duplex (`ethtool <interface>`), a traffic limit (`tc qdisc show`), "
        f"errors (`ip -s link`), its switch port"
    )


def negotiated(mbits: float, label: int | None) -> str:
    """Which slower link a bandwidth looks like, as a question; empty when it looks like none, or like the label."""
    for step in RATES:
        if 0.8 * step <= mbits <= step:
            return f"negotiated {label_of(step)}?" if label is None or step < label else ""
    return ""


def _below_label(
    values: Mapping[Pair, float], speeds: Mapping[str, int | None], known: Collection[Pair]
) -> list[Verdict]:
    """Bandwidths far below the slower label of the two NICs; `known`: pairs that are told already.

    One TCP stream seldom fills more than 10 Gbit/s, so that faster labels are held to a fifth, others to a half.
    """
    labels = {}
    for pair in values:
        both = [label for label in (speeds.get(pair[0]), speeds.get(pair[1])) if label]
        if both:
            labels[pair] = min(both)
    below = [
        p for p, label in labels.items() if p not in known and values[p] < (0.5 if label <= 10000 else 0.2) * label
    ]
    if not below:
        return []

    def verdict(where: str, pairs: Sequence[Pair]) -> Verdict:
        measured, label = median([values[p] for p in pairs]), min(labels[p] for p in pairs)
        step = negotiated(measured, label)
        what = f"{rate(measured)} measured on NICs labelled {label_of(label)}"
        fix = "look at cables, switch ports, `ethtool <interface>`, and other traffic or a limit on the way"
        return Verdict("bandwidth", where, WARNING, what, f"{step} {fix[0].upper()}{fix[1:]}" if step else fix)

    if len(below) == len(values) > 2:
        return [verdict("cluster", below)]
    told = blame(below, list(values))
    return [verdict(f"host {host}", pairs) for host, pairs in told.explained.items()] + [
        verdict(where_of(ways), ways) for ways in both_ways(told.pairs)
    ]


def _latency(links: Sequence[Link]) -> list[Verdict]:
    values, pairs = round_trips(links), late(links)
    if not pairs:
        return []
    usual = typical(values, median_low) or 0.0
    against = f"the median is {milliseconds(usual)}"
    if usual > LATE_MS:
        what = (
            f"round trips of {milliseconds(usual)} and more: this is not a local network; small collectives will wait"
        )
        return [Verdict("latency", "cluster", WARNING, what, _LATENCY_FIX)]
    told = blame(pairs, list(values))
    found = []
    for host in told.hosts:
        ms = median([values[pair] for pair in told.explained[host]])
        what = f"round trip {milliseconds(ms)} with most hosts, {against}"
        found.append(Verdict("latency", f"host {host}", WARNING, what, _LATENCY_FIX))
    for ways in both_ways(told.pairs):
        ms = max(values[pair] for pair in ways)
        found.append(
            Verdict("latency", where_of(ways), WARNING, f"round trip {milliseconds(ms)}, {against}", _LATENCY_FIX)
        )
    return found


def _each(mtus: Mapping[str, int]) -> str:
    """`9000 on h1, h2; 1500 on h3`, what most hosts have first."""
    sizes = sorted(set(mtus.values()), key=lambda size: (-sum(m == size for m in mtus.values()), -size))
    return "; ".join(f"{size} on {_some([h for h, m in mtus.items() if m == size])}" for size in sizes)


def _mtu(links: Sequence[Link], mtus: Mapping[str, int | None]) -> list[Verdict]:
    """NICs that differ, and paths that carry less than the NICs at both ends."""
    known = {host: mtu for host, mtu in mtus.items() if mtu}
    found = []
    if len(set(known.values())) > 1:
        found.append(Verdict("mtu", "cluster", WARNING, f"the NICs' MTUs differ: {_each(known)} bytes", _MTU_FIX))
    paths = {(k.source, k.target): k.path_mtu for k in links if k.error is None and k.path_mtu is not None}
    if not paths:
        return found
    largest = max(paths.values())
    expected = {}
    for pair in paths:
        ends = [known[host] for host in pair if host in known]
        expected[pair] = min(ends) if ends else largest
    below = [pair for pair, size in paths.items() if size < expected[pair]]

    def verdict(where: str, pairs: Sequence[Pair]) -> Verdict:
        ends = {host: known[host] for pair in pairs for host in pair if host in known}
        against = f"the NICs' MTU is {_each(ends)} bytes" if ends else f"other pairs let {largest} bytes through"
        what = f"packets of at most {_span([paths[p] for p in pairs])} get through "
        return Verdict("mtu", where, WARNING, f"{what}{_some([arrow(p) for p in pairs])}; {against}", _MTU_FIX)

    if below and len(below) == len(paths) > 2:
        return [*found, verdict("cluster", below)]
    told = blame(below, list(paths))
    found += [verdict(f"host {host}", pairs) for host, pairs in told.explained.items()]
    return found + [verdict(where_of(ways), ways) for ways in both_ways(told.pairs)]


def other(pair: Pair, host: str) -> str:
    """The pair's other host."""
    return pair[1] if pair[0] == host else pair[0]


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"


def _some(names: Sequence[str], most: int = 6) -> str:
    """Names in a row, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# Tables


def bandwidth_table(links: Sequence[Link], hosts: Sequence[str]) -> Table:
    """All pairs' bandwidth, from the row's host to the column's; for many hosts each host's extremes."""
    values, found = bandwidths(links), slow(links)
    name, scale = unit(found.typical or 0.0)
    usual = f"median {cell(found.typical, scale)}, * slow" if found.typical is not None else "not measured"
    shown = _Shown(f"Bandwidth in {name}", usual, links, values, set(found.pairs), lambda v: cell(v, scale))
    return _matrix(shown, hosts) if len(hosts) <= MATRIX_HOSTS else _summary(shown, hosts, "slowest", min)


def latency_table(links: Sequence[Link], hosts: Sequence[str]) -> Table:
    """All pairs' round trip in ms, opened by the row's host; for many hosts each host's extremes."""
    values = round_trips(links)
    usual = typical(values, median_low)
    words = f"median {number(usual)}, * late" if usual is not None else "not measured"
    shown = _Shown("Round trip in ms", words, links, values, set(late(links)), number)
    return _matrix(shown, hosts) if len(hosts) <= MATRIX_HOSTS else _summary(shown, hosts, "longest", max)


@dataclass(frozen=True)
class _Shown:
    """What a table shows: the figures of pairs, which of them are marked, and how a figure is written."""

    title: str
    caption: str
    links: Sequence[Link]
    values: Mapping[Pair, float]
    marked: Collection[Pair]
    write: Callable[[float], str]

    def broken(self) -> list[Pair]:
        return [(link.source, link.target) for link in self.links if link.error is not None]

    def cell(self, pair: Pair) -> Text:
        """One pair's figure; what is wrong is said by a mark or a word as well as by colour."""
        if pair in self.values:
            text = self.write(self.values[pair])
            return Text(f"{text}*", style="bold yellow") if pair in self.marked else Text(text)
        return Text("broken", style="bold red") if pair in self.broken() else Text("?", style="dim")


def _matrix(shown: _Shown, hosts: Sequence[str]) -> Table:
    table = Table(
        title=f"{shown.title} (row to column)", caption=shown.caption, title_justify="left", caption_justify="left"
    )
    table.add_column("from \\ to", style="bold", overflow="fold")
    for host in hosts:
        table.add_column(Text(host), justify="right", overflow="fold", min_width=6)
    for source in hosts:
        cells = [Text("-", style="dim") if source == target else shown.cell((source, target)) for target in hosts]
        table.add_row(Text(source), *cells)
    return table


def _summary(shown: _Shown, hosts: Sequence[str], word: str, pick: Callable[..., Pair]) -> Table:
    """Per host: its extreme pair in each direction, its median, its broken pairs, and its worst partner.

    A host to blame for its pairs would be every other host's extreme: it stands in its own row, and as worst partner.
    """
    values, broken = shown.values, shown.broken()
    named = blame([pair for pair in values if pair in shown.marked], list(values))
    table = Table(title=shown.title, caption=shown.caption, title_justify="left", caption_justify="left")
    table.add_column("host", style="bold", overflow="fold")
    for column in (f"{word} out", f"{word} in", "median", "broken", "worst partner"):
        table.add_column(column, justify="right", overflow="fold")
    for host in hosts:
        others = {pair for culprit, pairs in named.explained.items() if culprit != host for pair in pairs}
        row = [Text(host)]
        for end, to in ((0, "to"), (1, "from")):
            own = [pair for pair in values if pair[end] == host]
            own = [pair for pair in own if pair not in others] or own
            extreme = pick(own, key=values.__getitem__) if own else None
            row.append(shown.cell(extreme) + Text(f" {to} {extreme[1 - end]}") if extreme else Text("?", style="dim"))
        mine = [pair for pair in values if host in pair]
        row.append(Text(shown.write(median([values[pair] for pair in mine])) if mine else "?"))
        bad = [pair for pair in broken if host in pair]
        row.append(Text(str(len(bad)), style="bold red") if bad else Text("-", style="dim"))
        partner = other(bad[0] if bad else pick(mine, key=values.__getitem__), host) if bad or mine else "?"
        row.append(Text(f"{partner} (broken)" if bad else partner))
        table.add_row(*row)
    return table
