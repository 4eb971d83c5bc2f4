"""What the measured links say: which pairs and hosts are broken, slow, far away or unequal, with figures and a fix.

Pure: measures nothing and prints nothing. What most pairs of one host have in common is said of that host, once. What
is typical, and which pairs deviate from it, is decided in link_statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median, median_high, median_low

from launch.cli.units import milliseconds, number, rate, some
from launch.health import link_statistics as stats
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.network.links import Link

#: Pairs that one check reports one by one; the others are counted.
REPORTED_PAIRS = 10
#: Mbit/s for which Ethernet links are made. A link a little below one of them was probably negotiated at it.
ETHERNET_MBITS = (10, 100, 1000, 2500, 5000, 10000, 25000, 40000, 50000, 100000, 200000, 400000)
#: A bandwidth below this part of the label is reported; one TCP stream seldom fills labels above FAST_LABEL_MBITS.
LABEL_PART, FAST_LABEL_MBITS, FAST_LABEL_PART = 0.5, 10000, 0.2

_ALL_OF_THEM = "all are in report.html of `make check`, or in the record beside it"
_REACH_FIX = (
    "let TCP pass between them on the training network, both ways (the README lists the ports): check firewalls, "
    "VLAN and cable; then `make deploy` tests again and may choose another network"
)
_PORTS_FIX = "end what listens there; `ss -ltnp` shows it"
_MTU_FIX = (
    "give the NICs and every switch port between them the same MTU, or lower the NICs' to what gets through: "
    "ip link set dev <interface> mtu <bytes>"
)
_IPERF_FIX = "`make deploy` installs it, or `apt-get install iperf3` there; then check again"
_IPERF_FAILS_FIX = "run `iperf3 -s` there to see what is wrong with it; then check again"
_LATENCY_FIX = "look for a detour (VPN, router, wireless), power saving of the NIC, or other traffic on the way"


def verdicts(
    links: Sequence[Link],
    speeds: Mapping[str, int | None] | None = None,
    mtus: Mapping[str, int | None] | None = None,
    sampled: bool = False,
) -> list[Verdict]:
    """What is to be said of all pairs, and one healthy line with the figures of what is in order.

    speeds: by host the label of its training NIC in Mbit/s, None where it is unknown or known to be wrong.
    mtus: by host the MTU of that NIC in bytes.
    sampled: these are some of the hosts' pairs, and whatever is said of pairs says so; none is missed.
    Links without bandwidths (the quick form) are checked for errors, round trip and MTU alone. Empty for no links.
    """
    if not links:
        return []
    speeds, mtus = speeds or {}, mtus or {}
    values, trips, paths = stats.bandwidths(links), stats.round_trips(links), stats.path_mtus(links)
    bandwidth, latency, mtu = _bandwidth(values, speeds), _latency(trips), _path_mtu(paths, mtus)
    differing = _nic_mtus(mtus)
    figures = _figures(links, {} if bandwidth else values, {} if latency else trips, {} if mtu or differing else paths)
    healthy = [Verdict("links", "cluster", HEALTHY, figures)] if figures else []
    of_pairs = [*shortened(bandwidth), *shortened(latency), *differing, *shortened(mtu), *healthy]
    if not sampled:
        return [*shortened(_reach(links)), *_unable(links), *_missing(links), *of_pairs]
    hosts = len({host for link in links for host in stats.ends(link)})
    words = f" (a sample: {len(links)} of {hosts * (hosts - 1)} ordered pairs were checked; `make check` checks all)"
    found = [*shortened(_reach(links)), *of_pairs]
    return [one if one in differing else replace(one, what=one.what + words) for one in found]


def shortened(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One check's verdicts; of those on pairs the first few, and how many more there are."""
    more = [v for v in verdicts if " -> " in v.where][REPORTED_PAIRS:]
    if not more:
        return list(verdicts)
    what = f"{len(more)} more pairs likewise: {some([v.where for v in more])}; {_ALL_OF_THEM}"
    left_out = set(more)
    last = Verdict(more[0].check, "cluster", more[0].level, what, more[0].fix and "as above")
    return [*(v for v in verdicts if v not in left_out), last]


def _figures(
    links: Sequence[Link],
    values: Mapping[stats.Pair, float],
    trips: Mapping[stats.Pair, float],
    paths: Mapping[stats.Pair, int],
) -> str:
    """The healthy line: the figures of bandwidth, latency and MTU that are in order."""
    working = sum(link.error is None for link in links)
    parts = [f"{working} pairs" if working == len(links) else f"{working} of {len(links)} pairs work"]
    if values:
        slowest, usual = min(values, key=values.__getitem__), stats.typical(values, median_high)
        parts.append(f"slowest {stats.arrow(slowest)} {rate(values[slowest])}, median {rate(usual or 0)}")
    if trips:
        longest = max(trips, key=trips.__getitem__)
        usual = stats.typical(trips, median_low) or 0.0
        same = number(usual) == number(trips[longest])
        more = "" if same else f" (longest {stats.arrow(longest)} {milliseconds(trips[longest])})"
        parts.append(f"round trip {milliseconds(usual)}{more}")
    if paths:
        parts.append(f"path MTU {_span(list(paths.values()))}")
    return ", ".join(parts) if len(parts) > 1 else ""


def _reach(links: Sequence[Link]) -> list[Verdict]:
    errors = {stats.ends(link): link.error for link in links if link.error is not None}
    tested = [stats.ends(link) for link in links]
    if not errors:
        return []
    if len(errors) == len(tested) > 2:
        first = next(iter(errors))
        what = f"no pair of hosts works on this network; {stats.arrow(first)}: {errors[first]}"
        return [Verdict("reach", "cluster", ERROR, what, _reach_fix(errors[first]))]
    blamed = stats.blame(errors, tested)
    result = []
    for host, direction in blamed.hosts.items():
        own = blamed.explained[host]
        reasons = dict.fromkeys(errors[pair] or "" for pair in own)
        peers = some(list(dict.fromkeys(stats.other(pair, host) for pair in own)))
        what = {
            "both": f"exchanges no data with {peers}",
            "sending": f"no data passes {host} -> {peers}",
            "receiving": f"no data passes {peers} -> {host}",
        }[direction]
        more = f" (and {len(reasons) - 1} other reasons)" if len(reasons) > 1 else ""
        what += f": {next(iter(reasons))}{more}"
        result.append(Verdict("reach", f"host {host}", ERROR, what, _reach_fix(*reasons)))
    known = set(tested)
    for ways in stats.both_ways(blamed.pairs):
        reasons = dict.fromkeys(errors[pair] or "" for pair in ways)
        back = (ways[0][1], ways[0][0])
        what = "; ".join(reasons) + (f"; {stats.arrow(back)} works" if len(ways) == 1 and back in known else "")
        result.append(Verdict("reach", stats.place_of(ways), ERROR, what, _reach_fix(*reasons)))
    return result


def _reach_fix(*reasons: str | None) -> str:
    if reasons and all("no port from" in (reason or "") for reason in reasons):
        return _PORTS_FIX
    about_size = any(word in (reason or "").lower() for reason in reasons for word in ("mtu", "black hole"))
    return _MTU_FIX if about_size else _REACH_FIX


def _unable(links: Sequence[Link]) -> Iterator[Verdict]:
    """The hosts that could not measure bandwidth, those with the same reason in one line."""
    working = [link for link in links if link.error is None]
    for why in dict.fromkeys(why for link in working for why in link.problems.values()):
        lost = [link for link in working if why in link.problems.values()]
        own = list(dict.fromkeys(host for link in lost for host, reason in link.problems.items() if reason == why))
        what = f"{why} on {some(own)}: the bandwidth of {len(lost)} of {len(links)} pairs was not measured"
        where = f"host {own[0]}" if len(own) == 1 else "cluster"
        fix = _IPERF_FIX if "missing" in why else _IPERF_FAILS_FIX
        yield Verdict("bandwidth", where, INCOMPLETE, what, fix)


def _missing(links: Sequence[Link]) -> list[Verdict]:
    """Pairs of which nothing is known, and pairs without bandwidth where others have one."""
    hosts = list(dict.fromkeys(host for link in links for host in stats.ends(link)))
    known, count = {stats.ends(link) for link in links}, len(hosts) * (len(hosts) - 1)
    missing = [(a, b) for a in hosts for b in hosts if a != b and (a, b) not in known] if len(known) < count else []
    if any(link.mbits is not None for link in links):
        working = (link for link in links if link.error is None)
        missing += [stats.ends(link) for link in working if link.mbits is None and not link.problems]
    if not missing:
        return []
    what = f"{len(missing)} of {count} pairs were not measured: {some([stats.arrow(pair) for pair in missing])}"
    return [Verdict("links", "cluster", INCOMPLETE, what, "run `make check` again, with all hosts up and idle")]


def _bandwidth(values: Mapping[stats.Pair, float], speeds: Mapping[str, int | None]) -> list[Verdict]:
    found = stats.slow(values)
    if found.typical is None:
        return []
    against = f"the median is {rate(found.typical)}"
    result = []
    slow_pairs = set(found.pairs)
    if found.groups:
        names = " | ".join(", ".join(hosts) for hosts in found.groups)
        between = median([values[pair] for pair in found.pairs])
        among = median([value for pair, value in values.items() if pair not in slow_pairs])
        what = f"{rate(among)} within each of the groups {names}, but {rate(between)} between them"
        fix = "check the link between their switches; or train on the hosts of one group"
        result.append(Verdict("bandwidth", "cluster", WARNING, what, fix))
    for host, direction in found.blame.hosts.items():
        own = found.blame.explained[host]
        sent, received = ([values[pair] for pair in own if pair[end] == host] for end in (0, 1))
        words = [f"{host} -> others {rate(median(sent))}"] if sent else []
        words += [f"others -> {host} {rate(median(received))}"] if received else []
        only = "" if direction == "both" else "; the other direction is in order"
        label = speeds.get(host)
        labelled = f"; its NIC is labelled {rate(label)}" if label else ""
        what = f"{', '.join(words)}, {against}{only}{labelled}"
        fix = _host_fix(host, direction, sent + received, label)
        result.append(Verdict("bandwidth", f"host {host}", WARNING, what, fix))
    for ways in stats.both_ways(sorted(found.blame.pairs, key=values.__getitem__)):
        back = (ways[0][1], ways[0][0])
        shown = [*ways, back] if len(ways) == 1 and back in values else ways
        what = f"{', '.join(f'{stats.arrow(pair)} {rate(values[pair])}' for pair in shown)}, {against}"
        fix = f"check cables, switch ports and other traffic between {ways[0][0]} and {ways[0][1]}"
        result.append(Verdict("bandwidth", stats.place_of(ways), WARNING, what, fix))
    return result + _below_label(values, speeds, slow_pairs)


def _host_fix(host: str, direction: str, values: Sequence[float], label: int | None) -> str:
    step = negotiated(median(values), label)
    if step:
        return f"{step} Check {host}'s cable, its switch port and `ethtool <interface>`"
    if direction == "both":
        nic = "NIC, its speed and duplex (`ethtool <interface>`), and other traffic"
        return f"check {host}'s cable, switch port, {nic}"
    limit = "a traffic limit (`tc qdisc show`), errors (`ip -s link`)"
    return f"check {host}'s duplex (`ethtool <interface>`), {limit}, and its switch port"


def negotiated(mbits: float, label: int | None) -> str:
    """The slower Ethernet speed that a bandwidth suggests, as a question; empty if there is none below the label."""
    for step in ETHERNET_MBITS:
        if 0.8 * step <= mbits <= step:
            return f"negotiated {rate(step)}?" if label is None or step < label else ""
    return ""


def _below_label(
    values: Mapping[stats.Pair, float], speeds: Mapping[str, int | None], reported: Collection[stats.Pair]
) -> list[Verdict]:
    """Bandwidths far below the slower label of the two NICs; `reported`: slow pairs, of which all has been said."""
    labels = {pair: min(both) for pair in values if (both := [label for host in pair if (label := speeds.get(host))])}
    parts = {pair: LABEL_PART if label <= FAST_LABEL_MBITS else FAST_LABEL_PART for pair, label in labels.items()}
    below = [pair for pair, part in parts.items() if pair not in reported and values[pair] < part * labels[pair]]

    def verdict(where: str, pairs: Sequence[stats.Pair]) -> Verdict:
        measured, label = median([values[p] for p in pairs]), min(labels[p] for p in pairs)
        step = negotiated(measured, label)
        what = f"{rate(measured)} measured on NICs labelled {rate(label)}"
        fix = "check cables, switch ports, `ethtool <interface>`, and other traffic or a limit on the way"
        return Verdict("bandwidth", where, WARNING, what, f"{step} {fix[0].upper()}{fix[1:]}" if step else fix)

    return [verdict(*place) for place in stats.places(below, list(values))]


def _latency(values: Mapping[stats.Pair, float]) -> list[Verdict]:
    pairs = stats.high_latency_pairs(values)
    if not pairs:
        return []
    usual = stats.typical(values, median_low) or 0.0
    if usual > stats.HIGH_LATENCY_MS:
        what = f"round trips of {milliseconds(usual)} and more: this is no local network, small all-reduces will wait"
        return [Verdict("latency", "cluster", WARNING, what, _LATENCY_FIX)]
    against = f"the median is {milliseconds(usual)}"
    blamed = stats.blame(pairs, list(values))
    result = []
    for host, own in blamed.explained.items():
        ms = median([values[pair] for pair in own])
        what = f"round trip {milliseconds(ms)} with most hosts, {against}"
        result.append(Verdict("latency", f"host {host}", WARNING, what, _LATENCY_FIX))
    for ways in stats.both_ways(blamed.pairs):
        what = f"round trip {milliseconds(max(values[pair] for pair in ways))}, {against}"
        result.append(Verdict("latency", stats.place_of(ways), WARNING, what, _LATENCY_FIX))
    return result


def _by_mtu(mtus: Mapping[str, int]) -> str:
    """`9000 bytes on h1, h2; 1500 bytes on h3`, what most hosts have first."""
    hosts = stats.grouped((mtu, host) for host, mtu in mtus.items())
    sizes = sorted(hosts, key=lambda size: (-len(hosts[size]), -size))
    return "; ".join(f"{size} bytes on {some(hosts[size])}" for size in sizes)


def _nic_mtus(mtus: Mapping[str, int | None]) -> list[Verdict]:
    """NICs that differ."""
    known = {host: mtu for host, mtu in mtus.items() if mtu}
    if len(set(known.values())) < 2:
        return []
    return [Verdict("mtu", "cluster", WARNING, f"the NICs' MTUs differ: {_by_mtu(known)}", _MTU_FIX)]


def _path_mtu(paths: Mapping[stats.Pair, int], mtus: Mapping[str, int | None]) -> list[Verdict]:
    """Paths that carry less than the NICs at both ends."""
    known = {host: mtu for host, mtu in mtus.items() if mtu}
    largest = max(paths.values(), default=0)
    expected = {pair: min((known[host] for host in pair if host in known), default=largest) for pair in paths}

    def verdict(where: str, pairs: Sequence[stats.Pair]) -> Verdict:
        ends = {host: known[host] for pair in pairs for host in pair if host in known}
        against = f"the NICs' MTU is {_by_mtu(ends)}" if ends else f"other pairs let {largest} bytes through"
        size = _span([paths[pair] for pair in pairs])
        what = f"packets of at most {size} get through {some([stats.arrow(pair) for pair in pairs])}; {against}"
        return Verdict("mtu", where, WARNING, what, _MTU_FIX)

    below = [pair for pair, size in paths.items() if size < expected[pair]]
    return [verdict(*place) for place in stats.places(below, list(paths))]


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low} bytes" if low == high else f"{low} to {high} bytes"
