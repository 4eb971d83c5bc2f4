"""A script of your own with the three optional calls: hang detection, a checkpoint when the run is stopped, and another
attempt when a rank or a host fails, also on fewer hosts.

    make train NODES=2 WORKLOAD=examples SCRIPT=own_script.py ARGS="--steps 2000"
    make stop RUN=<id>                                                    # saves: runs/<id>/checkpoint.pt
    make train NODES=2 WORKLOAD=examples SCRIPT=own_script.py RESUME=<id>  # goes on from there

Everything else is plain PyTorch, and torchrun alone runs it as well (then put train/start/muster_run.py beside it).
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import muster_run
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "checkpoint.pt"
FOLDER = Path(os.environ.get("MUSTER_RUN_DIR", "."))
EARLIER = os.environ.get("MUSTER_RESUME_DIR")  # what FOLDER was in the run that is resumed
SAVE_STEPS = 100


def newest(device: torch.device) -> dict[str, Any] | None:
    """The newest checkpoint that a host of this attempt has, on every rank."""
    folders = [FOLDER, *([Path(EARLIER)] if EARLIER else [])]
    found = next((folder / CHECKPOINT for folder in folders if (folder / CHECKPOINT).exists()), None)
    saved = torch.load(found, map_location=device) if found else None
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, saved["step"] if saved else 0)
    given = [saved]
    dist.broadcast_object_list(given, steps.index(max(steps)))
    return given[0]


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On every host: they share no disk, and each may be the one that is left."""
    draft = FOLDER / f".{CHECKPOINT}"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, draft)
    draft.replace(FOLDER / CHECKPOINT)  # whole, or as it was


def main() -> None:
    muster_run.can_resume()  # "start me again when something fails"
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(32, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    done = 0
    if saved := newest(device):
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        print(f"goes on after step {done}", flush=True)

    for step in range(done + 1, steps + 1):
        inputs = torch.randn(64, 32, device=device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        muster_run.progress(step, steps, loss=loss.detach())
        stopping = muster_run.stopping()  # the same answer on all ranks
        if local_rank == 0 and (stopping or step % SAVE_STEPS == 0):
            save(step, model.module, optimizer)
        if stopping:
            if local_rank == 0:
                print(f"stopped after step {step}, saved {CHECKPOINT}", flush=True)
            sys.exit(muster_run.EXIT_STOPPED)

    if dist.get_rank() == 0:
        print(f"done: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
