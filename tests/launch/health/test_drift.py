"""Promise: what changed on the links since an earlier check is named with both figures and the date."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.health import drift
from launch.health.verdicts import HEALTHY, WARNING
from launch.network.links import Link
from tests.launch.health.test_link_checks import AB, BA, H3, H4, links, names, of, pairs_of, reported

WHEN = "2026-08-01T12:00:00+00:00"

DRIFTS: dict[str, tuple[list[Link], list[Link], list[tuple[str, str]]]] = {
    "a slower pair": (links(H3, {AB: 600}), links(H3), [("h1 -> h2", WARNING)]),
    "a little slower": (links(H3, {AB: 720}), links(H3), []),
    "both directions": (links(H4, {AB: 600, BA: 500}), links(H4), [("h1 -> h2, h2 -> h1", WARNING)]),
    "a faster pair": (links(H3), links(H3, {AB: 94}), [("h1 -> h2", HEALTHY)]),
    "a slower host": (links(H4, of("h3", 4, 94)), links(H4), [("host h3", WARNING)]),
    "everything slower": (links(H3, usual=94), links(H3), [("cluster", WARNING)]),
    "newly broken": (links(H3, error={AB: "refused"}), links(H3), [("h1 -> h2", WARNING)]),
    "works again": (links(H3), links(H3, error={AB: "refused"}), [("h1 -> h2", HEALTHY)]),
    "broken as before": (links(H3, error={AB: "x"}), links(H3, error={AB: "x"}), []),
    "a longer round trip": (links(H3, rtt={AB: 1.2}), links(H3), [("h1 -> h2", WARNING)]),
    "three times nothing": (links(H3, rtt={AB: 0.9}), links(H3), []),
    "a smaller path": (links(H3, mtu={AB: 1400}), links(H3), [("h1 -> h2", WARNING)]),
    "a host came": (links(H4, of("h4", 4, 94)), links(H3), []),
    "a host went": (links(H3), links(H4, of("h4", 4, 94)), []),
    "the quick form after the full": (links(H3, usual=None), links(H3), []),
}


@pytest.mark.parametrize("case", DRIFTS)
def test_drift_names_what_changed(case: str) -> None:
    now, before, wanted = DRIFTS[case]
    found = drift.drift(now, before, WHEN)
    nothing = [("cluster", HEALTHY)]
    assert [(v.where, v.level) for v in found] == (wanted or nothing)
    assert all(v.check == "drift" and "2026-08-01 12:00 UTC" in v.what for v in found)


def test_drift_is_reported_with_both_figures() -> None:
    (slower,) = drift.drift(links(H3, {AB: 470}), links(H3), WHEN)
    assert slower.what == "0.47 Gbit/s, on 2026-08-01 12:00 UTC it was 0.941 Gbit/s (50% slower)"
    (broken,) = drift.drift(links(H3, error={AB: "timed out"}), links(H3), WHEN)
    assert broken.what == "worked on 2026-08-01 12:00 UTC at 0.941 Gbit/s, now broken: timed out"


def test_clusters_without_a_common_pair_are_not_compared() -> None:
    assert drift.drift(links(["a", "b"]), links(["c", "d"]), WHEN) == []
    assert drift.drift([], links(H3), WHEN) == []


@given(st.integers(3, 10), st.data())
def test_one_host_that_got_slower_is_named_once(n: int, data: st.DataObject) -> None:
    host = data.draw(st.sampled_from(names(n)))
    speeds = {p: data.draw(st.floats(100, 1000)) for p in pairs_of(names(n))}
    now = {p: v * (0.5 if host in p else 0.9) for p, v in speeds.items()}
    found = drift.drift(links(names(n), now), links(names(n), speeds), WHEN)
    assert reported(found) == [("drift", f"host {host}", WARNING)]


@given(st.integers(2, 8), st.data())
def test_figures_that_scatter_little_are_no_drift(n: int, data: st.DataObject) -> None:
    speeds = {p: data.draw(st.floats(1, 90000)) for p in pairs_of(names(n))}
    now = {p: v * data.draw(st.floats(0.76, 1.24)) for p, v in speeds.items()}
    assert reported(drift.drift(links(names(n), now), links(names(n), speeds), WHEN)) == []
