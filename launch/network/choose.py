"""Which network the ranks talk over: a pure choice from facts, tested pairs and measured links. Runs no test itself.

Three steps: `working` says on which networks every host reaches every other. These are measured, and those that
`contested` names are measured again. Then `choose` takes the network whose slowest pair of hosts is the fastest.

What disturbs a measurement makes it slower, never faster. So a network is at least as fast as its best measurement. The
second best one tells how far that can be trusted. A measurement in which a link fails counts as 0 Mbit/s.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.cli.refusal import Problem, Refusal
from launch.cli.units import rate, some
from launch.hosts.clustermap import Network
from launch.network.links import Link

ByHost = Mapping[str, Mapping[str, Any]]  # facts or settings of each host
#: from host -> [{"peer", "address", "ok", "milliseconds", "error"}]
Reach = Mapping[str, Sequence[Mapping[str, Any]]]
Answered = Mapping[tuple[str, str, str], Mapping[str, Any]]  # the entries of Reach by host, peer and address

#: A network with at least this part of the fastest one's speed counts as equally fast: measurements differ as much.
SAME_SPEED_PART = 0.8
#: One measurement is enough to call a network slower if it has less than this part of another one's speed.
CLEARLY_SLOWER_PART = 0.15
#: No network is measured more often. If it is still not clear then which one is faster, they count as equally fast.
MOST_MEASUREMENTS = 4
#: Above this speed a processor core, not the link, may limit one stream of iperf3. Then networks count as equally fast
#: down to half the speed of the fastest one, and the speeds that the NICs claim decide between them.
CORE_LIMITED_MBITS = 5_000
CORE_LIMITED_SAME_SPEED_PART = 0.5


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
    named_hosts: tuple[str, ...] = ()  # the label names their NICs; without that, another network has the same label

    @property
    def label(self) -> str:
        """The name and the hosts' NICs, unlike any other network's: `10.0.0.0/24 (eno2, ens3; h3: ens3)`."""
        nics = some(list(dict.fromkeys(end.interface for end in self.endpoints.values())))
        named = "".join(f"; {host}: {self.endpoints[host].interface}" for host in self.named_hosts)
        return f"{self.name} ({nics}{named})"


@dataclass(frozen=True)
class WorkingNetworks:
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
    ends = []
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
            ends.append(Endpoint(nic["name"], str(address), str(network), nic["speed_mbits"], nic.get("mtu", 1500)))
    return ends


def working(facts: ByHost, settings: ByHost, reach: Reach) -> WorkingNetworks:
    """The networks on which every host reaches every other.

    A subnet in which a host has two NICs counts as two networks: one with the host's first address there, one with its
    second. Hosts that share no subnet at all may still reach each other by routing: then any tested address will do.
    Raises Refusal when a host has no address that may carry training, or when no network works, naming pairs for each.
    """
    hosts = list(facts)
    ends = {host: candidates(facts[host], settings[host]) for host in hosts}
    if len(hosts) == 1:
        own = ends[hosts[0]]
        alone = own[0] if own else Endpoint("lo", "127.0.0.1", "127.0.0.0/8", None, 65536)
        return WorkingNetworks([Working(alone.network if own else "loopback", {hosts[0]: alone})], {})
    bare = [host for host in hosts if not ends[host]]
    if bare:
        raise Refusal(_no_candidate(host, facts[host], settings[host]) for host in bare)
    answered = {(host, result["peer"], result["address"]): result for host in hosts for result in reach.get(host, [])}
    networks, failures = [], dict[str, str]()
    shared = False
    for network in dict.fromkeys(end.network for own in ends.values() for end in own):
        on_it = {host: [end for end in ends[host] if end.network == network] for host in hosts}
        if missing := [host for host in hosts if not on_it[host]]:
            failures[network] = f"{some(missing)} {'has' if len(missing) == 1 else 'have'} no address on it"
            continue
        shared = True
        variants, reason = _variants(network, on_it, answered)
        networks += variants
        if not variants:
            failures[network] = reason
    if not shared:
        picked, reason = _pick(ends, answered)
        if not reason:
            networks.append(Working("routed", picked))
    if not networks:
        raise Refusal(Problem(f"network {network}", reason, _FIX) for network, reason in failures.items())
    return WorkingNetworks(networks, failures)


def _variants(network: str, on_it: Mapping[str, Sequence[Endpoint]], answered: Answered) -> tuple[list[Working], str]:
    """The network with each host's first address on it, with its second, ...; those that work, else why not."""
    variants: dict[tuple[str, ...], Working] = {}
    reasons = []
    for number in range(max(len(own) for own in on_it.values())):
        turned = {host: [*own[number % len(own) :], *own[: number % len(own)]] for host, own in on_it.items()}
        picked, reason = _pick(turned, answered)
        if reason:
            reasons.append(reason)
        else:
            variants.setdefault(tuple(end.interface for end in picked.values()), Working(network, picked))
    return [_told_apart(one, list(variants.values())) for one in variants.values()], "; ".join(reasons[:1])


def _told_apart(network: Working, variants: Sequence[Working]) -> Working:
    """The network with a label that none of its variants has: it names the first host in which it differs from each."""
    others = [other.endpoints for other in variants if other is not network and other.label == network.label]
    own = network.endpoints
    differing = (next(host for host in own if own[host].interface != other[host].interface) for other in others)
    return replace(network, named_hosts=tuple(dict.fromkeys(differing)))


@dataclass(frozen=True)
class Measurements:
    """All that was measured, by `Working.label`; empty for a single host."""

    links: dict[str, list[Link]] = field(default_factory=dict)  # the best of each pair
    speeds: dict[str, list[float]] = field(default_factory=dict)  # Mbit/s of the slowest pair, one measurement each
    failures: dict[str, list[str]] = field(default_factory=dict)  # why links failed, for each measurement that failed
    busy: list[str] = field(default_factory=list)  # hosts whose processors were busy during a measurement

    def with_round(self, links: Mapping[str, Sequence[Link]], busy: Sequence[str] = ()) -> Measurements:
        """These and one more measurement of some networks or all."""
        best, speeds, failures = dict(self.links), dict(self.speeds), dict(self.failures)
        for label, measured in links.items():
            best[label] = [
                max(pair, key=lambda link: (link.error is None, link.mbits or 0.0))
                for pair in zip(best.get(label, measured), measured, strict=True)
            ]
            why = _broken(measured)
            speeds[label] = [*speeds.get(label, []), 0.0 if why else slowest(measured)]
            if why:
                failures[label] = [*failures.get(label, []), why]
        return Measurements(best, speeds, failures, list(dict.fromkeys([*self.busy, *busy])))


def choose(
    facts: ByHost,
    ssh_addresses: Mapping[str, str],
    networks: WorkingNetworks,
    measurements: Measurements,
    kept: str = "",
) -> Choice:
    """The network whose slowest pair of hosts is the fastest, of those that no measurement saw fail.

    Of equally fast networks the one with the label `kept` is taken, an earlier choice; else one that does not carry
    SSH; then IPv4; then the fastest. A network that failed in some measurements is taken only if every network did.
    Raises Refusal, naming pairs, when every network has a pair that failed in all measurements.
    """
    usable, measured = _usable([network.label for network in networks.working], measurements), measurements.links
    passed = [network for network in networks.working if network.label in usable]
    unusable = [network.label for network in networks.working if network.label not in usable]
    failures = networks.failures | {label: _failed(label, measurements) for label in unusable}
    if not passed:
        raise Refusal(Problem(f"network {network}", reason, _FIX) for network, reason in failures.items())
    speeds = {label: slowest(measured.get(label, [])) for label in usable}
    leader = max(speeds, key=speeds.__getitem__)
    tied = [network for network in passed if _alike(network.label, leader, measurements)]
    if speeds[leader] >= CORE_LIMITED_MBITS:
        labelled = max(_label_speed(network) for network in tied)
        tied = [network for network in tied if _label_speed(network) == labelled]
    carriers = ssh_interfaces(facts, ssh_addresses)
    best = min(tied, key=lambda network: _preference(network, carriers, speeds[network.label], kept))
    refused = [{"network": network, "reason": reason} for network, reason in failures.items()]
    refused += [
        {"network": network.label, "reason": _why_not(network, best, leader, measurements, carriers, kept)}
        for network in passed
        if network is not best
    ]
    links = list(measured.get(best.label, []))
    failed = _failed(best.label, measurements, "; check its cables and switch ports, as it ")
    network = Network(best.name, _why(best, links, carriers) + failed, refused + _refused_nics(facts))
    return Choice(network, best.endpoints, links)


def _usable(labels: Sequence[str], measurements: Measurements) -> list[str]:
    """The networks that failed in no measurement; if all failed, those of which each pair worked at least once."""
    never_failed = [label for label in labels if label not in measurements.failures]
    return never_failed or [label for label in labels if not any(link.error for link in measurements.links[label])]


def _failed(label: str, measurements: Measurements, before: str = "") -> str:
    """`failed in 1 of 3 measurements: why` after `before`; the reason alone of a single one; "" where none failed."""
    reasons, count = measurements.failures.get(label, []), len(measurements.speeds.get(label, []))
    words = f"{before}failed in {len(reasons)} of {count} measurements: " if count > 1 else ""
    return words + "; ".join(dict.fromkeys(reasons)) if reasons else ""


def slowest(links: Sequence[Link]) -> float:
    """Mbit/s of the slowest pair that was measured; 0 where none was."""
    return min((link.mbits for link in links if link.mbits is not None), default=0.0)


def contested(measurements: Measurements) -> list[str]:
    """The networks to measure once more: it is not clear yet which one is faster, or none has worked, measured once."""
    usable = _usable(list(measurements.links), measurements)
    if not usable:  # perhaps a host was busy: no deploy is refused for one measurement
        return [label for label, speeds in measurements.speeds.items() if len(speeds) == 1]
    leader = max(usable, key=lambda label: max(measurements.speeds[label]))
    unclear = [label for label in usable if label != leader and not _settled(label, leader, measurements)]
    again = [label for label in [leader, *unclear] if len(measurements.speeds[label]) < MOST_MEASUREMENTS]
    return [label for label in usable if label in again] if unclear else []


def _settled(label: str, leader: str, measurements: Measurements) -> bool:
    """Whether it is clear that a network is slower than the fastest one, or as fast as it."""
    own, best = measurements.speeds[label], measurements.speeds[leader]
    if min(len(own), len(best)) == 1:
        slower = max(own) < CLEARLY_SLOWER_PART * max(best) and not measurements.busy
        return slower or _near(max(own), max(best))
    return _near(max(own), max(best)) or not _overlap(own, best) or len(own) >= MOST_MEASUREMENTS


def _near(speed: float, fastest: float) -> bool:
    """Whether two figures in Mbit/s are the same, as far as one measurement can tell."""
    core_limited = min(speed, fastest) >= CORE_LIMITED_MBITS
    return speed >= fastest * (CORE_LIMITED_SAME_SPEED_PART if core_limited else SAME_SPEED_PART)


def _overlap(own: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a network's best measurement reaches the second best of the fastest one."""
    return max(own) >= sorted(best)[-2:][0]


def _alike(label: str, leader: str, measurements: Measurements) -> bool:
    """Whether a network is as fast as the fastest one: near to it, or their repeated measurements overlap."""
    own, best = (measurements.speeds.get(one, [0.0]) for one in (label, leader))
    return _near(max(own), max(best)) or (min(len(own), len(best)) > 1 and _overlap(own, best))


_FIX = (
    "open TCP between the hosts on one network (the README lists the ports), "
    "or name the right one with train_network or train_interface in the inventory"
)


def _pick(ends: Mapping[str, Sequence[Endpoint]], answered: Answered) -> tuple[dict[str, Endpoint], str]:
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
    """The first reasons why links failed, each once; "" where all work."""
    reasons = list(dict.fromkeys(link.error for link in links if link.error))
    more = f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _label_speed(network: Working) -> int:
    """Mbit/s that the slowest NIC claims; 0 where one claims nothing."""
    return min(end.speed_mbits or 0 for end in network.endpoints.values())


def _preference(
    network: Working, carriers: Mapping[str, str], speed: float, kept: str
) -> tuple[bool, bool, bool, float, str]:
    first = next(iter(network.endpoints.values()))
    other = network.label != kept
    return other, _carries_ssh(network, carriers), ":" in first.address, -speed, network.label


def ssh_interfaces(facts: ByHost, ssh_addresses: Mapping[str, str]) -> dict[str, str]:
    """By host, the NIC that holds the address at which SSH reaches it; without hosts behind a translated address."""
    return {
        host: nic["name"]
        for host, known in facts.items()
        for nic in known["nics"]
        if any(entry["address"] == ssh_addresses.get(host) for entry in nic["addresses"])
    }


def _carries_ssh(network: Working, carriers: Mapping[str, str]) -> bool:
    """Whether the NIC of any host on this network is the one that SSH comes in by, by whatever address."""
    return any(end.interface == carriers.get(host) for host, end in network.endpoints.items())


def slowest_words(links: Sequence[Link]) -> str:
    known = {f"{link.source} -> {link.target}": link.mbits for link in links if link.mbits is not None}
    if not known:
        return "works, bandwidth not measured"
    pair = min(known, key=known.__getitem__)
    more = f", {len(links) - len(known)} pairs not measured" if len(known) < len(links) else ""
    return f"{rate(known[pair])} measured on the slowest pair ({pair}){more}"


def _why(best: Working, links: Sequence[Link], carriers: Mapping[str, str]) -> str:
    if len(best.endpoints) == 1:
        return "one host only: nothing to reach"
    words = [f"all {len(best.endpoints) * (len(best.endpoints) - 1)} ordered pairs of hosts work"]
    if links:
        words.append(slowest_words(links))
    words.append("it also carries SSH" if _carries_ssh(best, carriers) else "it does not carry SSH")
    return ", ".join(words)


def _why_not(
    other: Working, best: Working, leader: str, measurements: Measurements, carriers: Mapping[str, str], kept: str
) -> str:
    links = measurements.links.get(other.label, [])
    figure = (slowest_words(links) if links else "works") + _failed(other.label, measurements, ", ")
    if not _alike(other.label, leader, measurements):
        return figure
    speeds = measurements.speeds
    if _label_speed(other) < _label_speed(best) and max(speeds.get(leader, [0.0])) >= CORE_LIMITED_MBITS:
        return f"{figure}; its slowest NIC is slower by its label than that of {best.label}"
    if not _near(*sorted(max(speeds.get(network.label, [0.0])) for network in (other, best))):
        figure += f"; {len(speeds[other.label])} measurements did not show which of the two is faster"
    if best.label == kept:
        return f"{figure}; {best.label} was chosen before and is as fast (`make deploy MEASURE=1` chooses again)"
    if _carries_ssh(other, carriers) and not _carries_ssh(best, carriers):
        return f"{figure}; it is as fast, but it carries SSH"
    return f"{figure}; {best.label} is as fast and comes first"


def _refused_nics(facts: ByHost) -> list[dict[str, str]]:
    """Decoys and dead NICs, grouped by reason: their names and the hosts on which they stand."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for host, known in facts.items():
        for nic in known["nics"]:
            if nic["refused"] and nic["kind"] != "loopback":
                names, hosts = found.setdefault(nic["refused"], ({}, {}))
                names[nic["name"]] = hosts[host] = None
    return [
        {"network": f"{some(list(names))} ({some(list(hosts))})", "reason": reason}
        for reason, (names, hosts) in found.items()
    ]


def _no_candidate(host: str, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Problem:
    wanted = " ".join(f"{k}={settings[k]}" for k in ("train_network", "train_interface") if k in settings)
    usable = [nic for nic in facts["nics"] if not nic["refused"]]
    if wanted and usable:
        has = ", ".join(f"{nic['name']} {a['address']}/{a['prefix']}" for nic in usable for a in nic["addresses"])
        return Problem(f"host {host}", f"has no usable address that fits {wanted}", f"correct it; the host has {has}")
    seen = "; ".join(f"{nic['name']}: {nic['refused']}" for nic in facts["nics"])
    return Problem(f"host {host}", f"no network interface can carry training ({seen})", _FIX)
