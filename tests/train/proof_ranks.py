"""Run by test_proof.py: real gloo ranks, forked from one interpreter, each with an environment of its own.

python -m tests.train.proof_ranks CASES.json OUT: for each case, a list of {"environment", "seed", "data"} (one for each
rank), what `prove` said on each rank.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.model import torchvision_cpu

torchvision_cpu.watch()

import torchvision  # noqa: E402, F401  (once, before the ranks are forked)

from train.start import proof  # noqa: E402
from train.start.muster_run import leave_process_group  # noqa: E402


@dataclass(frozen=True)
class Fields:
    seed: int = 0
    run_dir: str = ""


def one_rank(rank: int, case: list[dict[str, Any]], folder: str, out: Path) -> None:
    torch.set_num_threads(1)
    mine = case[rank]
    os.environ.update(mine.get("environment", {}))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(case))
    try:
        facts = proof.prove(Fields(mine.get("seed", 0), f"/runs/{rank}"), mine.get("data", "5 samples"))
        said: dict[str, Any] = {"facts": facts}
    except proof.ProofError as error:
        said = {"error": str(error)}
    out.write_text(json.dumps(said))
    leave_process_group()


def main() -> int:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                fork.Process(target=one_rank, args=(rank, case, folder, out / f"{name}-{rank}.json"))
                for rank in range(len(case))
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
