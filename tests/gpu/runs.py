"""Starts trainings for the tests of this folder, each in a process of its own, and reads what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.conftest import ROOT
from train.checkpoints import load
from train.start.group import SHARED_GPUS, VARIABLES

GUARD_SECONDS = 400  # no promise: what hangs fails the test
# 515 images in batches of 130: the last of an epoch's four is short.
DATA = ("--dataset", "fake", "--batch-size", "130", "--loggers", "none")
STEPS = 4  # of an epoch


@dataclass(frozen=True)
class Ended:
    status: int
    said: str  # stdout and stderr
    folder: Path  # of the run

    def document(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def losses(self) -> list[float]:
        """Of the steps."""
        return [event["loss"] for event in self.events("step")]

    def state(self, step: int) -> Any:
        """A checkpoint."""
        return load(self.folder / "checkpoints", step)


def environment(device: torch.device, **more: str) -> dict[str, str]:
    """Of a run on this device."""
    ours = {name for names in VARIABLES for name in names}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("MUSTER_")}
    hidden = {} if device.type == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    return kept | hidden | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)} | more


def command(folder: Path, *words: str, cases: tuple[str, ...]) -> list[str]:
    """Of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    epochs = () if "--epochs" in words else ("--epochs", "2")
    size = ("--image-size", "8") if "tiny" in cases else ()
    return ["tests.gpu.rank", str(folder), *cases, "--", *DATA, *epochs, *size, "--run-dir", str(folder), *words]


def start(device: torch.device, folder: Path, words: list[str], **more: str) -> Ended:
    """`python -m words`. GUARD_SECONDS later it is killed, and the test fails."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment(device, **more), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=GUARD_SECONDS, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, folder)


def train(device: torch.device, folder: Path, *words: str, cases: tuple[str, ...] = ("tiny",)) -> Ended:
    """The trainer, alone, with these arguments."""
    return start(device, folder, command(folder, *words, cases=cases))


def under_the_agent(
    device: torch.device, folder: Path, ranks: int, *words: str, cases: tuple[str, ...] = ("tiny",)
) -> Ended:
    """So many ranks under torchrun. They share the GPU, which gloo allows."""
    agent = ["train.start.agent", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    agent += [f"--log-dir={folder / 'logs'}", "--tee=3", "-m"]
    more = {"MUSTER_RUN_DIR": str(folder), "MUSTER_HOST": "h7", SHARED_GPUS: "1"}
    backend = ("--backend", "gloo") if ranks > 1 else ()
    return start(device, folder, [*agent, *command(folder, *words, *backend, cases=cases)], **more)
