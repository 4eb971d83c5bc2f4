"""curves.png: loss and accuracy over a run, drawn from the events of metrics.jsonl. Imports matplotlib when
called.
"""

from pathlib import Path
from typing import Any

Event = dict[str, Any]

TRAIN, TEST, QUIET = "#2a6fbb", "#d1495b", "#9fb8d4"


def draw(events: list[Event], title: str, path: Path) -> None:
    """Writes the picture; no display is needed and no state of matplotlib is left behind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    steps = [e for e in events if e["event"] == "step"]
    epochs = [e for e in events if e["event"] == "epoch"]
    if not steps or not epochs:
        return
    per_epoch = len(steps) / len(epochs)
    number = [e["epoch"] for e in epochs]
    last = f"held out ({epochs[-1]['test_accuracy']:.2%} at the end)"

    figure = Figure(figsize=(11, 4.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    left, right = figure.subplots(1, 2)

    left.plot(
        [e["step"] / per_epoch for e in steps],
        [e["loss"] for e in steps],
        color=QUIET,
        lw=0.8,
        label="each step",
    )
    left.plot(number, [e["train_loss"] for e in epochs], color=TRAIN, lw=2, marker="o", ms=4, label="training")
    left.plot(number, [e["test_loss"] for e in epochs], color=TEST, lw=2, marker="o", ms=4, label="held out")
    left.set(ylabel="loss (cross entropy)", yscale="log")

    right.plot(number, [e["train_accuracy"] for e in epochs], color=TRAIN, lw=2, marker="o", ms=4, label="training")
    right.plot(number, [e["test_accuracy"] for e in epochs], color=TEST, lw=2, marker="o", ms=4, label=last)
    right.set(ylabel="accuracy", ylim=(min(0.5, *(e["test_accuracy"] for e in epochs)) - 0.02, 1.01))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.set_xlim(0, number[-1] * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=130)
