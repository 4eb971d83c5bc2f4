"""Unequal shares of the global batch (`--shares`): how much each rank gets, as given or by measured speed.

The update does not depend on them: each rank weighs its samples by world size / global count
(`Strategy.scale`), so that the averaged gradient is that of the whole batch however it is cut.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from train.model.precision import Precision
from train.model.running_statistics import unchanged_buffers
from train.order import Cut
from train.parallel.strategy import Strategy
from train.settings import SettingsError
from train.torch_versions import all_gather_single

Loss = Callable[[Any, Any], torch.Tensor]  # (outputs, targets) -> a loss for each sample, [n]
ALIKE = 0.05  # speeds that differ by less than this part count as equal: measurements vary as much
ROUNDS, WARM_UP_ROUNDS = 5, 2


def parse_shares(text: str, world_size: int) -> list[float]:
    """`3,1` -> [3.0, 1.0]: one weight above 0 for each rank. Raises SettingsError."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise SettingsError(f"--shares {text}: numbers with commas between, as 3,1, or auto") from error
    if bad := [weight for weight in weights if not 0 < weight < float("inf")]:
        raise SettingsError(
            f"--shares {text}: {bad[0]:g} is no share: numbers above 0 (a rank without work: leave it out)"
        )
    if len(weights) != world_size:
        raise SettingsError(
            f"--shares {text}: {len(weights)} shares for {world_size} rank(s): give one for each, by rank"
        )
    return weights


def split(samples: int, weights: Sequence[float]) -> list[int]:
    """Places where the ranks' contiguous shares of a global batch begin, and its end: [0, ..., samples].

    Sizes are in proportion to the weights, rounded by largest remainder (ties: the lower rank); each rank has a sample
    at least, taken from the largest shares, if there are as many as ranks.
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (sizes[rank] - exact[rank], rank))
    for rank in by_remainder[: samples - sum(sizes)]:
        sizes[rank] += 1
    while 0 in sizes and max(sizes) > 1:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]


def cut_by(weights: Sequence[float]) -> Cut:
    """The cut of global batches for `train.order`."""
    return lambda samples: split(samples, weights)


def settled(speeds: Sequence[float]) -> list[float]:
    """Weights from speeds (samples/s): relative to the slowest rank, all 1 where they are alike, two decimals."""
    slowest = min(speeds)
    if max(speeds) <= slowest * (1 + ALIKE):
        return [1.0] * len(speeds)
    return [round(speed / slowest, 2) for speed in speeds]


def measured(strategy: Strategy, precision: Precision, images: Any, labels: Any, loss: Loss) -> list[float]:
    """Weights by the speed of each rank's own device, the same list on all ranks (collective).

    What is measured is a pass as the training makes it, in its precision and compiled, but that no rank waits for
    another inside. All ranks measure at the same time, as they train. Changes no weight, buffer, gradient or random
    number. `images`, `labels`: this rank's usual pass, on the device.
    """
    one = tree_leaves(images)[0]  # whatever structure a user's own dataset makes
    device, network = one.device, strategy.network
    was_training = network.training
    network.train()
    dist.barrier()
    times = []
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, unchanged_buffers(network), own_batch_statistics(network):
        for _ in range(WARM_UP_ROUNDS + ROUNDS):
            begun = time.perf_counter()
            with strategy.passes(last=False):
                with precision.autocast():
                    losses = loss(strategy.module(images), labels)
                losses.sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
            for parameter in network.parameters():
                parameter.grad = None
    network.train(was_training)
    mine = torch.tensor([len(one) / statistics.median(times[WARM_UP_ROUNDS:])], dtype=torch.float64, device=device)
    speeds = torch.empty(dist.get_world_size(), dtype=torch.float64, device=device)
    all_gather_single(speeds, mine)
    return settled(speeds.tolist())


@contextmanager
def own_batch_statistics(network: nn.Module) -> Iterator[None]:
    """SyncBatchNorm as BatchNorm inside: it would wait for the other ranks, and all would be as fast as the slowest."""
    synchronised = [module for module in network.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in synchronised:
        module.forward = MethodType(nn.BatchNorm2d.forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in synchronised:
            del module.forward
