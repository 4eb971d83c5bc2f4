"""Run by test_parallel_states.py on real ranks: states saved under one way of parallelism, taken up under another."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.train.parallel_models import CPU, adamw, data, gradients, network, strategy_of, whole_gradients
from train.model.ema import Ema
from train.model.pieces import whole
from train.model.precision import Precision
from train.model.running_statistics import evaluating_with, gather_buffers, mean_buffers, set_buffers
from train.order import equally
from train.parallel import Strategy
from train.parallel.state import model_state
from train.settings import Settings
from train.start.group import Place

BATCHES = [np.arange(40)[start : start + 13] for start in (0, 9, 18)]


def step(strategy: Strategy, optimizer: torch.optim.Optimizer, place: Place, number: int) -> None:
    gradients(strategy, BATCHES[number], equally(place.world_size), place.rank)
    optimizer.step()
    optimizer.zero_grad()


def save(place: Place, out: Path, parallel: str, **compiled: Any) -> None:
    """Two steps, then OUT/saved.pt and, after the third, OUT/next.pt: both by local rank 0, as a checkpoint."""
    strategy = strategy_of(place, network(), parallel=parallel)
    if compiled:
        strategy.compile(**compiled)
    optimizer = adamw(strategy)
    for number in range(3):
        step(strategy, optimizer, place, number)
        if number:
            state = {"model": strategy.model_state(), "optimizer": strategy.optimizer_state(optimizer)}
            if place.local_rank == 0:
                torch.save(state, out / ("saved.pt" if number == 1 else "next.pt"))
    dist.barrier()


def save_ddp(place: Place, out: Path) -> None:
    save(place, out, "ddp")


def save_compiled(place: Place, out: Path) -> None:
    save(place, out, "ddp", backend="eager")


def save_compiled_fsdp(place: Place, out: Path) -> None:
    save(place, out, "fsdp", backend="eager")


def save_fsdp(place: Place, out: Path) -> None:
    save(place, out, "fsdp")


def resume(
    place: Place, out: Path, parallel: str, layout: torch.memory_format = torch.contiguous_format
) -> dict[str, Any]:
    """What a fresh run holds after loading OUT/saved.pt, and after the third step."""
    saved = torch.load(out / "saved.pt", weights_only=True)
    strategy = strategy_of(place, network(seed=6).to(memory_format=layout), parallel=parallel)  # type: ignore[call-overload]
    optimizer = adamw(strategy)
    strategy.load(saved["model"], optimizer, saved["optimizer"])
    loaded = {"model": strategy.model_state(), "optimizer": strategy.optimizer_state(optimizer)}
    torch.save(loaded, out / f"loaded-{place.rank}.pt")
    step(strategy, optimizer, place, 2)
    return {"loaded": torch.load(out / f"loaded-{place.rank}.pt"), "next": model_state(strategy.network)}


def resume_ddp(place: Place, out: Path) -> dict[str, Any]:
    return resume(place, out, "ddp")


def resume_channels_last(place: Place, out: Path) -> dict[str, Any]:
    return resume(place, out, "ddp", torch.channels_last)


def resume_none(place: Place, out: Path) -> dict[str, Any]:
    return resume(place, out, "none")


def resume_fsdp(place: Place, out: Path) -> dict[str, Any]:
    return resume(place, out, "fsdp")


def clipped(place: Place, out: Path) -> dict[str, Any]:
    """Norm and gradients of one step, clipped, by each way."""
    found = {}
    for parallel in ("ddp", "fsdp"):
        strategy = strategy_of(place, network(), parallel=parallel)
        gradients(strategy, BATCHES[0], equally(place.world_size), place.rank)
        found[parallel] = {"norm": strategy.clip(0.01), "gradients": whole_gradients(strategy)}
    return found


def scaled(place: Place, out: Path) -> dict[str, Any]:
    """fsdp under a GradScaler: one rank's infinite gradient makes all ranks skip the step."""
    strategy = strategy_of(place, network(), parallel="fsdp")
    optimizer = torch.optim.SGD(strategy.network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copied(strategy.network)
    images, labels = data()
    with strategy.passes(True):
        outputs = strategy.module(images[:4])
        factor = float("inf") if place.rank == place.world_size - 1 else 1.0
        scaler.scale(functional.cross_entropy(outputs, labels[:4])).backward()
    poisoned = list(strategy.network.parameters())[-1]
    poisoned.grad.mul_(factor)  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return {"before": before, "after": copied(strategy.network), "scale": scaler.get_scale()}


def halved(place: Place, out: Path) -> dict[str, Any]:
    """Gradients of a step in two passes under --amp bf16, by fsdp and ddp; and what was gathered and reduced how."""
    images, labels = data()
    found: dict[str, Any] = {}
    for batch_norm in (False, True):
        for parallel in ("fsdp", "ddp"):
            strategy = strategy_of(place, network(batch_norm), parallel=parallel, amp="bf16")
            precision, gathered, reduced = Precision(Settings(amp="bf16"), CPU), dict[str, Any](), set[torch.dtype]()
            with watched(strategy.network, gathered, reduced):
                for half, last in ((0, False), (1, True)):
                    part = slice(20 * place.rank + 10 * half, 20 * place.rank + 10 * half + 10)
                    with strategy.passes(last):
                        with precision.autocast():
                            outputs = strategy.module(images[part])
                            loss = functional.cross_entropy(outputs, labels[part], reduction="sum")
                        (loss * strategy.scale(40)).backward()
            found[f"{parallel} {batch_norm}"] = {
                "gradients": whole_gradients(strategy),
                "statistics": buffers(strategy.network),
                "kept": {p.dtype for p in strategy.network.parameters()},
                "gathered": gathered,
                "reduced": reduced,
            }
    return found


@contextmanager
def watched(model: nn.Module, gathered: dict[str, Any], reduced: set[torch.dtype]) -> Iterator[None]:
    """Notes the precision of each module's parameters in its forward, and of the sums that go around."""
    name_of_it = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce = getattr(dist, name_of_it)

    def noting(*given: Any, **named: Any) -> Any:
        reduced.update(each.dtype for each in (*given, *named.values()) if isinstance(each, Tensor))
        return reduce(*given, **named)

    def note(name: str, module: nn.Module) -> None:
        gathered.update({f"{name}.{key}": p.dtype for key, p in module.named_parameters(recurse=False)})

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, _, name=name: note(name, module))
    with mock.patch.object(dist, name_of_it, noting):
        yield


def cut_block_by_block(place: Place, out: Path) -> dict[str, Any]:
    """How many whole parameters each move to the device took along."""
    moved, to = list[int](), nn.Module.to
    total = sum(p.numel() for p in network().parameters())

    def noting(module: nn.Module, *where: Any, **named: Any) -> Any:
        moved.append(sum(p.numel() for p in module.parameters() if not isinstance(p, DTensor)))
        return to(module, *where, **named)

    with mock.patch.object(nn.Module, "to", noting):
        strategy_of(place, network(seed=place.rank), parallel="fsdp")
    return {"moved": moved, "total": total}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model_state(model).items()}


def statistics(place: Place, out: Path) -> dict[str, Any]:
    """Buffers of batch normalisation after two steps on different samples: own, mean, in evaluation, and after it."""
    strategy = strategy_of(place, network(batch_norm=True), parallel="ddp")
    optimizer = adamw(strategy)
    for number in range(2):
        step(strategy, optimizer, place, number)
    own = buffers(strategy.network)
    rows = gather_buffers(strategy.network)
    mean = mean_buffers(strategy.network)
    with evaluating_with(strategy.network, mean):
        inside = buffers(strategy.network)
    after = buffers(strategy.network)
    set_buffers(strategy.network, rows[0])
    return {
        "own": own,
        "rows": rows,
        "mean": mean,
        "inside": inside,
        "after": after,
        "rank 0's": buffers(strategy.network),
        "weights": [whole(p.detach()) for p in strategy.network.parameters()],
    }


def averaged_statistics(place: Place, out: Path) -> dict[str, Any]:
    """The same with averages: this rank's own, those in evaluation, the state's, and those of a fresh run after it."""
    found = {}
    for parallel in ("ddp", "fsdp"):
        strategy = strategy_of(place, network(batch_norm=True), parallel=parallel)
        optimizer, ema = adamw(strategy), Ema(strategy.network, 0.9)
        for number in range(2):
            step(strategy, optimizer, place, number)
            ema.update(number + 1)
        before = buffers(strategy.network)
        with ema.swapped_in():
            inside = buffers(strategy.network)
        again = Ema(strategy.network, 0.9)
        again.load(ema.state(), ema.rank_buffers()[place.rank])
        found[parallel] = {
            "own": copies(ema.averaged_buffers),
            "again": copies(again.averaged_buffers),
            "inside": inside,
            "state": ema.state(),
            "before": before,
            "after": buffers(strategy.network),
        }
    return found


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Forgetful(nn.Module):
    """Leaves out a layer, from the step on that `until` says."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.until = until

    def forward(self, x: Tensor) -> Tensor:
        self.until -= 1
        return self.used(self.unused(x) if self.until >= 0 else x)


def unused(place: Place, out: Path) -> dict[str, str]:
    """What each kind of model and setting raises within three steps."""

    def complaint(until: int, **settings: bool) -> str:
        strategy = strategy_of(place, Forgetful(until), parallel="ddp", **settings)
        try:
            for _ in range(3):
                with strategy.passes(last=True):
                    strategy.module(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    return {
        "at once": complaint(0),
        "later": complaint(1),
        "asked": complaint(0, find_unused_parameters=True),
        "static": complaint(0, static_graph=True),
    }


def joined(place: Place, out: Path) -> dict[str, Any]:
    """Rank r makes 3 - r steps of plain SGD, under join."""
    strategy = strategy_of(place, network(), parallel="ddp")
    optimizer = torch.optim.SGD(strategy.network.parameters(), lr=0.1)
    images, labels = data()
    if place.rank == 1:
        strategy.network.register_forward_pre_hook(lambda *_: time.sleep(0.2))  # a slow host
    with strategy.join():
        for number in range(3 - place.rank):
            chosen = slice(8 * number + 4 * place.rank, 8 * number + 4 * place.rank + 4)
            for half, last in ((0, False), (1, True)):
                part = slice(chosen.start + 2 * half, chosen.start + 2 * half + 2)
                with strategy.passes(last):
                    functional.cross_entropy(strategy.module(images[part]), labels[part], reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
    figures = {"comm": strategy.comm_share(), "computing": strategy.computing_seconds()}
    return {"model": copied(strategy.network), **figures}
