"""Promises of `make report`: one run's page or that of all, its path said, an unknown run refused in one message."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launch import files
from launch.cli.refusal import Refusal
from launch.report import __main__ as command
from launch.report import all_runs, documents
from tests.launch.health.test_page import assert_self_contained, parse
from tests.launch.report import made_runs
from tests.launch.report.made_runs import FAILED, LOCAL, NASTY, RESTARTED, SCRIPT, SUCCEEDED


@pytest.mark.slow
def test_the_page_of_one_run_is_written_and_its_path_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.report(SUCCEEDED) == 0
    page = runs / SUCCEEDED / "report.html"
    assert capsys.readouterr().out == f"report: {files.shown(page)}\n" and page.exists()
    assert not (runs / LOCAL / "report.html").exists()


@pytest.mark.slow
def test_without_a_run_there_is_a_page_of_all_with_links_to_theirs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.report("") == 0
    html = (runs / "report.html").read_text()
    assert capsys.readouterr().out == f"report: {files.shown(runs / 'report.html')}\n"
    assert_self_contained(html)
    links = [attributes["href"] for tag, attributes in parse(html).tags if tag == "a"]
    assert links == [f"{name}/report.html" for name in made_runs.KINDS]  # the newest first
    assert all((runs / str(link)).exists() for link in links)
    rows = parse(html).rows[""]
    words = [[cell.strip(" \n") for cell in row] for row in rows]
    assert words[0] == [column.name for column in all_runs.COLUMNS]
    assert words[1][1:9] == ["succeeded", "resnet18 on digits", "2", "3", "94.99%", "280", "26.6 s", "ada@lab"]
    by_run = {row[0]: row for row in words}
    assert by_run[RESTARTED][-1] == "after 1 restart" and by_run[SUCCEEDED][-1] == ""
    assert by_run[FAILED][-1] == "rank 2 on h2: ValueError: the labels do not fit (exit 1)"
    assert by_run[LOCAL][-2] == "this machine" and by_run[SCRIPT][2] == "main.py"


def test_a_page_is_written_again_only_after_its_run_has_changed(runs: Path) -> None:
    command.report("")
    page = runs / SUCCEEDED / "report.html"
    os.utime(page, (time.time() + 60,) * 2)
    page.write_text("kept")
    os.utime(page, (time.time() + 60,) * 2)
    command.report("")
    assert page.read_text() == "kept"
    os.utime(page, (0, 0))
    command.report("")
    assert page.read_text() != "kept"


def test_one_run_whose_page_cannot_be_written_does_not_stop_the_others(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / FAILED / "report.html").mkdir()
    os.utime(runs / FAILED / "report.html", (0, 0))
    assert command.report("") == 0
    assert f"`make report RUN={FAILED}` tries again" in capsys.readouterr().out
    assert (runs / SUCCEEDED / "report.html").is_file()


@pytest.mark.parametrize("name", ["no-such-run", "../runs", "..", "/tmp"])
def test_an_unknown_run_is_refused_with_those_that_are_here(runs: Path, name: str) -> None:
    with pytest.raises(Refusal, match=f"there is no run {name} in .*runs") as refusal:
        command.report(name)
    assert SUCCEEDED in str(refusal.value) and len(refusal.value.problems) == 1
    assert ("make gather" in str(refusal.value)) == (name == "no-such-run")


def test_without_any_run_the_page_says_how_to_make_one(project: Path) -> None:
    assert command.report("") == 0
    assert "No run is here yet" in (files.runs_dir() / "report.html").read_text()
    with pytest.raises(Refusal, match="no run is here yet"):
        command.report("some-run")


def test_a_folder_that_cannot_be_written_is_one_message(runs: Path) -> None:
    (runs / SUCCEEDED / "report.html").mkdir()
    with pytest.raises(Refusal, match="the page cannot be written"):
        command.report(SUCCEEDED)


def test_everything_in_the_list_of_runs_is_escaped(project: Path) -> None:
    folder = made_runs.failed(files.runs_dir() / FAILED, NASTY)
    html = command.write_all().read_text()
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    assert documents.read(folder).status == "failed"
