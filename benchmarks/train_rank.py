"""Variants of the trainer and of the plain script that `make bench-train` runs under torchrun.

-m benchmarks.train_rank alternating --model resnet18 ...   the trainer, without input in every other epoch
-m benchmarks.train_rank small ours|plain --model ...       either of the two, with benchmarks/small_net.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from train.datasets.loader import Loader
from train.order import Ints
from train.start.group import Place

Batch = tuple[Tensor, Tensor]


def is_real(epoch: int) -> bool:
    """Which of the epochs, counted from 0, have input. Of each two after one another it is one, now the first, now the
    second: what becomes slower or faster meanwhile favours neither."""
    return epoch % 4 in (0, 3)


class AlternatingLoader(Loader):
    """train.datasets.loader.Loader; but in the other epochs all batches of a size are the same one, made once."""

    def __init__(self, dataset: Any, settings: Any, device: torch.device, place: Place) -> None:
        super().__init__(dataset, settings, device, place)
        size = settings.image_size or dataset.image_size
        self.make = lambda count: (
            torch.randn(count, 3, size, size, device=device),
            torch.arange(count, device=device) % dataset.classes,
        )
        self.constant: dict[int, Batch] = {}

    def training(self, requests: Iterable[Ints], epoch: int) -> Iterator[Batch]:
        return super().training(requests, epoch) if is_real(epoch) else self.batches(requests)

    def batches(self, requests: Iterable[Ints]) -> Iterator[Batch]:
        for indices in requests:
            count = len(indices)
            if count not in self.constant:
                self.constant[count] = self.make(count)
            yield self.constant[count]


def alternating(arguments: list[str]) -> int:
    """`python -m train` with AlternatingLoader."""
    from train import __main__ as trainer
    from train import session

    session.Loader = AlternatingLoader  # type: ignore[attr-defined]
    sys.argv[1:] = arguments
    return trainer.main()


def with_small_net(arguments: list[str]) -> int | None:
    """`python -m train` or plain_ddp.py, with the model small_net registered."""
    from benchmarks import (
        plain_ddp,
        small_net,  # noqa: F401
    )
    from train import __main__ as trainer

    sys.argv[1:] = arguments[1:]
    return {"ours": trainer.main, "plain": plain_ddp.main}[arguments[0]]()


if __name__ == "__main__":
    sys.exit({"alternating": alternating, "small": with_small_net}[sys.argv[1]](sys.argv[2:]))
