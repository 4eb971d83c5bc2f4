"""What a run leaves for others to read as it goes: metrics.jsonl, and what loggers make of the same. On
rank 0 and, under a keeper, on one rank of each host; loggers on rank 0 alone.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from train.reporting.loggers import Event, Loggers
from train.start.memory import most_taken
from train.whole_files import write_file

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Writes metrics.jsonl: one JSON object per line, {"event", "time": unix seconds, ...}, flushed line by
    line, and gives the same to the run's loggers.

    Events, the optional fields in brackets:
    start {"world_size", "device", "host": whose clock "time" is of, or null, "resumed_from": step or null,
    "versions": {name: version}, "notes", all settings};
    step {"epoch", "step", "loss", "lr", "images", "accuracy": or null, where there is none of such a loss and such
    targets, "grad_norm": of the whole batch's gradient before clipping, null where fp16 overflowed and the step was
    skipped, "seconds": of this epoch so far, ["computing",
    "waiting": lists by rank, in seconds: the mean of the steps that it has timed since the last such event, null where
    it has timed none: what it computed, and what it then waited for the others and the network. After each of the
    first ten steps, then after each hundredth (work.py)]};
    epoch {"epoch", "step", "train_loss", "train_accuracy", "test_accuracy", "test_top5": of more than five classes,
    "test_loss", "images_per_second", "seconds": of training, "data_wait", "comm": parts of that time, 0 to 1}; null
    where there is no such figure: those of the test in an epoch that was not evaluated, accuracies as in a step;
    checkpoint {"step", "seconds": that the training waited for it};
    bad_samples {"step", "samples": {name: why} of those found since the last such event, which were left out};
    end {as result.json}.

    A run that continues after optimizer step `after` keeps the events up to that step and drops the rest, so
    that a curve has each step once; `epochs`, if given: of these only the first so many epochs. These events are in
    `folder`, or in `earlier`, the folder of the run that is continued; or they are `given`, by a rank that knows more.
    With `after` 0 the file begins empty.
    """

    def __init__(
        self,
        folder: Path,
        after: int = 0,
        earlier: Path | None = None,
        loggers: str = "none",
        given: list[Event] | None = None,
        epochs: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """loggers: as in --loggers; settings: what they learn of the run. Raises OSError."""
        path = folder / METRICS_FILE
        self.before = events_before(folder, after, earlier, epochs) if given is None else given
        write_file(path, "".join(line_of(event) for event in self.before).encode())
        self.file = path.open("a", encoding="utf-8", buffering=1)
        self.loggers = Loggers(loggers, folder, self.before, settings)
        self.result: dict[str, Any] | None = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self.loggers.close(self.result)

    def write(self, event: str, **values: Any) -> None:
        entry = {"event": event, "time": time.time(), **values}
        self.file.write(line_of(entry))
        self.loggers.add(entry)
        if event == "end":
            self.result = values


def line_of(event: Event) -> str:
    return json.dumps(event) + "\n"


def events_before(folder: Path, after: int, earlier: Path | None = None, epochs: int | None = None) -> list[Event]:
    """What a folder, or the one of the run that is continued, has up to optimizer step `after`."""
    return kept(known_events(folder, earlier), after, epochs) if after else []


def known_events(folder: Path, earlier: Path | None) -> list[Event]:
    """Of the first folder that has any."""
    for path in (folder / METRICS_FILE, *([earlier / METRICS_FILE] if earlier else [])):
        if path.is_file() and (events := read_metrics(path)):
            return events
    return []


def kept(events: list[Event], after: int, epochs: int | None = None) -> list[Event]:
    """The events up to optimizer step `after`. An epoch belongs to the step before it; an end is no end any more.

    epochs: how many had ended there, with their evaluation. The steps of another one may all be made.
    """
    found: list[Event] = []
    step = 0
    for event in events:
        if event["event"] == "start":
            step = event.get("resumed_from") or 0
        step = event.get("step", step)
        is_later = event["event"] == "epoch" and epochs is not None and event["epoch"] > epochs
        if event["event"] != "end" and step <= after and not is_later:
            found.append(event)
    return found


def read_metrics(path: Path) -> list[Event]:
    """All whole lines of a metrics.jsonl; the last one may be torn while a run writes it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """The most memory that this process had at once, in bytes: resident, and tensors on its GPU."""
    on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"peak_rss_bytes": most_taken(), "peak_gpu_bytes": on_gpu}
