"""Run by the tests of this folder: a rank of the trainer that leaves what it saw, and that may have a fault.

    python -m tests.gpu.rank OUT [case ...] -- the trainer's arguments

OUT/seen-<rank>.json: {"backend", "device", "graphs": how many torch.compile had made after each epoch}. Cases:

tiny               a small network for images of 8 pixels, with what may go wrong: batch statistics, dropout
crash=STEP         os._exit in the optimizer step of this number, counted from 1
raise=STEP:RANK    a ValueError on that rank; OUT/fault holds the time
memory=STEP:RANK   more memory is asked for than any device has; OUT/fault as well
curves             curves.png is drawn at the end, which takes longer than the training
without=NAME,...   these modules cannot be imported, as where they are not installed
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

CRASH = 9


class WithoutSome(MetaPathFinder):
    """Finds modules as Python does, but for those of these names."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if name.split(".")[0] in self.names else PathFinder.find_spec(name, path, target)


def tiny() -> Any:
    from torch import Tensor, manual_seed, nn

    class Tiny(nn.Module):  # a Sequential alone would not be compiled: torch leaves out what lies in its own files
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
            self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8 * 16, 16), nn.ReLU(), nn.Linear(16, 10))

        def forward(self, images: Tensor) -> Tensor:
            answer: Tensor = self.head(self.features(images).relu().flatten(1))
            return answer

    manual_seed(7)
    return Tiny()


def in_step(number: int, fault: Any) -> None:
    """Have `fault` called, with the rank's session, in the optimizer step of this number."""
    from train import trainer

    made = trainer.Training.step

    def step(training: Any, *arguments: Any) -> None:
        if training.session.position.step + 1 == number:
            fault(training.session)
        made(training, *arguments)

    mock.patch.object(trainer.Training, "step", step).start()


def wrong(out: Path, kind: str, rank: int) -> Any:
    def fault(session: Any) -> None:
        import torch

        if session.place.rank != rank:
            return
        (out / "fault").write_text(str(time.time()))
        if kind == "memory":
            torch.empty(1 << 55, dtype=torch.uint8, device=session.device)
        raise ValueError("a fault in the third step")

    return fault


def watch(out: Path) -> None:
    """Have OUT/seen-<rank>.json written after each epoch."""
    from torch._dynamo.utils import counters
    from torch.distributed import distributed_c10d

    from train import trainer

    made, graphs = trainer.Training.end_epoch, list[int]()

    def end_epoch(training: Any) -> Any:
        score = made(training)
        graphs.append(counters["stats"]["unique_graphs"])
        seen = {"backend": distributed_c10d.get_backend_config(), "device": str(training.session.device)}
        path = out / f"seen-{training.session.place.rank}.json"
        path.write_text(json.dumps({**seen, "graphs": graphs}))
        return score

    mock.patch.object(trainer.Training, "end_epoch", end_epoch).start()


def main() -> None:
    split = sys.argv.index("--")
    out, cases, arguments = Path(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
    given = dict(case.partition("=")[::2] for case in cases)
    if "without" in given:
        finder: Any = PathFinder
        sys.meta_path[sys.meta_path.index(finder)] = WithoutSome(given["without"].split(","))
    if "tiny" in given:
        from train import run

        mock.patch.object(run, "build_model", lambda *_: tiny()).start()
    if not {"curves", "without"} & set(given):
        from train.reporting import picture

        mock.patch.object(picture, "draw").start()
    if "crash" in given:
        in_step(int(given["crash"]), lambda session: os._exit(CRASH))
    for kind in ("raise", "memory"):
        if kind in given:
            step, rank = map(int, given[kind].split(":"))
            in_step(step, wrong(out, kind, rank))
    watch(out)
    sys.argv = ["train", *arguments]
    runpy.run_module("train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
