"""A user's own script, as the tutorials write them: nothing of Muster in it. Prints one line per rank."""

import argparse
import os
from pathlib import Path

import tabulate  # from this workload's requirements.txt
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--word", default="")
parser.add_argument("--model", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
if args.model and dist.get_rank() == 0:
    import torchvision  # twice the time that torch takes

    torchvision.models.get_model(args.model)
Path("written-by-the-script.txt").write_text(f"rank {dist.get_rank()}\n")
print(
    f"rank={dist.get_rank()} world={dist.get_world_size()} local={os.environ['LOCAL_RANK']} sum={total.item():.0f} "
    f"ifname={os.environ['GLOO_SOCKET_IFNAME']} word={args.word} tabulate={tabulate.__name__}"
)
dist.destroy_process_group()
