"""What was measured between hosts, as the map and the checks keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
