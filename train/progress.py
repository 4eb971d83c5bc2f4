"""What a person sees of a run: a bar on a terminal, else plain lines that survive torchrun's --tee and SSH.
Rank 0 only.
"""

import sys
import time
from typing import Any

PAUSE = 2.0  # seconds between plain lines within an epoch


class Progress:
    """Plain lines: one every PAUSE seconds at most, and one for each epoch."""

    def __init__(self, epochs: int, steps: int) -> None:
        self.epochs, self.steps = epochs, steps
        self.spoke = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.spoke = time.monotonic()

    def step(self, epoch: int, step: int, loss: float, images_per_second: float) -> None:
        if time.monotonic() - self.spoke >= PAUSE:
            self.say(step_text(epoch, self.epochs, step, self.steps, loss, images_per_second))

    def epoch(self, values: dict[str, Any]) -> None:
        self.say(epoch_text(values, self.epochs))

    def close(self) -> None:
        pass


class Bar(Progress):
    """The same on a terminal, with a bar below the epochs' lines."""

    def __init__(self, epochs: int, steps: int) -> None:
        super().__init__(epochs, steps)
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            transient=True,
        )
        self.task = self.bar.add_task("training", total=steps, text="")
        self.bar.start()

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False)

    def step(self, epoch: int, step: int, loss: float, images_per_second: float) -> None:
        text = step_text(epoch, self.epochs, step, self.steps, loss, images_per_second)
        self.bar.update(self.task, completed=step, text=text)

    def close(self) -> None:
        self.bar.stop()


def step_text(epoch: int, epochs: int, step: int, steps: int, loss: float, images_per_second: float) -> str:
    return f"epoch {epoch}/{epochs}  step {step}/{steps}  loss {loss:.4f}  {images_per_second:.0f} images/s"


def epoch_text(values: dict[str, Any], epochs: int) -> str:
    return (
        f"epoch {values['epoch']}/{epochs}  loss {values['train_loss']:.4f}  "
        f"train {values['train_accuracy']:.2%}  test {values['test_accuracy']:.2%}  "
        f"{values['images_per_second']:.0f} images/s  {values['seconds']:.1f} s"
    )


def progress_for(epochs: int, steps: int) -> Progress:
    return (Bar if sys.stdout.isatty() else Progress)(epochs, steps)
