"""Variants of the trainer and of the plain script that `make bench-train` runs under torchrun.

-m benchmarks.train_rank constant --model resnet18 ...   the trainer with one constant batch instead of input
-m benchmarks.train_rank small --model small_net ...     the plain script, with benchmarks/small_net.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from train.order import Ints
from train.start.group import Place

Batch = tuple[Tensor, Tensor]


class ConstantLoader:
    """Replaces train.datasets.loader.Loader: all batches of the same size are the same one, made once."""

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


def plain_with_small_net(arguments: list[str]) -> None:
    """plain_ddp.py, for which the model small_net is one of torchvision's."""
    from torchvision.models._api import register_model

    from benchmarks import plain_ddp, small_net

    register_model()(small_net.small_net)
    sys.argv[1:] = arguments
    plain_ddp.main()


if __name__ == "__main__":
    sys.exit({"constant": constant, "small": plain_with_small_net}[sys.argv[1]](sys.argv[2:]))
