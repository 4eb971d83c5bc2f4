"""curves.png: loss, accuracy, learning rate and throughput over a run, drawn from the events of metrics.jsonl.

Imports matplotlib when called. A run that continued from a checkpoint has a mark there; a curve begins where the
events begin.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Event = dict[str, Any]
Curve = tuple[list[float], list[float]]

TRAIN, TEST, QUIET, MARK = "#2a6fbb", "#d1495b", "#9fb8d4", "#8a8a8a"
LOG_FROM = 20  # times from the smallest to the largest value: more are legible on a logarithmic axis alone
MOST_POINTS = 1500  # of a curve of single steps: more are averaged, as no pixel could show them


def draw(events: list[Event], title: str, path: Path) -> None:
    """Writes the picture, where there is a whole epoch to show."""
    figure = figure_of(events, title)
    if figure is not None:
        figure.savefig(path, dpi=130)


def figure_of(events: list[Event], title: str) -> "Figure | None":
    """The picture; no display is needed and no state of matplotlib is left behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    if not steps or not epochs:
        return None
    per_epoch = steps_per_epoch(steps, epochs)
    figure = Figure(figsize=(11, 7.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    (loss, accuracy), (rate, speed) = figure.subplots(2, 2)
    drawn = [loss, accuracy, rate, speed]
    draw_loss(loss, steps, epochs, per_epoch)
    if any(e["train_accuracy"] is not None for e in epochs):
        draw_accuracy(accuracy, epochs)
    elif any(e.get("grad_norm") is not None for e in steps):
        draw_gradients(accuracy, steps, per_epoch)
    else:
        drawn.remove(accuracy)
        accuracy.remove()
    draw_rate(rate, steps, per_epoch)
    draw_speed(speed, steps, epochs, per_epoch)
    begin = (steps[0]["step"] - 1) / per_epoch
    for axes in drawn:
        finish(axes, begin, max(epochs[-1]["epoch"], steps[-1]["step"] / per_epoch), marks(events, per_epoch, begin))
    return figure


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
    axes.set_ylabel("loss, by image")
    values = [e[name] for e in epochs for name in ("train_loss", "test_loss") if e.get(name) is not None]
    scaled(axes, [*single[1], *values])


def scaled(axes: Any, values: Sequence[float]) -> None:
    """A logarithmic axis where the values differ much; its ticks are plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if min(values) > 0 and max(values) > LOG_FROM * min(values):
        axes.set_yscale("log")
        many = max(values) > 1e4 * min(values)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=20))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_accuracy(axes: Any, epochs: Sequence[Event]) -> None:
    from matplotlib.ticker import PercentFormatter

    tested = [e["test_accuracy"] for e in epochs if e["test_accuracy"] is not None]
    label = "held out"
    if tested:
        label += f" ({tested[-1]:.2%} at the end" + (f", best {max(tested):.2%})" if max(tested) > tested[-1] else ")")
    by_epoch(axes, epochs, "train_accuracy", TRAIN, "training")
    by_epoch(axes, epochs, "test_accuracy", TEST, label)
    lowest = min([*tested, *(e["train_accuracy"] for e in epochs if e["train_accuracy"] is not None)])
    axes.set(ylabel="accuracy", ylim=(max(-0.02, min(0.86, lowest - 0.04)), 1.01))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def draw_gradients(axes: Any, steps: Sequence[Event], per_epoch: float) -> None:
    known = [e for e in steps if e.get("grad_norm") is not None]
    curve = averaged(([e["step"] / per_epoch for e in known], [e["grad_norm"] for e in known]))
    axes.plot(*curve, color=QUIET, lw=0.8, label="each step")
    axes.set_ylabel("norm of the gradient")
    scaled(axes, curve[1])


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
    """Of the epochs that have this figure; nothing is drawn where none has."""
    known = [e for e in epochs if e.get(name) is not None]
    marker = {"marker": "o", "ms": 4} if len(known) <= 60 else {}
    if known:
        axes.plot([e["epoch"] for e in known], [e[name] for e in known], color=colour, lw=2, label=label, **marker)


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
