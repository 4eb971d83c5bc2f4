"""Run by test_parallel_resume.py on real ranks: broken off after two steps of four and resumed, by each way."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.train.parallel_models import adamw, data, gradients, strategy_of
from train.model.running_statistics import gather_buffers, set_buffers
from train.order import equally
from train.parallel.state import model_state
from train.start.group import Place

BATCHES = [np.arange(40)[start : start + 13] for start in (0, 9, 18, 27)]


class Crossed(nn.Module):
    """Layers used in another order than they are registered in, so that DDP sorts its buckets anew; more than one
    bucket (the first holds 1 MiB); batch statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(300, 10)
        self.first = nn.Linear(192, 400)
        self.last = nn.Linear(500, 300)
        self.norm = nn.BatchNorm1d(400)
        self.middle = nn.Linear(400, 500)
        self.unseen = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(images.flatten(1))))
        return self.head(torch.tanh(self.last(torch.tanh(self.middle(self.unseen(x))))))


def crossed() -> nn.Module:
    torch.manual_seed(5)
    return Crossed()


def unbroken_and_resumed(place: Place, parallel: str) -> dict[str, Any]:
    """The weights after four steps: in one go; resumed after two with warm_up; and without."""

    def steps(strategy: Any, optimizer: Any, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(100 + number)
            gradients(strategy, BATCHES[number], equally(place.world_size), place.rank, micro_batch=4)
            optimizer.step()
            optimizer.zero_grad()

    strategy = strategy_of(place, crossed(), parallel=parallel)
    optimizer = adamw(strategy)
    steps(strategy, optimizer, range(2))
    rows = gather_buffers(strategy.network)
    everywhere: list[Any] = [copy.deepcopy((strategy.model_state(), strategy.optimizer_state(optimizer)))]
    torch.distributed.broadcast_object_list(everywhere)  # as a file that every host has
    model, state = everywhere[0]
    steps(strategy, optimizer, range(2, 4))
    found = {"unbroken": copied(strategy.network)}
    for name in ("warm", "cold"):
        strategy = strategy_of(place, crossed(), parallel=parallel)
        optimizer = adamw(strategy)
        strategy.load(model, optimizer, state)
        set_buffers(strategy.network, rows[place.rank])
        if name == "warm":
            images, labels = data()
            module = strategy.module
            strategy.warm_up(lambda: nn.functional.cross_entropy(module(images[:4]), labels[:4]))  # noqa: B023
        steps(strategy, optimizer, range(2, 4))
        found[name] = copied(strategy.network)
    return found


def copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model_state(network).items()}


def ddp(place: Place, out: Path) -> dict[str, Any]:
    return unbroken_and_resumed(place, "ddp")


def fsdp(place: Place, out: Path) -> dict[str, Any]:
    return unbroken_and_resumed(place, "fsdp")


def none(place: Place, out: Path) -> dict[str, Any]:
    return unbroken_and_resumed(place, "none")
