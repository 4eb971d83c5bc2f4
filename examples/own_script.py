"""A script of your own with the two optional calls: hang detection, and a checkpoint when the run is stopped.

    make train NODES=2 WORKLOAD=examples SCRIPT=own_script.py ARGS="--steps 2000"
    make stop RUN=<id>                                                    # saves: runs/<id>/checkpoint.pt
    make train NODES=2 WORKLOAD=examples SCRIPT=own_script.py RESUME=<id>  # goes on from there

Everything else is plain PyTorch, and torchrun alone runs it as well (then put train/start/muster_run.py beside it).
"""

import argparse
import os
import sys
from pathlib import Path

import muster_run
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "checkpoint.pt"
FOLDER = Path(os.environ.get("MUSTER_RUN_DIR", "."))
EARLIER = os.environ.get("MUSTER_RESUME_DIR")  # what FOLDER was in the run that is resumed


def main() -> None:
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
    if EARLIER:
        saved = torch.load(Path(EARLIER, CHECKPOINT), map_location=device)
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
        if muster_run.stopping():  # the same answer on all ranks
            if local_rank == 0:  # on every host: they share no disk, and each resumes from its own
                state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, FOLDER / CHECKPOINT)
                print(f"stopped after step {step}, saved {CHECKPOINT}", flush=True)
            sys.exit(muster_run.EXIT_STOPPED)

    if dist.get_rank() == 0:
        print(f"done: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
