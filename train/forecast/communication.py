"""How long exchanges between hosts take, by themselves and beside other work, and what they need of the processor."""

import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.start.group import Place

Timed = Callable[[], tuple[float, float]]  # one exchange: (seconds, computing time)
Figures = dict[str, list[float]]
MOST_REPEATS = 5  # of a round's exchanges, at most
MOST_SECONDS = 3.0  # of a round's exchanges, alone and busy each, unless one of each takes longer
SPIN_SECONDS = 0.5  # five periods of the kernel's usual quota


def spin(place: Place) -> float:
    """Cores' worth of computing time that this rank can use while all ranks compute (collective)."""
    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    with busy_cores(place):
        time.sleep(SPIN_SECONDS)
    return (time.process_time() - cpu) / (time.perf_counter() - begun)


@contextmanager
def busy_cores(place: Place) -> Iterator[None]:
    """Threads that compute on all cores of this rank, inside the context."""
    done, data = threading.Event(), bytes(1 << 16)

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(data)  # which lets go of the interpreter's lock

    threads = max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        done.set()
        for worker in workers:
            worker.join()


def all_reduces(sizes: Sequence[int], group: Any, device: torch.device) -> list[Timed]:
    """Of buffers of these sizes, in bytes."""

    def of(buffer: Tensor) -> Timed:
        def once() -> tuple[float, float]:
            begun, cpu = time.perf_counter(), time.process_time()
            dist.all_reduce(buffer, group=group)
            wait_for(device)
            return time.perf_counter() - begun, time.process_time() - cpu

        return once

    return [of(torch.ones(size // 4, device=device)) for size in sizes]


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished its work; returns at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_all(
    exchanges: Sequence[Timed], group: Any, place: Place, device: torch.device, rest: float, most: int = MOST_REPEATS
) -> Figures:
    """Of each exchange, one after the other (collective in `group`): {"seconds", "cpu_seconds", "busy_seconds": beside
    other work of the processor; on GPUs the same as alone}.

    Before each repeat the link has `rest` seconds without traffic, as in a step: a switch, or a limiter of a virtual
    machine's rate, lets some data pass at once after a pause.
    """

    def repeat() -> list[list[float]]:
        """[seconds of each, computing time of each]"""
        done, begun = list[list[tuple[float, float]]](), time.perf_counter()
        spent = torch.zeros(1, device=device)
        while len(done) < most and spent.item() < MOST_SECONDS:
            time.sleep(rest)
            dist.barrier(group)
            done.append([once() for once in exchanges])
            spent[0] = time.perf_counter() - begun
            dist.broadcast(spent, 0, group=group)
        return [[statistics.median(row[at][part] for row in done) for at in range(len(exchanges))] for part in (0, 1)]

    for once in exchanges:  # connections are made
        once()
    seconds, cpu = repeat()
    busy = seconds
    if device.type == "cpu":
        with busy_cores(place):
            busy, _ = repeat()
    return {"seconds": seconds, "cpu_seconds": cpu, "busy_seconds": busy}


def merged(every: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each round's figures over its ranks: the longest. every: of each rank, those of the rounds that it took part in:
    later hosts lack the first ones."""
    return [
        longest([mine[index - len(every[0])] for mine in every[: entry["world_size"]]])
        for index, entry in enumerate(every[0])
    ]


def longest(same: list[Any]) -> Any:
    """Of equal documents the largest number in each place."""
    if isinstance(same[0], dict):
        return {key: longest([one[key] for one in same]) for key in same[0]}
    if isinstance(same[0], list):
        return list(map(max, *same)) if len(same) > 1 else same[0]
    return same[0]
