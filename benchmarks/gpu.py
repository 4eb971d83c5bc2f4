"""`make bench-gpu`: the trainer's images/s on one GPU, and what limits it; one command of at most ten minutes.

ResNet-50 at 224 pixels in batches of 256, with bf16, channels_last and torch.compile. Each row is a process of its own;
files are written here (benchmarks/pictures.py). What torch has compiled in one row it finds again in the others.

- images_per_second: the trainer, its data (STL-10's format) in the GPU's memory, resized and cropped there.
- synthetic_share: that, divided by the trainer without input: in one process whose epochs alternate between the two.
- over_plain: the trainer without input, divided by `plain` without input: a script as tutorials write it, with the same
  flags (AMP, channels_last, compile, cudnn.benchmark, set_device). over_recipe: divided by the settings and the loop of
  pytorch/examples' imagenet/main.py (https://github.com/pytorch/examples/tree/main/imagenet), said again here in a few
  lines: float32, NCHW, SGD, and loss and top-1 and top-5 accuracy read in each step; without input, too.
- jpeg: images/s with JPEGs of 500 x 375 pixels that workers decode: of the trainer, of `plain` with as many DataLoader
  workers as there are cores, and of `plain` with nvJPEG (torchvision.io.decode_jpeg(device="cuda")); then of the parts
  of it alone: `decode` (the trainer's own loader without a model), `copy` (bytes of a batch from pinned memory to the
  GPU) and `compute` (the trainer without input). `bottleneck` is the slowest of the three.

--cpu-smoke runs the same code on the CPU in a size that means nothing, without bf16, compiling and nvJPEG.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from benchmarks.common import close
from benchmarks.pictures import write_jpegs, write_stl10
from benchmarks.train import SKIP, Rates, apart, epoch_rates

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 10
BLOCKS = 5  # parts of a row, of which the median counts
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIMIT_SECONDS = 240  # of a row: it compiles ResNet-50
Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Work:
    model: str = "resnet50"
    image_size: int = 224
    batch_size: int = 256
    steps: int = 24  # of an epoch, and of a block
    epochs: int = 2 * (BLOCKS + 1)  # of the trainer whose epochs alternate
    jpeg_epochs: int = 3
    blocks: int = BLOCKS  # of a row
    fast: bool = True  # bf16 and torch.compile, which take long on a CPU
    device: str = "cuda:0"
    folder: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def images(self) -> int:
        return self.steps * self.batch_size


SMOKE = Work("shufflenet_v2_x0_5", 32, 4, SKIP + 2, 4, 1, blocks=1, fast=False, device="cpu")


def trainer(work: Work, dataset: str, epochs: int, *how: str) -> Rates:
    """Images/s of each epoch of the trainer, or of the command `how`, which takes its options. Raises RowFailed."""
    run_dir = Path(work.folder) / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = ["--channels-last", *(["--amp", "bf16", "--compile"] if work.fast else [])]
    memory = ["--memory", "gpu"] if work.on_gpu and dataset == "stl10" else []
    words = [
        *(how or ("-m", "train")), "--model", work.model,
        "--dataset", dataset, "--data-dir", f"{work.folder}/{dataset}",
        "--image-size", work.image_size, "--batch-size", work.batch_size, "--epochs", epochs, "--run-dir", run_dir,
        "--optimizer", "sgd", "--lr", "0.1", "--momentum", "0.9", "--weight-decay", "1e-4", "--loggers", "none",
        *memory, *flags,
    ]  # fmt: skip
    in_a_process(*words)
    return epoch_rates((run_dir / "metrics.jsonl").read_text())


class RowFailed(Exception):
    """A row without figures; the message says why."""


def in_a_process(*words: object) -> str:
    """What a new interpreter printed. Raises RowFailed."""
    command = shlex.join(map(str, words))
    try:
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RowFailed(f"{command} took more than {LIMIT_SECONDS} s") from None
    if done.returncode != 0:
        raise RowFailed(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def row(name: str, work: Work) -> Rates:
    """Images/s of the blocks of one of ROWS, in a process of its own. Raises RowFailed."""
    printed = in_a_process("-m", "benchmarks.gpu", "--row", name, "--work", json.dumps(dataclasses.asdict(work)))
    return [float(rate) for rate in json.loads(printed.splitlines()[-1])]


# -- rows: each returns images/s of its blocks ----------------------------------------------------------------------


def blocks(work: Work, step: Callable[[], object]) -> Rates:
    """Images/s of `work.blocks` times `work.steps` steps, after as many to warm up.

    As of the trainer's epochs, the first SKIP steps of a block do not count: in them a loader begins its epoch.
    """
    rates = []
    for _ in range(work.blocks + 1):
        for number in range(work.steps):
            if number == SKIP:
                wait_for_gpu(work)
                begun = time.perf_counter()
            step()
        wait_for_gpu(work)
        rates.append((work.steps - SKIP) * work.batch_size / (time.perf_counter() - begun))
    return rates[1:]


def wait_for_gpu(work: Work) -> None:
    if work.on_gpu:
        torch.cuda.synchronize()


def constant(work: Work) -> Batches:
    shape = (work.batch_size, 3, work.image_size, work.image_size)
    images = torch.randn(shape, device=work.device).to(memory_format=torch.channels_last)
    labels = torch.arange(work.batch_size, device=work.device) % CLASSES
    while True:
        yield images, labels


def plain(work: Work, batches: Batches) -> Rates:
    """The script with the same flags as the trainer."""
    if work.on_gpu:
        torch.cuda.set_device(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device(work.device)
    model: nn.Module = torchvision.models.get_model(work.model, num_classes=CLASSES)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled: Any = torch.compile(model) if work.fast else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        images, labels = next(batches)
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=work.fast):
            loss = criterion(compiled(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return blocks(work, step)


def plain_constant(work: Work) -> Rates:
    return plain(work, constant(work))


def recipe(work: Work) -> Rates:
    """The settings and the loop of pytorch/examples' imagenet/main.py, without its input."""
    device = torch.device(work.device)
    model = torchvision.models.get_model(work.model, num_classes=CLASSES).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss().to(device)
    images, labels = next(constant(work))
    images, figures = images.contiguous(), [0.0] * 3

    def step() -> None:
        outputs = model(images)
        loss = criterion(outputs, labels)
        right = outputs.detach().topk(5, 1).indices.eq(labels[:, None])
        for place, value in enumerate((loss, right[:, :1].sum(), right.sum())):
            figures[place] += value.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return blocks(work, step)


def plain_jpeg(work: Work) -> Rates:
    """`plain` with torchvision's ImageFolder, PIL, and a DataLoader worker for each core."""
    change = transforms.Compose(
        [
            transforms.RandomResizedCrop(work.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    dataset = torchvision.datasets.ImageFolder(f"{work.folder}/imagefolder/train", change)
    workers = len(os.sched_getaffinity(0))
    loader = DataLoader(
        dataset, work.batch_size, shuffle=True, num_workers=workers, pin_memory=work.on_gpu, persistent_workers=True,
        drop_last=True,
    )  # fmt: skip

    def batches() -> Batches:
        while True:
            yield from loader

    return plain(work, batches())


def nvjpeg(work: Work) -> Rates:
    """`plain` whose JPEGs lie in memory as they are on the disk, decoded, cropped and resized on the GPU."""
    from torchvision.transforms import v2

    files = sorted(Path(work.folder, "imagefolder", "train").rglob("*.jpg"))[: work.batch_size]
    encoded = [torch.from_numpy(np.fromfile(file, np.uint8)) for file in files]
    encoded = (encoded * -(-work.batch_size // len(encoded)))[: work.batch_size]
    labels = torch.arange(work.batch_size, device=work.device) % CLASSES
    change = v2.Compose(
        [
            v2.RandomResizedCrop(work.image_size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(MEAN), list(STD)),
        ]
    )

    def batches() -> Batches:
        while True:
            decoded: Any = torchvision.io.decode_jpeg(encoded, device=work.device)
            yield torch.stack([change(image) for image in decoded]), labels

    return plain(work, batches())


def decode(work: Work) -> Rates:
    """The trainer's own loader of JPEGs, with its own number of workers and no model."""
    from train.datasets import load
    from train.datasets.loader import Loader
    from train.settings import Settings
    from train.start.group import Place

    settings = Settings(
        dataset="imagefolder", data_dir=Path(work.folder, "imagefolder"), image_size=work.image_size,
        channels_last=True, batch_size=work.batch_size,
    )  # fmt: skip
    dataset = load(settings, Place())
    order = np.arange(work.images, dtype=np.int64).reshape(work.steps, work.batch_size)
    with Loader(dataset, settings, torch.device(work.device), Place()) as loader:
        batches = (batch for epoch in range(work.blocks + 1) for batch in loader.training(iter(order), epoch))
        return blocks(work, lambda: next(batches))


def copy(work: Work) -> Rates:
    """The bytes of a batch, from pinned memory to the GPU."""
    shape = (work.batch_size, 3, work.image_size, work.image_size)
    host = torch.zeros(shape, dtype=torch.uint8, pin_memory=work.on_gpu)
    there = torch.empty(shape, dtype=torch.uint8, device=work.device)
    return blocks(work, lambda: there.copy_(host, non_blocking=True))


ROWS = {
    "plain": plain_constant, "recipe": recipe, "plain_jpeg": plain_jpeg, "nvjpeg": nvjpeg,
    "decode": decode, "copy": copy,
}  # fmt: skip


# -- all of it ------------------------------------------------------------------------------------------------------


def measure(work: Work) -> dict[str, Rates]:
    """Images/s of each row's blocks or epochs, each said as soon as it is known; without the rows that failed."""
    folder, found = Path(work.folder), dict[str, Rates]()
    write_stl10(folder / "stl10", work.images, work.batch_size)
    write_jpegs(folder / "imagefolder", work.images, work.batch_size)

    def alternating() -> dict[str, Rates]:
        pairs = apart(trainer(work, "stl10", work.epochs, "-m", "benchmarks.train_rank", "alternating"))
        return {kind: [turn[0] for turn in turns] for kind, turns in pairs.items()}

    def jpeg() -> dict[str, Rates]:
        rates = trainer(work, "imagefolder", work.jpeg_epochs)
        return {"jpeg": rates[1:] or rates}

    def alone(name: str) -> dict[str, Rates]:
        return {name: row(name, work)}

    rows = [name for name in ROWS if work.on_gpu or name != "nvjpeg"]
    makers: list[Callable[[], dict[str, Rates]]] = [alternating, jpeg, *(partial(alone, name) for name in rows)]
    for make in makers:
        try:
            made = make()
        except RowFailed as error:
            print(f"a row without figures: {error}", flush=True)
            continue
        for name, rates in made.items():
            print(f"{name}: {', '.join(f'{rate:.1f}' for rate in rates)} images/s", flush=True)
        found |= made
    return found


def figures(found: dict[str, Rates]) -> dict[str, Any]:
    """What the line says; null where a row that it needs has failed."""
    rates = {name: round(statistics.median(each), 1) for name, each in found.items()}

    def over(name: str) -> float | None:
        ours, other = rates.get("without_input"), rates.get(name)
        return round(ours / other, 3) if ours and other else None

    pairs = zip(found.get("with_input", []), found.get("without_input", []), strict=True)
    shares = [mine / ceiling for mine, ceiling in pairs]
    parts = {"decode": rates.get("decode"), "copy": rates.get("copy"), "compute": rates.get("without_input")}
    known = {name: rate for name, rate in parts.items() if rate}
    jpeg = {"images_per_second": "jpeg", "plain": "plain_jpeg", "nvjpeg": "nvjpeg"}
    return {
        "images_per_second": rates.get("with_input"),
        "synthetic_share": round(statistics.median(shares), 3) if shares else None,
        "synthetic_share_spread": [round(min(shares), 3), round(max(shares), 3)] if shares else None,
        "over_plain": over("plain"),
        "over_recipe": over("recipe"),
        "plain_images_per_second": rates.get("plain"),
        "recipe_images_per_second": rates.get("recipe"),
        "jpeg": {name: rates.get(row) for name, row in jpeg.items()} | parts,
        "bottleneck": min(known, key=lambda name: known[name]) if len(known) == len(parts) else None,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure all rows and print the figures."""
    p = argparse.ArgumentParser(description="the trainer's images/s on one GPU")
    p.add_argument("--cpu-smoke", action="store_true", help="only try that it works, on the CPU: no figures")
    p.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    p.add_argument("--work", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = p.parse_args(arguments)
    if options.row:
        print(json.dumps(ROWS[options.row](Work(**options.work))))
        return
    if not (options.cpu_smoke or torch.cuda.is_available()):
        raise SystemExit("bench-gpu: torch sees no GPU here. ARGS=--cpu-smoke only tries that its code runs")
    if options.cpu_smoke:
        os.environ["OMP_NUM_THREADS"] = "1"  # so small a network is faster without threads that wait for each other
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        found = measure(dataclasses.replace(SMOKE if options.cpu_smoke else Work(), folder=folder))
    if options.cpu_smoke:
        print("--cpu-smoke: the figures of this line mean nothing", flush=True)
    close(
        {
            **figures(found),
            "gpu": torch.cuda.get_device_name(0) if not options.cpu_smoke else "none: --cpu-smoke",
            "torch": torch.__version__,
            "cores": len(os.sched_getaffinity(0)),
            "seconds": round(time.monotonic() - begun),
        }
    )
    if any(name not in found for name in ("with_input", "jpeg", *ROWS) if name != "nvjpeg" or not options.cpu_smoke):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
