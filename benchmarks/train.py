"""`make bench-train`: the trainer's images/s on two processes, against a plain DDP script and against no input at all.

The plain script is benchmarks/plain_ddp.py. Both get the same model, optimizer, global batch, threads, number of steps
and files (STL-10's format, and JPEGs of 500 x 375 pixels, written here, because nothing can be downloaded). Both are
started with torchrun, as a user does it. The plain script has as many DataLoader workers (0, 1 or 2 for each rank) as
make it fastest, which is tried first. Then they take turns, TURNS times, every other turn in reverse order. A figure is
the median of the turns, a ratio is the median of the turns' ratios, and `spread` has the least and the greatest of
them. The first few steps of an epoch do not count, nor do the start of workers, evaluation and checkpoints.

- model_bound_ratio: resnet18 on images of 96 pixels, their own size; the model takes nearly all the time.
- tuned_ratio: the same, against the plain script with what it can have of the trainer's own ways: a fused optimizer,
  gradients in DDP's buckets, no buffers sent around, no `loss.item()`, freed memory kept (KEPT_MEMORY).
- huge_pages_ratio: the trainer as Muster starts it, with memory in huge pages (HUGE_PAGES), against the same without.
- large_blocks_ratio: VGG-11, whose weights are 500 MB, with and without the trainer's keeping freed blocks of any size
  (train.start.memory.keep_large_blocks), both with memory in huge pages. Needs 15 GB, or nothing is kept.
- synthetic_share: a training with input, divided by the same without: in one process, whose epochs alternate between
  the loader's batches and one constant batch. Each pair of epochs is a turn; the first pair warms up, uncounted.
- input_bound_ratio: the trainer against the plain script on images resized to 224, with a network that takes almost no
  time (benchmarks/small_net.py). The median without the first epoch: the trainer keeps the images that it has resized,
  and in each new epoch a rank needs fewer that it has not had before. input_bound_first_epoch: the same ratio in the
  epoch in which the trainer resizes most.
- jpeg_ratio: the same network on the JPEGs, cropped at random and resized to 224 by both, of all epochs.

On STL-10's files the trainer also crops its images at random, the plain script only mirrors them. Needs 2 cores with
nothing else running on them: `load` is the machine's load average before and after, of which the benchmark itself
causes about 2. Takes about 20 minutes; `ARGS="--parts model"` takes a part of it (model, pages, blocks, synthetic,
input, jpeg).
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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common import close
from benchmarks.pictures import write_jpegs, write_stl10
from benchmarks.train_rank import is_real
from train.start.memory import HUGE_PAGES, NO_MMAP

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
TURNS = 5
SKIP = 4  # first steps of an epoch that are not counted
LIMIT_SECONDS = 300
WORKERS = (0, 1, 2)  # of the plain script's DataLoader, for each rank
PARTS = ("model", "pages", "blocks", "synthetic", "input", "jpeg")
# What train.start.memory sets in the end, where the host has the room, as glibc reads it from the environment.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": str(NO_MMAP), "MALLOC_TRIM_THRESHOLD_": str(2**62)}
OWN = {"small_net": "benchmarks.small_net:small_net"}  # models that are not torchvision's
SMALL = ("-m", "benchmarks.train_rank", "small")
Rates = list[float]  # images/s of all ranks, of each epoch
Found = dict[str, list[Rates]]  # kind -> for each turn, the rates of its epochs


@dataclass(frozen=True)
class Work:
    """A training that both sides do."""

    model: str
    image_size: int
    batch_size: int  # of all ranks together
    steps: int  # of an epoch
    epochs: int  # of the trainer
    plain_epochs: int  # of the plain script, whose epochs are all alike
    jpeg: bool = False

    @property
    def images(self) -> int:
        return self.steps * self.batch_size

    @property
    def is_small(self) -> bool:
        return self.model == "small_net"

    def write(self, folder: Path) -> None:
        (write_jpegs if self.jpeg else write_stl10)(folder, self.images)


MODEL_BOUND = Work("resnet18", 96, 64, steps=SKIP + 14, epochs=1, plain_epochs=1)
LARGE_BLOCKS = Work("vgg11", 96, 32, steps=SKIP + 8, epochs=1, plain_epochs=0)
ALTERNATING = Work("resnet18", 96, 64, steps=SKIP + 4, epochs=2 * (TURNS + 1), plain_epochs=0)
INPUT_BOUND = Work("small_net", 224, 256, steps=16, epochs=8, plain_epochs=3)
JPEG = Work("small_net", 224, 64, steps=24, epochs=2, plain_epochs=2, jpeg=True)


def quick(work: Work) -> Work:
    """The same in a size that only shows that it runs."""
    return Work(work.model, work.image_size, 8, SKIP + 2, min(work.epochs, 4), min(work.plain_epochs, 1), work.jpeg)


def torchrun(*words: object, **environment: str) -> str:
    """Run RANKS ranks, which share the cores equally; return what they printed.

    Raises:
        SystemExit: a rank failed.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    ours = {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *map(str, words)],
        env=os.environ | ours | environment,
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


def plain(work: Work, data: Path, workers: int, tuned: bool = False) -> Rates:
    """Rates of benchmarks/plain_ddp.py."""
    printed = torchrun(
        *(SMALL if work.is_small else ("benchmarks/plain_ddp.py",)),
        *("--data-dir", data, "--model", work.model, "--image-size", work.image_size, "--skip", SKIP),
        *("--batch-size", work.batch_size, "--epochs", work.plain_epochs, "--workers", workers),
        *(("--imagefolder",) if work.jpeg else ()),
        *(("--tuned",) if tuned else ()),
        **(KEPT_MEMORY if tuned else {}),
    )
    return [float(rate) for rate in re.findall(r"([\d.]+) images/s", printed)]


def trainer(work: Work, data: Path, *how: str, **environment: str) -> Rates:
    """Rates of `-m train`, or of the command `how`, which takes the same options."""
    run_dir = data / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    torchrun(
        *(how or ("-m", "train")),
        *("--dataset", "imagefolder" if work.jpeg else "stl10", "--data-dir", data),
        *("--model", OWN.get(work.model, work.model), "--image-size", work.image_size),
        *("--batch-size", work.batch_size, "--epochs", work.epochs),
        *("--run-dir", run_dir, "--resume", "none"),
        *("--optimizer", "sgd", "--lr", "0.01", "--momentum", "0.9", "--weight-decay", "5e-4"),
        **environment,
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


def fastest(work: Work, data: Path) -> int:
    """The number of workers with which the plain script is fastest."""
    rates = {workers: statistics.median(plain(work, data, workers)) for workers in WORKERS}
    said = ", ".join(f"{workers}: {rate:.1f} images/s" for workers, rate in rates.items())
    print(f"{work.model}, {'JPEGs' if work.jpeg else 'STL-10'}, the plain script by its workers: {said}", flush=True)
    return max(rates, key=lambda workers: rates[workers])


def measure(parts: Sequence[str], turns: int, quickly: bool, root: Path) -> tuple[Found, dict[str, int]]:
    """What was found, and the plain script's workers in each part."""
    found, workers = Found(), dict[str, int]()
    for part, work in (("model", MODEL_BOUND), ("input", INPUT_BOUND), ("jpeg", JPEG)):
        if part not in parts:
            continue
        data, work = root / part, quick(work) if quickly else work
        work.write(data)
        workers[part] = fastest(work, data)
        for kind, rates in in_turns(kinds_of(part, work, data, workers[part]), turns).items():
            found[kind] = rates
    if "pages" in parts:
        data, work = root / "pages", quick(MODEL_BOUND) if quickly else MODEL_BOUND
        work.write(data)
        found |= in_turns(
            {
                "huge_pages": lambda: trainer(work, data, GLIBC_TUNABLES=HUGE_PAGES),
                "small_pages": lambda: trainer(work, data, GLIBC_TUNABLES=""),
            },
            turns,
        )
    if "blocks" in parts:
        data, work = root / "blocks", quick(LARGE_BLOCKS) if quickly else LARGE_BLOCKS
        work.write(data)
        variant = ("-m", "benchmarks.train_rank", "giving_back")
        kinds = {
            "large_blocks": lambda: trainer(work, data, GLIBC_TUNABLES=HUGE_PAGES),
            "given_back": lambda: trainer(work, data, *variant, GLIBC_TUNABLES=HUGE_PAGES),
        }
        found |= in_turns(kinds, turns)
    if "synthetic" in parts:
        data, work = root / "synthetic", quick(ALTERNATING) if quickly else ALTERNATING
        work.write(data)
        pairs = apart(trainer(work, data, "-m", "benchmarks.train_rank", "alternating"))
        for kind, epochs in pairs.items():
            print(f"{kind}: {', '.join(f'{rates[0]:.1f}' for rates in epochs)} images/s", flush=True)
        found |= pairs
    return found, workers


def kinds_of(part: str, work: Work, data: Path, workers: int) -> dict[str, Callable[[], Rates]]:
    name = part if work.jpeg else f"{part}_bound"
    kinds: dict[str, Callable[[], Rates]] = {
        name: lambda: trainer(work, data),
        f"{name}_plain": lambda: plain(work, data, workers),
    }
    if part == "model":
        kinds["tuned_plain"] = lambda: plain(work, data, workers, tuned=True)
    return kinds


def in_turns(kinds: dict[str, Callable[[], Rates]], turns: int) -> Found:
    found: Found = {kind: [] for kind in kinds}
    for turn in range(turns):
        for kind in reversed(kinds) if turn % 2 else kinds:
            found[kind].append(kinds[kind]())
            print(f"turn {turn + 1}: {kind} {', '.join(f'{r:.1f}' for r in found[kind][-1])} images/s", flush=True)
    return found


def apart(rates: Rates) -> Found:
    """The epochs of an alternating training as turns of one epoch each, without the first pair."""
    return {
        kind: [[rate] for epoch, rate in enumerate(rates) if epoch > 1 and is_real(epoch) == real]
        for kind, real in (("with_input", True), ("without_input", False))
    }


def steady(rates: Rates) -> float:
    """Without the first epoch, if there are others."""
    return statistics.median(rates[1:] or rates)


Of = Callable[[Rates], float]
#: ratio -> (what is compared, how its epochs become one figure, with what, how that one's do)
RATIOS: dict[str, tuple[str, Of, str, Of]] = {
    "model_bound_ratio": ("model_bound", statistics.median, "model_bound_plain", statistics.median),
    "tuned_ratio": ("model_bound", statistics.median, "tuned_plain", statistics.median),
    "huge_pages_ratio": ("huge_pages", statistics.median, "small_pages", statistics.median),
    "large_blocks_ratio": ("large_blocks", statistics.median, "given_back", statistics.median),
    "input_bound_first_epoch": ("input_bound", lambda rates: rates[0], "input_bound_plain", statistics.median),
    "input_bound_ratio": ("input_bound", steady, "input_bound_plain", statistics.median),
    "jpeg_ratio": ("jpeg", statistics.median, "jpeg_plain", statistics.median),
    "synthetic_share": ("with_input", statistics.median, "without_input", statistics.median),
}


def summary(found: Found) -> dict[str, Any]:
    """The ratios, their spreads, then images/s."""
    turns = {
        name: [of(a) / of_other(b) for a, b in zip(found[ours], found[other], strict=True)]
        for name, (ours, of, other, of_other) in RATIOS.items()
        if ours in found
    }
    return {
        **{name: round(statistics.median(values), 3) for name, values in turns.items()},
        "spread": {name: [round(min(values), 3), round(max(values), 3)] for name, values in turns.items()},
        "images_per_second": {
            kind: round(statistics.median(steady(rates) for rates in each), 1) for kind, each in found.items()
        },
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure all kinds in turns and print the ratios."""
    p = argparse.ArgumentParser(description="the trainer's images/s against a plain DDP script's")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    p.add_argument("--turns", type=int, default=TURNS)
    p.add_argument("--quick", action="store_true", help="only try that it works: tiny sizes, one turn, no figures")
    options = p.parse_args(arguments)
    before, begun = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-train-") as folder:
        turns = 1 if options.quick else options.turns
        found, workers = measure(options.parts, turns, options.quick, Path(folder))
    close(
        {
            **summary(found),
            "plain_workers": workers,
            "turns": turns,
            "load": [round(before, 2), round(os.getloadavg()[0], 2)],
            "ranks": RANKS,
            "cores": len(os.sched_getaffinity(0)),
            "seconds": round(time.monotonic() - begun),
            "reference": "benchmarks/plain_ddp.py: DataLoader, PIL, DDP; same files and steps"
            + ("; --quick: these figures mean nothing" if options.quick else ""),
        }
    )


if __name__ == "__main__":
    main()
