"""The memory of a rank's process: how much the host has left, and what glibc's malloc keeps of it between two steps.

A step on the CPU frees nearly all that it took. What malloc gives back then, the kernel has to find and clear anew in
the next step, and in a virtual machine its host as well. But what is kept fits the next step's blocks less well: the
most that training needs grows by up to two fifths (benchmarks/RESULTS.md, 2026-11-27, eighth entry). All this is of the
main thread's memory, where steps are; glibc keeps no large blocks of other threads.
"""

import ctypes
import resource
from pathlib import Path

import torch

# GLIBC_TUNABLES of ranks, which glibc reads when a process starts: it asks the kernel for huge pages (2 MB) wherever it
# gets memory. In a virtual machine the processor takes long to find a small page's place (benchmarks/RESULTS.md,
# 2026-11-26, fifth entry; `make bench-train ARGS="--parts pages"`).
HUGE_PAGES = "glibc.malloc.hugetlb=1"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of glibc's malloc.h
LARGEST_KEPT_BYTES = 32 << 20  # of one block, at first; the most that every glibc accepts
KEPT_BYTES = 1 << 30  # in all, at first
NEVER_TRIM, NO_MMAP = -1, 0
CGROUP = Path("/sys/fs/cgroup")
#: In times of what the ranks have taken at most in their first step: room for copies of the state and for what fits
#: less well.
ROOM = 2.0


def keep_freed_memory() -> None:
    """Makes glibc keep the blocks that a step frees for the next one, but for the large ones. Does nothing under
    another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def keep_large_blocks(local_world_size: int, device: torch.device) -> None:
    """After a first step: makes glibc keep blocks of any size, if the host has much memory left, beside what its ranks
    have taken. No-op under another C library, and where steps take their memory from a GPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and device.type == "cpu" and has_room(local_world_size):
        mallopt(M_MMAP_MAX, NO_MMAP)
        mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)


def has_room(local_world_size: int) -> bool:
    return available_memory() >= ROOM * local_world_size * most_taken()


def most_taken() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def available_memory() -> int:
    """Bytes that this process may still take: the machine's or, where that is less, its container's, where files that
    nobody has read for a while make room. 0: unknown."""
    rooms = list[int]()
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        rooms.append(int(fields["MemAvailable"].split()[0]) * 1024)
    for *names, files in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        paths = [CGROUP / name for name in names]
        if all(path.exists() for path in paths):
            limit, used, statistics = (path.read_text().strip() for path in paths)
            if limit != "max":
                numbers = dict(line.split() for line in statistics.splitlines())
                rooms.append(int(limit) - int(used) + int(numbers[files]))
    return max(0, min(rooms, default=0))
