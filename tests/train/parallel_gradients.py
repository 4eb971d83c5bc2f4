"""Run by test_parallel.py on real ranks: the gradients of each way of parallelism."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.train.parallel_models import CLASSES, CPU, adamw, data, gradients, network, strategy_of, whole_gradients
from train.losses import per_sample
from train.model.precision import Precision
from train.order import equally
from train.parallel import shares
from train.parallel.ddp import Ddp
from train.parallel.shares import cut_by
from train.settings import Settings
from train.start.group import Place

BATCHES = (np.arange(17), np.arange(17, 18), np.arange(20, 40))  # the second leaves ranks without a sample
CASES: dict[str, dict[str, Any]] = {
    "equal": {},
    "unequal": {"weights": [3.0, 1.0, 2.0, 0.5]},
    "accumulated": {"micro_batch": 3},
    "unequal, accumulated": {"weights": [3.0, 1.0, 2.0, 0.5], "micro_batch": 2},
}


def of_all_cases(place: Place, parallel: str, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        weights = case.get("weights", [1.0] * 4)[: place.world_size]
        cut = cut_by(weights) if "weights" in case else equally(place.world_size)
        strategy = strategy_of(
            place, network(seed=5 + place.rank if parallel == "ddp" else 5), parallel=parallel, **settings
        )
        found[name] = []
        for batch in BATCHES:
            gradients(strategy, batch, cut, place.rank, case.get("micro_batch", 0))
            found[name].append(whole_gradients(strategy))
            strategy.network.zero_grad()
    return found


def ddp(place: Place, out: Path) -> dict[str, Any]:
    return of_all_cases(place, "ddp")


def static_graph(place: Place, out: Path) -> dict[str, Any]:
    return of_all_cases(place, "ddp", static_graph=True)


def unused(place: Place, out: Path) -> dict[str, Any]:
    return of_all_cases(place, "ddp", find_unused_parameters=True)


def fsdp(place: Place, out: Path) -> dict[str, Any]:
    return of_all_cases(place, "fsdp")


def none(place: Place, out: Path) -> dict[str, Any]:
    return of_all_cases(place, "none")


def one_rank(place: Place, out: Path) -> dict[str, Any]:
    """Weights and momenta after three steps, clipped, in passes: of one rank under --parallel ddp, and under DDP."""
    ours = strategy_of(place, network(), parallel="ddp")
    ddp = Ddp(network(), place, CPU)
    found: dict[str, Any] = {"kinds": (type(ours).__name__, type(ddp).__name__)}
    for name, strategy in (("ours", ours), ("ddp", ddp)):
        optimizer = adamw(strategy)
        for batch in BATCHES:
            gradients(strategy, batch, equally(1), 0, micro_batch=6)
            strategy.clip(0.1)
            optimizer.step()
            optimizer.zero_grad()
        states = [each["exp_avg_sq"] for each in optimizer.state.values()]
        found[name] = [parameter.detach() for parameter in strategy.network.parameters()] + states
    return found


class Slow(nn.Module):
    """Takes half a second more on rank 0 in float32, and on rank 1 under autocast: a busy machine may hold
    up any pass for a tenth of a second."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model, self.rank = model, rank
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        rests(self.rank == int(torch.is_autocast_enabled("cpu")))
        return self.norm(self.model(images))


def rests(long: bool) -> None:
    time.sleep(0.5 * long)


def measured(place: Place, out: Path) -> dict[str, Any]:
    """Shares by speed in float32 and under --amp bf16, and whether anything has changed."""
    found: dict[str, Any] = {}
    for amp in ("off", "bf16"):
        model = Slow(network(), place.rank)
        strategy = strategy_of(place, model, parallel="ddp", amp=amp)
        setattr(model.norm, "__class__", nn.SyncBatchNorm)  # noqa: B010  # which DDP would refuse on the CPU, and which raises there
        before = {name: value.clone() for name, value in model.state_dict().items()}
        random = torch.get_rng_state()
        images, labels = data()
        found[amp] = shares.measured(strategy, Precision(Settings(amp=amp), CPU), images, labels, per_sample)
        found[f"{amp} unchanged"] = (
            all(value.equal(before[name]) for name, value in model.state_dict().items())
            and torch.get_rng_state().equal(random)
            and all(p.grad is None for p in model.parameters())
            and "forward" not in vars(model.norm)
        )
    return found
