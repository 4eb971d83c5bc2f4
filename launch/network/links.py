"""What was measured between hosts, as the map and the checks keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Link:
    """One ordered pair of hosts on one network."""

    source: str
    target: str
    mbits: float | None  # TCP bandwidth from source to target in 10^6 bit/s; None: not measured (quick form) or broken
    rtt_ms: float | None  # round trip of one byte over an open connection, the least of several
    path_mtu: int | None  # bytes of the largest IP packet that got through; None: not known (UDP is blocked)
    error: str | None  # why the pair cannot be used; None: it works
    problems: Mapping[str, str] = field(default_factory=dict)  # by host why it cannot measure: "iperf3 is missing"


def of_deploy(measured: Mapping[str, Any], network: str) -> list[Link]:
    """What the deploy measured on the training network. measured, network: as in the cluster map."""
    return [Link(**entry) for entry in _entries(measured, network)]


def _entries(measured: Mapping[str, Any], network: str) -> Iterator[dict[str, Any]]:
    known: Mapping[str, Any] = measured.get("links", {})
    return (entry for label, each in known.items() if label.startswith(f"{network} (") for entry in each)


def with_shortest_trips(links: Sequence[Link], measured: Mapping[str, Any], network: str) -> list[Link]:
    """The links, each with the shorter round trip of now and of the deploy. measured, network: as in `of_deploy`."""
    known = {(one["source"], one["target"]): one["rtt_ms"] for one in _entries(measured, network) if one["rtt_ms"]}

    def shortest(link: Link) -> float | None:
        return None if link.rtt_ms is None else min(link.rtt_ms, known.get((link.source, link.target), link.rtt_ms))

    return [replace(link, rtt_ms=shortest(link)) for link in links]
