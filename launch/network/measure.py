"""Measures the links between hosts on some networks: who with whom and when, and what the answers mean."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.hosts import hostcall
from launch.hosts.connection import Machine
from launch.network.links import Link

BANDWIDTH_SECONDS = 1  # of each pair, both directions at once
PATIENCE_SECONDS = 20  # of a host for its partner in a pair, which may be busy in another one
FULLY_BUSY_PART = 0.9  # of the processor time: in use while links were measured, it may limit them
PAIR_SECONDS = 0.4  # what a pair takes beside its bandwidth, about


@dataclass(frozen=True)
class NetworkAddresses:
    """A network to measure on: every host's address there and the MTU of its NIC."""

    name: str
    addresses: dict[str, str]
    mtus: dict[str, int]


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every unordered pair once, as (caller, callee), with no host in two pairs of a round. Pure.

    N - 1 rounds for an even number of hosts, N for an odd one. The circle method of round-robin tournaments: one host
    stays, the others turn. With an odd number a place in the circle is empty, and the host that meets it rests.
    """
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half, made = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        made.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in made if pairs]


def options(hosts: Sequence[str], networks: Sequence[NetworkAddresses], seconds: int) -> dict[str, dict[str, Any]]:
    """What each host is asked (muster_answer's `meeting` and `links`): its own pairs and the addresses that they need.

    Pairs stand in the order of the rounds, network by network: so no host is in two measurements at once.
    """
    pairs: dict[str, list[dict[str, Any]]] = {host: [] for host in hosts}
    for number, network in enumerate(networks):
        for a, b in itertools.chain.from_iterable(rounds(hosts)):
            mtus = {a: network.mtus[a], b: network.mtus[b]}
            for own, peer in ((a, b), (b, a)):
                ends = {"own": network.addresses[own], "theirs": network.addresses[peer]}
                pairs[own].append({"network": number, "peer": peer, "calls": own == a, "mtus": mtus, **ends})
    meetings = hostcall.meetings({host: [network.addresses[host] for network in networks] for host in hosts})
    asked = {"seconds": seconds, "patience": PATIENCE_SECONDS}
    return {host: {"meeting": meetings[host], "links": {"pairs": pairs[host], **asked}} for host in hosts}


def expected_seconds(hosts: int, networks: int, seconds: int) -> float:
    """How long a measurement takes where all is well."""
    return 1 + networks * len(rounds([str(host) for host in range(hosts)])) * (PAIR_SECONDS + seconds)


def longest_seconds(hosts: int, networks: int, seconds: int) -> float:
    """After which a host that has not answered is given up: every pair waited for in vain."""
    return 30 + networks * len(rounds([str(host) for host in range(hosts)])) * (PATIENCE_SECONDS + seconds + 10)


def links(
    hosts: Sequence[str], networks: Sequence[NetworkAddresses], answers: Mapping[str, hostcall.Answer | BaseException]
) -> dict[str, list[Link]]:
    """The answers as links by network; each ordered pair once, also where a host did not answer. Pure."""
    measured: dict[tuple[str, str, str], Link] = {}
    for answer in answers.values():
        for entry in (answer.links or []) if isinstance(answer, hostcall.Answer) else []:
            name = networks[entry["network"]].name
            words = {key: value for key, value in entry.items() if key != "network"}
            measured[name, entry["source"], entry["target"]] = Link(**words)
    lost = {host: str(answer) for host, answer in answers.items() if not isinstance(answer, hostcall.Answer)}

    def link(network: str, source: str, target: str) -> Link:
        silent = next((host for host in (source, target) if host in lost), None)
        why = f"{silent} did not answer: {lost[silent]}" if silent else "not measured"
        return measured.get((network, source, target)) or Link(source, target, None, None, None, why)

    return {network.name: [link(network.name, a, b) for a in hosts for b in hosts if a != b] for network in networks}


def measure(
    machines: Sequence[Machine], networks: Sequence[NetworkAddresses], seconds: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Link]], list[str]]:
    """(network -> its links in both directions, hosts whose processors were busy during the measurement).

    With `seconds` 0 without bandwidth. say: for progress.
    """
    hosts = [machine.name for machine in machines]
    limit = longest_seconds(len(hosts), len(networks), seconds)
    answers = hostcall.call_hosts(machines, options(hosts, networks, seconds), limit, say)
    return links(hosts, networks, answers), busy(answers)


def busy(answers: Mapping[str, hostcall.Answer | BaseException]) -> list[str]:
    """The hosts whose processors may have been what limited a measurement. Pure."""
    known = {host: answer.busy for host, answer in answers.items() if isinstance(answer, hostcall.Answer)}
    return [host for host, part in known.items() if (part or 0.0) >= FULLY_BUSY_PART]
