"""The page of all runs, runs/report.html: a table that a click sorts, with a link to the page of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.files import runs_dir
from launch.job.outcome import after_restarts, in_short, number
from launch.page import render
from launch.report import documents, run_page
from launch.report.documents import Run
from launch.report.words import duration

TEMPLATE = Path(__file__).parent / "templates" / "runs.html"


@dataclass(frozen=True)
class Column:
    name: str
    is_number: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell; `value`: what it is sorted by, where that is not its text."""

    text: str
    value: float | str | None = None
    link: str = ""
    is_number: bool = False


COLUMNS = (
    Column("run"),
    Column("status"),
    Column("model or script"),
    Column("nodes", True),
    Column("ranks", True),
    Column("result", True),
    Column("images/s", True),
    Column("duration", True),
    Column("owner"),
    Column("reason"),
)


def write() -> Path:
    """Write the page; returns its path. Raises OSError when it cannot be written."""
    path = runs_dir() / documents.PAGE
    render.write(path, TEMPLATE, content([documents.read(folder, whole=False) for folder in documents.folders()]))
    return path


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What the template shows. runs: the newest first."""
    counts = Counter(run.status for run in runs).most_common()
    rows = [row(run) for run in runs]
    return {"columns": COLUMNS, "rows": rows, "counts": counts, "status_column": 1, "drawings": False}


def row(run: Run) -> list[Cell]:
    """A run's cells, under COLUMNS."""
    page = run.folder / documents.PAGE
    figures = {name: number(run.summary.get(name)) for name in ("nodes", "world_size", "images_per_second")}
    return [
        Cell(run.name, link=f"{run.name}/{documents.PAGE}" if page.exists() else ""),
        Cell(run.status),
        Cell(run_page.what_ran(run)),
        _number(figures["nodes"] or len(run.hosts) or None, "{:.0f}"),
        _number(figures["world_size"], "{:.0f}"),
        _result(run),
        _number(figures["images_per_second"], "{:.0f}"),
        Cell(duration(run.seconds) if run.seconds else "", "" if run.seconds is None else run.seconds, is_number=True),
        Cell(str(run.plan.get("owner") or ("this machine" if run.is_local else ""))),
        Cell(f"{run_page.failure_of(run)}{after_restarts(run.summary.get('restarts'))}".strip()),
    ]


def _result(run: Run) -> Cell:
    """Sorted by accuracy; runs of which only a loss is known are below all others, the highest loss the lowest."""
    accuracy, loss = number(run.summary.get("test_accuracy")), number(run.summary.get("test_loss"))
    value = accuracy if accuracy is not None else -loss - 1 if loss is not None else ""
    return Cell(in_short(run.summary), value, is_number=True)


def _number(value: float | None, form: str) -> Cell:
    return Cell("", "", is_number=True) if value is None else Cell(form.format(value), value, is_number=True)
