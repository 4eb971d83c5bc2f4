"""Who sends to whom while an image is distributed. Pure. On the hosts: playbooks/module_utils/muster_relay.py.

The hosts are a chain: the origin sends to the first one, and each passes on to the next what it has. So every byte
crosses each line once each way, however many hosts there are, and as pieces are passed on as they come, the last host
has all hardly later than the first. A host leaves a source that fails, stands still or is slow for one further ahead in
the chain, at last for the origin: the control machine, or the host that has built the image, which is then the first
of the chain and has all.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.network.links import Link

CONTROL = "control machine"  # as a source
STANDSTILL_SECONDS = 20.0  # without a byte, after which a host or its source has a problem
BEHIND_BYTES = 128 << 20  # that a source may be behind its own source: more than what lies in buffers between them
BEHIND_SHARE = 0.5  # of the pace of its own source, with which a source that is so far behind is too slow for others
FAILED_PEERS = 2  # after so many a host takes from the control machine
SLOW_SHARE = 0.5  # of the median bandwidth: a host with less comes last in the chain


@dataclass(frozen=True)
class State:
    """How far a host is."""

    lacks: int  # bytes
    listens: bool | None = None  # whether others can take from it; None: it has not said so yet
    source: str | None = None  # from whom it takes; None: from nobody yet, or not any more
    failed: frozenset[str] = field(default_factory=frozenset)  # sources with which it has failed
    quiet_seconds: float = 0.0  # since anything came, or since its source was named
    pace: float | None = None  # bytes/s that have come to it so far; None: it has lacked nothing
    gone: bool = False


def chain(hosts: Sequence[str], links: Sequence[Link]) -> list[str]:
    """The order in which hosts pass on: as given, but those with slow links at the end. links: what was measured."""
    speeds = {}
    for host in hosts:
        own = [link.mbits for link in links if host in (link.source, link.target) and link.mbits is not None]
        if own:
            speeds[host] = statistics.median(own)
    usual = statistics.median(speeds.values()) if speeds else 0.0
    slow = {host: speed for host, speed in speeds.items() if speed < SLOW_SHARE * usual}
    return sorted(hosts, key=lambda host: -slow.get(host, float("inf")))


def next_sources(order: Sequence[str], states: Mapping[str, State], origin: str = CONTROL) -> dict[str, str]:
    """The sources that hosts shall take from now on, where these are not what they have; states: of all in `order`."""
    wanted = _wanted(order, states, origin)
    cut_off = stranded(order, states, origin)
    return {host: source for host, source in wanted.items() if source != states[host].source and host not in cut_off}


def stranded(order: Sequence[str], states: Mapping[str, State], origin: str = CONTROL) -> list[str]:
    """The hosts for which nothing is left but an origin that cannot be used, or with which they have failed."""
    if origin not in states:
        return []
    lost = not _is_usable(states[origin], states)
    wanted = _wanted(order, states, origin)
    return [host for host, source in wanted.items() if source == origin and (lost or origin in states[host].failed)]


def _wanted(order: Sequence[str], states: Mapping[str, State], origin: str) -> dict[str, str]:
    """The hosts that need a source, and which one they would get."""
    found = {}
    for place, host in enumerate(order):
        state = states[host]
        if state.gone or not state.lacks or state.source == CONTROL:
            continue
        if state.source is None or _to_leave(state, states):
            source = _best(place, order, states, origin)
            if source is not None:
                found[host] = source
    return found


def failed_with(order: Sequence[str], states: Mapping[str, State]) -> dict[str, str]:
    """The hosts to which nothing comes from another one that has what they lack, with that one."""
    sources = {host: states[host].source or CONTROL for host in order if is_to_blame(states[host], states)}
    return {host: source for host, source in sources.items() if source in states}


def is_to_blame(state: State, states: Mapping[str, State]) -> bool:
    """Whether a host stands still although its source has what it lacks."""
    if state.gone or not state.lacks or state.source is None or state.quiet_seconds <= STANDSTILL_SECONDS:
        return False
    source = states.get(state.source or CONTROL)
    return source is None or source.lacks < state.lacks


def _to_leave(state: State, states: Mapping[str, State]) -> bool:
    return state.source in state.failed or not _is_usable(states[state.source or ""], states)


def _best(place: int, order: Sequence[str], states: Mapping[str, State], origin: str) -> str | None:
    """Whom the host at this place takes from: the nearest one before it that can be used, first of those that have had
    no trouble themselves; else one behind it that has all, else the origin. None: that shows when the nearest one has
    said whether it listens."""
    host = states[order[place]]
    if len(host.failed) >= FAILED_PEERS:
        return origin
    ahead = sorted(reversed(order[:place]), key=lambda name: len(states[name].failed))
    whole = (name for name in order[place + 1 :] if states[name].lacks == 0)
    for name in (*ahead, *whole):
        if name not in host.failed and _is_usable(states[name], states):
            return name if states[name].listens else None
    return origin


def _is_usable(state: State, states: Mapping[str, State]) -> bool:
    return not (state.gone or state.listens is False or is_to_blame(state, states) or _is_slow(state, states))


def _is_slow(state: State, states: Mapping[str, State]) -> bool:
    """Whether a host would hold up those that take from it: it falls behind its own source."""
    source = states.get(state.source or CONTROL)
    if source is None or source.pace is None or state.pace is None or state.lacks - source.lacks < BEHIND_BYTES:
        return False
    return state.pace < BEHIND_SHARE * source.pace
