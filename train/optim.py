"""The optimizer, its groups of parameters, and the learning rate at each optimizer step."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.settings import Settings

Group = dict[str, Any]


def make_groups(
    network: nn.Module, weight_decay: float, head: str | None = None, head_factor: float = 1.0
) -> list[Group]:
    """Two groups for an optimizer, in the network's order: decayed weights, then norms and biases, undecayed; without
    frozen parameters. head: the layer whose parameters get two groups of their own, with `head_factor` times the
    learning rate of the others (Schedule.set).

    What has at most one dimension is a norm or a bias: pulling a scale to zero does not simplify a network (He et
    al. 2018, 3.1). `param_names` is torch's own key: checkpoints and reports name the parameters
    by it. Call it on the bare network (plain names), with `fsdp` after wrapping (other parameters).
    """
    named = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    in_head = [(name, parameter) for name, parameter in named if head == name.rpartition(".")[0]]
    others = [(name, parameter) for name, parameter in named if head != name.rpartition(".")[0]]
    parts = [*by_decay(others, weight_decay, {}), *by_decay(in_head, weight_decay, {"lr_factor": head_factor})]
    return [
        {"params": [p for _, p in part], "param_names": [name for name, _ in part], **options}
        for part, options in parts
        if part
    ]


def by_decay(
    named: list[tuple[str, nn.Parameter]], weight_decay: float, options: Group
) -> list[tuple[list[tuple[str, nn.Parameter]], Group]]:
    decayed = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
    undecayed = [(name, parameter) for name, parameter in named if parameter.ndim <= 1]
    return [(decayed, {"weight_decay": weight_decay, **options}), (undecayed, {"weight_decay": 0.0, **options})]


def make_optimizer(settings: Settings, groups: list[Group], device: torch.device) -> torch.optim.Optimizer:
    """SGD or AdamW over `make_groups`'s groups; fused kernels where there are any, else foreach: torch 2.13 has no
    fused SGD for fsdp's sharded parameters.

    Fused on the CPU, too: one pass over memory instead of ten took 8 ms for ResNet-18's AdamW step instead of 27 (one
    core), 6 instead of 18 for SGD. Differs from the plain loop by rounding; the number of threads changes no bit.
    """
    sharded = any(isinstance(p, DTensor) for group in groups for p in group["params"])
    fused = device.type in ("cuda", "cpu") and not (sharded and settings.optimizer == "sgd")
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if settings.optimizer == "sgd":
        how |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        optimizer = torch.optim.SGD(groups, lr=peak_lr(settings), **how)
        if fused and settings.momentum:
            begin_momentum(optimizer)
        return optimizer
    return torch.optim.AdamW(groups, lr=peak_lr(settings), **how)


def begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Momentum begins with zeros, which makes the first step what it is anyway. torch 2.13's fused SGD begins with
    uninitialised memory, and keeps it when that step is skipped, because fp16 gradients overflowed.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def peak_lr(settings: Settings) -> float:
    """The highest learning rate. With --scale-lr N it grows with the global batch (Goyal et al. 2017, 2.1)."""
    return settings.lr * settings.batch_size / settings.scale_lr if settings.scale_lr else settings.lr


@dataclass(frozen=True)
class Schedule:
    """The learning rate at an optimizer step, 0 .. total_steps-1, whatever the number of ranks.

    Warm-up is linear and ends at the peak. Then: `cosine`, half a cosine to 0 over the remaining steps (Loshchilov and
    Hutter 2016, one cycle); `step`, times step_gamma after every `step_every` epochs, counted from the first one;
    `constant`.
    """

    settings: Settings
    steps_per_epoch: int
    total_steps: int

    @property
    def warm_up_steps(self) -> int:
        part = self.settings.warmup
        return max(1, round(part * self.total_steps)) if part > 0 else 0

    def at(self, step: int) -> float:
        peak, warm_up = peak_lr(self.settings), self.warm_up_steps
        if step < warm_up:
            return peak * (step + 1) / warm_up
        if self.settings.schedule == "constant":
            return peak
        if self.settings.schedule == "step":
            return peak * self.settings.step_gamma ** (step // (self.settings.step_every * self.steps_per_epoch))
        progress = (step - warm_up) / max(1, self.total_steps - warm_up)
        return peak * (1 + math.cos(math.pi * progress)) / 2

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Gives every group the learning rate of this step, as a float, and returns it; a head's own is in proportion
        to it."""
        lr = self.at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        return lr

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: all that decides `at`."""
        names = ("schedule", "warmup", "step_every", "step_gamma")
        kept = {name: value for name, value in asdict(self.settings).items() if name in names}
        steps = {"steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps}
        return {"peak": peak_lr(self.settings), **kept, **steps}
