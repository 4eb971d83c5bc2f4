"""Trains a torchvision classifier with DDP.  python -m train --help, or on all cores of this machine: make
local

Reads from top to bottom: settings, process group, data and model, epochs, results. What the steps mean is in
the modules beside it. Leaves metrics.jsonl, checkpoints/, curves.png and, last, result.json in the run's
folder.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

STARTED = time.monotonic()

# Only what reads the command line is imported here; torch, which takes a second, after that.
from train.settings import EXIT_BAD_SETTINGS, Settings, SettingsError, parse, problems  # noqa: E402


def main() -> int:
    settings, complaint = Settings(), ""
    try:
        settings = parse(sys.argv[1:])
        complaint = "; ".join(problems(settings, int(os.environ.get("WORLD_SIZE", "1"))))
    except SettingsError as error:
        complaint = str(error)
    if complaint and os.environ.get("WORLD_SIZE", "1") == "1":
        return refuse(complaint)

    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)(settings, complaint) or 0


def run(settings: Settings, complaint: str) -> int:
    """Trains; or, where any rank has a complaint, leaves on all ranks together with one line from rank 0."""
    from train import torchvision_cpu

    torchvision_cpu.watch()
    from train import data, model, process, trainer

    settings = dataclasses.replace(settings, image_size=settings.image_size or 32)
    process.keep_freed_memory()
    place = process.Place.from_environment()
    try:
        device = process.device_of(place)
    except SettingsError as error:
        return refuse(str(error)) if place.local_rank == 0 else EXIT_BAD_SETTINGS
    with process.process_group(place, device, settings.timeout if not complaint else Settings.timeout):
        dataset = network = None
        if not complaint:
            try:
                dataset = data.DATASETS[settings.dataset]()
                network = model.build(settings.model, dataset.classes, settings.image_size, settings.seed)
                trainer.prepare_run_dir(settings.run_dir)
            except (SettingsError, data.DataError) as error:
                complaint = str(error)
            except OSError as error:
                complaint = f"--run-dir {settings.run_dir}: cannot write there ({error.strerror or error})"
        complaint = process.first_complaint(complaint, place)
        if complaint or dataset is None or network is None:
            return refuse(complaint) if place.rank == 0 else EXIT_BAD_SETTINGS
        if place.rank == 0:
            print(
                opening(settings, place.world_size, device.type, len(dataset.train), len(dataset.test)),
                flush=True,
            )
        result = trainer.train(settings, place, device, dataset, network, STARTED)
    if place.rank == 0:
        finish(settings, result)
    return 0


def opening(settings: Settings, world_size: int, device: str, train: int, test: int) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    kind = "the CPU" if device == "cpu" else "GPUs"
    return (
        f"training {settings.model} on {settings.dataset} ({train} images, {test} held out, "
        f"{settings.image_size} px): {settings.epochs} epochs, global batch {settings.batch_size}, "
        f"{ranks} on {kind}, seed {settings.seed}"
    )


def finish(settings: Settings, result: dict[str, Any]) -> None:
    """The picture, then result.json: whoever sees that file sees a whole folder."""
    from train import metrics, picture

    events = metrics.read_metrics(settings.run_dir / "metrics.jsonl")
    ranks = "1 rank" if result["world_size"] == 1 else f"{result['world_size']} ranks"
    title = f"{settings.model} on {settings.dataset}, {ranks}"
    picture.draw(events, title, settings.run_dir / "curves.png")
    metrics.write_json(settings.run_dir / "result.json", result)
    print(
        f"test accuracy {result['test_accuracy']:.2%}, {result['images_per_second']:.0f} images/s, "
        f"{result['train_seconds']:.1f} s of training",
        flush=True,
    )


def refuse(complaint: str) -> int:
    print(f"train: {complaint}", file=sys.stderr, flush=True)
    return EXIT_BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main())
