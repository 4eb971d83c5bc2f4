"""How long a user's script under torch's DistributedDataParallel computes in each step, without a word of the script.

All ranks' steps take equally long, as each waits for the slowest; who that is, only the computing shows. DDP can time
it by itself (`computed`): forward, and backward until all gradients are there, without the all-reduces. `watch` has DDP
do so in every step of every module that it wraps, and tells the keeper ten times a second at most (keeper/slow.py).
Beside it, it takes the time that the script waited for its DataLoader. On the CPU it costs 35 microseconds a step. On a
GPU DDP waits for its own events when it reads them, so that there only each tenth step is timed.

In the training image it is the top-level module `muster_ddp_times`, which muster_faster_import calls in the ranks of a
run when torch is loaded. It imports the standard library alone, and torch where it is loaded already. Our own trainer
does without `watch`: it says the same with its progress.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

TELL_SECONDS = 0.1  # between two messages, at least
GPU_STEPS = 10  # of so many steps on a GPU one is timed


def computed(figures: Mapping[str, Any]) -> float:
    """Nanoseconds of forward and backward in DDP's times of one step; backward ends when all gradients are there."""
    return float(figures.get("forward_compute_time", 0) + figures.get("backward_compute_time", 0))


def time_steps(module: Any, on_gpu: bool) -> None:
    """Have a DistributedDataParallel module time each step, instead of each hundredth after its first ten."""
    module._set_ddp_runtime_logging_sample_rate(GPU_STEPS if on_gpu else 1)


class Watch:
    """What this rank has done so far, and who is told."""

    def __init__(self, keeper: str, rank: int) -> None:
        self.keeper, self.rank = keeper, rank
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.steps = self.timed = 0
        self.computed = self.waited = 0.0  # seconds of the timed steps, and for data
        self.fetched = 0.0  # seconds that the DataLoader took for the batch that is next
        self.last: object = None  # the step that was timed last, as DDP names it
        self.quiet_until = 0.0

    def fetch(self, seconds: float) -> None:
        """A batch has come; it counts when a step is made of it."""
        self.fetched = seconds

    def step(self, figures: Mapping[str, Any]) -> None:
        """A step begins. figures: DDP's, of the step that it timed last."""
        self.steps += 1
        self.waited, self.fetched = self.waited + self.fetched, 0.0
        timed = figures.get("forward_compute_time_start")
        if timed != self.last and computed(figures) > 0:
            self.last = timed
            self.timed += 1
            self.computed += computed(figures) / 1e9
        now = time.monotonic()
        if now >= self.quiet_until:
            self.quiet_until = now + TELL_SECONDS
            work = [self.steps, self.timed, round(self.computed, 6), round(self.waited, 6)]
            words = {"rank": self.rank, "pid": os.getpid(), "work": work}
            self.socket.sendto(json.dumps(words).encode(), socket.MSG_DONTWAIT, self.keeper)


def watch(torch: ModuleType, keeper: str, rank: int) -> None:
    """From now on every module that torch's DDP wraps is timed. Whatever fails in it, no training ends of that."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter as Batches

    told = Watch(keeper, rank)
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    batches: Any = Batches
    made, fetch = ddp.__init__, batches.__next__

    @functools.wraps(made)
    def init(module: Any, *arguments: Any, **options: Any) -> None:
        made(module, *arguments, **options)
        try:
            time_steps(module, on_gpu=any(one.is_cuda for one in module.parameters()))
            module.register_forward_pre_hook(begin_step)
        except Exception:
            return

    def begin_step(module: Any, _: Any) -> None:
        try:
            if torch.compiler.is_compiling():  # nothing of this belongs into a compiled graph
                return
            if torch.is_grad_enabled() and module.require_backward_grad_sync:
                told.step(module._get_ddp_logging_data())
        except Exception:
            return

    @functools.wraps(fetch)
    def timed(iterator: Any) -> Any:
        begun = time.perf_counter()
        batch = fetch(iterator)
        told.fetch(time.perf_counter() - begun)
        return batch

    ddp.__init__, batches.__next__ = init, timed
