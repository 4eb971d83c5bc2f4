"""A job with a fault: one rank raises, is killed, exits, or nobody says anything. No @record, as users write them."""

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("fault", choices=["raise", "kill", "exit", "silent", "silent-raise"])
parser.add_argument("--rank", type=int, default=-1)
args = parser.parse_args()

dist.init_process_group("gloo")
dist.barrier()
mine = dist.get_rank() == args.rank
if mine and args.fault in ("raise", "silent-raise"):
    raise RuntimeError("the fault that was asked for")
if mine and args.fault == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if mine and args.fault == "exit":
    sys.exit(7)
if args.fault.startswith("silent"):
    time.sleep(600)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
