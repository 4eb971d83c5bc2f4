"""Who measures with whom and when: rounds in which no host is in two measurements at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every unordered pair once, as (caller, callee); N - 1 rounds for an even number of hosts, N for an odd one.

    The circle method of round-robin tournaments: one host stays, the others turn. With an odd number a place in the
    circle is empty, and the host that meets it rests. Each pair measures both directions.
    """
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    made = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        made.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in made if pairs]
