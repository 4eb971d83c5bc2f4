"""Promises: everything that happened is on one line, where it was by the clocks of the hosts, and each thing once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.page import drawing
from launch.report import documents, timeline
from launch.report.timeline import TRAINING, Mark, TimeLine, moments
from launch.report.words import duration, event_in_words
from tests.launch.report import made_runs
from tests.launch.report.made_runs import FAILED, LOCAL, RESTARTED, SCRIPT, SUCCEEDED


def line_of(folder: Path) -> TimeLine:
    return timeline.of_run(documents.read(folder))


def marks(made: TimeLine, *kinds: str) -> list[tuple[str, float, str]]:
    return [(mark.kind, round(mark.at, 1), mark.row) for mark in made.marks if mark.kind in kinds]


def test_the_real_run_has_its_epochs_checkpoints_and_hosts(runs: Path) -> None:
    made = line_of(runs / SUCCEEDED)
    assert made.rows == [TRAINING, "h1", "h2"]
    epochs = [span.what for span in made.spans if span.row == TRAINING]
    assert len(epochs) == 3 and epochs[2].startswith("epoch 3, test accuracy 9")
    assert [what for _, _, what in spans(made, "h2")] == ["starting", "running", "starting"]  # it waits for h1's ranks
    said = [mark.what for mark in made.marks if mark.kind == "checkpoint"]
    assert said[0] == "checkpoint of step 12, no longer kept" and said[-1].startswith("checkpoint of step 36, 12")
    assert made.seconds == pytest.approx(26.6, abs=0.1)


def spans(made: TimeLine, row: str) -> list[tuple[float, float, str]]:
    return [(round(span.start, 1), round(span.end, 1), span.kind) for span in made.spans if span.row == row]


def test_a_restart_shows_its_cause_once_and_both_attempts_of_each_host(runs: Path) -> None:
    made = line_of(runs / RESTARTED)
    kinds = ["starting", "running", "ending", "starting", "running", "starting"]
    assert [kind for _, _, kind in spans(made, "h1")] == [kind for _, _, kind in spans(made, "h3")] == kinds
    for one, other in zip(spans(made, "h1"), spans(made, "h3"), strict=True):
        assert one[0] == pytest.approx(other[0], abs=2.5)  # though the clock of h3 is 20 s ahead
    assert spans(made, "h2") == [(0.0, 4.7, "starting"), (4.7, 25.3, "running")]  # to the last state that it wrote
    assert marks(made, "failure") == [("failure", 27.8, "h2")]
    assert ("notice", 25.3, "h2") in marks(made, "notice")
    assert marks(made, "attempt") == [("attempt", 27.8, "h3"), ("attempt", 27.8, "h1")]
    (what,) = {mark.what for mark in made.marks if mark.kind == "attempt"}
    gone = "its keeper is gone: the container was ended, not by its run"
    assert what == f"attempt 2 on h1, h3; without h2 ({gone}); because of h2: {gone}"
    assert made.attempts == {1: 0.0, 2: pytest.approx(27.8, abs=0.1)}
    epochs = [span for span in made.spans if span.row == TRAINING]
    assert [span.what for span in epochs][1] == "an epoch that was not finished" and len(epochs) == 6
    assert not any(span.start < 27.8 < span.end for span in epochs)  # nothing is trained between two attempts


def test_what_the_trainer_wrote_is_placed_by_the_clock_of_the_host_that_wrote_it(runs: Path) -> None:
    """After a restart without its first host, a run's metrics come from another one."""
    file = runs / RESTARTED / "metrics.jsonl"
    before = [span.start for span in line_of(runs / RESTARTED).spans if span.row == TRAINING]
    events = [{**event, "time": event["time"] + 20.0} for event in made_runs.read_lines(file)]
    file.write_text(made_runs.lines({**event, **({"host": "h3"} if "host" in event else {})} for event in events))
    after = [span.start for span in line_of(runs / RESTARTED).spans if span.row == TRAINING]
    assert after == pytest.approx(before, abs=0.1)


def test_why_a_run_was_not_started_again_is_on_the_line(runs: Path) -> None:
    file = runs / FAILED / "logs" / "h1" / "events.jsonl"
    words = {"event": "given_up", "reason": "three attempts made no new step", "alone": False}
    last = made_runs.read_lines(file)[-1]
    file.write_text(file.read_text() + made_runs.lines([{**last, **words}]))
    assert "not started again: three attempts made no new step" in [line.what for line in line_of(runs / FAILED).lines]
    assert ("notice", 18.0, "h1") in marks(line_of(runs / FAILED), "notice")


def test_a_slow_host_is_marked_and_so_is_its_end(runs: Path) -> None:
    file = runs / SUCCEEDED / "logs" / "h2" / "events.jsonl"
    events = made_runs.read_lines(file)
    words = {"event": "slow", "host": "h2", "rank": None, "times": 2.0, "seconds": 0.2, "others_seconds": 0.1}
    begun = {**events[-1], **words, "after": 10.0, "over": False, "step": 9, "reason": "a CPU quota"}
    over = {**events[-1], **words, "after": 12.0, "over": True, "step": 19, "reason": ""}
    file.write_text(made_runs.lines(sorted([*events, begun, over], key=lambda event: float(event["after"]))))
    made = line_of(runs / SUCCEEDED)
    [slow], [notice] = marks(made, "slow"), marks(made, "notice")
    assert slow[2] == notice[2] == "h2" and slow[1] < notice[1]
    said = [line.what for line in made.lines if "slow" in line.what]
    assert said[0].startswith("h2 is slow: its steps take 2.0 times") and said[1] == "h2 is no longer slow (step 19)"


def test_a_failure_is_on_the_row_of_the_host_that_it_names_and_what_follows_is_only_a_notice(runs: Path) -> None:
    made = line_of(runs / FAILED)
    assert marks(made, "failure") == [("failure", 17.1, "h2")] and marks(made, "notice") == [("notice", 17.3, "h1")]
    assert any(line.what.endswith("(follows from another failure)") for line in made.lines)


def test_a_stop_is_shown_once(runs: Path) -> None:
    made = line_of(runs / SCRIPT)
    assert marks(made, "stop") == [("stop", 4000.0, "h1")]
    assert next(line.what for line in made.lines if "stop" in line.what).endswith("ada; 30 s for the ranks to save")


def test_a_run_without_keepers_has_the_row_of_its_training(runs: Path) -> None:
    assert line_of(runs / LOCAL).rows == [TRAINING]


def test_what_the_continued_run_did_is_no_part_of_this_ones_line(runs: Path) -> None:
    folder = runs / SUCCEEDED
    events = made_runs.read_lines(folder / "metrics.jsonl")
    earlier = [{**event, "time": event["time"] - 86400.0} for event in events]
    (folder / "metrics.jsonl").write_text(made_runs.lines([*earlier, *events]))
    made = line_of(folder)
    assert made.seconds < 27 and len([span for span in made.spans if span.row == TRAINING]) == 3


def event(time: float, after: float) -> documents.Words:
    return {"time": time, "after": after}


def test_a_hosts_clock_that_is_set_does_not_move_what_follows() -> None:
    assert moments([event(1000.0, 0.1), event(1001.0, 1.1), event(5000.0, 2.1)]) == pytest.approx([0.0, 1.0, 2.0])


def test_after_a_keeper_was_started_anew_the_hosts_clock_counts() -> None:
    found = moments([event(1000.0, 0.0), event(1030.0, 30.0), event(1050.0, 0.1), event(1060.0, 10.1)])
    assert found == pytest.approx([0.0, 30.0, 50.0, 60.0])


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e6)), min_size=1))
def test_time_never_runs_back(listed: list[tuple[float, float]]) -> None:
    found = moments([event(*one) for one in listed])
    assert found[0] == 0.0 and found == sorted(found)


def test_an_event_of_another_version_is_shown_by_its_name() -> None:
    assert event_in_words({"event": "rejoined", "host": "h2"}) == "rejoined"


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (59.97, "1:00 min"), (185, "3:05 min"), (7800, "2:10:00 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "unit"), [(100, "seconds"), (600, "minutes"), (40_000, "hours")])
def test_the_axis_has_a_unit_that_suits_the_runs_length(seconds: float, unit: str) -> None:
    made = TimeLine(["h1"], [], [Mark("h1", seconds, "end", "the run ended here: succeeded")])
    spec = timeline.figure(made).spec
    assert f"{unit} since the start" in str(spec)


@pytest.mark.slow
def test_vega_lite_draws_every_kind_of_span_and_mark(runs: Path) -> None:
    picture = drawing.picture(timeline.figure(line_of(runs / RESTARTED)).spec | {"width": 600, "height": 120})
    assert picture.count('aria-roledescription="bar"') == len(line_of(runs / RESTARTED).spans)
    assert picture.count('aria-roledescription="point"') == len(line_of(runs / RESTARTED).marks)
