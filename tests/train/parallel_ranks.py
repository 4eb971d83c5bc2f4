"""Runs one function of a `tests.train.parallel_*` module on real gloo ranks, forked from one interpreter.

    python -m tests.train.parallel_ranks MODULE FUNCTION OUT WORLD_SIZE...

FUNCTION(place, OUT) returns what rank r of w leaves in OUT/w-r.pt. Status 1 if any rank failed.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.start.group import Place
from train.start.muster_run import leave_process_group

ROOT = Path(__file__).resolve().parents[2]
Scenario = Callable[[Place, Path], Any]


def one_rank(scenario: Scenario, rank: int, world_size: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
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


def main() -> int:
    module, function, out, *world_sizes = sys.argv[1:]
    scenario: Scenario = getattr(importlib.import_module(f"tests.train.{module}"), function)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    for world_size in map(int, world_sizes):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [(scenario, rank, world_size, f"{folder}/store", Path(out)) for rank in range(world_size)]
            ranks = [fork.Process(target=one_rank, args=each) for each in arguments]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                return 1
    return 0


def run(module: str, function: str, out: Path, *world_sizes: int) -> dict[tuple[int, int], Any]:
    """Called by tests. Returns what each (world size, rank) left."""
    command = [sys.executable, "-m", "tests.train.parallel_ranks", module, function, str(out), *map(str, world_sizes)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {(w, r): torch.load(out / f"{w}-{r}.pt", weights_only=False) for w in world_sizes for r in range(w)}


def environment() -> dict[str, str]:
    """Of a test's process: this one's, without what torchrun may have set, on one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
