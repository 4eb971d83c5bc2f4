"""Which network the ranks talk over: a pure choice from facts, tested pairs and measured links. Runs no test itself.

Two steps: `working` says on which networks every host reaches every other; these are measured; `choose` takes the
fastest by its slowest pair.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.cli.refusal import Problem, Refusal
from launch.hosts.clustermap import Network
from launch.network.links import Link

#: from host -> [{"peer", "address", "ok", "milliseconds", "error"}]
Reach = Mapping[str, Sequence[Mapping[str, Any]]]

#: Networks this near to the fastest are as fast as it: the rest is the measurement's.
ALIKE = 0.8
#: Above this many Mbit/s one stream of iperf3 may be limited by a core, not by the link: figures within a factor of two
#: are alike, and the NICs' own labels tell the networks apart.
ONE_STREAM = 5_000
ALIKE_ABOVE = 0.5


@dataclass(frozen=True)
class Endpoint:
    """One address of one host that may carry training."""

    interface: str
    address: str
    network: str
    speed_mbits: int | None
    mtu: int


@dataclass(frozen=True)
class Working:
    """A network on which every ordered pair of hosts connects, with every host's own endpoint."""

    name: str  # CIDR; "routed" where the hosts share no subnet; "loopback" for a single host without any
    endpoints: dict[str, Endpoint]

    @property
    def label(self) -> str:
        """The name with the NICs that stand for it."""
        return f"{self.name} ({', '.join(dict.fromkeys(end.interface for end in self.endpoints.values()))})"


@dataclass(frozen=True)
class Found:
    """The networks that work, best guess first, and why the others do not."""

    working: list[Working]
    failures: dict[str, str]


@dataclass(frozen=True)
class Choice:
    """The chosen network and every host's own endpoint on it."""

    network: Network
    endpoints: dict[str, Endpoint]
    links: list[Link]  # measured on it; empty for a single host


def candidates(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Endpoint]:
    """The addresses of a host that are not decoys, narrowed by the user's train_interface and train_network."""
    found = []
    for nic in facts["nics"]:
        if nic["refused"] or settings.get("train_interface", nic["name"]) != nic["name"]:
            continue
        for entry in nic["addresses"]:
            address = ipaddress.ip_address(entry["address"])
            network = ipaddress.ip_interface(f"{address}/{entry['prefix']}").network
            if address.is_link_local or address.is_loopback:
                continue
            if "train_network" in settings and address not in ipaddress.ip_network(settings["train_network"]):
                continue
            found.append(Endpoint(nic["name"], str(address), str(network), nic["speed_mbits"], nic.get("mtu", 1500)))
    return found


def working(facts: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]], reach: Reach) -> Found:
    """The networks on which every host reaches every other.

    A host with two NICs in one subnet stands for two: one with its first address there, one with its second.
    Hosts that share no subnet at all may still reach each other by routing: then any tested address will do.

    Raises:
        Refusal: a host has no address that may carry training, or no network is left; naming pairs network by network.
    """
    hosts = list(facts)
    ends = {host: candidates(facts[host], settings[host]) for host in hosts}
    if len(hosts) == 1:
        own = ends[hosts[0]]
        alone = own[0] if own else Endpoint("lo", "127.0.0.1", "127.0.0.0/8", None, 65536)
        return Found([Working(alone.network if own else "loopback", {hosts[0]: alone})], {})
    bare = [host for host in hosts if not ends[host]]
    if bare:
        raise Refusal(_no_candidate(host, facts[host], settings[host]) for host in bare)
    answered = {(host, result["peer"], result["address"]): result for host in hosts for result in reach.get(host, [])}
    found, failures = [], dict[str, str]()
    shared = {end.network: None for own in ends.values() for end in own}
    everywhere = [n for n in shared if all(any(e.network == n for e in own) for own in ends.values())]
    for network in shared:
        on_it = {host: [end for end in ends[host] if end.network == network] for host in hosts}
        if network not in everywhere:
            missing = [host for host in hosts if not on_it[host]]
            failures[network] = f"{_listed(missing)} {'has' if len(missing) == 1 else 'have'} no address on it"
            continue
        kept, reason = _variants(network, on_it, answered)
        found += kept
        if not kept:
            failures[network] = reason
    if not everywhere:
        picked, reason = _pick(ends, answered)
        if not reason:
            found.append(Working("routed", picked))
    if not found:
        raise Refusal(Problem(f"network {network}", reason, _FIX) for network, reason in failures.items())
    return Found(found, failures)


def _variants(
    network: str,
    on_it: Mapping[str, Sequence[Endpoint]],
    answered: Mapping[tuple[str, str, str], Mapping[str, Any]],
) -> tuple[list[Working], str]:
    """The network with each host's first address on it, with its second, ...; those that work, else why not."""
    kept: dict[tuple[str, ...], Working] = {}
    reasons = []
    for number in range(max(len(own) for own in on_it.values())):
        turned = {host: [*own[number % len(own) :], *own[: number % len(own)]] for host, own in on_it.items()}
        picked, reason = _pick(turned, answered)
        if reason:
            reasons.append(reason)
        else:
            kept.setdefault(tuple(end.interface for end in picked.values()), Working(network, picked))
    return list(kept.values()), "; ".join(reasons[:1])


def choose(
    facts: Mapping[str, Mapping[str, Any]],
    ssh_addresses: Mapping[str, str],
    found: Found,
    measured: Mapping[str, Sequence[Link]],
) -> Choice:
    """The fastest network on which all pairs work, by its slowest pair that was measured.

    Of networks that are alike (ALIKE), one that does not carry SSH is taken; then IPv4; then the fastest. `measured`:
    links by `Working.label`; may be empty for a single host.

    Raises:
        Refusal: on no network do all pairs pass the measurement; naming pairs network by network.
    """
    failures = dict(found.failures)
    passed = []
    for network in found.working:
        broken = [link for link in measured.get(network.label, []) if link.error]
        if broken:
            failures[network.label] = _broken(broken)
        else:
            passed.append(network)
    if not passed:
        raise Refusal(Problem(f"network {network}", reason, _FIX) for network, reason in failures.items())
    speeds = {network.label: slowest(measured.get(network.label, [])) for network in passed}
    fastest = max(speeds.values())
    tied = [network for network in passed if alike(speeds[network.label], fastest)]
    if fastest >= ONE_STREAM:
        labelled = max(_label_speed(network) for network in tied)
        tied = [network for network in tied if _label_speed(network) == labelled]
    best = min(tied, key=lambda network: _preference(network, ssh_addresses, speeds[network.label]))
    refused = [{"network": network, "reason": reason} for network, reason in failures.items()]
    refused += [
        {"network": network.label, "reason": _why_later(network, best, speeds, measured, ssh_addresses)}
        for network in passed
        if network is not best
    ]
    links = list(measured.get(best.label, []))
    chosen = Network(best.name, _why(best, links, ssh_addresses), refused + _refused_nics(facts))
    return Choice(chosen, best.endpoints, links)


def slowest(links: Sequence[Link]) -> float:
    """Mbit/s of the slowest pair that was measured; 0 where none was."""
    return min((link.mbits for link in links if link.mbits is not None), default=0.0)


def alike(speed: float, fastest: float) -> bool:
    """Whether a network is as fast as the fastest one, as far as a measurement can tell."""
    return speed >= fastest * (ALIKE_ABOVE if min(speed, fastest) >= ONE_STREAM else ALIKE)


def contested(measured: Mapping[str, Sequence[Link]]) -> bool:
    """Whether networks differ at speeds at which a processor, and not the link, may be what differs."""
    speeds = [slowest(links) for links in measured.values() if not any(link.error for link in links)]
    fast = [speed for speed in speeds if speed >= ONE_STREAM * ALIKE_ABOVE]
    return len(fast) > 1 and not alike(min(fast), max(fast))


def rate(mbits: float) -> str:
    """A bandwidth in words: 94 Mbit/s, 9.41 Gbit/s."""
    return f"{mbits:.0f} Mbit/s" if mbits < 1000 else f"{mbits / 1000:.3g} Gbit/s"


_FIX = (
    "open TCP between the hosts on one network (the README lists the ports), "
    "or name the right one with train_network or train_interface in the inventory"
)


def _pick(
    ends: Mapping[str, Sequence[Endpoint]], answered: Mapping[tuple[str, str, str], Mapping[str, Any]]
) -> tuple[dict[str, Endpoint], str]:
    """For each host its first endpoint that every other host reached, or the reason why there is none."""
    picked: dict[str, Endpoint] = {}
    reasons: list[str] = []
    for host, own in ends.items():
        failed: list[str] = []
        for end in own:
            untested = {"ok": False, "error": "not tested"}
            results = {o: answered.get((o, host, end.address), untested) for o in ends if o != host}
            bad = [
                f"{o} does not reach {host} at {end.address} ({r['error']})" for o, r in results.items() if not r["ok"]
            ]
            if not bad:
                picked[host] = end
                break
            failed += bad
        if host not in picked:
            reasons += failed
    more = f" (and {len(reasons) - 3} more pairs)" if len(reasons) > 3 else ""
    return picked, "; ".join(reasons[:3]) + more


def _broken(links: Sequence[Link]) -> str:
    """The first reasons, each once."""
    reasons = list(dict.fromkeys(str(link.error) for link in links))
    more = f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _label_speed(network: Working) -> int:
    """Mbit/s that the slowest NIC claims; 0 where one claims nothing."""
    return min(end.speed_mbits or 0 for end in network.endpoints.values())


def _preference(network: Working, ssh_addresses: Mapping[str, str], speed: float) -> tuple[bool, bool, float, str]:
    first = next(iter(network.endpoints.values()))
    return _carries_ssh(network, ssh_addresses), ":" in first.address, -speed, network.label


def _carries_ssh(network: Working, ssh_addresses: Mapping[str, str]) -> bool:
    return any(end.address == ssh_addresses.get(host) for host, end in network.endpoints.items())


def _slowest_words(links: Sequence[Link]) -> str:
    known = {f"{link.source} -> {link.target}": link.mbits for link in links if link.mbits is not None}
    if not known:
        return "works, bandwidth not measured"
    pair = min(known, key=known.__getitem__)
    more = f", {len(links) - len(known)} pairs not measured" if len(known) < len(links) else ""
    return f"{rate(known[pair])} measured on the slowest pair ({pair}){more}"


def _why(best: Working, links: Sequence[Link], ssh_addresses: Mapping[str, str]) -> str:
    if len(best.endpoints) == 1:
        return "one host only: nothing to reach"
    words = [f"all {len(best.endpoints) * (len(best.endpoints) - 1)} ordered pairs of hosts work"]
    if links:
        words.append(_slowest_words(links))
    words.append("it also carries SSH" if _carries_ssh(best, ssh_addresses) else "it does not carry SSH")
    return ", ".join(words)


def _why_later(
    other: Working,
    best: Working,
    speeds: Mapping[str, float],
    measured: Mapping[str, Sequence[Link]],
    ssh_addresses: Mapping[str, str],
) -> str:
    links = measured.get(other.label, [])
    figure = _slowest_words(links) if links else "works"
    fastest = max(speeds.values())
    if not alike(speeds[other.label], fastest):
        return figure
    if _label_speed(other) < _label_speed(best) and fastest >= ONE_STREAM:
        return f"{figure}; its slowest NIC is slower by its label than that of {best.label}"
    if _carries_ssh(other, ssh_addresses) and not _carries_ssh(best, ssh_addresses):
        return f"{figure}, but it carries SSH"
    return f"{figure}; {best.label} is as fast and comes first"


def _refused_nics(facts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Decoys and dead NICs, grouped by reason: their names and the hosts on which they stand."""
    names: dict[str, dict[str, None]] = {}
    hosts: dict[str, dict[str, None]] = {}
    for host, known in facts.items():
        for nic in known["nics"]:
            if nic["refused"] and nic["kind"] != "loopback":
                names.setdefault(nic["refused"], {}).setdefault(nic["name"])
                hosts.setdefault(nic["refused"], {}).setdefault(host)
    return [
        {"network": f"{_listed(list(nics))} ({_listed(list(hosts[reason]))})", "reason": reason}
        for reason, nics in names.items()
    ]


def _no_candidate(host: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Problem:
    wanted = " ".join(f"{k}={settings[k]}" for k in ("train_network", "train_interface") if k in settings)
    usable = [nic for nic in facts["nics"] if not nic["refused"]]
    if wanted and usable:
        has = ", ".join(f"{nic['name']} {a['address']}/{a['prefix']}" for nic in usable for a in nic["addresses"])
        return Problem(f"host {host}", f"has no usable address that fits {wanted}", f"correct it; the host has {has}")
    seen = "; ".join(f"{nic['name']}: {nic['refused']}" for nic in facts["nics"])
    return Problem(f"host {host}", f"no network interface can carry training ({seen})", _FIX)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
