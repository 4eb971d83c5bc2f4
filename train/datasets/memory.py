"""Host memory: batches that use it again, and prepared images that are kept in it."""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from train.datasets.base import Bytes
from train.order import Ints
from train.start.memory import available_memory

KEPT_PART = 0.25  # of the memory that is available may hold prepared images, all ranks of the host together
UNREFERENCED = 2  # sys.getrefcount of an array that only a list holds: the list's and its own argument's
HUGE = 4 << 20  # bytes from which huge pages pay
MADV_HUGEPAGE = 14


def huge_pages(array: npt.NDArray[np.generic]) -> None:
    """Asks for huge pages: faulting in small ones takes as long as making a batch. No-op where there are none."""
    if array.nbytes < HUGE or sys.platform != "linux":
        return
    start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)


class Recycler:
    """Float tensors for batches on the CPU. One whose last tensor, view or autograd graph is gone is used again.

    Each tensor handed out holds a reference to its array, which the array's reference count shows.
    most: arrays that are kept. With 0 none is, and threads may share this.
    """

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self.arrays: list[npt.NDArray[np.float32]] = []

    def empty(self, count: int) -> Tensor:
        """float32 [count], whatever was in it."""
        for index in range(len(self.arrays)):
            if sys.getrefcount(self.arrays[index]) == UNREFERENCED and self.arrays[index].size >= count:
                return torch.from_numpy(self.arrays[index][:count])
        array = np.empty(count, np.float32)
        huge_pages(array)
        idle = [one for one in range(len(self.arrays)) if sys.getrefcount(self.arrays[one]) == UNREFERENCED]
        if idle:
            self.arrays[idle[0]] = array  # too small
        elif len(self.arrays) < self.most:
            self.arrays.append(array)
        return torch.from_numpy(array)


class Kept:
    """Prepared images by sample number, filled when first needed: memory is taken only then.

    All ranks of a host can have the same memory. They need no lock: in an epoch a sample is one rank's alone, and what
    another has filled in an earlier epoch is there, since steps of all ranks lie between.
    """

    def __init__(self, samples: int, shape: tuple[int, ...], memory: mmap.mmap) -> None:
        """shape: of one image, uint8. memory: zeros, as many bytes as `bytes_of` says."""
        flat = np.frombuffer(memory, np.uint8)
        self.images: Bytes = flat[: samples * math.prod(shape)].reshape(samples, *shape)
        self.filled = flat[samples * math.prod(shape) :]  # 0 or 1, for each sample

    @staticmethod
    def bytes_of(samples: int, shape: tuple[int, ...]) -> int:
        return samples * (math.prod(shape) + 1) or 1  # there is no memory of nothing

    def missing(self, indices: Ints) -> Ints:
        lacking = self.filled[indices] == 0
        return np.unique(indices[lacking]) if lacking.any() else indices[:0]

    def fill(self, indices: Ints, images: Bytes) -> None:
        """indices: missing ones, each once."""
        self.images[indices] = images
        self.filled[indices] = 1


@dataclass(frozen=True)
class Offer:
    """Memory of a process, which others of its host and container can map, too, while it lives."""

    host: str
    process: int
    files: tuple[int, ...]  # its file descriptors

    @staticmethod
    def of(sizes: Sequence[int]) -> "Offer | None":
        """New memory, zeros, of so many bytes each; none is taken before something is written there. None where the
        system has no such memory."""
        files = list[int]()
        try:
            for size in sizes:
                files.append(os.memfd_create("muster-prepared-images"))
                os.ftruncate(files[-1], size)
        except (AttributeError, OSError):  # not Linux; not allowed
            for file in files:
                os.close(file)
            return None
        return Offer(this_host(), os.getpid(), tuple(files))

    def map(self) -> list[mmap.mmap]:
        """The memory; nothing where this process cannot have it."""
        maps = list[mmap.mmap]()
        try:
            for file in self.files:
                with open(f"/proc/{self.process}/fd/{file}", "r+b", buffering=0) as opened:
                    maps.append(mmap.mmap(opened.fileno(), 0))
        except OSError:
            return []
        return maps

    def close(self) -> None:
        """Those who have mapped it keep it."""
        for file in self.files:
            os.close(file)


def this_host() -> str:
    """The same in processes that see each other's numbers, and in no others."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"process {os.getpid()}"


def keeps(memory: str, samples: int, shape: tuple[int, ...], local_world_size: int = 1) -> bool:
    """Whether so many prepared images are kept in memory, by so many ranks of a host: as --memory says or, for auto, if
    they fit."""
    if memory in ("ram", "disk"):
        return memory == "ram"
    return samples * math.prod(shape) <= available_memory() * KEPT_PART / local_world_size
