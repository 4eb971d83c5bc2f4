"""Cases for test_model.py, test_ema.py and test_step_stats.py on real gloo ranks, forked from the tests' process."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.train.parallel_ranks import fork
from train.losses import per_sample
from train.model import torchvision_cpu
from train.model.ema import Ema
from train.model.precision import Precision
from train.model.prepare import prepare
from train.model.recompute import blocks
from train.optim import make_groups, make_optimizer
from train.reporting.step_stats import NonFiniteLoss, StepStats
from train.settings import Settings
from train.start.muster_run import leave_process_group
from train.torch_versions import OWN_BUFFERS

torchvision_cpu.watch()

CPU = torch.device("cpu")


class TwoHeads(nn.Module):
    """A backbone of torchvision's blocks with batch normalisation, dropout and two heads."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        stages = [nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4)) for _ in range(2)]
        self.stages = nn.Sequential(*stages)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.dropout(self.stages(images).mean((2, 3)))
        return self.first(features), self.second(features)


def two_heads(checkpointing: bool) -> nn.Module:
    torch.manual_seed(4)
    return prepare(TwoHeads(), Settings(activation_checkpointing=checkpointing), CPU, 2)


def samples(rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + rank)
    return torch.randn(6, 4, 5, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)


def backward_of_two_losses(module: nn.Module, way: str, images: Tensor, labels: Tensor) -> None:
    """one_pass: both losses of one pass; two_passes: one loss of each pass, summed; separate: a backward for each."""
    if way in ("one_pass", "sharded"):
        first, second = module(images)
        (per_sample(first, labels).mean() + per_sample(second, labels).mean()).backward()
    elif way == "two_passes":
        first, second = sum_of(module(images)), sum_of(module(images.flip(0)))
        (per_sample(first, labels).mean() + per_sample(second, labels.flip(0)).mean() * 2).backward()
    else:
        no_sync = module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()
        with no_sync:
            per_sample(sum_of(module(images)), labels).mean().backward()
        per_sample(sum_of(module(images.flip(0))), labels.flip(0)).mean().mul(2).backward()


def sum_of(heads: tuple[Tensor, Tensor]) -> Tensor:
    return heads[0] + heads[1]


WAYS = ("one_pass", "two_passes", "separate", "sharded")


def two_losses(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients and buffers with checkpointing: under DDP or fsdp, and of the plain model on every rank's samples."""
    result: dict[str, Any] = {}
    for way in WAYS:
        network = two_heads(checkpointing=True)
        if way == "sharded":
            for name in blocks(network):
                fully_shard(network.get_submodule(name))
            fully_shard(network)
        module: nn.Module = network
        if way != "sharded":
            module = DistributedDataParallel(network, **OWN_BUFFERS, gradient_as_bucket_view=True)
        torch.manual_seed(rank)
        backward_of_two_losses(module, way, *samples(rank))
        plain = two_heads(checkpointing=False)
        fresh = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
        mine: dict[str, Tensor] = {}
        for other in range(world_size):
            plain.load_state_dict(fresh)
            torch.manual_seed(other)
            backward_of_two_losses(plain, way, *samples(other))
            if other == rank:
                mine = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        result[way] = {
            "gradients": {name: whole(p.grad) for name, p in network.named_parameters() if p.grad is not None},
            "plain_gradients": {
                name: p.grad / world_size for name, p in plain.named_parameters() if p.grad is not None
            },
            "buffers": dict(network.named_buffers()),
            "plain_buffers": mine,
        }
    return result


def chain() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def averaged(rank: int, world_size: int) -> dict[str, Any]:
    """The same training with and without fully_shard: averages, and what is computed with them."""
    result: dict[str, Any] = {}
    inputs = torch.arange(10.0).view(2, 5)
    for name in ("plain", "sharded"):
        network = chain()
        if name == "sharded":
            fully_shard(network[0])  # type: ignore[index]
            fully_shard(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        ema = Ema(network, 0.9)
        for step in range(1, 4):
            optimizer.zero_grad()
            network(inputs).square().sum().backward()
            optimizer.step()
            ema.update(step)
        with torch.no_grad():
            before = network(inputs)
            with ema.swapped_in():
                within = network(inputs)
            after = network(inputs)
        state = {key: value.clone() for key, value in ema.state().items()}
        again = Ema(network, 0.9)
        again.load(state)
        loaded = {key: value.clone() for key, value in again.state().items()}
        result[name] = {"state": state, "loaded": loaded, "before": before, "within": within, "after": after}
    return result


def overflow(rank: int, world_size: int) -> dict[str, Any]:
    """Two fp16 steps of ddp and of fsdp; in the first one a single rank's gradients overflow."""
    result: dict[str, Any] = {}
    for parallel in ("ddp", "fsdp"):
        for optimizer_name in ("sgd", "adamw"):
            settings = Settings(amp="fp16", optimizer=optimizer_name, parallel=parallel)
            torch.manual_seed(2)
            network = nn.Sequential(nn.Linear(5, 3))  # the overflow stays in the first row: one rank's shard
            module: nn.Module = network
            if parallel == "fsdp":
                fully_shard(network)
            else:
                module = DistributedDataParallel(network)
            optimizer = make_optimizer(settings, make_groups(network, 0.0), CPU)
            precision = Precision(settings, CPU)
            changed, scales = [], []
            for step in range(2):
                before = [whole(p) for p in network.parameters()]
                optimizer.zero_grad()
                with precision.autocast():
                    outputs = module(torch.ones(2, 5))
                loss = outputs.float().sum() / 100
                if step == 0 and rank == 1:
                    loss = loss + 1e38 * outputs[0, 0].float()
                precision.backward(loss)
                precision.unscale(optimizer)
                precision.step(optimizer)
                after = [whole(p) for p in network.parameters()]
                changed.append(any(not a.equal(b) for a, b in zip(before, after, strict=True)))
                scales.append((precision.state() or {})["scale"])
            result[f"{parallel} {optimizer_name}"] = {"changed": changed, "scales": scales, "weights": after}
    return result


def whole(parameter: Tensor) -> Tensor:
    tensor: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().clone()


def stats(rank: int, world_size: int) -> dict[str, Any]:
    """Four steps; the last rank is asked to stop in the second one, ranks 1 and up have NaN in the third."""
    watch, seen, error = StepStats(world_size, rank, CPU), [], ""
    try:
        for step in range(1, 5):
            bad = step == 3 and rank >= 1
            loss = torch.tensor(float("nan") if bad else float(rank + step))
            stop = step == 2 and rank == world_size - 1
            times = (0.5 + rank, 0.25) if step == 2 and rank != 1 else None
            record = watch.add(
                step, 1, loss, torch.tensor(rank), loss.isfinite(), world_size * 2, stop=stop, times=times, lr=step / 10
            )
            figures = ("step", "loss", "accuracy", "stop", "values", "computing", "waiting")
            seen.append(record and tuple(getattr(record, name) for name in figures))
    except NonFiniteLoss as nonfinite:
        error = str(nonfinite)
    other = StepStats(world_size, rank, CPU)
    other.add(9, 2, torch.tensor(1.0), torch.tensor(1), torch.tensor(True), world_size)
    last = other.flush()
    return {"seen": seen, "error": error, "last": [(one.step, one.loss) for one in last], "none": other.flush()}


CASES = {"two_losses": two_losses, "averaged": averaged, "overflow": overflow, "stats": stats}


def one_rank(case: str, rank: int, world_size: int, store: str, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.save(CASES[case](rank, world_size), out / f"{case}-{rank}.pt")
    leave_process_group()


def run(out: Path, case: str, world_size: int) -> list[dict[str, Any]]:
    """What each rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        fork(one_rank, [(case, rank, world_size, f"{folder}/store", out) for rank in range(world_size)])
    return [torch.load(out / f"{case}-{rank}.pt") for rank in range(world_size)]
