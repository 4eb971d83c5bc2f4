"""The trainer's settings: what they are, how they are read from the command line, and what is wrong with
them.

Not here: anything that needs torch. What only a built model can tell (unknown model, image too small) is
`train.model`'s.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

EXIT_BAD_SETTINGS = 2
DATASET_NAMES = ("digits", "fake")


class SettingsError(Exception):
    """Settings that cannot be trained with. Found before training; exit status 2."""


@dataclass(frozen=True)
class Settings:
    model: str = "resnet18"
    dataset: str = "digits"
    epochs: int = 9
    batch_size: int = 120  # the digits' 1438 make 12 batches of nearly one size: a runt at the end unsettles it
    lr: float = 0.002
    seed: int = 0
    image_size: int = 32
    run_dir: Path = Path("runs")
    timeout: float = 300.0


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving: under torchrun only rank 0 may speak, and all ranks must leave together."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see python -m train --help)")


def parser() -> argparse.ArgumentParser:
    default = Settings()
    p = Parser(
        prog="python -m train",
        description="Trains a torchvision classification model with DistributedDataParallel: one process per "
        "rank under torchrun, or alone. Uses the GPUs (NCCL) where there are any, else the CPU (gloo).",
        epilog="Exit status: 0 trained; 1 failed; 2 wrong settings, nothing was started.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what = p.add_argument_group("what to train")
    what.add_argument("--model", default=default.model, help="any torchvision classification model")
    what.add_argument("--dataset", default=default.dataset, choices=DATASET_NAMES, help="digits are real images")
    what.add_argument("--image-size", type=int, default=default.image_size, metavar="PIXELS", help="model's input")
    how = p.add_argument_group("how to train")
    how.add_argument("--epochs", type=int, default=default.epochs, help="passes over the training part")
    how.add_argument("--batch-size", type=int, default=default.batch_size, metavar="N", help="of all ranks together")
    how.add_argument("--lr", type=float, default=default.lr, help="highest learning rate (AdamW; warm-up, then cosine)")
    how.add_argument("--seed", type=int, default=default.seed, help="same seed: same order, augmentation, weights")
    run = p.add_argument_group("the run")
    run.add_argument(
        "--run-dir",
        type=Path,
        default=None,
        help="folder to write to (default: MUSTER_RUN_DIR, else runs/<time>)",
    )
    run.add_argument(
        "--timeout",
        type=float,
        default=default.timeout,
        metavar="S",
        help="longest wait of a rank for the others",
    )
    return p


def parse(arguments: list[str]) -> Settings:
    """Raises SettingsError for what argparse refuses."""
    options = vars(parser().parse_args(arguments))
    options["run_dir"] = options["run_dir"] or default_run_dir()
    return Settings(**options)


def default_run_dir() -> Path:
    given = os.environ.get("MUSTER_RUN_DIR")
    return Path(given) if given else Path("runs") / time.strftime("%Y%m%d-%H%M%S-train")


def problems(settings: Settings, world_size: int) -> list[str]:
    """All that is wrong with the settings for this many ranks, one clause each; empty if nothing is."""
    found = []
    if settings.epochs < 1:
        found.append(f"--epochs {settings.epochs}: at least 1")
    if settings.batch_size < world_size:
        found.append(
            f"--batch-size {settings.batch_size}: it counts the samples of all ranks together, "
            f"so at least one for each of the {world_size} ranks"
        )
    if not (math.isfinite(settings.lr) and settings.lr > 0):
        found.append(f"--lr {settings.lr}: a number above 0")
    if settings.seed < 0:
        found.append(f"--seed {settings.seed}: 0 or more")
    if settings.image_size < 1:
        found.append(f"--image-size {settings.image_size}: at least 1 pixel")
    if not (math.isfinite(settings.timeout) and settings.timeout > 0):
        found.append(f"--timeout {settings.timeout}: seconds above 0")
    return found
