"""A job with a fault: one rank raises, exits, stands still, eats all memory, leaves early, or prints much.

It has no @record, as users write their scripts. `steps` goes on until a fault comes from outside; `stuck`, `eat` and
`leave` do so, too, until SIGUSR2 tells a rank to stand still in the middle of a step, to eat, or to end with status 0
after its step. `stuck` reports its progress. `chatty` prints much in each step.
"""

import argparse
import signal
import sys
import time

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
FAULTS = ["raise", "exit", "silent-raise", "steps", "stuck", "eat", "leave", "chatty"]
parser.add_argument("fault", choices=FAULTS)
parser.add_argument("--rank", type=int, default=-1)
args = parser.parse_args()
told: list[int] = []


def stand_still() -> None:
    time.sleep(600)


def eat() -> None:
    held = []
    while True:
        held.append(b"x" * 2**24)


signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
dist.init_process_group("gloo")
dist.barrier()
mine = dist.get_rank() == args.rank
if mine and args.fault in ("raise", "silent-raise"):
    raise RuntimeError("the fault that was asked for")
if mine and args.fault == "exit":
    sys.exit(7)
if args.fault == "silent-raise":  # the others wait for nobody
    time.sleep(600)
if args.fault == "stuck":
    import muster_run
step = 0
while not (told and args.fault == "leave"):
    dist.all_reduce(torch.ones(1))
    step += 1
    if args.fault == "stuck":
        muster_run.progress(step, patience=10.0)  # a script says itself how long it may be silent
    if args.fault == "chatty":
        print("x" * 5000, flush=True)
    if step == 10 and dist.get_rank() == 0:
        print("10 steps", flush=True)
    for _ in range(10):
        time.sleep(0.01)
        if told and args.fault != "leave":
            eat() if args.fault == "eat" else stand_still()
