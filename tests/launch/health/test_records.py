"""Promise: the last fifty checks are kept whole, and the newest with links in order is the one to compare with."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.health import records
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from tests.launch.health.test_link_checks import AB, H3, links


def record(when: datetime, network: str = "10.78.0.0/24", **more: Any) -> dict[str, Any]:
    return records.document(
        inventory="inventory/lab", network=network, hosts=H3, links=links(H3), verdicts=[], when=when, **more
    )


def at(second: int) -> datetime:
    return datetime(2026, 8, 1, 12, 0, 0, tzinfo=UTC) + timedelta(seconds=second)


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    given_links = links(H3, error={AB: "refused"})
    saved = record(at(0)) | {"links": [asdict(link) for link in given_links]}
    path = records.save(tmp_path / "checks", saved)
    assert path.name == "20260801T120000.000000Z.json"
    found = records.previous(tmp_path / "checks")
    assert found == saved and records.links_of(found) == given_links


def test_the_newest_on_the_network_counts(tmp_path: Path) -> None:
    assert records.previous(tmp_path / "none") is None
    for second, network in ((1, "a"), (2, "a"), (3, "b")):
        records.save(tmp_path, record(at(second), network))

    def second_of(network: str | None) -> int | None:
        found = records.previous(tmp_path, network)
        return datetime.fromisoformat(found["when"]).second if found else None

    assert [second_of(network) for network in ("a", "b", None, "c")] == [2, 3, 3, None]


def test_a_check_that_found_a_fault_of_links_is_not_compared_with(tmp_path: Path) -> None:
    def verdict(check: str, level: str) -> dict[str, str]:
        return asdict(Verdict(check, "h1 -> h2", level, "x"))

    def second_of_previous() -> int:
        found = records.previous(tmp_path)
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
    for second in range(records.KEPT_RECORDS + 7):
        records.save(tmp_path, record(at(second)))
    kept = sorted(path.name for path in tmp_path.glob("*.json"))
    assert len(kept) == records.KEPT_RECORDS and kept[0] == "20260801T120007.000000Z.json"
    assert len(list(tmp_path.iterdir())) == records.KEPT_RECORDS + 1


def test_a_clock_set_back_does_not_lose_the_record_just_made(tmp_path: Path) -> None:
    for second in range(records.KEPT_RECORDS):
        records.save(tmp_path, record(at(second)))
    assert records.save(tmp_path, record(at(-100))).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"schema": "muster.check/2"',
        "[]",
        "null",
        '{"schema": "muster.check/0"}',
        '{"schema": "muster.check/2", "links": [], "when": "yesterday", "network": "n"}',
        '{"schema": "muster.check/2", "links": [{"from": "h1"}], "when": "2026-08-01", "network": "n"}',
        '{"schema": "muster.check/2", "links": 3, "when": "2026-08-01", "network": "n"}',
        '{"schema": "muster.check/2", "links": [], "when": "2026-08-01"}',
    ],
)
def test_records_that_cannot_be_read_are_passed_over(tmp_path: Path, text: str) -> None:
    saved = record(at(0))
    records.save(tmp_path, saved)
    (tmp_path / "20270101T000000.000000Z.json").write_text(text)
    (tmp_path / "20270102T000000.000000Z.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "20270103T000000.000000Z.json").mkdir()
    assert records.previous(tmp_path) == saved


def test_a_write_that_fails_leaves_neither_a_torn_file_nor_the_old_one_changed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    files.write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_whole(path, "new \udcff")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_document_is_plain_json() -> None:
    verdict = Verdict("clock", "host h1", WARNING, "3 s behind", "start chrony")
    made = records.document(
        inventory="i", network="n", hosts=H3, links=links(H3), verdicts=[verdict], forecast={"rows": []}
    )
    assert json.loads(json.dumps(made)) == made and made["schema"] == "muster.check/2"
    assert made["verdicts"][0]["fix"] == "start chrony"
