"""TensorBoard's event files: the numbers of metrics.jsonl as curves over the optimizer steps.

Importing the writer takes a third of a second, so a thread does it while the training runs: at the end of epoch 1,
after IMPORT_DELAY_SECONDS, or at the end of the run, whatever comes first. Until then numbers wait in a queue.
"""

import queue
import sys
import threading
from pathlib import Path
from typing import Any

IMPORT_DELAY_SECONDS = 20.0
LONGEST_CLOSE_SECONDS = 60.0  # that the end of a run waits for the disk

#: event -> field -> curve
CURVES = {
    "step": {"loss": "step/loss", "lr": "step/learning_rate", "accuracy": "step/accuracy"},
    "epoch": {
        "train_loss": "loss/training",
        "test_loss": "loss/held_out",
        "train_accuracy": "accuracy/training",
        "test_accuracy": "accuracy/held_out",
        "images_per_second": "speed/images_per_second",
        "data_wait": "speed/waiting_for_data",
        "comm": "speed/communication",
    },
}

Point = tuple[str, float, int, float]  # curve, value, optimizer step, unix seconds


class EventFiles:
    """Writes to `folder`. After a resumption at optimizer step `after`, TensorBoard hides the later steps of before."""

    def __init__(self, folder: Path, after: int = 0) -> None:
        self.folder, self.after = folder, after
        self.step = after
        self.points: queue.SimpleQueue[list[Point] | None] = queue.SimpleQueue()
        self.wanted = threading.Event()  # the writer is
        self.thread = threading.Thread(target=self._write, daemon=True, name="tensorboard")
        self.thread.start()

    def has_history(self) -> bool:
        """Whether an earlier start of this run has left event files here."""
        return self.folder.is_dir() and any(self.folder.glob("events.out.tfevents.*"))

    def add(self, event: dict[str, Any]) -> None:
        """An event of metrics.jsonl. Epochs are drawn at the step before them."""
        self.step = event.get("step", self.step)
        curves = CURVES.get(event["event"], {})
        values = [(curve, event[name]) for name, curve in curves.items() if event.get(name) is not None]
        if values:
            self.points.put([(curve, value, self.step, event["time"]) for curve, value in values])
        if event["event"] == "epoch":
            self.wanted.set()

    def close(self) -> None:
        self.points.put(None)
        self.wanted.set()
        self.thread.join(LONGEST_CLOSE_SECONDS)

    def _write(self) -> None:
        self.wanted.wait(IMPORT_DELAY_SECONDS)
        try:
            self._write_all()
        except (ImportError, OSError) as error:
            print(f"TensorBoard's files end here ({error}): fix this, or give --no-tensorboard", file=sys.stderr)

    def _write_all(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # It flushes by itself, every two minutes.
        with SummaryWriter(str(self.folder), purge_step=self.after + 1 if self.after else None) as writer:
            while points := self.points.get():
                for curve, value, step, when in points:
                    writer.add_scalar(curve, value, step, when)
