"""Small models, batches and one training step for the tests of train.parallel."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from train.order import Cut, Ints, step_of
from train.parallel import Strategy, make
from train.settings import Settings
from train.start.group import Place

CPU = torch.device("cpu")
SAMPLES, SIZE, CLASSES = 40, 8, 10


class Network(nn.Sequential):
    """torch.compile leaves out torch's own containers: with a forward of its own it is a model to it."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)


def network(batch_norm: bool = False, seed: int = 5) -> nn.Sequential:
    """3 x 8 x 8 images to 10 classes: a stem, a trunk of blocks, a head."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(7) if batch_norm else nn.Identity()
    stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), norm, nn.Tanh(), nn.AvgPool2d(2))
    block = nn.Sequential(nn.Conv2d(7, 6, 3, padding=1), nn.Tanh())
    return Network(stem, block, nn.Flatten(), nn.Linear(96, 33), nn.Tanh(), nn.Linear(33, CLASSES))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    images = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def strategy_of(place: Place, model: nn.Module, **settings: Any) -> Strategy:
    return make(Settings(**settings), model, place, CPU)


def adamw(strategy: Strategy, lr: float = 0.01) -> Optimizer:
    parameters = list(strategy.network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return strategy.optimizer(lambda those: torch.optim.AdamW(those, lr=lr, fused=True), groups)


def gradients(strategy: Strategy, batch: Ints, cut: Cut, rank: int, micro_batch: int = 0) -> None:
    """Forward and backward of the rank's share of the global batch, as the trainer does them."""
    images, labels = data()
    step = step_of(batch, cut, rank, micro_batch)
    for number, part in enumerate(step.passes):
        chosen = torch.from_numpy(part.indices)
        weights = (torch.arange(len(chosen)) < part.count).float()
        with strategy.passes(last=number == len(step.passes) - 1):
            losses = functional.cross_entropy(strategy.module(images[chosen]), labels[chosen], reduction="none")
            ((losses * weights).sum() * strategy.scale(step.global_count)).backward()
    strategy.before_step()


def whole_gradients(strategy: Strategy) -> list[Tensor]:
    from train.model.pieces import whole

    return [whole(p.grad).clone() for p in strategy.network.parameters() if p.grad is not None]


def reference(batches: Sequence[Ints], batch_norm: bool = False) -> list[list[Tensor]]:
    """The gradients of the mean loss over each whole batch, by nothing but autograd."""
    model, (images, labels), found = network(batch_norm), data(), []
    for batch in batches:
        model.zero_grad()
        chosen = torch.from_numpy(batch)
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found
