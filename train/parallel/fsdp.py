"""--parallel fsdp: parameters, gradients and optimizer state in pieces, one per rank (FSDP2, `fully_shard`).

For models that do not fit one GPU. A block of the model is gathered when it is computed and freed after; the rest
(stem, head) stays gathered from forward to backward. Blocks move to the GPU one after the other, each cut before the
next one comes. Buffers are not cut: each rank has its own, as under ddp. Gradients of parameters are reduce-scattered
and divided by the number of ranks.

Every pass, of training and of evaluation, gathers parameters: all ranks make the same number of them
(`equal_passes`), if need be with padding. While micro-batches accumulate, gradients are whole on each rank, so a
micro-batch saves activations' memory at the cost of gradients'.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from train.model.pieces import whole
from train.parallel import state
from train.parallel.single import Single
from train.settings import SettingsError
from train.start.group import Place

LARGEST_BLOCK = 1 / 8  # part of all parameters: a block with more is searched for smaller ones
SMALLEST_BLOCK = 1 / 100  # one with fewer stays with the rest: it is not worth a collective of its own
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Fsdp(Single):
    equal_passes = True

    def __init__(
        self, network: nn.Module, place: Place, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        """`network`: on the CPU. dtype: of --amp."""
        self.device, self.note = device, ""
        self.world_size = place.world_size
        self.writes = place.local_rank == 0
        if any(p.ndim == 0 for p in network.parameters()):
            raise SettingsError(
                "--parallel fsdp: the model has a parameter without dimensions, which cannot be cut: ddp"
            )
        mesh = init_device_mesh(device.type, (place.world_size,))
        self.blocks = list(blocks(network))
        cut = set[nn.Module]()
        for module in (*self.blocks, network):
            same_start(module.to(device))
            own = [each for each in module.modules() if each not in cut]
            fully_shard(module, mesh=mesh, mp_policy=policy(own, dtype))
            cut.update(own)
        self.network = self.module = network

    def compile(self, **options: Any) -> None:
        """Block by block: the gathering between them stays outside of what is compiled."""
        for block in self.blocks or [self.network]:
            block.compile(**options)

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        raise SettingsError("--parallel fsdp: ranks with different numbers of steps cannot be joined: --parallel ddp")

    def scale(self, global_count: int) -> float:
        return self.world_size / global_count

    def clip(self, max_norm: float) -> Tensor:
        return whole(super().clip(max_norm))

    def gradient_norm(self) -> Tensor:
        return whole(super().gradient_norm())

    def keep(self, tensor: Tensor) -> Tensor | None:
        """What is gathered leaves the GPU at once, and is kept once per host: one process of each host writes."""
        return tensor.cpu() if self.writes else None

    def model_state(self) -> dict[str, Tensor]:
        return state.model_state(self.network, self.keep)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        gathered = state.optimizer_state(self.network, optimizer, self.keep)
        return gathered if self.writes else {}


def policy(modules: list[nn.Module], dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Parameters of these modules are gathered in `dtype`, and gradients reduced in float32, in which the rank's own
    pieces stay. What is computed in which precision is autocast's affair, as under any other --parallel: inputs are
    not cast. Where there is batch normalisation among the modules they are gathered in float32, which its kernels want
    beside the float32 statistics.
    """
    if dtype is None or any(isinstance(module, _BatchNorm) for module in modules):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def same_start(module: nn.Module) -> None:
    """Rank 0's parameters and buffers on all ranks, as under DDP; contiguous, as fully_shard wants them, also where
    channels_last was asked for (convolutions then take that layout from their input). What is in pieces is left alone.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.contiguous()
            dist.broadcast(tensor.data, src=0)


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Modules to be sharded by themselves, disjoint, in the model's order; what they leave belongs to the root.

    Only modules whose own forward is called, since gathering hangs on that: not containers, which a model may
    iterate over, and nothing inside of modules that may use a child's weight without calling it (attention).
    """
    total = size_of(network)
    yield from blocks_of(network, total * LARGEST_BLOCK, total * SMALLEST_BLOCK)


def blocks_of(module: nn.Module, largest: float, smallest: float) -> Iterator[nn.Module]:
    for child in module.children():
        size = size_of(child)
        inside = sum(size_of(grandchild) for grandchild in child.children() if isinstance(grandchild, CONTAINERS))
        is_trunk = size > largest and inside > size / 2
        if (isinstance(child, CONTAINERS) and type(child).forward in FORWARDS) or is_trunk:
            yield from blocks_of(child, largest, smallest)
        elif size >= smallest:
            yield child


# Of containers without a forward of their own (torchvision's _DenseBlock, a ModuleDict, has one).
FORWARDS = {kind.forward for kind in CONTAINERS}
