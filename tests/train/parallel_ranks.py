"""Runs one function of a `tests.train.parallel_*` module on real gloo ranks, forked from the tests' process, which has
torch loaded.

function(place, out) returns what rank r of w leaves in out/w-r.pt.
"""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import GUARD_SECONDS
from train.start.group import Place
from train.start.muster_run import leave_process_group

ROOT = Path(__file__).resolve().parents[2]
Scenario = Callable[[Place, Path], Any]


def one_rank(scenario: Scenario, rank: int, world_size: int, store: str, out: Path) -> None:
    place = Place(rank, rank, world_size, world_size)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        torch.save(scenario(place, out), out / f"{world_size}-{rank}.pt")
    except Exception:
        traceback.print_exc()
        os._exit(1)  # not waiting for ranks that hang in a collective with this one
    leave_process_group()


def run(module: str, function: str, out: Path, *world_sizes: int) -> dict[tuple[int, int], Any]:
    """Called by tests. Returns what each (world size, rank) left."""
    scenario: Scenario = getattr(importlib.import_module(f"tests.train.{module}"), function)
    for world_size in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            fork(one_rank, [(scenario, rank, world_size, f"{folder}/store", out) for rank in range(world_size)])
    return {(w, r): torch.load(out / f"{w}-{r}.pt", weights_only=False) for w in world_sizes for r in range(w)}


def fork(rank: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    """Has a rank with each of these arguments run to its end, with an exit status of 0."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_begin, args=(rank, *each)) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(GUARD_SECONDS)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()  # no-op for those that have ended
        process.join()
    assert statuses == [0] * len(ranks), statuses


def _begin(rank: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    rank(*arguments)


def environment() -> dict[str, str]:
    """Of a test's process: this one's, without what torchrun may have set, on one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}
