"""curves.png: loss, accuracy, learning rate and throughput over a run, drawn from the events of metrics.jsonl.

Imports matplotlib when called. A run that continued from a checkpoint has a mark there; a curve begins where the
events begin.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Curve = tuple[list[float], list[float]]

TRAIN, TEST, QUIET, MARK = "#2a6fbb", "#d1495b", "#9fb8d4", "#8a8a8a"
MOST_POINTS = 1500  # of a curve of single steps: more are averaged, as no pixel could show them


def draw(events: list[Event], title: str, path: Path) -> None:
    """Writes the picture; no display is needed and no state of matplotlib is left behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    if not steps or not epochs:
        return
    per_epoch = steps_per_epoch(steps, epochs)
    figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2)
    draw_loss(loss, steps, epochs, per_epoch)
    draw_accuracy(accuracy, epochs)
    draw_rate(rate, steps, per_epoch)
    draw_speed(speed, steps, epochs, per_epoch)
    begin = (steps[0]["step"] - 1) / per_epoch
    for axes in (loss, accuracy, rate, speed):
        finish(axes, begin, max(epochs[-1]["epoch"], steps[-1]["step"] / per_epoch), marks(events, per_epoch, begin))
    figure.savefig(path, dpi=130)


def steps_per_epoch(steps: Sequence[Event], epochs: Sequence[Event]) -> float:
    """From the last step of a whole epoch, which a run that continued in the middle of one has too."""
    number = epochs[-1]["epoch"]
    last = max((e["step"] for e in steps if e["epoch"] == number), default=steps[-1]["step"])
    return last / number


def marks(events: Iterable[Event], per_epoch: float, begin: float) -> list[float]:
    """Where the run continued from a checkpoint, in epochs."""
    places = {e["resumed_from"] / per_epoch for e in events if e["event"] == "start" and e.get("resumed_from")}
    return sorted(place for place in places if place > begin)


def averaged(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Neighbouring points averaged to one, where there are more than `most`."""
    size = -(-len(curve[0]) // most)
    if size <= 1:
        return curve
    pieces = [[values[i : i + size] for i in range(0, len(values), size)] for values in curve]
    x, y = ([sum(piece) / len(piece) for piece in values] for values in pieces)
    return x, y


def throughput(steps: Sequence[Event], per_epoch: float) -> Curve:
    """Images per second of steps that know their time in the epoch; averaged over as many as make a legible curve."""
    timed = [
        (one["step"], one["images"], one["seconds"] - before["seconds"])
        for before, one in pairwise(steps)
        if one["step"] == before["step"] + 1 and one["epoch"] == before["epoch"] and "seconds" in before
    ]
    size = max(1, len(timed) // 200)
    pieces = [timed[i : i + size] for i in range(0, len(timed), size)]
    rates = [(piece[-1][0], sum(p[1] for p in piece), sum(p[2] for p in piece)) for piece in pieces]
    good = [(step / per_epoch, images / seconds) for step, images, seconds in rates if seconds > 0]
    return [x for x, _ in good], [y for _, y in good]


def draw_loss(axes: Any, steps: Sequence[Event], epochs: Sequence[Event], per_epoch: float) -> None:
    single = averaged(([e["step"] / per_epoch for e in steps], [e["loss"] for e in steps]))
    axes.plot(*single, color=QUIET, lw=0.8, label="each step")
    by_epoch(axes, epochs, "train_loss", TRAIN, "training")
    by_epoch(axes, epochs, "test_loss", TEST, "held out")
    positive = all(e["loss"] > 0 for e in steps)
    axes.set(ylabel="loss (cross entropy)", yscale="log" if positive else "linear")


def draw_accuracy(axes: Any, epochs: Sequence[Event]) -> None:
    from matplotlib.ticker import PercentFormatter

    if any(e["test_accuracy"] is None for e in epochs):  # there is none of such outputs and targets
        axes.set(ylabel="accuracy (none is defined)")
        return
    best = max(e["test_accuracy"] for e in epochs)
    last = epochs[-1]["test_accuracy"]
    label = f"held out ({last:.2%} at the end" + (f", best {best:.2%})" if best > last else ")")
    by_epoch(axes, epochs, "train_accuracy", TRAIN, "training")
    by_epoch(axes, epochs, "test_accuracy", TEST, label)
    lowest = min(min(e["test_accuracy"], e["train_accuracy"]) for e in epochs)
    axes.set(ylabel="accuracy", ylim=(max(-0.02, min(0.86, lowest - 0.04)), 1.01))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def draw_rate(axes: Any, steps: Sequence[Event], per_epoch: float) -> None:
    curve = averaged(([e["step"] / per_epoch for e in steps], [e["lr"] for e in steps]))
    axes.plot(*curve, color=TRAIN, lw=1.6, label=f"highest {max(e['lr'] for e in steps):.3g}")
    axes.set(ylabel="learning rate", ylim=(0, max(curve[1]) * 1.08 or 1))


def draw_speed(axes: Any, steps: Sequence[Event], epochs: Sequence[Event], per_epoch: float) -> None:
    single = throughput(steps, per_epoch)
    if single[0]:
        axes.plot(*single, color=QUIET, lw=0.8, label="steps")
    by_epoch(axes, epochs, "images_per_second", TRAIN, "each epoch")
    highest = max([e["images_per_second"] for e in epochs] + sorted(single[1])[: -len(single[1]) // 50 or None])
    axes.set(ylabel="images/s", ylim=(0, highest * 1.15))


def by_epoch(axes: Any, epochs: Sequence[Event], name: str, colour: str, label: str) -> None:
    marker = {"marker": "o", "ms": 4} if len(epochs) <= 60 else {}
    axes.plot([e["epoch"] for e in epochs], [e[name] for e in epochs], color=colour, lw=2, label=label, **marker)


def finish(axes: Any, begin: float, end: float, resumed: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, place in enumerate(resumed):
        label = "continued" if number == 0 and axes.get_ylabel().startswith("loss") else None
        axes.axvline(place, color=MARK, lw=1, ls=(0, (4, 3)), label=label, zorder=0)
    axes.set_xlabel("epoch")
    axes.set_xlim(begin, end + 0.02 * (end - begin))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
