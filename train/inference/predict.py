"""python -m train predict --checkpoint runs/<id> IMAGES...: classifies images, on one device or several.

Images are prepared exactly as evaluation did it in training. With several GPUs each holds a copy of the model and takes
the next batch when it is free; results come in the order of the images. One process; a thread for each device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.settings import EXIT_REFUSED

if TYPE_CHECKING:  # they import torch
    from train.inference.classify import Answer
    from train.inference.weights import Trained

EXIT_SKIPPED = 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m train predict",
        description="Prints for each image, in tabs: path, class, probability, and those of the next likely classes.",
        epilog="Exit status: 0 all images classified; 1 some were skipped, each named; 2 refused, none was classified.",
    )
    p.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files, or folders of them")
    p.add_argument("--checkpoint", type=Path, required=True, help="step-<n>.pt, a run's folder, or an exported file")
    p.add_argument("--ema", action="store_true", help="with the averaged weights, of a run with --ema")
    p.add_argument("--project", type=Path, metavar="DIR", help="folder of the module of a model of your own")
    where = p.add_mutually_exclusive_group()
    where.add_argument("--device", default="", help="cpu, cuda, cuda:3 or 3 (default: the first GPU, else cpu)")
    where.add_argument("--devices", default="", metavar="0,1", help="several GPUs that share the work")
    p.add_argument("--top", type=int, default=1, metavar="K", help="show the K likeliest classes (default: 1)")
    p.add_argument("--json", action="store_true", help="one JSON object for each image and line")
    p.add_argument("--batch-size", type=int, default=64, metavar="N", help="images at a time on a device (default: 64)")
    return p


def main(arguments: list[str]) -> int:
    p = parser()
    options = p.parse_args(arguments)
    for flag, value in (("--top", options.top), ("--batch-size", options.batch_size)):
        if value < 1:
            p.error(f"{flag} {value}: at least 1")
    return run(options)


def run(options: argparse.Namespace) -> int:
    from train.model import torchvision_cpu

    torchvision_cpu.watch()
    from train import own_parts
    from train.checkpoints.files import CheckpointError
    from train.inference import classify, weights
    from train.start import devices

    own_parts.use(options.project)
    gpus = devices.gpus_here()
    try:
        flag, words = ("--devices", options.devices.split(",")) if options.devices else ("--device", [options.device])
        chosen = devices.parse(words if words != [""] else ["0" if gpus else "cpu"], gpus, flag)
        trained = weights.read(options.checkpoint, options.ema, say)
        classifier = classify.Classifier(trained, chosen, options.batch_size)
    except (devices.DeviceError, CheckpointError) as error:
        say(str(error))
        return EXIT_REFUSED
    say(f"{opening(trained)}, on {', '.join(devices.describe(device) for device in chosen)}")
    paths = list(files_of(options.images))
    skipped = 0
    for path, answer in zip(paths, classifier.classify(paths), strict=True):
        if isinstance(answer, str):
            say(f"{path}: {answer}; skipped")
            skipped += 1
        else:
            print(line(path, trained.recipe.class_names, answer, options.top, options.json), flush=True)
    if not paths:
        say(f"there is no file in {', '.join(map(str, options.images))}")
    return EXIT_SKIPPED if skipped or not paths else 0


def say(text: str) -> None:
    print(f"predict: {text}", file=sys.stderr, flush=True)


def opening(trained: Trained) -> str:
    recipe = trained.recipe
    step = "" if recipe.step is None else f" at step {recipe.step}"
    return f"{recipe.model}, {len(recipe.class_names)} classes of {recipe.dataset}, from {trained.path}{step}"


def files_of(given: Sequence[Path]) -> Iterator[Path]:
    """Files as given; of folders all files in them, at any depth, in the order of their names, dot files left out."""
    for path in given:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def line(path: Path, class_names: Sequence[str], answer: Answer, top: int, as_json: bool) -> str:
    """answer: (class number, probability), the likeliest first."""
    likeliest: list[dict[str, Any]] = [
        {"class": class_names[index], "index": index, "probability": probability} for index, probability in answer[:top]
    ]
    if as_json:
        return json.dumps({"path": str(path), **likeliest[0], "top": likeliest})
    words = [word for each in likeliest for word in (each["class"], f"{each['probability']:.4f}")]
    return "\t".join([str(path), *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
