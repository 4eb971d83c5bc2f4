"""What has changed on the links since an earlier check on the same network. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from launch.cli.units import milliseconds, rate
from launch.health.link_checks import shortened
from launch.health.link_statistics import Pair, bandwidths, path_mtus, places, round_trips
from launch.health.records import moment_of
from launch.health.verdicts import HEALTHY, WARNING, Verdict
from launch.network.links import Link

#: A bandwidth has drifted when it changed by this part of the earlier one or more.
BANDWIDTH_DRIFT = 0.25
#: A round trip has drifted when it is this many times the earlier one, and longer than the floor.
LATENCY_DRIFT, LATENCY_FLOOR_MS = 3.0, 1.0

Links = Mapping[Pair, Link]


def drift(now: Sequence[Link], before: Sequence[Link], when: str) -> list[Verdict]:
    """What changed between two checks on one network; `when`: ISO time of the earlier one.

    Only pairs that both checks tested count: hosts that came or went are no drift. What got worse is a warning; what
    got better is healthy, and reported too. A host most of whose pairs have changed is named once. Empty where the
    checks have no pair in common.
    """
    old = {(link.source, link.target): link for link in before}
    new = {(link.source, link.target): link for link in now if (link.source, link.target) in old}
    if not new:
        return []
    since = moment_of(when)
    changes = [
        verdict
        for compare in (_broken, _repaired, _slower, _faster, _latency, _mtu)
        for verdict in shortened(compare(new, old, since))
    ]
    if changes:
        return changes
    what = f"no bandwidth of {len(new)} pairs changed by {BANDWIDTH_DRIFT:.0%} or more since {since}"
    if not _in_both(bandwidths(now), bandwidths(before)):
        what = f"{len(new)} pairs as on {since}"
    return [Verdict("drift", "cluster", HEALTHY, what)]


def _in_both(now: Iterable[Pair], before: Mapping[Pair, float]) -> list[Pair]:
    return [pair for pair in now if pair in before]


def _broken(new: Links, old: Links, since: str) -> list[Verdict]:
    tested = [pair for pair in new if old[pair].error is None]
    result = []
    for where, pairs in places([pair for pair in tested if new[pair].error is not None], tested):
        speeds = [mbits for pair in pairs if (mbits := old[pair].mbits) is not None]
        figure = f" at {rate(median(speeds))}" if speeds else ""
        what = f"worked on {since}{figure}, now broken: {new[pairs[0]].error}"
        fix = "ask what has been changed since then: firewall, cables, addresses"
        result.append(Verdict("drift", where, WARNING, what, fix))
    return result


def _repaired(new: Links, old: Links, since: str) -> list[Verdict]:
    repaired = [pair for pair in new if old[pair].error is not None and new[pair].error is None]
    # Compared with all pairs: a single pair that was broken says nothing of its host.
    return [
        Verdict("drift", where, HEALTHY, f"works again; on {since} it was broken: {old[pairs[0]].error}")
        for where, pairs in places(repaired, list(new))
    ]


def _slower(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = bandwidths(new.values()), bandwidths(old.values())
    tested = _in_both(now, before)
    slower = [pair for pair in tested if now[pair] <= (1 - BANDWIDTH_DRIFT) * before[pair] > 0]
    fix = (
        "measure again when nothing else runs; if it stays, ask what has been changed since then: cable, switch port, "
        "driver, other traffic (where that is intended, remove build/<inventory>/checks, and the next check is the new "
        "standard)"
    )
    return [
        Verdict("drift", where, WARNING, _from_to(now, before, pairs, since, "slower"), fix)
        for where, pairs in places(slower, tested)
    ]


def _faster(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = bandwidths(new.values()), bandwidths(old.values())
    tested = _in_both(now, before)
    faster = [pair for pair in tested if now[pair] >= (1 + BANDWIDTH_DRIFT) * before[pair] > 0]
    return [
        Verdict("drift", where, HEALTHY, _from_to(now, before, pairs, since, "faster"))
        for where, pairs in places(faster, tested)
    ]


def _from_to(
    now: Mapping[Pair, float], before: Mapping[Pair, float], pairs: Sequence[Pair], since: str, word: str
) -> str:
    """The medians of some pairs' bandwidths, now and in the earlier check."""
    is_, was = median([now[pair] for pair in pairs]), median([before[pair] for pair in pairs])
    return f"{rate(is_)}, on {since} it was {rate(was)} ({abs(is_ / was - 1):.0%} {word})"


def _latency(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = round_trips(new.values()), round_trips(old.values())
    tested = _in_both(now, before)
    longer = [pair for pair in tested if now[pair] > max(LATENCY_DRIFT * before[pair], LATENCY_FLOOR_MS)]
    result = []
    for where, pairs in places(longer, tested):
        is_, was = median([now[p] for p in pairs]), median([before[p] for p in pairs])
        what = f"round trip {milliseconds(is_)}, on {since} it was {milliseconds(was)}"
        result.append(Verdict("drift", where, WARNING, what, "look for a new detour or other traffic on the way"))
    return result


def _mtu(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = path_mtus(new.values()), path_mtus(old.values())
    tested = _in_both(now, before)
    result = []
    for where, pairs in places([pair for pair in tested if now[pair] < before[pair]], tested):
        is_, was = min(now[p] for p in pairs), max(before[p] for p in pairs)
        what = f"packets of at most {is_} bytes get through, on {since} it was {was} bytes"
        fix = "ask what has been changed since then: the MTU of a NIC, a switch or a tunnel"
        result.append(Verdict("drift", where, WARNING, what, fix))
    return result
