"""Which network the ranks talk over: a pure choice from facts and tested pairs. Runs no test itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.clustermap import Network
from launch.refusal import Problem, Refusal

#: from host -> [{"peer", "address", "ok", "milliseconds", "error"}]
Reach = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Endpoint:
    """One address of one host that may carry training."""

    interface: str
    address: str
    network: str
    speed_mbits: int | None


@dataclass(frozen=True)
class Choice:
    """The chosen network and every host's own endpoint on it."""

    network: Network
    endpoints: dict[str, Endpoint]


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
            found.append(Endpoint(nic["name"], str(address), str(network), nic["speed_mbits"]))
    return found


def choose(
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
    ssh_addresses: Mapping[str, str],
    reach: Reach,
) -> Choice:
    """The network on which every host reaches every other.

    Of several, the one with the fastest slowest NIC wins; then one that does not carry SSH; then IPv4.
    Hosts that share no subnet at all may still reach each other by routing: then any tested address will do.

    Raises:
        Refusal: naming the pairs that cannot reach each other, network by network.
    """
    hosts = list(facts)
    ends = {host: candidates(facts[host], settings[host]) for host in hosts}
    bare = [host for host in hosts if not ends[host] and len(hosts) > 1]
    if bare:
        raise Refusal(_no_candidate(host, facts[host], settings[host]) for host in bare)
    answered = {(host, result["peer"], result["address"]): result for host in hosts for result in reach.get(host, [])}
    shared = {e.network: None for end in ends.values() for e in end}
    working: list[tuple[str, dict[str, Endpoint]]] = []
    failures: dict[str, str] = {}
    nothing_shared = True
    for network in shared:
        on_it = {host: [e for e in ends[host] if e.network == network] for host in hosts}
        missing = [host for host in hosts if not on_it[host]]
        if missing:
            failures[network] = f"{_listed(missing)} {'has' if len(missing) == 1 else 'have'} no address on it"
            continue
        nothing_shared = False
        picked, reason = _pick(on_it, answered)
        if reason:
            failures[network] = reason
        else:
            working.append((network, picked))
    if nothing_shared and len(hosts) > 1:
        picked, reason = _pick(ends, answered)
        if not reason:
            working.append(("routed", picked))
    if not working and len(hosts) == 1:
        working.append(("loopback", {hosts[0]: Endpoint("lo", "127.0.0.1", "127.0.0.0/8", None)}))
    if not working:
        raise Refusal(
            [Problem(f"network {network}", reason, _MEND) for network, reason in failures.items()]
            or [Problem("network", "the hosts share no network", _MEND)]
        )
    ranked = sorted(working, key=lambda item: _rank(item[1], ssh_addresses))
    name, picked = ranked[0]
    refused = [{"network": n, "reason": r} for n, r in failures.items()]
    refused += [{"network": n, "reason": _why_later(name, picked, p, ssh_addresses)} for n, p in ranked[1:]]
    refused += _refused_nics(facts)
    return Choice(Network(name, _why(name, picked, ssh_addresses), refused), picked)


_MEND = (
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


def _rank(picked: Mapping[str, Endpoint], ssh_addresses: Mapping[str, str]) -> tuple[int, bool, bool, str]:
    speeds = [end.speed_mbits or 0 for end in picked.values()]
    first = next(iter(picked.values()))
    return -min(speeds), _carries_ssh(picked, ssh_addresses), ":" in first.address, first.network


def _carries_ssh(picked: Mapping[str, Endpoint], ssh_addresses: Mapping[str, str]) -> bool:
    return any(end.address == ssh_addresses.get(host) for host, end in picked.items())


def _why(name: str, picked: Mapping[str, Endpoint], ssh_addresses: Mapping[str, str]) -> str:
    pairs = len(picked) * (len(picked) - 1)
    if not pairs:
        return "one host only: nothing to reach"
    words = [f"all {pairs} ordered pairs of hosts connect"]
    speeds = [end.speed_mbits for end in picked.values()]
    if all(speeds):
        words.append(f"slowest NIC {min(s for s in speeds if s)} Mbit/s by its label")
    words.append("it also carries SSH" if _carries_ssh(picked, ssh_addresses) else "it does not carry SSH")
    return ", ".join(words)


def _why_later(
    name: str, best: Mapping[str, Endpoint], other: Mapping[str, Endpoint], ssh_addresses: Mapping[str, str]
) -> str:
    mine, theirs = _rank(best, ssh_addresses), _rank(other, ssh_addresses)
    if mine[0] != theirs[0]:
        return f"works, but its slowest NIC is slower by label than that of {name}, or of unknown speed"
    if mine[1] != theirs[1]:
        return "works, but carries SSH"
    return f"works too; {name} comes first"


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
    return Problem(f"host {host}", f"no network interface can carry training ({seen})", _MEND)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
