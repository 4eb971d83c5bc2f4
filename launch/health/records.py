"""The checks' records, build/<inventory>/checks/<UTC time>.json. Not for what changed between two of them: see drift.

One record is one `make check`: the document that `document` makes and that launch.health.report shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.files import read_json, write_json
from launch.health.verdicts import HEALTHY, Verdict
from launch.network.links import Link

SCHEMA = "muster.check/2"
#: Records kept for each inventory.
KEPT_RECORDS = 50
#: The checks whose verdicts are of links, or of what disturbs measuring them.
OF_LINKS = ("nic", "reach", "links", "bandwidth", "latency", "mtu", "drift", "runs")


def document(
    *,
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

    network: the training network's name in the cluster map. hosts: in inventory order. when: with a time zone; None:
    now. The last three are None where they were left out, else:

    sameness: {"hosts": [name], "rows": [{"property", "values": [text by host], "odd": [host], "level": of the
        difference, "majority": text}]}
    allreduce: {"rows": [{"bytes", "seconds", "bus_mbits"}], "note": text}
    forecast: {"rows": [{"nodes", "option", "step_seconds", "images_per_second", "steady_images_per_second",
        "speedup", "efficiency"}],
        "recommendation": text, "note": text}
    """
    return {
        "schema": SCHEMA,
        "when": (when or datetime.now(UTC)).astimezone(UTC).isoformat(),
        "inventory": inventory,
        "network": network,
        "hosts": list(hosts),
        "links": [vars(link) | {"problems": dict(link.problems)} for link in links],  # asdict takes ten times as long
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "sameness": sameness,
        "allreduce": allreduce,
        "forecast": forecast,
    }


def links_of(record: Mapping[str, Any]) -> list[Link]:
    """The links of a document. Raises TypeError or KeyError when they are not those of this schema."""
    return [Link(**link) for link in record["links"]]


def save(folder: Path, record: Mapping[str, Any]) -> Path:
    """Keep a check's document in `folder` under its time; the newest KEPT_RECORDS stay. Raises OSError."""
    moment = datetime.fromisoformat(record["when"]).astimezone(UTC)
    path = folder / f"{moment:%Y%m%dT%H%M%S.%fZ}.json"
    write_json(path, record)
    for old in sorted(folder.glob("*.json"))[:-KEPT_RECORDS]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def previous(folder: Path, network: str | None = None) -> dict[str, Any] | None:
    """The newest record on this network (None: on any) whose links were in order; None when there is none.

    Where links were never in order, the newest record: a fault is reported until it is fixed, and later checks are not
    compared with it. Records that are torn, foreign or of another version are passed over. Call it before `save`.
    """
    newest = None
    for path in sorted(folder.glob("*.json"), reverse=True):
        record = read_json(path)
        if _is_whole(record) and network in (None, record["network"]):
            if _links_in_order(record):
                return record
            newest = newest or record
    return newest


def last_before(folder: Path, when: str) -> dict[str, Any] | None:
    """The newest record that is not later than an ISO time with a time zone; None when there is none."""
    moment = datetime.fromisoformat(when)
    for path in sorted(folder.glob("*.json"), reverse=True):
        record = read_json(path)
        if _is_whole(record) and datetime.fromisoformat(record["when"]) <= moment:
            return record
    return None


def _links_in_order(record: Mapping[str, Any]) -> bool:
    """Whether no verdict is against the links, and no run used them during the check."""
    return all(entry["level"] == HEALTHY for entry in record["verdicts"] if entry["check"] in OF_LINKS)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a file holds a record of this version."""
    try:
        links_of(record)
        moment_of(record["when"])
        _links_in_order(record)
        return record["schema"] == SCHEMA and isinstance(record["network"], str)
    except (ValueError, TypeError, KeyError):
        return False


def moment_of(when: str) -> str:
    """An ISO time as people read it, in UTC: `2026-08-01 12:00 UTC`."""
    return f"{datetime.fromisoformat(when).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
