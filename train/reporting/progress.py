"""The progress of a run: a bar on a terminal, else plain lines, which torchrun's --tee and SSH pass on.
Rank 0 only.
"""

import sys
import time
from contextlib import suppress
from typing import Any

LINE_SECONDS = 2.0  # between plain lines within an epoch, at least


class Progress:
    """Plain lines: one every LINE_SECONDS at most, and one for each epoch."""

    def __init__(self, epochs: int, steps: int) -> None:
        """steps: of all epochs, also where a run continues in the middle."""
        self.epochs, self.steps = epochs, steps
        self.spoke = time.monotonic()
        self.first: tuple[int, float] | None = None  # the first step seen, and when

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.spoke = time.monotonic()

    def step(
        self,
        epoch: int,
        step: int,
        loss: float,
        images_per_second: float,
        accuracy: float | None = None,
        data_wait: float | None = None,
        comm: float | None = None,
    ) -> None:
        """After optimizer step `step` of `epoch`, both counted from 1. accuracy: of this epoch so far; data_wait, comm:
        parts of the time, 0 to 1; None where not known."""
        left = self.time_left(step)
        self.show(epoch, step, step_text(loss, images_per_second, accuracy, data_wait, comm, left))

    def show(self, epoch: int, step: int, figures: str) -> None:
        """The figures of a step, as step_text writes them."""
        if time.monotonic() - self.spoke >= LINE_SECONDS:
            self.say(f"epoch {epoch}/{self.epochs}  step {step}/{self.steps}  {figures}")

    def time_left(self, step: int) -> float | None:
        """Seconds until the last step at the pace since the first one seen, evaluations included."""
        if self.first is None:
            self.first = (step, time.monotonic())
        begun, when = self.first
        return (time.monotonic() - when) / (step - begun) * (self.steps - step) if step > begun else None

    def epoch(self, values: dict[str, Any]) -> None:
        self.say(epoch_text(values, self.epochs))

    def close(self) -> None:
        pass


class Bar(Progress):
    """The same on a terminal, with a bar below the epochs' lines."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__(epochs, steps)
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[text]}"),
            transient=True,
        )
        self.task = self.bar.add_task("training", total=steps, epoch=f"1/{epochs}", text="")
        self.bar.start()

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False)

    def show(self, epoch: int, step: int, figures: str) -> None:
        self.bar.update(self.task, completed=step, epoch=f"{epoch}/{self.epochs}", text=figures)

    def close(self) -> None:
        self.bar.stop()


def step_text(
    loss: float,
    images_per_second: float,
    accuracy: float | None = None,
    data_wait: float | None = None,
    comm: float | None = None,
    left: float | None = None,
) -> str:
    parts = [
        f"loss {loss:.4f}",
        "" if accuracy is None else f"train {accuracy:.1%}",
        f"{images_per_second:.0f} images/s",
        "" if data_wait is None else f"data {data_wait:.0%}",
        "" if comm is None else f"comm {comm:.0%}",
        "" if left is None else f"ETA {duration(left)}",
    ]
    return "  ".join(filter(None, parts))


def duration(seconds: float) -> str:
    """0:07, 12:30, 3:05:00"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(part: float) -> str:
    return f"{part:.2%}"


def epoch_text(values: dict[str, Any], epochs: int) -> str:
    """values: as in an epoch's event. What is not known is left out; the held-out loss stands in for an accuracy."""
    test, loss = values["test_accuracy"], values["test_loss"]
    parts = [
        f"epoch {values['epoch']}/{epochs}",
        f"loss {values['train_loss']:.4f}",
        "" if values["train_accuracy"] is None else f"train {percent(values['train_accuracy'])}",
        f"test {percent(test)}" if test is not None else "" if loss is None else f"test loss {loss:.4f}",
        "" if values.get("test_top5") is None else f"top-5 {percent(values['test_top5'])}",
        f"{values['images_per_second']:.0f} images/s",
        f"{values['seconds']:.1f} s",
    ]
    return "  ".join(filter(None, parts))


def progress_for(epochs: int, steps: int) -> Progress:
    """A bar on a terminal, where rich is installed; else plain lines."""
    with suppress(ModuleNotFoundError):
        if sys.stdout.isatty():
            return Bar(epochs, steps)
    return Progress(epochs, steps)
