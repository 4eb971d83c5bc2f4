"""The checks' records, build/<inventory>/checks/<UTC time>.json, and what has drifted since the last one.

One record is one `make check`: the document that `document` makes, which launch.health.report shows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from launch.files import write_whole
from launch.health import link_checks
from launch.health.link_checks import Pair
from launch.health.verdicts import HEALTHY, WARNING, Verdict
from launch.network.links import Link

SCHEMA = "muster.check/1"
#: Records kept for each inventory.
KEPT = 50
FULL = "full"

#: The checks whose verdicts are of links, or of what disturbs measuring them.
OF_LINKS = ("reach", "links", "bandwidth", "latency", "mtu", "drift", "runs")

#: A bandwidth has drifted when it changed by this part of the former one or more.
BANDWIDTH_DRIFT = 0.25
#: A round trip has drifted when it is so many times the former one, and longer than this.
LATENCY_DRIFT, LATENCY_FLOOR_MS = 3.0, 1.0


def document(
    *,
    kind: str,
    inventory: str,
    network: str,
    hosts: Sequence[str],
    links: Sequence[Link],
    verdicts: Sequence[Verdict],
    when: datetime | None = None,
    sameness: Mapping[str, Any] | None = None,
    allreduce: Mapping[str, Any] | None = None,
    forecast: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One check as a document for JSON.

    kind: FULL. network: the training network's name in the cluster map. hosts: in inventory order.
    when: with a time zone; now by default. The last three are as launch.health.report shows them; None: not done.
    """
    return {
        "schema": SCHEMA,
        "when": (when or datetime.now(UTC)).astimezone(UTC).isoformat(),
        "kind": kind,
        "inventory": inventory,
        "network": network,
        "hosts": list(hosts),
        "links": [asdict(link) for link in links],
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "sameness": sameness,
        "allreduce": allreduce,
        "forecast": forecast,
    }


def links_of(record: Mapping[str, Any]) -> list[Link]:
    """The links of a document.

    Raises:
        TypeError, KeyError: when they are not those of this schema.
    """
    return [Link(**link) for link in record["links"]]


def save(folder: Path, record: Mapping[str, Any]) -> Path:
    """Keep a check's document in `folder` under its time, and of all records the newest KEPT.

    Raises:
        OSError: when the folder cannot be written.
    """
    moment = datetime.fromisoformat(record["when"]).astimezone(UTC)
    path = folder / f"{moment:%Y%m%dT%H%M%S.%fZ}.json"
    write_whole(path, json.dumps(record, indent=1) + "\n")
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def previous(folder: Path, kind: str | None = None, network: str | None = None) -> dict[str, Any] | None:
    """The newest readable record of this kind and on this network (None: any); None when there is none.

    Of several the newest whose links were sound: a fault stays told until it is fixed, and is no standard for later.
    Call it before `save`. Records that are torn, foreign or of another version are passed over.
    """
    newest = None
    for path in sorted(folder.glob("*.json"), reverse=True):
        record = _read(path)
        if record and kind in (None, record["kind"]) and network in (None, record["network"]):
            if _sound(record):
                return record
            newest = newest or record
    return newest


def _sound(record: Mapping[str, Any]) -> bool:
    """Whether nothing was said against the links, and no run took its part of them."""
    return all(entry["level"] == HEALTHY for entry in record["verdicts"] if entry["check"] in OF_LINKS)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            return None
        links_of(record)
        datetime.fromisoformat(record["when"]).astimezone(UTC)
        _sound(record)
        return record if isinstance(record["network"], str) and isinstance(record["kind"], str) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def moment_of(when: str) -> str:
    """An ISO time as people read it, in UTC: `2026-08-01 12:00 UTC`."""
    return f"{datetime.fromisoformat(when).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


# Drift


def drift(now: Sequence[Link], before: Sequence[Link], when: str) -> list[Verdict]:
    """What changed between two checks on one network; `when`: ISO time of the earlier one.

    Only pairs that both checks tested count: hosts that came or went are no drift. What got worse is a warning, what
    got better is healthy and said too. A host whose pairs have mostly changed is named once. Empty without such pairs.
    """
    old = {(link.source, link.target): link for link in before}
    new = {(link.source, link.target): link for link in now if (link.source, link.target) in old}
    if not new:
        return []
    since = moment_of(when)
    found = [
        verdict
        for judge in (_broken, _healed, _slower, _faster, _latency, _mtu)
        for verdict in link_checks.shortened(judge(new, old, since))
    ]
    if found:
        return found
    what = f"no bandwidth of {len(new)} pairs changed by {BANDWIDTH_DRIFT:.0%} or more since {since}"
    if not _both(link_checks.bandwidths(now), link_checks.bandwidths(before)):
        what = f"{len(new)} pairs as on {since}"
    return [Verdict("drift", "cluster", HEALTHY, what)]


def _both(now: Mapping[Pair, float], before: Mapping[Pair, float]) -> list[Pair]:
    return [pair for pair in now if pair in before]


def _places(changed: Collection[Pair], tested: Collection[Pair]) -> list[tuple[str, list[Pair]]]:
    """Where to say that pairs have changed: of the cluster when all have, of hosts, of the remaining pairs."""
    if len(changed) == len(tested) > 2:
        return [("cluster", list(changed))]
    told = link_checks.blame(changed, tested)
    places = [(f"host {host}", told.explained[host]) for host in told.hosts]
    return places + [(link_checks.where_of(ways), ways) for ways in link_checks.both_ways(told.pairs)]


def _broken(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    tested = [pair for pair in new if old[pair].error is None]
    found = []
    for where, pairs in _places([pair for pair in tested if new[pair].error is not None], tested):
        speeds = [mbits for pair in pairs if (mbits := old[pair].mbits) is not None]
        figure = f" at {link_checks.rate(median(speeds))}" if speeds else ""
        what = f"worked on {since}{figure}, now broken: {new[pairs[0]].error}"
        found.append(Verdict("drift", where, WARNING, what, "ask what was changed since: firewall, cabling, addresses"))
    return found


def _healed(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    tested = [pair for pair in new if old[pair].error is not None]
    healed = [pair for pair in tested if new[pair].error is None]
    # Judged among all pairs: one that was broken alone says nothing of its host.
    return [
        Verdict("drift", where, HEALTHY, f"works again; on {since} it was broken: {old[pairs[0]].error}")
        for where, pairs in _places(healed, list(new))
    ]


def _slower(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    now, before = link_checks.bandwidths(new.values()), link_checks.bandwidths(old.values())
    tested = _both(now, before)
    slower = [pair for pair in tested if now[pair] <= (1 - BANDWIDTH_DRIFT) * before[pair] > 0]
    fix = (
        "measure again when nothing else runs; if it stays, ask what was changed since: cable, switch port, driver, "
        "other traffic (is it meant to be so: remove build/<inventory>/checks, and the next check is the standard)"
    )
    return [
        Verdict("drift", where, WARNING, _from_to(now, before, pairs, since, "slower"), fix)
        for where, pairs in _places(slower, tested)
    ]


def _faster(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    now, before = link_checks.bandwidths(new.values()), link_checks.bandwidths(old.values())
    tested = _both(now, before)
    faster = [pair for pair in tested if now[pair] >= (1 + BANDWIDTH_DRIFT) * before[pair] > 0]
    return [
        Verdict("drift", where, HEALTHY, _from_to(now, before, pairs, since, "faster"))
        for where, pairs in _places(faster, tested)
    ]


def _from_to(
    now: Mapping[Pair, float], before: Mapping[Pair, float], pairs: Sequence[Pair], since: str, word: str
) -> str:
    """The medians of some pairs' bandwidths, now and then."""
    is_, was = median([now[pair] for pair in pairs]), median([before[pair] for pair in pairs])
    return f"{link_checks.rate(is_)}, on {since} it was {link_checks.rate(was)} ({abs(is_ / was - 1):.0%} {word})"


def _latency(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    now, before = link_checks.round_trips(new.values()), link_checks.round_trips(old.values())
    tested = _both(now, before)
    longer = [pair for pair in tested if now[pair] > max(LATENCY_DRIFT * before[pair], LATENCY_FLOOR_MS)]
    found = []
    for where, pairs in _places(longer, tested):
        was, is_ = median([before[p] for p in pairs]), median([now[p] for p in pairs])
        what = f"round trip {link_checks.milliseconds(is_)}, on {since} it was {link_checks.milliseconds(was)}"
        found.append(Verdict("drift", where, WARNING, what, "look for a new detour or other traffic on the way"))
    return found


def _mtu(new: Mapping[Pair, Link], old: Mapping[Pair, Link], since: str) -> list[Verdict]:
    now, before = ({p: k.path_mtu for p, k in links.items() if k.path_mtu is not None} for links in (new, old))
    tested = [pair for pair in now if pair in before]
    smaller = [pair for pair in tested if now[pair] < before[pair]]
    found = []
    for where, pairs in _places(smaller, tested):
        was, is_ = max(before[p] for p in pairs), min(now[p] for p in pairs)
        what = f"packets of {is_} bytes get through, on {since} it was {was} bytes"
        found.append(Verdict("drift", where, WARNING, what, "ask what was changed since: MTU of NIC, switch or tunnel"))
    return found
