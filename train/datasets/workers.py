"""Processes that make samples (decode image files) in shared memory, always a little ahead of the model.

The memory is a fixed number of slots, each for a chunk of a batch. A worker gets the number of a slot and the samples
to put there, and only reports when it is done. Workers come from a fork server: forking a process that runs NCCL or
CUDA is unsafe. They end with their parent, however that ends.
"""

import multiprocessing
import multiprocessing.context
import os
import shutil
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_process
from pathlib import Path
from typing import Protocol

import torch
import torch.multiprocessing  # teaches multiprocessing to hand tensors over in shared memory
from torch import Tensor

from train.datasets.base import DataError
from train.datasets.decode import Bad, Task
from train.order import Ints

MOST_SAMPLES = 16  # of one task
MOST_WORKERS = 64  # of one rank: each takes memory and a moment to start; a rank of eight on a host has fewer cores
SHARED = Path("/dev/shm")
MOST_SHARED_BYTES = 1 << 30  # shared memory of one rank


class Work(Protocol):
    """What samples are made by: decode.Job from files, array_job.ArrayJob from arrays."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample."""
        ...

    def for_workers(self) -> "Work":
        """What is sent to each worker."""
        ...

    def task(self, indices: Ints, epoch: int | None) -> Task: ...

    def into(self, out: Tensor, task: Task) -> list[Bad]: ...


_work: Work
_slots: Tensor


def auto_workers(local_world_size: int, on_gpu: bool) -> int:
    """For one rank: its part of the cores; on the CPU, where the model needs them too, a quarter of that."""
    cores = len(os.sched_getaffinity(0)) // local_world_size
    return max(1, min(MOST_WORKERS, cores if on_gpu else cores // 4))


def chunk_of(batch: int, workers: int) -> int:
    """Samples of one task: all workers can work on one batch."""
    return max(1, min(MOST_SAMPLES, -(-batch // max(1, workers))))


def slots_for(image_bytes: int, chunk: int, batch: int, workers: int, local_world_size: int) -> int:
    """How many chunks may wait: two batches and one for each worker, if there is room. Raises DataError."""
    wanted = 2 * -(-batch // chunk) + workers
    free = shutil.disk_usage(SHARED).free // 2 // local_world_size if SHARED.is_dir() else MOST_SHARED_BYTES
    fit = min(free, MOST_SHARED_BYTES) // (chunk * image_bytes)
    if fit < 2:
        raise DataError(
            f"{SHARED} is too small for workers that decode images: half of its free {free >> 20} MiB per rank holds "
            f"{fit} chunks of {chunk} images. Enlarge it on the host (mount -o remount,size=50% /dev/shm), or "
            "set --workers 0"
        )
    return min(wanted, fit)


def from_fork_server(module: str) -> multiprocessing.context.BaseContext:
    """What makes worker processes that have this module, in a process group of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.datasets.apart", module])
    return context


def initialise(work: Work, slots: Tensor) -> None:
    global _work, _slots
    _work, _slots = work, slots
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_process([parent.sentinel])
        os._exit(1)


def decode(slot: int, task: Task) -> list[Bad]:
    return _work.into(_slots[slot, : len(task.indices)], task)


@contextmanager
def pool_is_whole() -> Iterator[None]:
    """Raises DataError where a worker was ended."""
    try:
        yield
    except BrokenProcessPool as error:
        raise DataError(
            "a process that decodes images was ended from outside, often because memory ran out: set fewer "
            "--workers (0: none), or give the container more memory"
        ) from error


class Pool:
    """Does tasks of at most `chunk` samples in order. With no workers it does them in this process."""

    def __init__(self, work: Work, workers: int, slots: int, chunk: int) -> None:
        self.work, self.chunk = work, chunk
        self.free: list[int] = []
        self.executor: ProcessPoolExecutor | None = None
        if workers:
            self.slots = torch.empty((slots, chunk, *work.shape), dtype=torch.uint8).share_memory_()
            self.free = list(range(slots))
            context = from_fork_server(__name__)
            self.executor = ProcessPoolExecutor(workers, context, initialise, (work.for_workers(), self.slots))
            # The workers start while the caller builds its model.
            self.first = [self.executor.submit(os.getpid) for _ in range(workers)]

    def chunks(self, tasks: Iterable[Task]) -> Generator[tuple[Tensor, list[Bad]], None, None]:
        """uint8 [n, *shape] for each task, and which of it is bad. Each is to be used before the next is asked for.

        Raises DataError of the worker.
        """
        coming, waiting = iter(tasks), deque[tuple[int, int, Future[list[Bad]]]]()
        try:
            while True:
                self._hand_out(coming, waiting)
                if waiting:
                    slot, count, done = waiting[0]
                    bad = self._result(done)
                    yield self.slots[slot, :count], bad
                    waiting.popleft()
                    self.free.append(slot)
                    continue
                # No workers, or another iteration, not yet ended, holds all slots.
                task = next(coming, None)
                if task is None:
                    return
                chunk = torch.empty((len(task.indices), *self.work.shape), dtype=torch.uint8)
                yield chunk, self.work.into(chunk, task)
        finally:
            self._take_back(waiting)

    def _hand_out(self, tasks: Iterator[Task], waiting: deque[tuple[int, int, "Future[list[Bad]]"]]) -> None:
        while self.executor and self.free:
            task = next(tasks, None)
            if task is None:
                return
            slot = self.free.pop()
            with pool_is_whole():
                waiting.append((slot, len(task.indices), self.executor.submit(decode, slot, task)))

    def _result(self, done: "Future[list[Bad]]") -> list[Bad]:
        with pool_is_whole():
            return done.result()

    def _take_back(self, waiting: deque[tuple[int, int, "Future[list[Bad]]"]]) -> None:
        running = [done for _, _, done in waiting if not done.cancel()]
        wait(running)
        self.free += [slot for slot, _, _ in waiting]

    def close(self) -> None:
        if self.executor:
            self.executor.shutdown(cancel_futures=True)
            self.executor = None
            self.free = []
