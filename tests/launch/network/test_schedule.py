"""Promise: every pair of hosts meets once, no host is in two measurements at once, in as few rounds as can be; and a
sample leaves no host out."""

from __future__ import annotations

from itertools import combinations

import pytest

from launch.network.measure import EVERY_PAIR_HOSTS, SAMPLED_ROUNDS, rounds, sampled_rounds


@pytest.mark.parametrize("count", range(1, 34))
def test_every_pair_once_and_nobody_twice_in_a_round(count: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    made = rounds(hosts)
    assert sorted(tuple(sorted(pair)) for pairs in made for pair in pairs) == sorted(
        tuple(sorted(pair)) for pair in combinations(hosts, 2)
    )
    for pairs in made:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    assert len(made) == (0 if count == 1 else count - 1 if count % 2 == 0 else count)


@pytest.mark.parametrize("count", [EVERY_PAIR_HOSTS + 1, 63, 64, 256])
@pytest.mark.parametrize("first", [0, 5, -1])
def test_a_sample_has_every_host_in_it_and_connects_all_hosts(count: int, first: int) -> None:
    hosts = [f"h{number}" for number in range(count)]
    pairs = [pair for made in sampled_rounds(hosts, first) for pair in made]
    assert len(set(map(frozenset, pairs))) == len(pairs) <= SAMPLED_ROUNDS * count // 2
    others: dict[str, set[str]] = {host: set() for host in hosts}
    for a, b in pairs:
        others[a].add(b)
        others[b].add(a)
    assert all(SAMPLED_ROUNDS - 1 <= len(own) <= SAMPLED_ROUNDS for own in others.values())
    reached, new = set[str](), {hosts[0]}
    while new:
        reached |= new
        new = set().union(*(others[host] for host in new)) - reached
    assert reached == set(hosts)


def test_all_pairs_are_in_some_sample() -> None:
    hosts = [f"h{number}" for number in range(18)]
    seen = {frozenset(pair) for first in range(18) for made in sampled_rounds(hosts, first) for pair in made}
    assert len(seen) == 18 * 17 // 2
