"""The VPN that training goes through, where the inventory has `train_vpn`: who has which address, and bringing it up.

It goes over the network that was chosen by measurement. Who has which key and address is worked out from the hosts'
facts (`addresses`, `settings`: pure); the hosts' half is muster_vpn.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from launch.cli import exits
from launch.cli.output import detail
from launch.cli.refusal import Problem, Refusal, refuse
from launch.deploy import detect
from launch.hosts import hostcall, ssh
from launch.hosts.clustermap import VPN_INTERFACE, VPN_PORT
from launch.hosts.connection import LINK_ERRORS, Machine
from launch.network import choose, measure
from launch.network.links import Link

ByHost = Mapping[str, Mapping[str, Any]]

HEADER_BYTES = {4: 60, 6: 80}  # of WireGuard, UDP and IP
CHANGE_SECONDS = 60.0
KEEPALIVE_SECONDS = 25  # a session without any traffic would end
#: Where the VPN's addresses are taken from: the first network that no host has a way to.
RANGES = [ipaddress.ip_network(f"10.{second}.0.0/16") for second in range(213, 256)]
SMALLEST_PREFIX = 24

_FIX = "see what it says on the host, then `make deploy` again; or leave `train_vpn` out of the inventory"


def addresses(facts: ByHost) -> dict[str, ipaddress.IPv4Interface]:
    """Every host's address in the VPN. Raises Refusal where all ranges are in use. Pure."""
    taken = [ipaddress.ip_network(one, strict=False) for known in facts.values() for one in known["vpn"]["routes"]]
    prefix = min(SMALLEST_PREFIX, 32 - (len(facts) + 1).bit_length())
    for network in (one for wide in RANGES for one in wide.subnets(new_prefix=prefix)):
        if not any(network.overlaps(other) for other in taken):
            return {
                host: ipaddress.IPv4Interface(f"{network[number]}/{prefix}") for number, host in enumerate(facts, 1)
            }
    what = f"the hosts have ways to all networks from {RANGES[0]} to {RANGES[-1]}: none is free for the VPN"
    raise refuse("train_vpn", what, "free one of them, or leave `train_vpn` out of the inventory")


def mtu(choice: choose.Choice) -> int:
    """Bytes: what fits through the network below once it is wrapped. Pure."""
    ends = list(choice.endpoints.values())
    found = [link.path_mtu for link in choice.links if link.path_mtu]
    version = ipaddress.ip_address(ends[0].address).version
    return min([end.mtu for end in ends] + found) - HEADER_BYTES[version]


def settings(
    host: str, own: Mapping[str, ipaddress.IPv4Interface], keys: Mapping[str, str], below: choose.Choice
) -> str:
    """What wg-quick is given on a host, which adds its key. Pure.

    Of two hosts the first one greets, and keeps alive what they agreed on. Greetings that cross end each other: both
    hosts would try again after 5 s, and might cross again.
    """
    others = {peer: end for peer, end in below.endpoints.items() if peer != host}
    order = list(below.endpoints)
    greeted = [f"peer {keys[peer]} persistent-keepalive {KEEPALIVE_SECONDS}" for peer in order[order.index(host) + 1 :]]
    lines = [
        "# Written by Muster (make deploy); make teardown removes it.",
        "[Interface]",
        f"Address = {own[host]}",
        f"ListenPort = {VPN_PORT}",
        f"MTU = {mtu(below)}",
        "Table = off",
        " ".join(["PostUp = wg set %i private-key /etc/wireguard/%i.key", *greeted]),
    ]
    for peer, end in others.items():
        address = f"[{end.address}]" if ":" in end.address else end.address
        lines += ["", "[Peer]", f"# {peer}", f"PublicKey = {keys[peer]}", f"Endpoint = {address}:{VPN_PORT}"]
        lines += [f"AllowedIPs = {own[peer].ip}/32"]
    return "\n".join(lines)


def to_change(facts: ByHost, below: choose.Choice) -> list[str]:
    """The hosts where it is not up as it is to be, over this network. Pure."""
    own, known = addresses(facts), {name: facts[name]["vpn"] for name in facts}
    keys = {name: known[name]["public_key"] for name in known}
    return [
        name for name in known if not known[name]["up"] or known[name]["settings"] != settings(name, own, keys, below)
    ]


def refuse_runs(facts: ByHost) -> None:
    """Raises Refusal for a run that is in progress: it would lose the VPN. Pure."""
    if runs := detect.runs_in_progress(facts):
        what = f"the VPN is to be changed, and run {next(iter(runs))} is in progress"
        raise refuse("the hosts", what, "run `make deploy` when it has ended")


def bring_up(machines: Sequence[Machine], facts: ByHost, below: choose.Choice) -> None:
    """Bring it up on all hosts, over this network: first it goes down on all, so that nobody greets a former one.

    Raises Refusal, naming hosts, where it does not come up, and those between which nothing comes through.
    """
    own, names = addresses(facts), [machine.name for machine in machines]
    keys = {name: said["public_key"] for name, said in _ask(machines, dict.fromkeys(names, None)).items()}
    said = _ask(machines, {name: settings(name, own, keys, below) for name in names})
    pairs = [(one, other) for number, one in enumerate(names) for other in names[number + 1 :]]
    _refuse_silent(
        [
            f"{one} and {other} do not hear each other"
            for one, other in pairs
            if keys[other] in said[one]["unmet"] or keys[one] in said[other]["unmet"]
        ],
        f"let UDP to port {VPN_PORT} pass between the hosts, both ways; or leave `train_vpn` out of the inventory",
    )


def _refuse_silent(failed: Sequence[str], fix: str) -> None:
    if failed:
        more = f" (and {len(failed) - 3} more pairs)" if len(failed) > 3 else ""
        what = f"{VPN_INTERFACE} is up, and nothing comes through it: {'; '.join(failed[:3])}{more}"
        raise refuse("train_vpn", what, fix, exits.DEPLOY_FAILED)


def choose_it(
    machines: Sequence[Machine],
    facts: dict[str, dict[str, Any]],
    below: choose.Choice,
    measured: detect.Measured,
    is_new: bool,
    console: Console,
) -> tuple[choose.Choice, detect.Measured]:
    """It as the network that training takes, and all that was measured; the facts get its NICs.

    The figures that `measured` has of it hold, unless it is new. Raises Refusal where hosts do not reach each other.
    """
    own = addresses(facts)
    network = next(iter(own.values())).network
    ends = {name: choose.Endpoint(VPN_INTERFACE, str(own[name].ip), str(network), None, mtu(below)) for name in own}
    over = choose.Working(str(network), ends)
    reached = detect.reach(machines, {name: [end.address] for name, end in ends.items()}, console)
    _refuse_silent(
        [f"{host} does not reach {one['peer']}" for host, all_ in reached.items() for one in all_ if not one["ok"]],
        f"let UDP to port {VPN_PORT} pass between the hosts, and TCP from {network} by {VPN_INTERFACE}; "
        "or leave `train_vpn` out of the inventory",
    )
    measurements = measured.measurements
    if is_new or over.label not in measurements.links:
        links, busy = measure.measure(machines, [detect.addresses_of(over)], measure.BANDWIDTH_SECONDS, detail(console))
        measurements = forget(measured).measurements.with_round(links, busy)
    if reasons := measurements.failures.get(over.label):
        raise refuse("train_vpn", f"the VPN fails: {reasons[0]}", _FIX)
    _add_nics(facts, ends, own)
    return _choice(below, over, measurements.links[over.label]), replace(measured, measurements=measurements)


def forget(measured: detect.Measured) -> detect.Measured:
    """Without what was measured over it. Pure."""

    def others(each: Mapping[str, Any]) -> dict[str, Any]:
        return {label: one for label, one in each.items() if not label.endswith(f"({VPN_INTERFACE})")}

    known = measured.measurements
    kept = replace(known, links=others(known.links), speeds=others(known.speeds), failures=others(known.failures))
    return replace(measured, measurements=kept)


def _choice(below: choose.Choice, over: choose.Working, links: list[Link]) -> choose.Choice:
    """The VPN, and why it is the network below it that it goes over."""
    label = choose.Working(below.network.name, below.endpoints).label
    speed = choose.slowest_words(links)
    reason = f"a VPN (WireGuard), {speed}; it goes over {label}: {below.network.reason}"
    refused = [one for one in below.network.refused if not one["network"].startswith(f"{VPN_INTERFACE} ")]
    return choose.Choice(
        replace(below.network, name=over.name, reason=reason, refused=refused, below=label), over.endpoints, links
    )


def _add_nics(
    facts: dict[str, dict[str, Any]],
    ends: Mapping[str, choose.Endpoint],
    own: Mapping[str, ipaddress.IPv4Interface],
) -> None:
    """The facts are of before it came up."""
    for name, end in ends.items():
        address = {"address": end.address, "prefix": own[name].network.prefixlen, "family": 4, "scope": "global"}
        nic = {"name": VPN_INTERFACE, "kind": "vpn", "up": True, "carrier": True, "mtu": end.mtu, "mac": ""}
        nic |= {"speed_mbits": None, "master": None, "parent": None, "addresses": [address], "refused": None}
        others = [one for one in facts[name]["nics"] if one["name"] != VPN_INTERFACE]
        facts[name]["nics"] = [*others, nic]


def left_over(facts: ByHost) -> list[str]:
    """The hosts that have it still. Pure."""
    return [name for name, known in facts.items() if known["vpn"]["settings"] or known["vpn"]["up"]]


def remove(machines: Sequence[Machine]) -> None:
    """Take it and its keys off these hosts. Raises Refusal, naming each host where that failed."""
    _ask(machines, dict.fromkeys((machine.name for machine in machines), ""))


def _ask(machines: Sequence[Machine], wanted: Mapping[str, str | None]) -> dict[str, dict[str, Any]]:
    """What these hosts say; wanted: the settings of muster_vpn.run, by host."""
    asked = [machine for machine in machines if machine.name in wanted]

    def one(machine: Machine) -> dict[str, Any]:
        return hostcall.say_to(machine, "muster_vpn", {"settings": wanted[machine.name]}, CHANGE_SECONDS)

    results = dict(zip((machine.name for machine in asked), ssh.in_parallel(one, asked), strict=True))
    problems = []
    for name, result in results.items():
        if isinstance(result, (RuntimeError, *LINK_ERRORS)):
            problems.append(Problem(f"host {name}", f"the VPN cannot be changed: {result}", _FIX))
        elif isinstance(result, BaseException):
            raise result
    if problems:
        raise Refusal(problems, exits.DEPLOY_FAILED)
    return {name: result for name, result in results.items() if isinstance(result, dict)}
