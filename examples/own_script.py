"""A script of your own with the two optional calls: hang detection, and a checkpoint when the run is stopped.

    make train NODES=2 WORKLOAD=examples SCRIPT=own_script.py ARGS="--steps 2000"
    make stop RUN=<id>      # saves; checkpoint.pt comes back in runs/<id>/workload/

Everything else is plain PyTorch, and torchrun alone runs it as well (then put train/start/muster_run.py beside it).
"""

import argparse
import os
import sys

import muster_run
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = "checkpoint.pt"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(32, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for step in range(1, steps + 1):
        inputs = torch.randn(64, 32, device=device)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        muster_run.progress(step, steps, loss=loss.detach())
        if muster_run.stopping():  # the same answer on all ranks
            if dist.get_rank() == 0:
                torch.save({"step": step, "model": model.module.state_dict()}, CHECKPOINT)
                print(f"stopped after step {step}, saved {CHECKPOINT}", flush=True)
            sys.exit(muster_run.EXIT_STOPPED)

    if dist.get_rank() == 0:
        print(f"done: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
