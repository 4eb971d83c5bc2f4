"""What has changed on the links since an earlier check on the same network. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median

from launch.cli.units import milliseconds, rate
from launch.health.link_checks import shortened
from launch.health.link_statistics import Pair, bandwidths, ends, path_mtus, places, round_trips
from launch.health.records import moment_of
from launch.health.verdicts import HEALTHY, WARNING, Verdict
from launch.network.links import Link

#: A bandwidth has drifted when it changed by this part of the earlier one or more.
BANDWIDTH_DRIFT = 0.25
#: A round trip has drifted when it is this many times the earlier one, and longer than the floor.
LATENCY_DRIFT, LATENCY_FLOOR_MS = 3.0, 1.0

_BROKEN_FIX = "ask what has been changed since then: firewall, cables, addresses"
_SLOWER_FIX = (
    "measure again when nothing else runs; if it stays, ask what has been changed since then: cable, switch port, "
    "driver, other traffic (where that is intended, remove build/<inventory>/checks, and the next check is the new "
    "standard)"
)
_LATENCY_FIX = "look for a new detour or other traffic on the way"
_MTU_FIX = "ask what has been changed since then: the MTU of a NIC, a switch or a tunnel"

Links = Mapping[Pair, Link]


def drift(now: Sequence[Link], before: Sequence[Link], when: str) -> list[Verdict]:
    """What changed between two checks on one network; `when`: ISO time of the earlier one.

    Only pairs that both checks tested count: hosts that came or went are no drift. What got worse is a warning; what
    got better is healthy, and reported too. A host most of whose pairs have changed is named once. Empty where the
    checks have no pair in common.
    """
    old = {ends(link): link for link in before}
    new = {ends(link): link for link in now if ends(link) in old}
    if not new:
        return []
    since = moment_of(when)
    changes = [verdict for compare in (_errors, _bandwidth, _latency, _mtu) for verdict in compare(new, old, since)]
    if changes:
        return changes
    what = f"{len(new)} pairs as on {since}"
    if bandwidths(now).keys() & bandwidths(before).keys():
        what = f"no bandwidth of {len(new)} pairs changed by {BANDWIDTH_DRIFT:.0%} or more since {since}"
    return [Verdict("drift", "cluster", HEALTHY, what)]


def _verdicts(
    level: str, changed: Collection[Pair], tested: Sequence[Pair], what: Callable[[list[Pair]], str], fix: str = ""
) -> list[Verdict]:
    """One kind of change, reported where it belongs; `what`: describes those of its pairs that have one place."""
    return shortened([Verdict("drift", where, level, what(pairs), fix) for where, pairs in places(changed, tested)])


def _errors(new: Links, old: Links, since: str) -> list[Verdict]:
    def broken(pairs: list[Pair]) -> str:
        speeds = [mbits for pair in pairs if (mbits := old[pair].mbits) is not None]
        return f"worked on {since}{f' at {rate(median(speeds))}' if speeds else ''}, now broken: {new[pairs[0]].error}"

    def repaired(pairs: list[Pair]) -> str:
        return f"works again; on {since} it was broken: {old[pairs[0]].error}"

    worked, works = ([pair for pair in new if links[pair].error is None] for links in (old, new))
    # What works again is compared with all pairs: a single pair that was broken says nothing of its host.
    return [
        *_verdicts(WARNING, [pair for pair in worked if new[pair].error is not None], worked, broken, _BROKEN_FIX),
        *_verdicts(HEALTHY, [pair for pair in works if old[pair].error is not None], list(new), repaired),
    ]


def _bandwidth(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = bandwidths(new.values()), bandwidths(old.values())

    def what(pairs: list[Pair]) -> str:
        """The medians of some pairs' bandwidths, now and in the earlier check."""
        is_, was = (median([values[pair] for pair in pairs]) for values in (now, before))
        word = "slower" if is_ < was else "faster"
        return f"{rate(is_)}, on {since} it was {rate(was)} ({abs(is_ / was - 1):.0%} {word})"

    tested = [pair for pair in now if pair in before]
    slower = [pair for pair in tested if now[pair] <= (1 - BANDWIDTH_DRIFT) * before[pair] > 0]
    faster = [pair for pair in tested if now[pair] >= (1 + BANDWIDTH_DRIFT) * before[pair] > 0]
    return [*_verdicts(WARNING, slower, tested, what, _SLOWER_FIX), *_verdicts(HEALTHY, faster, tested, what)]


def _latency(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = round_trips(new.values()), round_trips(old.values())

    def what(pairs: list[Pair]) -> str:
        is_, was = (milliseconds(median([values[pair] for pair in pairs])) for values in (now, before))
        return f"round trip {is_}, on {since} it was {was}"

    tested = [pair for pair in now if pair in before]
    longer = [pair for pair in tested if now[pair] > max(LATENCY_DRIFT * before[pair], LATENCY_FLOOR_MS)]
    return _verdicts(WARNING, longer, tested, what, _LATENCY_FIX)


def _mtu(new: Links, old: Links, since: str) -> list[Verdict]:
    now, before = path_mtus(new.values()), path_mtus(old.values())

    def what(pairs: list[Pair]) -> str:
        is_, was = min(now[pair] for pair in pairs), max(before[pair] for pair in pairs)
        return f"packets of at most {is_} bytes get through, on {since} it was {was} bytes"

    tested = [pair for pair in now if pair in before]
    return _verdicts(WARNING, [pair for pair in tested if now[pair] < before[pair]], tested, what, _MTU_FIX)
