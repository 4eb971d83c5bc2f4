"""What `make bench-train` runs on each rank beside the trainer and the plain script themselves, under torchrun.

    -m benchmarks.train_rank constant --model resnet18 ...   the trainer, but every batch is one that is there already
    -m benchmarks.train_rank input ours|plain --data-dir ... the input alone: batches are made and thrown away

`input` takes the flags of plain_ddp.py and prints its lines: images/s of all ranks in each epoch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.group import Place, device_of, keep_freed_memory, leave_process_group
from train.order import Ints, equally, steps

Batch = tuple[Tensor, Tensor]


class ConstantLoader:
    """In the place of train.datasets.loader.Loader: the first batch of each size, made once, for ever."""

    def __init__(self, dataset: Any, settings: Any, device: torch.device, place: Place) -> None:
        self.waited = 0.0
        size = settings.image_size or dataset.image_size
        self.make = lambda count: (
            torch.randn(count, 3, size, size, device=device),
            torch.arange(count, device=device) % dataset.classes,
        )
        self.batches: dict[int, Batch] = {}

    def training(self, requests: Iterable[Ints], epoch: int) -> Iterator[Batch]:
        for indices in requests:
            count = len(indices)
            if count not in self.batches:
                self.batches[count] = self.make(count)
            yield self.batches[count]

    def held_out(self, requests: Iterable[Ints]) -> Iterator[Batch]:
        return self.training(requests, 0)

    def close(self) -> None:
        self.batches = {}


def constant(arguments: list[str]) -> int:
    """`python -m train` with ConstantLoader."""
    from train import __main__ as trainer
    from train import session

    session.Loader = ConstantLoader  # type: ignore[assignment, attr-defined]
    sys.argv[1:] = arguments
    return trainer.main()


def ours(args: argparse.Namespace) -> Callable[[int], Iterator[Batch]]:
    """Epoch -> this rank's batches, as the trainer asks for them."""
    from train.datasets import load
    from train.datasets.loader import Loader
    from train.settings import Settings

    keep_freed_memory()
    place = Place.from_environment()
    settings = Settings(dataset="stl10", data_dir=Path(args.data_dir), image_size=args.image_size)
    dataset = load(settings, place)
    loader = Loader(dataset, settings, device_of(place), place)

    def epoch(number: int) -> Iterator[Batch]:
        mine = steps(len(dataset.train), args.batch_size, 0, number, equally(place.world_size), place.rank)
        return loader.training((piece.indices for step in mine for piece in step.passes), number)

    return epoch


def plain(args: argparse.Namespace) -> Callable[[int], Iterator[Batch]]:
    from benchmarks.plain_ddp import make_loader

    loader = make_loader(args)
    device = device_of(Place.from_environment())

    def epoch(number: int) -> Iterator[Batch]:
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return ((images.to(device), labels.to(device)) for images, labels in loader)

    return epoch


def input_alone(arguments: list[str]) -> int:
    from benchmarks.plain_ddp import parse

    args = parse(arguments[1:])
    dist.init_process_group("gloo")
    epochs = {"ours": ours, "plain": plain}[arguments[0]](args)
    for number in range(args.epochs):
        images = 0
        for step, (_, labels) in enumerate(epochs(number), 1):
            images += len(labels)
            if step == args.skip:
                dist.barrier()
                images, begun = 0, time.perf_counter()
        dist.barrier()  # until the slowest rank has its last batch
        seconds = time.perf_counter() - begun
        if dist.get_rank() == 0:
            print(f"epoch {number + 1}: {images * dist.get_world_size() / seconds:.2f} images/s", flush=True)
    leave_process_group()
    return 0


if __name__ == "__main__":
    sys.exit({"constant": constant, "input": input_alone}[sys.argv[1]](sys.argv[2:]))
