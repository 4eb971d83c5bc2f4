"""Model, optimizer, learning rate, and one optimizer step: the arithmetic of data-parallel training."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from train.settings import SettingsError

WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")
WARM_UP = 0.2  # part of all steps
WEIGHT_DECAY = 0.05


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite; the message names rank, epoch and step."""


def build(name: str, classes: int, image_size: int, seed: int) -> nn.Module:
    """A torchvision classification model with random weights that are a function of the seed.

    Raises SettingsError for a name that torchvision does not know (with near ones) and an image size that it
    refuses.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise SettingsError(f"--model {name}: torchvision has no such model{near(name, names)}")
    options: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name in WITH_AUXILIARY_HEADS else {}
    torch.manual_seed(seed)
    if name.startswith("vit_"):
        options["image_size"] = image_size
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--image-size {image_size}: {name} does not take it ({reason}); try 224") from error
    return model


def near(name: str, names: list[str]) -> str:
    from difflib import get_close_matches  # only for this message

    close = get_close_matches(name, names)
    return f"; did you mean {', '.join(close)}?" if close else f"; it has {', '.join(names)}"


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; biases and normalisation weights are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


@dataclass(frozen=True)
class Schedule:
    """The learning rate at an optimizer step, 0 .. total_steps-1: linear warm-up, then half a cosine."""

    peak: float
    total_steps: int

    def at(self, step: int) -> float:
        warm_up = max(1, round(WARM_UP * self.total_steps))
        if step < warm_up:
            return self.peak * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.total_steps - warm_up)
        return self.peak * (1 + math.cos(math.pi * progress)) / 2


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    count: int,
    global_count: int,
    rank: int,
    world_size: int,
    where: str,
) -> Tensor:
    """One optimizer step with this rank's share: the update is that of the whole global batch's mean loss.

    DDP divides the sum of the ranks' gradients by `world_size`, so each rank's loss is world_size /
    global_count * (sum over its first `count` samples); ranks may hold different counts, or none. Returns
    this rank's own sums, float64 [2] on the device: loss, correct answers. Raises NonFiniteLoss, naming rank
    and `where`, before anything reaches another rank or the weights.
    """
    outputs = model(images)
    losses = functional.cross_entropy(outputs, labels, reduction="none")
    loss = losses[:count].sum()
    value = float(losses.detach().sum())  # with the padding: 0 times infinity is no 0
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the loss is {value} on rank {rank} at {where}: try a smaller --lr, or look at the data")
    # The padding takes part with weight 0: every rank goes through the same collectives.
    weighted = (loss + 0.0 * losses[count:].sum()) * (world_size / global_count)
    optimizer.zero_grad(set_to_none=True)
    weighted.backward()
    optimizer.step()
    correct = (outputs[:count].argmax(1) == labels[:count]).sum()
    return torch.stack([loss.detach().double(), correct.double()])
