"""Promise: checks are kept whole, the last fifty; what changed since the last is named with both figures and date."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import files
from launch.health import records
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.network.links import Link
from tests.launch.health.test_link_checks import AB, BA, H3, H4, links, names, of, pairs_of, told

WHEN = "2026-08-01T12:00:00+00:00"


def record(when: datetime, kind: str = records.FULL, network: str = "10.78.0.0/24", **more: Any) -> dict[str, Any]:
    return records.document(
        kind=kind, inventory="inventory/lab", network=network, hosts=H3, links=links(H3), verdicts=[], when=when, **more
    )


def at(second: int) -> datetime:
    return datetime(2026, 8, 1, 12, 0, 0, tzinfo=UTC) + timedelta(seconds=second)


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    given_links = links(H3, error={AB: "refused"})
    saved = record(at(0)) | {"links": [asdict(link) for link in given_links]}
    path = records.save(tmp_path / "checks", saved)
    assert path.name == "20260801T120000.000000Z.json"
    found = records.previous(tmp_path / "checks", records.FULL)
    assert found == saved and records.links_of(found) == given_links


def test_the_newest_of_the_kind_and_network_counts(tmp_path: Path) -> None:
    assert records.previous(tmp_path / "none", records.FULL) is None
    for second, kind, network in ((1, "full", "a"), (2, "quick", "a"), (3, "full", "b"), (4, "quick", "b")):
        records.save(tmp_path, record(at(second), kind, network))

    def second_of(kind: str | None, network: str | None) -> int | None:
        found = records.previous(tmp_path, kind, network)
        return datetime.fromisoformat(found["when"]).second if found else None

    asked = [("full", "a"), ("quick", "a"), ("full", None), (None, "a"), (None, None), ("full", "c")]
    assert [second_of(*words) for words in asked] == [1, 2, 3, 2, 4, None]


def test_a_check_that_found_a_fault_of_links_is_no_standard(tmp_path: Path) -> None:
    def verdict(check: str, level: str) -> dict[str, str]:
        return asdict(Verdict(check, "h1 -> h2", level, "x"))

    def second_of_previous() -> int:
        found = records.previous(tmp_path, "full")
        assert found is not None
        return datetime.fromisoformat(found["when"]).second

    faults = (("drift", WARNING), ("bandwidth", INCOMPLETE), ("reach", ERROR), ("runs", ERROR))
    records.save(tmp_path, record(at(0)) | {"verdicts": [verdict("reach", ERROR)]})
    assert second_of_previous() == 0  # better than nothing
    records.save(tmp_path, record(at(1)) | {"verdicts": [verdict("bandwidth", HEALTHY), verdict("clock", ERROR)]})
    for second, fault in enumerate(faults, 2):
        records.save(tmp_path, record(at(second)) | {"verdicts": [verdict(*fault)]})
    assert second_of_previous() == 1


def test_names_are_in_utc_whatever_the_zone(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=9))
    records.save(tmp_path, record(datetime(2026, 8, 1, 8, 0, tzinfo=zone)))
    assert [path.name for path in tmp_path.iterdir()] == ["20260731T230000.000000Z.json"]


def test_the_last_fifty_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for second in range(records.KEPT + 7):
        records.save(tmp_path, record(at(second)))
    kept = sorted(path.name for path in tmp_path.glob("*.json"))
    assert len(kept) == records.KEPT and kept[0] == "20260801T120007.000000Z.json"
    assert len(list(tmp_path.iterdir())) == records.KEPT + 1


def test_a_clock_set_back_does_not_lose_the_record_just_made(tmp_path: Path) -> None:
    for second in range(records.KEPT):
        records.save(tmp_path, record(at(second)))
    assert records.save(tmp_path, record(at(-100))).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"schema": "muster.check/1"',
        "[]",
        "null",
        '{"schema": "muster.check/2"}',
        '{"schema": "muster.check/1", "links": [], "when": "yesterday", "network": "n", "kind": "full"}',
        '{"schema": "muster.check/1", "links": [{"from": "h1"}], "when": "2026-08-01", "network": "n", "kind": "full"}',
        '{"schema": "muster.check/1", "links": 3, "when": "2026-08-01", "network": "n", "kind": "full"}',
        '{"schema": "muster.check/1", "links": [], "when": "2026-08-01"}',
    ],
)
def test_records_that_cannot_be_read_are_passed_over(tmp_path: Path, text: str) -> None:
    saved = record(at(0))
    records.save(tmp_path, saved)
    (tmp_path / "20270101T000000.000000Z.json").write_text(text)
    (tmp_path / "20270102T000000.000000Z.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "20270103T000000.000000Z.json").mkdir()
    assert records.previous(tmp_path, records.FULL) == saved


def test_a_write_that_fails_leaves_neither_a_torn_file_nor_the_old_one_changed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    files.write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole(path, "new \udcff")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_document_is_plain_json() -> None:
    verdict = Verdict("clock", "host h1", WARNING, "3 s behind", "start chrony")
    made = records.document(
        kind="full", inventory="i", network="n", hosts=H3, links=links(H3), verdicts=[verdict], forecast={"rows": []}
    )
    assert json.loads(json.dumps(made)) == made and made["schema"] == "muster.check/1"
    assert made["verdicts"][0]["fix"] == "start chrony"


# Drift

DRIFTS: dict[str, tuple[list[Link], list[Link], list[tuple[str, str]]]] = {
    "a slower pair": (links(H3, {AB: 600}), links(H3), [("h1 -> h2", WARNING)]),
    "a little slower": (links(H3, {AB: 720}), links(H3), []),
    "both directions": (links(H4, {AB: 600, BA: 500}), links(H4), [("h1 <-> h2", WARNING)]),
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
    found = records.drift(now, before, WHEN)
    nothing = [("cluster", HEALTHY)]
    assert [(v.where, v.level) for v in found] == (wanted or nothing)
    assert all(v.check == "drift" and "2026-08-01 12:00 UTC" in v.what for v in found)


def test_drift_tells_both_figures() -> None:
    (slower,) = records.drift(links(H3, {AB: 470}), links(H3), WHEN)
    assert slower.what == "470 Mbit/s, on 2026-08-01 12:00 UTC it was 941 Mbit/s (50% slower)"
    (broken,) = records.drift(links(H3, error={AB: "timed out"}), links(H3), WHEN)
    assert broken.what == "worked on 2026-08-01 12:00 UTC at 941 Mbit/s, now broken: timed out"


def test_clusters_without_a_common_pair_are_not_compared() -> None:
    assert records.drift(links(["a", "b"]), links(["c", "d"]), WHEN) == []
    assert records.drift([], links(H3), WHEN) == []


@given(st.integers(3, 10), st.data())
def test_one_host_that_got_slower_is_named_once(n: int, data: st.DataObject) -> None:
    host = data.draw(st.sampled_from(names(n)))
    speeds = {p: data.draw(st.floats(100, 1000)) for p in pairs_of(names(n))}
    now = {p: v * (0.5 if host in p else 0.9) for p, v in speeds.items()}
    found = records.drift(links(names(n), now), links(names(n), speeds), WHEN)
    assert told(found) == [("drift", f"host {host}", WARNING)]


@given(st.integers(2, 8), st.data())
def test_figures_that_scatter_little_are_no_drift(n: int, data: st.DataObject) -> None:
    speeds = {p: data.draw(st.floats(1, 90000)) for p in pairs_of(names(n))}
    now = {p: v * data.draw(st.floats(0.76, 1.24)) for p, v in speeds.items()}
    assert told(records.drift(links(names(n), now), links(names(n), speeds), WHEN)) == []
