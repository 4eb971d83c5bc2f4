"""The curves of a run, from what our trainer wrote of its steps and epochs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from launch.job.outcome import number
from launch.page.drawing import Figure, Key, Line, Point, lines
from launch.report.documents import Metrics

HEIGHT = 210  # pixels of a plot
MOST_RATES = 200  # points of the speed of single steps: fewer, each over more steps, are steadier
LOG_FROM = 20  # times from the smallest to the largest loss: more are legible on a logarithmic axis alone


def figures(metrics: Metrics) -> list[Figure]:
    """Loss, accuracy, learning rate, gradients, speed and where the time goes, as far as they are known."""
    per_epoch = metrics.steps_per_epoch
    x = "step" if per_epoch is None else "epoch"
    scale = per_epoch or 1.0
    at = [step / scale for step in metrics.steps["step"]]
    resumed = [place / scale for place in continued(metrics)]
    loss = [
        Line("each step", "faint", list(zip(at, metrics.steps["loss"], strict=True)), wide=False),
        Line("training", "l0", by_epoch(metrics, "train_loss")),
        Line("held out", "l1", by_epoch(metrics, "test_loss")),
    ]
    accuracy = [
        Line("training", "l0", by_epoch(metrics, "train_accuracy")),
        Line("held out", "l1", by_epoch(metrics, "test_accuracy")),
        Line("among the first five", "l1", by_epoch(metrics, "test_top5"), dashed=True),
    ]
    norms = zip(metrics.norms["step"], metrics.norms["norm"], strict=True)
    gradients = [Line("each step", "faint", [(step / scale, norm) for step, norm in norms], wide=False)]
    rate = [Line("learning rate", "l0", list(zip(at, metrics.steps["lr"], strict=True)))]
    speed = [
        Line("steps", "faint", [(step / scale, value) for step, value in rates(metrics)], wide=False),
        Line("each epoch", "l0", by_epoch(metrics, "images_per_second")),
    ]
    shares = [
        Line("for data", "l1", by_epoch(metrics, "data_wait")),
        Line("for other ranks and the network", "l0", by_epoch(metrics, "comm")),
    ]
    percent = {"format": ".0~%"}
    plots = (
        ("Loss", loss, "loss, by image", {"log": is_wide(loss)}, ""),
        ("Accuracy", accuracy, "images classified rightly", percent, ""),
        ("Speed", speed, "images/s", {"zero": True}, "In training: without evaluation and checkpoints."),
        ("Learning rate", rate, "learning rate", {"zero": True, "format": "~g"}, ""),
        ("Gradients", gradients, "norm of the gradient", {"log": is_wide(gradients)}, ""),
        ("Waiting", shares, "part of the time of training", {**percent, "zero": True}, ""),
    )
    made: list[Figure] = []
    for title, drawn, y, options, note in plots:
        known = [line for line in drawn if line.points]
        if known:
            key = [line.key() for line in known]
            if resumed and not made:
                key.append(Key("continued from a checkpoint", "quiet", "dashes"))
            made.append(Figure(title, lines(known, x, y, marked=resumed, **options), HEIGHT, key, note))
    return made


def is_wide(drawn: Sequence[Line]) -> bool:
    """Whether a logarithmic axis suits these lines."""
    values = [value for line in drawn for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values)


def by_epoch(metrics: Metrics, name: str) -> list[Point]:
    """A figure of the epochs that have it."""
    known = ((event["epoch"], number(event.get(name))) for event in metrics.epochs)
    return [(epoch, value) for epoch, value in known if value is not None]


def continued(metrics: Metrics) -> list[float]:
    """The steps from which the run was continued."""
    return sorted({step for event in metrics.starts if (step := number(event.get("resumed_from")))})


def rates(metrics: Metrics) -> list[Point]:
    """(step, images a second) of steps that follow one of the same epoch; over as many as make a legible curve."""
    steps, size = list(_timed(metrics)), max(1, len(metrics.steps["step"]) // MOST_RATES)
    pieces = (steps[start : start + size] for start in range(0, len(steps), size))
    sums = ((piece[-1][0], sum(one[1] for one in piece), sum(one[2] for one in piece)) for piece in pieces)
    return [(step, images / seconds) for step, images, seconds in sums if seconds > 0]


def _timed(metrics: Metrics) -> Iterator[tuple[float, float, float]]:
    """Step, images and seconds."""
    columns: Sequence[Sequence[float]] = [metrics.steps[name] for name in ("step", "epoch", "images", "seconds")]
    for before, one in pairwise(zip(*columns, strict=True)):
        if one[0] == before[0] + 1 and one[1] == before[1]:
            yield one[0], one[2], one[3] - before[3]
