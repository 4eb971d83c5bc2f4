"""Variants of the trainer and of the plain script that `make bench-train` runs under torchrun.

-m benchmarks.train_rank alternating --model resnet18 ...   the trainer, without input in every other epoch
-m benchmarks.train_rank giving_back --model vgg11 ...      the trainer, which keeps no large blocks of memory
-m benchmarks.train_rank small --model small_net ...        the plain script, with benchmarks/small_net.py
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
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.make = lambda count: (
            torch.randn(count, 3, size, size, device=device).to(memory_format=layout),
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


def giving_back(arguments: list[str]) -> int:
    """`python -m train` without train.start.memory.keep_large_blocks."""
    from train import __main__ as trainer
    from train.start import memory

    memory.keep_large_blocks = lambda local_world_size, device: None
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
    variants = {"alternating": alternating, "giving_back": giving_back, "small": plain_with_small_net}
    sys.exit(variants[sys.argv[1]](sys.argv[2:]))
