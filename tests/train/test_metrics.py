"""Promises: a curve has each step once, also after a resumption; a person sees how a run goes and when it will end."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from train.reporting import picture, progress
from train.reporting.metrics import Metrics, events_before, kept, peak_memory, read_metrics
from train.reporting.report import rank_times
from train.reporting.step_stats import StepRecord
from train.whole_files import write_json

ROOT = Path(__file__).resolve().parents[2]
PER_EPOCH = 4


def write(log: Metrics, first: int, last: int, loss: float = 1.0) -> None:
    """Steps first .. last, and the epochs that end with them."""
    log.write("start", resumed_from=first - 1 or None)
    for step in range(first, last + 1):
        epoch = (step - 1) // PER_EPOCH + 1
        in_epoch = 0.1 * ((step - 1) % PER_EPOCH + 1)
        log.write("step", epoch=epoch, step=step, loss=loss, lr=0.1, images=10, seconds=in_epoch)
        if step % PER_EPOCH == 0:
            figures = {"train_loss": loss, "test_loss": loss, "train_accuracy": 0.5, "test_accuracy": 0.5}
            log.write("epoch", epoch=epoch, images_per_second=100.0, seconds=0.4, data_wait=0.1, **figures)


def steps_of(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events if event["event"] == "step"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of ten steps, killed while it wrote a line."""
    with Metrics(tmp_path) as log:
        write(log, 1, 10)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    return tmp_path


@pytest.mark.parametrize("after", [1, 4, 5, 8, 9, 10])
def test_after_a_resumption_each_step_and_epoch_is_there_once(run: Path, after: int) -> None:
    with Metrics(run, after=after) as log:
        write(log, after + 1, 12, loss=2.0)
        log.write("end")
    events = read_metrics(run / "metrics.jsonl")
    assert steps_of(events) == list(range(1, 13))
    assert [e["loss"] for e in events if e["event"] == "step"] == [1.0] * after + [2.0] * (12 - after)
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [1, 2, 3]
    assert [e["resumed_from"] for e in events if e["event"] == "start"] == [None, after]


def test_a_second_resumption_from_an_earlier_step_forgets_the_first(run: Path) -> None:
    for after, last in ((9, 11), (6, 8), (6, 12)):
        with Metrics(run, after=after) as log:
            write(log, after + 1, last)
    events = read_metrics(run / "metrics.jsonl")
    assert steps_of(events) == list(range(1, 13))
    assert [e["resumed_from"] for e in events if e["event"] == "start"] == [None, 6, 6]


def test_a_run_that_had_ended_and_goes_on_has_one_end(run: Path) -> None:
    ended = [*read_metrics(run / "metrics.jsonl"), {"event": "end"}]
    assert "end" not in [event["event"] for event in kept(ended, 10)]


def test_a_fresh_run_begins_anew(run: Path) -> None:
    with Metrics(run) as log:
        write(log, 1, 2)
    assert steps_of(read_metrics(run / "metrics.jsonl")) == [1, 2]


def test_a_continued_run_in_a_folder_of_its_own_takes_over_the_curve(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    with Metrics(new, after=6, earlier=run) as log:
        write(log, 7, 8)
    assert steps_of(read_metrics(new / "metrics.jsonl")) == list(range(1, 9))
    assert steps_of(read_metrics(run / "metrics.jsonl")) == list(range(1, 11))
    (tmp_path / "other").mkdir()
    with Metrics(tmp_path / "other", after=6, earlier=tmp_path / "absent") as log:
        write(log, 7, 8)
    assert steps_of(read_metrics(tmp_path / "other" / "metrics.jsonl")) == [7, 8]


def test_the_times_of_ranks_are_noted_where_any_has_news() -> None:
    def record(*computing: float) -> StepRecord:
        waiting = tuple(0.25 for _ in computing)
        return StepRecord(1, 1, 10, 1.0, 1.0, (), False, {}, computing, waiting)

    assert rank_times(record(0.1234567, 0.0)) == {"computing": [0.123457, None], "waiting": [0.25, None]}
    assert rank_times(record()) == {}


# -- TensorBoard -----------------------------------------------------------------------------------------------------


def curve_of(folder: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(point.step, point.value) for point in accumulator.Scalars(name)]


def test_tensorboard_shows_the_curves_and_after_a_resumption_each_step_once(tmp_path: Path) -> None:
    with Metrics(tmp_path, loggers="tensorboard") as log:
        write(log, 1, 10)
    with Metrics(tmp_path, after=6, loggers="tensorboard") as log:
        write(log, 7, 12, loss=2.0)
    assert curve_of(tmp_path, "step/loss") == [(step, 1.0 if step <= 6 else 2.0) for step in range(1, 13)]
    assert curve_of(tmp_path, "loss/held_out") == [(4, 1.0), (8, 2.0), (12, 2.0)]
    assert [step for step, _ in curve_of(tmp_path, "speed/waiting_for_data")] == [4, 8, 12]


@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("flushed", [False, True])
def test_tensorboard_of_a_start_before_is_replaced(flushed: bool, after: int, tmp_path: Path) -> None:
    with Metrics(tmp_path, loggers="tensorboard" if flushed else "none") as log:
        write(log, 1, 10)
    files = tmp_path / "tensorboard"
    files.mkdir(exist_ok=True)
    (files / "events.out.tfevents.1.h1.1.0").touch()
    known = [{**event, "time": event["time"] + 1.0} for event in events_before(tmp_path, after)]
    with Metrics(tmp_path, after=after, loggers="tensorboard", given=known) as log:
        write(log, after + 1, 12, loss=2.0)
    assert curve_of(tmp_path, "step/loss") == [(step, 1.0 if step <= after else 2.0) for step in range(1, 13)]
    assert len(list(files.iterdir())) == 1


def test_tensorboard_of_a_continued_run_has_the_steps_of_before(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    with Metrics(new, after=6, earlier=run, loggers="tensorboard") as log:
        write(log, 7, 8)
    assert [step for step, _ in curve_of(new, "step/loss")] == list(range(1, 9))


@pytest.mark.slow
def test_tensorboard_costs_the_first_steps_nothing(tmp_path: Path) -> None:
    """Its writer is not imported before the first epoch has ended."""
    program = (
        "import sys; from pathlib import Path; from train.reporting.metrics import Metrics\n"
        "log = Metrics(Path(sys.argv[1]), loggers='tensorboard')\n"
        "log.write('step', step=1, loss=1.0)\n"
        "sys.exit('tensorboard' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, timeout=300)


def test_without_tensorboard_there_is_no_such_folder(run: Path) -> None:
    assert not (run / "tensorboard").exists()


# -- what a person sees ----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_the_progress_line_says_how_it_goes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Progress(9, 108)
    shown.step(3, 30, 1.0, 800)
    clock.now += 39.0
    shown.step(4, 43, 0.51234, 812.4, accuracy=0.876, data_wait=0.031, comm=0.12)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == ("epoch 4/9  step 43/108  loss 0.5123  train 87.6%  812 images/s  data 3%  comm 12%  ETA 3:15")


def test_lines_are_not_more_than_one_in_two_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.Progress(1, 100)
    for step in range(1, 101):
        clock.now += 0.1
        shown.step(1, step, 1.0, 10)
    assert 3 <= len(capsys.readouterr().out.splitlines()) <= 5


def test_what_is_not_known_is_left_out() -> None:
    assert progress.step_text(0.5, 10) == "loss 0.5000  10 images/s"


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (750, "12:30"), (11100, "3:05:00"), (59.9, "1:00")])
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_the_bar_shows_the_same_below_the_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    bar = progress.Bar(9, 108)
    bar.bar.stop()
    bar.step(4, 43, 0.5, 812, accuracy=0.876, data_wait=0.03, comm=0.12)
    out = io.StringIO()
    Console(file=out, width=140).print(bar.bar.get_renderable())
    assert re.search(r"epoch 4/9 .* 43/108 loss 0\.5000  train 87\.6%  812 images/s  data 3%  comm 12%", out.getvalue())


# -- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last"), [(1, 12), pytest.param(1, 4, marks=pytest.mark.long), (7, 12)])
def test_a_picture_is_drawn_of_whole_and_of_continued_runs(tmp_path: Path, first: int, last: int) -> None:
    with Metrics(tmp_path) as log:
        write(log, first, last)
    events = read_metrics(tmp_path / "metrics.jsonl")
    picture.draw(events, "a run", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("losses", [[2.38, 2.4, 2.6, 2.2], [2.3, 0.5, 0.01, 0.002], [2.3, 0.1, 1e-4, 1e-7]])
def test_the_loss_has_plain_numbers_at_its_ticks(losses: list[float], tmp_path: Path) -> None:
    with Metrics(tmp_path) as log:
        for epoch, loss in enumerate(losses):
            write(log, PER_EPOCH * epoch + 1, PER_EPOCH * (epoch + 1), loss)
    figure = picture.figure_of(read_metrics(tmp_path / "metrics.jsonl"), "a run")
    assert figure is not None
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    labels = [one.get_text() for one in (*axes.get_yticklabels(), *axes.get_yticklabels(minor=True))]
    assert all(re.fullmatch(r"[0-9.]+(e-\d+)?|", label) for label in labels), labels
    assert 3 <= sum(low <= place <= high for place in axes.get_yticks()) <= 12


@pytest.mark.slow
def test_of_a_run_without_accuracy_the_norm_of_the_gradient_is_drawn_if_it_is_known() -> None:
    def events(**more: float) -> list[dict[str, Any]]:
        about = {"loss": 1.0, "lr": 0.1, "images": 8, "epoch": 1, "accuracy": None}
        steps = [{"event": "step", "step": n, "seconds": float(n), **about, **more} for n in (1, 2)]
        figures = {"train_loss": 1.0, "test_loss": 1.0, "train_accuracy": None, "test_accuracy": None}
        return [*steps, {"event": "epoch", "epoch": 1, "step": 2, "images_per_second": 8.0, **figures}]

    drawn = [picture.figure_of(one, "a run") for one in (events(), events(grad_norm=0.5))]
    titles = [[axes.get_ylabel() for axes in one.axes] for one in drawn if one]
    assert titles[0] == ["loss, by image", "learning rate", "images/s"]
    assert titles[1] == ["loss, by image", "norm of the gradient", "learning rate", "images/s"]


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ({"train_accuracy": 0.5, "test_accuracy": 0.25, "test_top5": 0.75, "test_loss": 2.0},
         "train 50.00%  test 25.00%  top-5 75.00%  "),
        ({"train_accuracy": 0.5, "test_accuracy": None, "test_top5": None, "test_loss": None}, "train 50.00%  "),
        ({"train_accuracy": None, "test_accuracy": None, "test_loss": 2.0}, "test loss 2.0000  "),
    ],
)  # fmt: skip
def test_the_line_of_an_epoch_has_what_is_known(figures: dict[str, Any], text: str) -> None:
    values = {"epoch": 2, "train_loss": 1.5, "images_per_second": 10.0, "seconds": 3.0, **figures}
    assert progress.epoch_text(values, 3) == f"epoch 2/3  loss 1.5000  {text}10 images/s  3.0 s"


def test_the_event_of_an_epoch_that_was_not_evaluated_whole_is_dropped(run: Path) -> None:
    events = read_metrics(run / "metrics.jsonl")
    for epochs, numbers in ((1, [1]), (2, [1, 2]), (None, [1, 2])):
        assert [e["epoch"] for e in kept(events, 8, epochs) if e["event"] == "epoch"] == numbers
        assert steps_of(kept(events, 8, epochs)) == list(range(1, 9))


def test_epochs_are_where_they_belong_also_without_the_first_steps(tmp_path: Path) -> None:
    with Metrics(tmp_path) as log:
        write(log, 7, 14)
    events = read_metrics(tmp_path / "metrics.jsonl")
    steps, epochs = ([e for e in events if e["event"] == name] for name in ("step", "epoch"))
    assert picture.steps_per_epoch(steps, epochs) == PER_EPOCH
    assert picture.marks(events, PER_EPOCH, begin=1.5) == []
    assert picture.marks(events, PER_EPOCH, begin=0.0) == [1.5]


def test_throughput_comes_from_the_time_of_training_alone(run: Path) -> None:
    steps = [e for e in read_metrics(run / "metrics.jsonl") if e["event"] == "step"]
    x, y = picture.throughput(steps, PER_EPOCH)
    assert y == pytest.approx([100.0] * len(y)) and len(x) == 10 - 3  # the first step of each epoch has none before it


def test_long_curves_are_averaged() -> None:
    x, y = picture.averaged(([float(n) for n in range(10_000)], [1.0] * 10_000), most=100)
    assert len(x) == len(y) == 100 and x[0] == 49.5


def test_a_run_without_an_epoch_has_no_picture(tmp_path: Path) -> None:
    picture.draw([{"event": "start"}], "nothing", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_peak_memory_is_this_process_own() -> None:
    found = peak_memory(torch.device("cpu"))
    assert found["peak_gpu_bytes"] is None and 50e6 < (found["peak_rss_bytes"] or 0) < 100e9


def test_documents_are_written_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"a": 1})
    assert json.loads((tmp_path / "result.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
