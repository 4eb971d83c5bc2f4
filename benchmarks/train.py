"""`make bench-train`: the trainer's images/s on two processes, against a plain DDP script and against no input at all.

The plain script is benchmarks/plain_ddp.py. Both get the same model, optimizer, global batch, threads, number of steps
and files (in STL-10's format, written here, because nothing can be downloaded). Both are started with torchrun, as a
user does it. They take turns, TURNS times, every other turn in reverse order. A figure is the median of the turns, a
ratio is the median of the turns' ratios. The first few steps of an epoch do not count, nor do the start of workers,
evaluation and checkpoints. Of several epochs the figure is the median without the first: the trainer keeps the images
that it has resized, and in each new epoch a rank needs about half of the images that it has not had before.

- model_bound_ratio: resnet18 on images of 96 pixels, their own size; the model takes nearly all the time.
- synthetic_share: the trainer in the same case, divided by the trainer with one constant batch (no input at all).
- input_bound_ratio: the trainer against the plain script on images resized to 224, with a network that takes almost no
  time (benchmarks/small_net.py). input_bound_first_epoch_ratio: the same in the epoch in which the trainer resizes.
- small_model_ratio: the same with shufflenet_v2_x0_5, the fastest of torchvision's models at 224. On CPU cores it takes
  several times as long as the plain script's input, so that it limits both; the ratio is what a user gets there.

The trainer also crops its images at random, the plain script only mirrors them. Needs 2 cores with nothing else running
on them: `load` is the machine's load average before and after, of which the benchmark itself causes about 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.common import close

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
TURNS = 3
SKIP = 4  # first steps of an epoch that are not counted
LIMIT_SECONDS = 300
SIZE = 96  # pixels of STL-10's images
CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
Rates = list[float]  # images/s of all ranks, of each epoch


@dataclass(frozen=True)
class Work:
    """A training that both sides do."""

    model: str
    image_size: int
    batch_size: int  # of all ranks together
    steps: int  # of an epoch
    epochs: int

    @property
    def images(self) -> int:
        return self.steps * self.batch_size


OWN = {"small_net": "benchmarks.small_net:small_net"}  # models that are not torchvision's
MODEL_BOUND = Work("resnet18", 96, 64, steps=12, epochs=1)
INPUT_BOUND = Work("small_net", 224, 256, steps=16, epochs=8)
SMALL_MODEL = Work("shufflenet_v2_x0_5", 224, 64, steps=14, epochs=2)
QUICK = tuple(Work(model, 96, 8, steps=SKIP + 2, epochs=2) for model in ("resnet18", "small_net", "shufflenet_v2_x0_5"))


def write_stl10(root: Path, images: int, held_out: int = 8) -> None:
    """Write STL-10's binary files: smooth colours with noise, column by column; labels count from 1."""
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", images), ("test", held_out)):
        coarse = random.integers(0, 200, (count, 3, SIZE // 8, SIZE // 8), np.uint8)
        pixels = coarse.repeat(8, 2).repeat(8, 3) + random.integers(0, 56, (count, 3, SIZE, SIZE), np.uint8)
        pixels.tofile(folder / f"{part}_X.bin")
        (np.arange(count, dtype=np.uint8) % len(CLASSES) + 1).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("\n".join(CLASSES) + "\n")


def torchrun(*words: object) -> str:
    """Run RANKS ranks, which share the cores equally; return what they printed.

    Raises:
        SystemExit: a rank failed.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark: {' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def plain(work: Work, data: Path, *how: str) -> Rates:
    """Rates of benchmarks/plain_ddp.py, or of the command `how`, which takes the same options."""
    printed = torchrun(
        *(how or ["benchmarks/plain_ddp.py"]),
        *("--data-dir", data, "--model", work.model, "--image-size", work.image_size),
        *("--batch-size", work.batch_size, "--epochs", work.epochs, "--skip", SKIP),
    )
    return [float(rate) for rate in re.findall(r"([\d.]+) images/s", printed)]


def trainer(work: Work, data: Path, *how: str) -> Rates:
    """Rates of `-m train`, or of the command `how`, which takes the same options."""
    run_dir = data / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    torchrun(
        *(how or ["-m", "train"]),
        *("--dataset", "stl10", "--data-dir", data, "--model", OWN.get(work.model, work.model)),
        *("--image-size", work.image_size),
        *("--batch-size", work.batch_size, "--epochs", work.epochs, "--run-dir", run_dir, "--resume", "none"),
        *("--optimizer", "sgd", "--lr", "0.01", "--momentum", "0.9", "--weight-decay", "5e-4"),
    )
    return epoch_rates((run_dir / "metrics.jsonl").read_text())


def epoch_rates(metrics: str) -> Rates:
    """Rates from a metrics.jsonl. A step is written when the next one ends, an epoch's last when it ends."""
    events = [event for event in map(json.loads, metrics.splitlines()) if event["event"] == "step"]
    rates = []
    for _, group in groupby(events, key=lambda event: event["epoch"]):
        steps = list(group)
        seconds = steps[-1]["time"] - steps[SKIP - 2]["time"]
        rates.append(sum(step["images"] for step in steps[SKIP:]) / seconds)
    return rates


def steady(rates: Rates) -> float:
    return statistics.median(rates[1:] or rates)


def measure(turns: int, quick: bool, root: Path) -> dict[str, list[Rates]]:
    """Kind -> for each turn, the rates of its epochs."""
    model_bound, input_bound, small_model = QUICK if quick else (MODEL_BOUND, INPUT_BOUND, SMALL_MODEL)
    for work in (model_bound, input_bound, small_model):
        write_stl10(folder_of(root, work), work.images)
    rank = ("-m", "benchmarks.train_rank")
    kinds: dict[str, Callable[[], Rates]] = {
        "model_bound": lambda: trainer(model_bound, folder_of(root, model_bound)),
        "model_bound_plain": lambda: plain(model_bound, folder_of(root, model_bound)),
        "synthetic": lambda: trainer(model_bound, folder_of(root, model_bound), *rank, "constant"),
        "input_bound": lambda: trainer(input_bound, folder_of(root, input_bound)),
        "input_bound_plain": lambda: plain(input_bound, folder_of(root, input_bound), *rank, "small"),
        "small_model": lambda: trainer(small_model, folder_of(root, small_model)),
        "small_model_plain": lambda: plain(small_model, folder_of(root, small_model)),
    }
    found: dict[str, list[Rates]] = {kind: [] for kind in kinds}
    for turn in range(turns):
        for kind in reversed(kinds) if turn % 2 else kinds:
            found[kind].append(kinds[kind]())
            print(f"turn {turn + 1}: {kind} {', '.join(f'{r:.1f}' for r in found[kind][-1])} images/s", flush=True)
    return found


def folder_of(root: Path, work: Work) -> Path:
    return root / f"{work.model}-{work.image_size}"


def summary(found: dict[str, list[Rates]]) -> dict[str, float | list[float]]:
    """The ratios, then images/s, then the ratios of each turn."""
    rates = {kind: [steady(turn) for turn in turns] for kind, turns in found.items()}
    rates["first"] = [turn[0] for turn in found["input_bound"]]
    ratios = {
        name: [a / b for a, b in zip(rates[ours], rates[reference], strict=True)]
        for name, ours, reference in (
            ("model_bound_ratio", "model_bound", "model_bound_plain"),
            ("input_bound_ratio", "input_bound", "input_bound_plain"),
            ("synthetic_share", "model_bound", "synthetic"),
            ("small_model_ratio", "small_model", "small_model_plain"),
            ("input_bound_first_epoch_ratio", "first", "input_bound_plain"),
        )
    }
    return {
        **{name: round(statistics.median(values), 3) for name, values in ratios.items()},
        **{f"{kind}_images_per_second": round(statistics.median(rates[kind]), 1) for kind in found},
        **{f"{name}_turns": [round(value, 3) for value in values] for name, values in ratios.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure all kinds in turns and print the ratios."""
    p = argparse.ArgumentParser(description="the trainer's images/s against a plain DDP script's")
    p.add_argument("--turns", type=int, default=TURNS)
    p.add_argument("--quick", action="store_true", help="only try that it works: tiny sizes, one turn")
    options = p.parse_args(arguments)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        found = measure(1 if options.quick else options.turns, options.quick, Path(folder))
    close(
        {
            **summary(found),
            "load": [round(before, 2), round(os.getloadavg()[0], 2)],
            "ranks": RANKS,
            "cores": len(os.sched_getaffinity(0)),
            "reference": "benchmarks/plain_ddp.py: DataLoader with 2 workers, PIL, DDP; same files and steps",
        }
    )


if __name__ == "__main__":
    main()
