"""Run by test_horovod.py under torchrun, horovodrun or alone: a few steps with --parallel horovod or none.

    python -m tests.train.horovod_ranks OUT PARALLEL MICRO_BATCH [again | busy | frozen]

Each rank saves OUT/<parallel>-<world size>-<micro batch>-<rank>.pt. The network has no batch normalisation, whose
statistics are each rank's own. The last batch has one sample: with two ranks one has none. `again` trains more than
once; with `busy` and `frozen` rank 1 stays away from the first step, and rank 0 saves how that ended.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from train.parallel import Strategy, make
from train.parallel.horovod_start import horovodrun_store, started_by_horovodrun
from train.settings import Settings
from train.start.group import Place
from train.start.muster_run import leave_process_group

SAMPLES, BATCH = 31, 15
TIMEOUT, SHORT = 60.0, 10.0  # s
CPU = torch.device("cpu")


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SAMPLES, 20, generator=generator), torch.randint(5, (SAMPLES,), generator=generator)


def start(parallel: str, place: Place, timeout: float = TIMEOUT) -> tuple[Strategy, torch.optim.Optimizer]:
    network = build(place.rank)  # rank 0's has to win
    strategy = make(Settings(parallel=parallel, timeout=timeout), network, place, CPU)
    parameters = list(strategy.network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return strategy, strategy.optimizer(lambda groups: torch.optim.AdamW(groups, lr=0.01), groups)


def step(
    strategy: Strategy, optimizer: torch.optim.Optimizer, place: Place, micro_batch: int, first: int
) -> tuple[Tensor, list[Tensor]]:
    """One step on the batch that begins at sample `first`. Returns the gradients' norm, and copies of them."""
    images, labels = data()
    whole = torch.arange(first, min(first + BATCH, SAMPLES))
    mine = whole[place.rank :: place.world_size]
    passes = list(mine.split(micro_batch or BATCH)) if len(mine) else []
    optimizer.zero_grad(set_to_none=True)
    for number, chosen in enumerate(passes):
        with strategy.passes(last=number == len(passes) - 1):
            losses = functional.cross_entropy(strategy.module(images[chosen]), labels[chosen], reduction="none")
            (losses.sum() * strategy.scale(len(whole))).backward()
    strategy.before_step()
    norm = strategy.clip(0.5)
    gradients = [p.grad.clone() for p in strategy.network.parameters() if p.grad is not None]
    optimizer.step()
    return norm, gradients


def run(parallel: str, place: Place, micro_batch: int) -> dict[str, Any]:
    strategy, optimizer = start(parallel, place)
    norms, gradients = [], []
    kept: Any = None
    for first in range(0, SAMPLES, BATCH):
        norm, gradient = step(strategy, optimizer, place, micro_batch, first)
        norms.append(norm)
        gradients.append(gradient)
        if kept is None:
            kept = copied([strategy.model_state(), strategy.optimizer_state(optimizer)])
    resumed, its_optimizer = start(parallel, place)
    resumed.load(kept[0], its_optimizer, kept[1])
    for first in range(BATCH, SAMPLES, BATCH):
        step(resumed, its_optimizer, place, micro_batch, first)
    return {
        "model": strategy.model_state(),
        "optimizer": strategy.optimizer_state(optimizer),
        "resumed": [resumed.model_state(), resumed.optimizer_state(its_optimizer)],
        "norms": norms,
        "gradients": gradients,
        "comm_share": strategy.comm_share(),
    }


def without_rank_1(place: Place, how: str) -> dict[str, Any]:
    """What rank 0 meets in its step: {"seconds": ..., "error": ...}."""
    strategy, optimizer = start("horovod", place, timeout=SHORT)
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    if place.rank == 1:
        if how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return {}
    begun, error = time.monotonic(), ""
    try:
        step(strategy, optimizer, place, 0, 0)
    except Exception as caught:
        error = str(caught)
    seconds = time.monotonic() - begun
    os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    return {"seconds": seconds, "error": error}


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


def main() -> int:
    out, parallel, micro_batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    place = Place.from_environment()
    if started_by_horovodrun():
        store: Any = horovodrun_store(place, TIMEOUT)
    elif "MASTER_ADDR" in os.environ:
        store = None
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
    where = {} if store is None else {"store": store, "rank": place.rank, "world_size": place.world_size}
    dist.init_process_group("gloo", **where)
    if "again" in sys.argv:  # small groups, so that there are several
        from train.parallel import horovod

        horovod.GROUP_BYTES = 2000
    if sys.argv[-1] in ("busy", "frozen"):
        result = without_rank_1(place, sys.argv[-1])
    else:
        result = run(parallel, place, micro_batch)
    if "again" in sys.argv:
        result["again"] = [run(parallel, place, micro_batch)["model"] for _ in range(10)]
    torch.save(result, out / f"{parallel}-{place.world_size}-{micro_batch}-{place.rank}.pt")
    leave_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
