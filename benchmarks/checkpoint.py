"""`make bench-checkpoint`: training time that a checkpoint costs, in the background against a blocking torch.save.

ResNet-50 with SGD and momentum (205 MB) trains on small images on the CPU. There are three kinds of rounds: some steps
without a checkpoint; the same steps with a checkpoint by train.checkpoints.Writer after the first step; and the same
steps with a plain `torch.save(state, path)` over the previous file (no sync, no hash, as tutorials write it). The order
of the kinds changes from turn to turn. Between the rounds, uncounted, the disk gets what a plain torch.save has left to
the kernel, so that no round pays for another one. A round is long enough for the background to end before the next
checkpoint, and the time that it takes from the steps beside it counts. The time that a checkpoint costs is the round
with it minus the round without it, as the median of all turns. One process finds another cost than the next one does,
so several measure and the median of their figures counts; `async_ms_each` has all of them. `spread_ms` is the
interquartile range of the rounds without a checkpoint: it says how quiet the machine was. Many short rounds find a
small cost sooner than few long ones.

There are two figures. `async_over_blocking` is measured with one training thread, which leaves a core to the
background, as GPU training does; `all_cores_async_over_blocking` with one thread for each core, so that the background
takes its time from the training, as in training on the CPU, and takes longer: these rounds are longer, too. Needs 2
cores with nothing else running on them: `load` is the machine's load average before and after. Takes about 9 minutes;
`ARGS="--threads 1"` measures in one process and with one thread alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch.nn import functional

from benchmarks.common import close
from train.checkpoints import Writer
from train.start.memory import keep_freed_memory

Save = Callable[[int, dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """How often and how long is measured."""

    processes: int
    rounds: int  # of each kind in each process
    seconds: float  # of a round; longer than writing a checkpoint takes


CORE_TO_SPARE, ALL_CORES_BUSY = Plan(processes=5, rounds=20, seconds=1.0), Plan(processes=3, rounds=8, seconds=3.0)


def nothing(step: int, state: dict[str, Any]) -> None:
    """Save nothing: the round that the others are compared with."""


class Training:
    """A model in training: its steps, and the state that a checkpoint holds."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.network = torchvision.models.resnet50()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-4, momentum=0.9)
        self.images, self.labels = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))
        self.step_number = 0

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.network(self.images), self.labels).backward()
        self.optimizer.step()
        self.step_number += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": {"epoch": 0, "batch": self.step_number, "step": self.step_number},
        }

    def round(self, steps: int, save: Save) -> tuple[float, float]:
        """Seconds of all steps with one checkpoint, and seconds of the call that saves it."""
        begun = time.perf_counter()
        self.step()
        called = time.perf_counter()
        save(self.step_number, self.state())
        returned = time.perf_counter()
        for _ in range(steps - 1):
            self.step()
        return time.perf_counter() - begun, returned - called


def measure(threads: int, plan: Plan, folder: Path) -> dict[str, float]:
    """Milliseconds that one checkpoint of each kind costs, that the call takes, and that a step takes."""
    training = Training(threads)
    for _ in range(3):
        training.step()
    writer = Writer(folder / "ours")
    writer.guard(training.optimizer)
    writer.reserve(training.state())
    writer.wait()
    path = folder / "plain.pt"
    kinds: dict[str, Save] = {
        "none": nothing,
        "async": lambda step, state: writer.save(step, state, None),
        "blocking": lambda step, state: torch.save(state, path),
    }
    steps = max(2, round(plan.seconds * 8 / training.round(8, nothing)[0]))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    calls: dict[str, list[float]] = {kind: [] for kind in kinds}
    longest_wait = 0.0
    for turn in range(plan.rounds + 1):
        for kind in list(kinds)[turn % 3 :] + list(kinds)[: turn % 3]:
            whole, call = training.round(steps, kinds[kind])
            begun = time.perf_counter()
            writer.wait()  # takes no time if the round was long enough
            waited = time.perf_counter() - begun
            os.sync()
            if turn:  # the first turn is the warm-up
                times[kind].append(whole + waited)
                calls[kind].append(call)
                longest_wait = max(longest_wait, waited)
    writer.close()
    low, base, high = statistics.quantiles(times["none"], n=4)
    figures = {"step_ms": base / steps * 1e3, "spread_ms": (high - low) * 1e3, "longest_wait_ms": longest_wait * 1e3}
    for kind in ("async", "blocking"):
        differences = [with_it - without for with_it, without in zip(times[kind], times["none"], strict=True)]
        figures[f"{kind}_ms"] = statistics.median(differences) * 1e3
        figures[f"{kind}_call_ms"] = statistics.median(calls[kind]) * 1e3
    return {name: round(value, 1) for name, value in figures.items()}


def in_processes(threads: int, plan: Plan, folder: Path) -> dict[str, Any]:
    """Medians of what `measure` finds in new interpreters, and what each has found of the checkpoint's cost.

    New, because libraries read the number of threads when they are loaded."""
    words = ["--threads", str(threads), "--rounds", str(plan.rounds), "--seconds", str(plan.seconds)]
    found = list[dict[str, float]]()
    for _ in range(plan.processes):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.checkpoint", *words, "--folder", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"benchmark: the training with {threads} thread(s) ended with {done.returncode}")
        print(f"{threads} training thread(s): {done.stdout.strip()}", flush=True)
        found.append(json.loads(done.stdout))
    medians = {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}
    return medians | {"async_ms_each": [one["async_ms"] for one in found]}


def main() -> None:
    """Measure with one training thread, then with one for each core, and print the ratios."""
    p = argparse.ArgumentParser(description="time that a checkpoint costs the training")
    p.add_argument("--rounds", type=int, help="of each kind in each process (default: 20, and 8 with all cores busy)")
    p.add_argument("--seconds", type=float, help="of a round (default: 1, and 3 with all cores busy)")
    p.add_argument("--threads", type=int, default=0, help="measure only this many training threads")
    p.add_argument("--folder", type=Path, default=Path("build"), help="a folder on the disk that is measured")
    options = p.parse_args()
    given = {name: value for name in ("rounds", "seconds") if (value := getattr(options, name)) is not None}
    spare, busy = (dataclasses.replace(plan, **given) for plan in (CORE_TO_SPARE, ALL_CORES_BUSY))
    options.folder.mkdir(exist_ok=True)
    if options.threads:
        keep_freed_memory()
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
            print(json.dumps(measure(options.threads, spare, Path(folder))))
        return
    cores, before = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    one = in_processes(1, spare, options.folder)
    every = in_processes(cores, busy, options.folder)
    close(
        {
            "async_over_blocking": round(one["async_ms"] / one["blocking_ms"], 3),
            "async_ms": one["async_ms"],
            "async_ms_each": one["async_ms_each"],
            "blocking_ms": one["blocking_ms"],
            "async_call_ms": one["async_call_ms"],
            "spread_ms": one["spread_ms"],
            "all_cores_async_over_blocking": round(every["async_ms"] / every["blocking_ms"], 3),
            "all_cores_async_ms": every["async_ms"],
            "all_cores_async_ms_each": every["async_ms_each"],
            "all_cores_blocking_ms": every["blocking_ms"],
            "all_cores_spread_ms": every["spread_ms"],
            "load": [round(before, 2), round(os.getloadavg()[0], 2)],
            "cores": cores,
            "reference": "torch.save(state, path) of ResNet-50 + SGD momentum, 205 MB, neither synced nor hashed",
        }
    )


if __name__ == "__main__":
    main()
