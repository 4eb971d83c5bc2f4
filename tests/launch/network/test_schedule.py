"""Promise: every pair of hosts meets once, no host is in two measurements at once, in as few rounds as can be."""

from __future__ import annotations

from itertools import combinations

import pytest

from launch.network.measure import rounds


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
