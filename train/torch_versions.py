"""What is called otherwise in some of the releases of torch that the trainer runs on, 2.11 to 2.13.

Each has a name here, and is found by looking at torch itself, not at its version. Anything else that a release lacks is
no affair of this file: it is not used. `make test-torch TORCH=2.11.0` runs the trainer's tests with another release.
"""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def keyword(function: Any, *names: str) -> str:
    """The first of the names that the function takes as an argument. Raises LookupError where it takes none of them."""
    taken = inspect.signature(function).parameters
    for name in names:
        if name in taken:
            return name
    raise LookupError(f"{function.__qualname__} takes none of {', '.join(names)}: torch 2.11 to 2.13 do")


#: DistributedDataParallel's argument with which each rank keeps its own buffers (2.13 has a new name for it).
OWN_BUFFERS: dict[str, Any] = {
    keyword(DistributedDataParallel.__init__, "forward_sync_buffers", "broadcast_buffers"): False
}


def all_gather_single(gathered: Tensor, mine: Tensor) -> None:
    """Puts every rank's `mine` (the same shape on all) into `gathered`, one after the other by rank (collective)."""
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(gathered, mine)
