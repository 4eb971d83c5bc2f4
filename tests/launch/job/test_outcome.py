"""Promise: the first cause of a failure is named, not one of its consequences; a run's summary says how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli import exits
from launch.job import outcome


def failed(rank: int, time: float, **more: Any) -> dict[str, Any]:
    plain = {"rank": rank, "exitcode": 1, "signal": None, "exception": "E: e", "time": time, "consequence": False}
    return plain | more


def report(*failures: dict[str, Any]) -> dict[str, Any]:
    return {"failures": list(failures)}


def test_a_closed_connection_yields_to_what_closed_it_even_when_noticed_earlier() -> None:
    found = outcome.root_failure(
        {
            "h1": report(failed(0, 10.0, exception="E: Connection closed by peer", consequence=True)),
            "h2": report(failed(1, 10.3, exitcode=-9, signal="SIGKILL", exception="killed by SIGKILL")),
        },
        {},
    )
    assert str(found) == "rank 1 on h2: killed by SIGKILL"


def test_torchruns_own_sigterm_is_never_the_cause() -> None:
    found = outcome.root_failure(
        {
            "h1": report(
                failed(0, 1.0, exitcode=-15, signal="SIGTERM", consequence=True),
                failed(1, 2.0, exception="ValueError: no"),
            )
        },
        {},
    )
    assert str(found) == "rank 1 on h1: ValueError: no (exit 1)"


def test_of_two_causes_the_earlier_counts() -> None:
    found = outcome.root_failure(
        {"h1": report(failed(0, 5.0, exception="A: a")), "h2": report(failed(1, 4.0, exception="B: b"))}, {}
    )
    assert found is not None and found.rank == 1


def test_a_host_that_left_no_word_is_the_cause_when_the_others_only_lost_it() -> None:
    end = outcome.describe_end(137, {"OOMKilled": True})
    found = outcome.root_failure(
        {"h1": report(failed(0, 1.0, exception="E: Connection reset by peer", consequence=True))}, {"h2": end}
    )
    assert found is not None and (found.host, found.rank) == ("h2", None) and "out of memory" in found.reason


@pytest.mark.parametrize(
    ("status", "said"),
    [(137, "SIGKILL"), (143, "SIGTERM"), (3, "exit status 3"), (-1, "gone"), (None, "lost")],
)
def test_how_a_container_ended_in_words(status: int | None, said: str) -> None:
    assert said in outcome.describe_end(status, {}, "no answer")


def test_the_summary_has_every_promised_key(tmp_path: Path) -> None:
    where = ("20260101-000000-abcd", 2, 3, "10.78.0.11")
    result = {"test_accuracy": 0.98, "images_per_second": 500.0, "train_seconds": 30.0}
    good = outcome.summary(*where, "succeeded", None, result)
    assert (good["exit_status"], good["nodes"], good["world_size"], good["failed_rank"]) == (
        exits.SUCCEEDED,
        2,
        3,
        None,
    )
    assert (good["test_accuracy"], good["master_addr"]) == (0.98, "10.78.0.11")
    bad = outcome.summary(*where, "failed", outcome.Failure("h2", 1, "killed by SIGKILL"))
    assert (bad["exit_status"], bad["failed_rank"], bad["test_accuracy"]) == (exits.FAILED, 1, None)
    files.write_json(tmp_path / "summary.json", bad)
    assert files.read_json(tmp_path / "summary.json") == bad


def test_a_torn_or_absent_document_reads_as_empty(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"a": ')
    assert files.read_json(tmp_path / "torn.json") == files.read_json(tmp_path / "absent.json") == {}


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([0, 0], "succeeded"),
        ([75, 75], "stopped"),
        ([143, 75], "stopped"),
        ([75, 1], "failed"),
        ([143, 143], "failed"),
        ([75, None], "failed"),
        ([0, 1], "failed"),
    ],
)
def test_ranks_that_saved_and_ended_on_request_have_not_failed(statuses: list[int | None], said: str) -> None:
    assert outcome.verdict(statuses) == said


def test_what_received_the_signal_is_named() -> None:
    assert outcome.stopped_reason(["h2"]).startswith("torchrun on h2 received a signal to stop")
    assert outcome.stopped_reason([]).startswith("a rank received a signal to stop")
