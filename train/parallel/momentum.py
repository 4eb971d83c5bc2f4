"""The momentum with which members go on after an exchange of weights (train.parallel.exchange): that of their mean.

Momentum remembers the last gradients. If each member kept its own, all would leave their common weights in the very
directions in which they had come apart. How far the mean went since the exchange before, over the sum of the learning
rates, is the mean of all members' momentum in these steps, and is there without sending anything more. With an
exchange in every step it is the momentum of data parallelism. (FedCM, Xu et al. 2021, arXiv 2106.10874, keeps momentum
at this mean until the next exchange; here it only begins with it.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from train.settings import Settings


@dataclass(frozen=True)
class Leg:
    """The steps between two exchanges. weight: of its mean in the momentum, 0 to 1.

    What a code lost of a long leg is sent with the next one, and would be most of the mean of a short one: such a leg
    counts by its part of the one before.
    """

    rates: float | None = 0.0  # sum of the learning rates; None: not known
    steps: int = 0
    weight: float = 1.0

    def after_step(self, rate: float | None) -> "Leg":
        return Leg(None if rate is None or self.rates is None else self.rates + rate, self.steps + 1)

    def ended(self, before: "Leg") -> "Leg":
        return Leg(self.rates, self.steps, min(1.0, self.steps / before.steps) if before.steps else 1.0)


class MeanMomentum:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        groups = enumerate(optimizer.param_groups)
        self.numbers = {parameter: number for number, group in groups for parameter in group["params"]}

    def factor(self, number: int) -> float:
        """The group's learning rate, as a part of the schedule's (train.optim.Schedule.set)."""
        return float(self.optimizer.param_groups[number].get("lr_factor", 1.0))

    def rate(self) -> float:
        """The schedule's learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"]) / self.factor(0)

    @torch.no_grad()
    def follow(self, parameter: nn.Parameter, way: Tensor, leg: Leg, part: slice | None = None) -> None:
        """The parameter's momentum becomes the mean's of this leg.

        way: how far the mean went, as a gradient points; of this part of the flat values, [n]; None: of all of them, in
        the parameter's shape.
        """
        own: Tensor | None = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if own is None or not leg.rates:
            return
        own, way = own if part is None else own.view(-1)[part], way.to(own)
        rate = leg.rates * self.factor(self.numbers[parameter])
        if leg.weight == 1:
            torch.div(way, rate, out=own)
        else:
            own.lerp_(way / rate, leg.weight)


def mean_momentum(optimizer: torch.optim.Optimizer | None, settings: Settings) -> MeanMomentum | None:
    """None where each member keeps its own.

    So it is with Nesterov's, whose steps are not of its momentum alone; with AdamW, where the mean's made no difference
    (benchmarks/RESULTS.md, 2026-11-26); with fp16, where members leave out steps; and with an outer momentum.
    """
    usual = settings.optimizer == "sgd" and not settings.nesterov and settings.amp != "fp16"
    return MeanMomentum(optimizer) if optimizer is not None and usual and not settings.outer_momentum else None
