"""Promise: KEEP_RUNS removes the oldest gathered runs, says which, and none that is not gathered or still needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import files
from launch.cli.refusal import Refusal
from launch.run import keep
from tests.launch.fake_hosts import plan


def made(name: str, summary: dict[str, Any] | None, **more: Any) -> None:
    folder = files.runs_dir() / name
    folder.mkdir(parents=True)
    if more is not None:
        files.write_json(folder / "plan.json", {"inventory": "inventory/lab", "resume": None, **more})
    if summary is not None:
        files.write_json(folder / "summary.json", summary)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)


WHOLE = {"status": "succeeded", "missing_hosts": []}


def test_the_newest_gathered_runs_stay_and_so_does_what_is_not_gathered_or_needed() -> None:
    for number in range(1, 7):
        made(f"0{number}", WHOLE)
    made("00-going", None)
    made("00-partly", {"status": "failed", "missing_hosts": ["h2"]})
    made("00-other", WHOLE, inventory="inventory/other")
    made("07", WHOLE, resume="01")
    (files.runs_dir() / "00-local").mkdir()
    files.write_json(files.runs_dir() / "00-local" / "summary.json", WHOLE)
    said: list[str] = []
    keep.prune(plan(1), 3, said.append)
    left = sorted(folder.name for folder in files.runs_dir().iterdir())
    assert left == ["00-going", "00-local", "00-other", "00-partly", "01", "05", "06", "07"]
    assert said == ["removed from runs/, as KEEP_RUNS=3: 02, 03, 04"]


def test_an_old_run_that_was_fetched_just_now_stays() -> None:
    for number in range(6):
        made(f"0{number}", WHOLE)
    keep.prune(plan(1, run="01"), 3, lambda line: None)
    assert sorted(folder.name for folder in files.runs_dir().iterdir()) == ["01", "03", "04", "05"]


def test_nothing_is_said_where_nothing_goes_and_0_keeps_all() -> None:
    for number in range(30):
        made(f"{number:02}", WHOLE)
    said: list[str] = []
    keep.prune(plan(1), 0, said.append)
    keep.prune(plan(1), 30, said.append)
    assert len(list(files.runs_dir().iterdir())) == 30 and said == []


def test_a_number_is_wanted() -> None:
    assert (keep.parse(""), keep.parse("0"), keep.parse("7")) == (keep.KEPT_RUNS, 0, 7)
    for wrong in ("-1", "all", "1.5", "²"):
        with pytest.raises(Refusal, match="KEEP_RUNS="):
            keep.parse(wrong)
