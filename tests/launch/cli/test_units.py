"""Promise: a figure has one unit and reads well, however small or large it is."""

from __future__ import annotations

import pytest

from launch.cli import units

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("mbits", "words"),
    [
        (0, "0 Gbit/s"),
        (0.0841, "0.000084 Gbit/s"),
        (0.84, "0.00084 Gbit/s"),
        (20, "0.02 Gbit/s"),
        (94.4, "0.094 Gbit/s"),
        (99.96, "0.1 Gbit/s"),
        (941, "0.941 Gbit/s"),
        (1000, "1 Gbit/s"),
        (1115, "1.11 Gbit/s"),
        (2350, "2.35 Gbit/s"),
        (23512, "23.5 Gbit/s"),
        (400_000, "400 Gbit/s"),
    ],
)
def test_a_bandwidth_is_in_gbits(mbits: float, words: str) -> None:
    assert units.rate(mbits) == words


@pytest.mark.parametrize(
    ("count", "words"), [(512, "512 bytes"), (64 * MIB, "64.0 MiB"), (1.5 * GIB, "1.5 GiB"), (2**41, "2.0 TiB")]
)
def test_a_size_is_in_the_unit_that_fits(count: float, words: str) -> None:
    assert units.size(count) == words


@pytest.mark.parametrize(("seconds", "words"), [(5, "5 s"), (90, "2 min"), (9000, "2.5 h"), (3 * 86400, "3 days")])
def test_a_span_of_time_is_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert units.age(seconds) == words


@pytest.mark.parametrize(("value", "words"), [(0.2, "0.20 ms"), (1.26, "1.3 ms"), (12.3, "12 ms")])
def test_a_round_trip_has_two_digits(value: float, words: str) -> None:
    assert units.milliseconds(value) == words
