"""What a run leaves for others to read: metrics.jsonl as it goes, result.json and curves.png at its end. Rank
0 only.
"""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class Metrics:
    """Writes metrics.jsonl: one JSON object per line, {"event", "time": unix seconds, ...}, flushed line by
    line.

    Events: start; step {"epoch", "step", "loss", "lr", "images"}; epoch {"epoch", "train_loss",
    "train_accuracy", "test_accuracy", "test_loss", "images_per_second", "seconds"}; end.
    """

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "metrics.jsonl").open("w", encoding="utf-8", buffering=1)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def write(self, event: str, **values: Any) -> None:
        self.file.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl; the last one may be torn while a run writes it."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes the file whole or not at all, readable to all."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    draft.replace(path)
