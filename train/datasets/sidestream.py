"""Batches made on a CUDA stream of their own, ahead of the model that works on the current stream."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Batch = tuple[Any, ...]
Request = TypeVar("Request")

AHEAD = 2  # batches


def on_side_stream(
    requests: Iterable[Request], make: Callable[[Request], Batch], stream: torch.cuda.Stream
) -> Iterator[Batch]:
    """make(request) for each request, its kernels and copies on `stream`, AHEAD of them begun before one is asked for.

    The stream that is current then waits for a batch that is yielded; the host does not.
    """
    coming, begun = iter(requests), deque[tuple[Batch, torch.cuda.Event]]()

    def begin() -> None:
        for request in coming:
            with torch.cuda.stream(stream):
                batch, ready = make(request), torch.cuda.Event()
                ready.record(stream)
            begun.append((batch, ready))
            return

    stream.wait_stream(torch.cuda.current_stream(stream.device))  # for what `make` reads, uploaded there
    for _ in range(AHEAD):
        begin()
    while begun:
        batch, ready = begun.popleft()
        begin()  # the host prepares the next one while the device still works on earlier steps
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(ready)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)  # its memory is not used again before the model is done with it
        yield batch
