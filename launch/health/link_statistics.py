"""What is typical of the measured links, which pairs deviate from it, and which hosts most of these pairs share. Pure.

A pair is compared with `typical`, the median over hosts of each host's own median. Unlike the median of all pairs, it
does not fall when one host of three is slow, although that host is in four of the six pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low
from typing import TypeVar

from launch.network.links import Link

#: (source, target): one direction between two hosts.
Pair = tuple[str, str]
K = TypeVar("K")
V = TypeVar("V")

#: A pair is slow below this part of the typical bandwidth, or of the bandwidth of its other direction.
SLOW = 0.5
#: A pair has high latency above this multiple of the typical round trip, if that is above the floor as well.
HIGH_LATENCY_TIMES, HIGH_LATENCY_FLOOR_MS = 10.0, 0.5
#: Above this no link is that of a local network, whatever is typical.
HIGH_LATENCY_MS = 5.0


@dataclass(frozen=True)
class Blame:
    """Bad pairs, explained by hosts that most of them share."""

    hosts: dict[str, str]  # host -> "both", "sending" or "receiving"
    explained: dict[str, list[Pair]]  # host -> the bad pairs that it explains
    pairs: list[Pair]  # the bad pairs that no host explains, in order


@dataclass(frozen=True)
class Slow:
    """Slow pairs and what explains them."""

    typical: float | None  # Mbit/s; None: nothing was measured
    pairs: list[Pair]  # all slow pairs
    groups: list[list[str]]  # sets of hosts that are fast among themselves and slow to others; may be empty
    blame: Blame


def arrow(pair: Pair) -> str:
    """`h1 -> h2`."""
    return f"{pair[0]} -> {pair[1]}"


def ends(link: Link) -> Pair:
    """The link's two hosts, source and target."""
    return link.source, link.target


def other(pair: Pair, host: str) -> str:
    """The pair's other host."""
    return pair[1] if pair[0] == host else pair[0]


def grouped(entries: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values by their key, both in the order in which they come."""
    groups: dict[K, list[V]] = {}
    for key, value in entries:
        groups.setdefault(key, []).append(value)
    return groups


def bandwidths(links: Iterable[Link]) -> dict[Pair, float]:
    """Mbit/s of the pairs that work and were measured."""
    return {(k.source, k.target): k.mbits for k in links if k.error is None and k.mbits is not None}


def round_trips(links: Iterable[Link]) -> dict[Pair, float]:
    """Milliseconds of the pairs that work and were measured."""
    return {(k.source, k.target): k.rtt_ms for k in links if k.error is None and k.rtt_ms is not None}


def path_mtus(links: Iterable[Link]) -> dict[Pair, int]:
    """Bytes of the largest packet on the pairs that work and were measured."""
    return {(k.source, k.target): k.path_mtu for k in links if k.error is None and k.path_mtu is not None}


def typical(values: Mapping[Pair, float], middle: Callable[[Iterable[float]], float]) -> float | None:
    """The median over hosts of the median of each host's pairs; None without values.

    `middle` chooses between two middle values: median_high for bandwidths and median_low for round trips, so that with
    two hosts each direction is compared with the better one.
    """
    hosts: dict[str, list[float]] = {}
    for (source, target), value in values.items():
        hosts.setdefault(source, []).append(value)
        hosts.setdefault(target, []).append(value)
    return middle([middle(own) for own in hosts.values()]) if hosts else None


def blame(bad: Iterable[Pair], tested: Sequence[Pair]) -> Blame:
    """Find the hosts that explain the bad ones of the tested pairs, in time linear in the number of pairs.

    A host explains the bad pairs on which it sends (or receives) when these are more than half of the tested ones, and
    lead to two other hosts at least. It explains both directions when that holds of all its pairs, and of at least half
    of the pairs of each direction. The host that explains most comes first, and the pairs that it explains count for no
    other host.
    """
    bad_pairs = set(bad)
    if not bad_pairs:
        return Blame({}, {}, [])
    ends = {"sending": 0, "receiving": 1}
    names = list(dict.fromkeys(itertools.chain.from_iterable(tested)))
    #: By direction and host the pairs that no host explains yet; dicts keep their order, as sets would not.
    open_pairs = {way: _by_end(names, tested, end) for way, end in ends.items()}
    open_bad = {way: _by_end(names, [pair for pair in tested if pair in bad_pairs], end) for way, end in ends.items()}

    def candidates(host: str) -> Iterable[tuple[int, float, str]]:
        """(bad pairs, their part of the tested ones, direction) of what the host could explain."""
        out, into = (len(open_bad[way][host]) for way in ends)
        all_out, all_into = (len(open_pairs[way][host]) for way in ends)
        # One bad pair in each direction may be with one and the same partner.
        same = max(out, into) < 2 and len({other(p, host) for way in ends for p in open_bad[way][host]}) < 2
        ways = [("sending", out, all_out), ("receiving", into, all_into)]
        if all_out and all_into and 2 * out >= all_out and 2 * into >= all_into:
            ways.insert(0, ("both", out + into, all_out + all_into))
        for direction, count, total in ways:
            if 2 * count > total and count >= 2 and not same:
                yield count, count / total, direction

    directions: dict[str, str] = {}
    explained: dict[str, list[Pair]] = {}
    while found := [(count, part, host, way) for host in names for count, part, way in candidates(host)]:
        *_, host, direction = max(found, key=lambda one: one[:2])
        directions[host] = "both" if host in directions else direction
        for own in ("sending", "receiving") if direction == "both" else (direction,):
            explained.setdefault(host, []).extend(open_bad[own][host])
            for pair in list(open_pairs[own][host]):
                for way, end in ends.items():
                    del open_pairs[way][pair[end]][pair]
                    open_bad[way][pair[end]].pop(pair, None)
    return Blame(directions, explained, [pair for pair in tested if pair in open_bad["sending"][pair[0]]])


def _by_end(names: Iterable[str], pairs: Iterable[Pair], end: int) -> dict[str, dict[Pair, None]]:
    """The pairs by the host at one end, 0 or 1, for every name."""
    groups: dict[str, dict[Pair, None]] = {host: {} for host in names}
    for pair in pairs:
        groups[pair[end]][pair] = None
    return groups


def groups(values: Mapping[Pair, float]) -> list[list[str]]:
    """Sets of two hosts or more that are fast among themselves and slow to all others, as behind a slow uplink.

    Fast is at least half of the fastest pair. Empty unless all pairs were measured and each of them fits.
    """
    hosts = list(dict.fromkeys(host for pair in values for host in pair))
    if len(values) != len(hosts) * (len(hosts) - 1) or len(hosts) < 4:
        return []
    limit = SLOW * max(values.values())
    fast = {host: frozenset(h for h in hosts if h == host or values[host, h] >= limit) for host in hosts}
    sets = list(dict.fromkeys(fast[host] for host in hosts))
    fits = len(sets) > 1 and sum(map(len, sets)) == len(hosts) and all(len(s) > 1 for s in sets)
    return [[h for h in hosts if h in s] for s in sets] if fits else []


def slow(values: Mapping[Pair, float]) -> Slow:
    """The pairs below half of the typical bandwidth or of their own other direction, and what they have in common.

    values: `bandwidths`.
    """
    usual = typical(values, median_high)
    if usual is None:
        return Slow(None, [], [], Blame({}, {}, []))
    parts = groups(values)
    if parts:
        group_of = {host: index for index, hosts in enumerate(parts) for host in hosts}
        between = [pair for pair in values if group_of[pair[0]] != group_of[pair[1]]]
        return Slow(usual, between, parts, Blame({}, {}, []))
    back = {pair: SLOW * values.get((pair[1], pair[0]), 0.0) for pair in values}
    below = [pair for pair, value in values.items() if value < SLOW * usual or value < min(usual, back[pair])]
    return Slow(usual, below, [], blame(below, list(values)))


def high_latency_pairs(values: Mapping[Pair, float]) -> list[Pair]:
    """The pairs whose round trip is far above the typical one, or long for a local network. values: `round_trips`."""
    limit = max(HIGH_LATENCY_TIMES * (typical(values, median_low) or 0.0), HIGH_LATENCY_FLOOR_MS)
    return [pair for pair, ms in values.items() if ms > min(limit, HIGH_LATENCY_MS)]


def both_ways(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs, each together with its other direction where that is among them."""
    return list(grouped((pair if pair[0] < pair[1] else (pair[1], pair[0]), pair) for pair in pairs).values())


def places(changed: Collection[Pair], tested: Sequence[Pair]) -> list[tuple[str, list[Pair]]]:
    """Where to report bad pairs, as (place, its bad pairs).

    The place is the cluster when all pairs are bad, then come the hosts that explain pairs, then the pairs left over.
    """
    if len(changed) == len(tested) > 2:
        return [("cluster", list(changed))]
    found = blame(changed, tested)
    hosts = [(f"host {host}", pairs) for host, pairs in found.explained.items()]
    return hosts + [(place_of(ways), ways) for ways in both_ways(found.pairs)]


def place_of(ways: Sequence[Pair]) -> str:
    """`h1 -> h2`, or `h1 -> h2, h2 -> h1` for both directions."""
    return ", ".join(map(arrow, ways))
