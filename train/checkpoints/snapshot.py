"""A copy of the training's state in host memory, taken while no step runs; the only thing that training waits for.

The memory is used again for each copy: touching 200 MB of fresh memory takes ten times as long as copying into old
one. CUDA tensors go to pinned memory on a stream of their own (that path is not verified here: no GPU).
"""

import ctypes
import sys
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from train.checkpoints.files import CheckpointError


class Snapshot:
    """Host memory for what is copied together; the n-th tensor found in it has the n-th buffer."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.deferred: list[tuple[Tensor, Tensor, int]] = []  # buffer, tensor, the tensor's version in take()

    def take(self, states: dict[str, Any], guarded: Set[int] = frozenset()) -> dict[str, Any]:
        """The same nested dicts, lists and tuples with each tensor replaced by its copy, which is valid until the next
        call. states: by their names in messages. CPU tensors whose data_ptr() is in `guarded` are copied in finish();
        until then they must not change.

        Raises CheckpointError for what could not be loaded again: neither tensor nor plain value.
        """
        pairs: list[tuple[Tensor, Tensor]] = []

        def copy_of(tensor: Tensor) -> Tensor:
            index = len(pairs)
            if index == len(self.buffers):
                self.buffers.append(buffer_for(tensor))
            elif not fits(self.buffers[index], tensor):
                self.buffers[index] = buffer_for(tensor)
            pairs.append((self.buffers[index], tensor.detach()))
            return self.buffers[index]

        copied = {name: rebuilt(state, name, copy_of) for name, state in states.items()}
        del self.buffers[len(pairs) :]
        is_deferred = [tensor.is_cpu and tensor.data_ptr() in guarded for _, tensor in pairs]
        self.deferred = [(*pair, pair[1]._version) for pair, defer in zip(pairs, is_deferred, strict=True) if defer]
        copy_all([pair for pair, defer in zip(pairs, is_deferred, strict=True) if not defer])
        return copied

    def finish(self) -> None:
        """Copies what take() left. Raises CheckpointError where a tensor has changed since."""
        deferred, self.deferred = self.deferred, []
        copy_all([(buffer, tensor) for buffer, tensor, _ in deferred])
        if any(tensor._version != version for _, tensor, version in deferred):
            raise CheckpointError("weights changed while they were copied: call Writer.settle() before changing them")


def rebuilt(value: Any, where: str, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """`value` with plain containers and values, its tensors through `copy_of`; `where` names it in messages.

    Equal texts become one object: pickle writes an object's second place as a reference to the first one, so that the
    bytes of a file would tell which texts were one object by chance, and hosts' files would differ.
    """
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, Parameter) or value.layout != torch.strided:
            raise CheckpointError(f"{where} is a {type(value).__name__}: checkpoints take whole, dense tensors")
        return copy_of(value)
    if isinstance(value, dict):
        return {plain(key): rebuilt(each, f"{where}[{key!r}]", copy_of) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [rebuilt(each, f"{where}[{index}]", copy_of) for index, each in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return plain(value)
    raise CheckpointError(f"{where} is a {type(value).__name__}: checkpoints hold tensors and plain values only")


def plain(value: Any) -> Any:
    """NumPy's floats, enums and their like as Python's own; equal texts as one object."""
    if isinstance(value, str):
        return sys.intern(str(value))
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return kind(value) if kind else value


def buffer_for(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)


def fits(buffer: Tensor, tensor: Tensor) -> bool:
    """Whether the copy needs no new memory. Strides are kept where the tensor is dense (channels_last)."""
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype and buffer.is_pinned() == tensor.is_cuda


@torch.no_grad()
def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """(host buffer, tensor) pairs; returns when all bytes are there."""
    streams = {}
    for buffer, tensor in pairs:
        if tensor.is_cuda:
            if tensor.device not in streams:
                streams[tensor.device] = torch.cuda.Stream(tensor.device)
                streams[tensor.device].wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(streams[tensor.device]):
                buffer.copy_(tensor, non_blocking=True)
        else:
            copy_on_host(buffer, tensor)
    for stream in streams.values():
        stream.synchronize()


def copy_on_host(buffer: Tensor, tensor: Tensor) -> None:
    """One core reaches the memory's speed. Tensor.copy_ would start all of OpenMP's threads for each tensor and wait
    for the slowest one: measured 40 times slower while something else runs on the cores.
    """
    if buffer.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg():
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        buffer.copy_(tensor)
