"""Measures the links between hosts on some networks: who with whom and when, and what the answers mean.

Disjoint pairs are measured at the same time, in rounds: N hosts take N - 1 rounds, not N (N - 1) / 2 measurements one
after another. With bandwidths 64 hosts take about a minute and a half on each network, 256 hosts six minutes
(`expected_seconds`). No host is told more than its own pairs.

A sample is what the check before a run measures of more than EVERY_PAIR_HOSTS hosts. Every host measures SAMPLED_ROUNDS
of its pairs, and all at once, without a measurement, the first host and every other one connect to each other: it is
the master. Other rounds are drawn each time, so that many runs have had all pairs checked.
Two rounds in a row connect all hosts, directly or through others, so that hosts that are cut off from the rest show.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.hosts import hostcall
from launch.hosts.connection import Machine
from launch.network.links import Link

BANDWIDTH_SECONDS = 1  # of each pair, both directions at once
PATIENCE_SECONDS = 20  # of a host for its partner in a pair, which may be busy in another one
FULLY_BUSY_PART = 0.9  # of the processor time: in use while links were measured, it may limit them
PAIR_SECONDS = 0.4  # what a pair takes beside its bandwidth, about
EVERY_PAIR_HOSTS = 16  # up to so many hosts, the check before a run measures every pair: 15 rounds
SAMPLED_ROUNDS = 4  # of more hosts

Pair = tuple[str, str]


@dataclass(frozen=True)
class NetworkAddresses:
    """A network to measure on: every host's address there and the MTU of its NIC."""

    name: str
    addresses: dict[str, str]
    mtus: dict[str, int]


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
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


def sampled_rounds(hosts: Sequence[str], first: int) -> list[list[Pair]]:
    """SAMPLED_ROUNDS of the rounds in a row, from one of them on. Pure."""
    made = rounds(hosts)
    return [made[(first + number) % len(made)] for number in range(min(SAMPLED_ROUNDS, len(made)))]


def options(
    hosts: Sequence[str], networks: Sequence[NetworkAddresses], seconds: int, sample: bool = False
) -> dict[str, dict[str, Any]]:
    """What each host is asked (muster_answer's `meeting`, `links` and `reach`): its own pairs and their addresses.

    Pairs stand in the order of the rounds, network by network: so no host is in two measurements at once. `sample`: of
    some pairs alone, on one network.
    """
    pairs: dict[str, list[dict[str, Any]]] = {host: [] for host in hosts}
    chosen = sampled_rounds(hosts, random.randrange(len(hosts))) if sample else rounds(hosts)
    for number, network in enumerate(networks):
        for a, b in itertools.chain.from_iterable(chosen):
            mtus = {a: network.mtus[a], b: network.mtus[b]}
            for own, peer in ((a, b), (b, a)):
                ends = {"own": network.addresses[own], "theirs": network.addresses[peer]}
                pairs[own].append({"network": number, "peer": peer, "calls": own == a, "mtus": mtus, **ends})
    meetings = hostcall.meetings({host: [network.addresses[host] for network in networks] for host in hosts})
    asked = {"seconds": seconds, "patience": PATIENCE_SECONDS}
    made = {host: {"meeting": meetings[host], "links": {"pairs": pairs[host], **asked}} for host in hosts}
    if sample:
        (network,), (first, *others) = networks, hosts
        addresses = {host: [network.addresses[host]] for host in hosts}
        for host in others:
            made[host]["reach"] = {first: addresses[first]}
        made[first]["reach"] = {host: addresses[host] for host in others}
    return made


def asked_pairs(options: Mapping[str, Mapping[str, Any]]) -> list[Pair]:
    """The ordered pairs of which `options` asks anything, in the order of the hosts. Pure."""
    place = {host: number for number, host in enumerate(options)}
    pairs = {(host, pair["peer"]) for host, asked in options.items() for pair in asked["links"]["pairs"]}
    pairs |= {(host, peer) for host, asked in options.items() for peer in asked.get("reach", ())}
    return sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))


def _rounds_of(hosts: int, sample: bool = False) -> int:
    every = len(rounds([str(host) for host in range(hosts)]))
    return min(SAMPLED_ROUNDS, every) if sample else every


def expected_seconds(hosts: int, networks: int, seconds: int, sample: bool = False) -> float:
    """How long a measurement takes where all is well."""
    return 1 + networks * _rounds_of(hosts, sample) * (PAIR_SECONDS + seconds)


def longest_seconds(hosts: int, networks: int, seconds: int, sample: bool = False) -> float:
    """After which a host that has not answered is given up: every pair waited for in vain."""
    return 30 + networks * _rounds_of(hosts, sample) * (PATIENCE_SECONDS + seconds + 10)


def links(
    hosts: Sequence[str],
    networks: Sequence[NetworkAddresses],
    answers: Mapping[str, hostcall.Answer | BaseException],
    pairs: Collection[Pair] | None = None,
) -> dict[str, list[Link]]:
    """The answers as links by network; each ordered pair once, also where a host did not answer. Pure.

    pairs: those that were asked for; None: all. Of one that the hosts only connected to each other, nothing is known
    but that.
    """
    measured: dict[tuple[str, str, str], Link] = {}
    for host, answer in answers.items():
        for tried in (answer.reach or []) if isinstance(answer, hostcall.Answer) else []:
            peer, why = tried["peer"], f"{host} does not reach {tried['peer']} at {tried['address']}: {tried['error']}"
            link_of = Link(host, peer, None, None, None, None if tried["ok"] else why)
            measured[networks[0].name, host, peer] = link_of
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

    every = [(a, b) for a in hosts for b in hosts if a != b] if pairs is None else pairs
    return {network.name: [link(network.name, *pair) for pair in every] for network in networks}


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
