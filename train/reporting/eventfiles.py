"""TensorBoard's event files: the numbers of metrics.jsonl as curves over the optimizer steps.

Importing the writer takes a third of a second, so a thread does it while the training runs: at the end of epoch 1,
after IMPORT_DELAY_SECONDS, or at the end of the run, whatever comes first. Until then numbers wait in a queue.
"""

import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

IMPORT_DELAY_SECONDS = 20.0
LONGEST_CLOSE_SECONDS = 60.0  # that the end of a run waits for the disk

#: event -> field -> curve
CURVES = {
    "step": {
        "loss": "step/loss",
        "lr": "step/learning_rate",
        "accuracy": "step/accuracy",
        "grad_norm": "step/gradient_norm",
    },
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

Event = dict[str, Any]
Point = tuple[dict[str, float], int, float]  # curve -> value, optimizer step, unix seconds


class EventFiles:
    """Writes to `folder` the events of `before`, then what is added. What an earlier start has left there goes: it may
    lack the last minutes before its process was killed, or have steps that were made again.
    """

    def __init__(self, folder: Path, before: Sequence[Event] = ()) -> None:
        self.folder = folder
        self.step = 0
        self.before = [point for event in before if (point := self.point_of(event))]
        self.points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self.wanted = threading.Event()  # the writer is
        self.thread = threading.Thread(target=self._write, daemon=True, name="tensorboard")
        self.thread.start()

    def point_of(self, event: Event) -> Point | None:
        """An event of metrics.jsonl. Epochs are drawn at the step before them."""
        self.step = event.get("step", self.step)
        curves = CURVES.get(event["event"], {})
        values = {curve: event[name] for name, curve in curves.items() if event.get(name) is not None}
        return (values, self.step, event["time"]) if values else None

    def add(self, event: Event) -> None:
        if point := self.point_of(event):
            self.points.put(point)
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

        old = list(self.folder.glob("events.out.tfevents.*"))
        # A TensorBoard that shows the old ones forgets their steps. The writer flushes by itself, every two minutes; it
        # is a thread, and the two of them waiting for each other, as they do at a queue of ten, takes twice as long.
        with SummaryWriter(str(self.folder), max_queue=0, purge_step=1 if old else None) as writer:
            for point in self.before:
                write_point(writer.file_writer, point)
            writer.flush()
            for path in old:
                path.unlink()
            while added := self.points.get():
                write_point(writer.file_writer, added)


def write_point(writer: "FileWriter", point: Point) -> None:
    """All curves of a step at once: three times as fast as add_scalar for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    values, step, when = point
    summary = Summary(value=[Summary.Value(tag=curve, simple_value=value) for curve, value in values.items()])
    writer.add_summary(summary, step, when)
