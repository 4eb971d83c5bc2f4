"""Promise: while an image is sent, each host's rest is said with the time that it will take at the pace so far."""

from __future__ import annotations

from launch.deploy import distribution

MIB = 2**20


def test_the_time_left_follows_from_two_reports() -> None:
    assert distribution._words("h2", (110.0, 60 * MIB), None) == "h2: 60.0 MiB to send"
    assert distribution._words("h2", (110.0, 60 * MIB), (100.0, 80 * MIB)) == "h2: 60.0 MiB to send, about 30 s"
    assert distribution._words("h2", (110.0, 60 * MIB), (100.0, 60 * MIB)) == "h2: 60.0 MiB to send"
    assert distribution._words("h2", (110.0, 0), (100.0, 60 * MIB)) == "h2 has all"
