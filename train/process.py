"""This process among the ranks: torchrun's environment, the device, the process group."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from train.settings import SettingsError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 32 << 20  # the most that glibc accepts
KEPT_IN_ALL = 1 << 30


@dataclass(frozen=True)
class Place:
    """Where this rank stands. Alone (no torchrun): rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def from_environment() -> "Place":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if "RANK" not in os.environ:
            return Place()
        return Place(*(int(os.environ[name]) for name in names))


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees for the next one: giving it back and faulting it in anew took a
    sixth of the training time on the CPU. Does nothing under another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_IN_ALL)


def device_of(place: Place) -> torch.device:
    """One GPU for each local rank, or the CPU where there is no GPU at all.

    Raises SettingsError where there are GPUs but fewer than local ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return torch.device("cpu")
    if place.local_world_size > gpus:
        raise SettingsError(
            f"{place.local_world_size} ranks on a host with {gpus} GPU(s): start at most one rank per GPU"
        )
    return torch.device("cuda", place.local_rank)


@contextmanager
def process_group(place: Place, device: torch.device, timeout: float) -> Iterator[None]:
    """The default process group: NCCL for GPUs, else gloo; no collective waits longer than `timeout` s."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit, device_id=device if backend == "nccl" else None)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def first_complaint(complaint: str, place: Place) -> str:
    """The complaint of the lowest rank that has one, known to all ranks; empty if none has."""
    everyone: list[str] = [""] * place.world_size
    dist.all_gather_object(everyone, complaint)
    named = [f"{text} (rank {rank})" if rank else text for rank, text in enumerate(everyone) if text]
    return named[0] if named else ""
