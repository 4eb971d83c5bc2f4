"""Where a run's figures go besides metrics.jsonl, while it runs: --loggers tensorboard, mlflow, wandb, or one's own.

Each logger has a thread of its own, so that no step waits for a network or a disk. One that raises is given up with one
warning, and one that hangs is left behind at the end: neither ends or slows the training. Rank 0 only.

A thread begins when epoch 1 has ended, after START_DELAY_SECONDS, or at the end of the run, whatever comes first: to
import TensorBoard's writer takes a third of a second, other packages take longer. Until then figures wait in a queue.
"""

import importlib.util
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from train import own_parts
from train.reporting.eventfiles import Point, TensorBoard
from train.reporting.trackers import Mlflow, Wandb
from train.settings import SettingsError, loggers_of

START_DELAY_SECONDS = 20.0
LONGEST_END_SECONDS = 60.0  # that the end of a run waits for its loggers
LONGEST_STOP_SECONDS = 5.0  # the same after a stop or a failure, when there may be little time
MOST_WAITING = 100_000  # points; of a logger that is slower than the training, what comes then is dropped

Event = dict[str, Any]

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
        "test_top5": "accuracy/held_out_top5",
        "images_per_second": "speed/images_per_second",
        "data_wait": "speed/waiting_for_data",
        "comm": "speed/communication",
    },
}


class Logger(Protocol):
    """All calls come from one thread, in this order. What they raise ends the logger, not the run."""

    def begin(self, settings: Mapping[str, Any], name: str) -> None:
        """settings: as in settings.json; name: the run's id. A run that is started again has the same one."""

    def log(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Figures after an optimizer step, by the names of CURVES; when: they were known, in unix seconds."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """result: as in result.json; None after a stop or a failure."""


def check(names: str) -> None:
    """Raises SettingsError where a logger of --loggers cannot be had."""
    for name in loggers_of(names):
        if ":" in name:
            own_parts.load("--loggers", name)
        elif name in ("mlflow", "wandb") and importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"--loggers {name}: the package {name} is not installed here: add it to the project's "
                f"requirements.txt, or leave {name} out of --loggers"
            )


class Background:
    """A logger and its thread."""

    def __init__(self, name: str, make: Callable[[], Logger], settings: Mapping[str, Any], run: str) -> None:
        self.name, self.make, self.settings, self.run = name, make, settings, run
        self.points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self.wanted = threading.Event()  # the thread is to begin
        self.result: Mapping[str, Any] | None = None
        self.complained = False
        self.thread = threading.Thread(target=self._work, daemon=True, name=name)
        self.thread.start()

    def add(self, point: Point) -> None:
        if not self.thread.is_alive():
            return
        if self.points.qsize() < MOST_WAITING:
            self.points.put(point)
        else:
            self.complain(f"it is slower than the training: it lacks figures after step {point[1]}")

    def close(self, result: Mapping[str, Any] | None) -> None:
        """Asks for the end; `join` waits for it."""
        self.result = result
        self.points.put(None)
        self.wanted.set()

    def join(self, seconds: float) -> None:
        self.thread.join(seconds)
        if self.thread.is_alive():
            self.complain("it does not end: the run goes on without it, and its last figures may be missing there")

    def complain(self, what: str) -> None:
        """Once."""
        if not self.complained:
            self.complained = True
            print(f"--loggers {self.name}: {what}", file=sys.stderr, flush=True)

    def _work(self) -> None:
        self.wanted.wait(START_DELAY_SECONDS)
        try:
            logger = self.make()
            logger.begin(self.settings, self.run)
            while point := self.points.get():
                logger.log(*point)
            logger.end(self.result)
        except Exception as error:  # of any package, a network, a disk
            said = " ".join(str(error).split()) or type(error).__name__
            self.complain(f"it ends here ({said}); the training goes on, and metrics.jsonl has all figures")


class Loggers:
    """The loggers that --loggers names, for a run whose events so far are `before`."""

    def __init__(
        self, names: str, folder: Path, before: Sequence[Event] = (), settings: Mapping[str, Any] | None = None
    ) -> None:
        self.step = 0
        earlier = [point for event in before if (point := self.point_of(event))]
        known: dict[str, Callable[[], Logger]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard", earlier),
            "mlflow": Mlflow,
            "wandb": Wandb,
        }
        about = {**(settings or {}), "run_dir": str(folder)}
        run = os.environ.get("MUSTER_RUN_ID") or folder.resolve().name
        self.all = [
            Background(name, known.get(name) or own_parts.load("--loggers", name), about, run)
            for name in loggers_of(names)
        ]

    def point_of(self, event: Event) -> Point | None:
        """An event of metrics.jsonl. Epochs are drawn at the step before them."""
        self.step = event.get("step", self.step)
        curves = CURVES.get(event["event"], {})
        values = {curve: event[name] for name, curve in curves.items() if event.get(name) is not None}
        return (values, self.step, event["time"]) if values else None

    def add(self, event: Event) -> None:
        if point := self.point_of(event):
            for logger in self.all:
                logger.add(point)
        if event["event"] == "epoch":
            for logger in self.all:
                logger.wanted.set()

    def close(self, result: Mapping[str, Any] | None) -> None:
        """result: None where the run did not come to its end."""
        for logger in self.all:
            logger.close(result)
        until = time.monotonic() + (LONGEST_STOP_SECONDS if result is None else LONGEST_END_SECONDS)
        for logger in self.all:
            logger.join(max(0.0, until - time.monotonic()))
