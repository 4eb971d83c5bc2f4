"""What a network is prepared with before a strategy wraps it, and the precision that it computes in.

Order: build on the CPU -> `prepare` -> strategy (to the device) -> `compiled` -> optimizer.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from train.recompute import checkpoint_blocks
from train.settings import Settings, SettingsError


def prepare(network: nn.Module, settings: Settings, device: torch.device, world_size: int) -> nn.Module:
    """The network with SyncBatchNorm, channels_last and activation checkpointing, as asked; names stay plain.

    device: where it will compute. Changes the network in place; returns it, or its replacement. Raises SettingsError.
    """
    if settings.sync_bn:
        check_sync_bn(settings, device)
        if world_size > 1:
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if settings.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.activation_checkpointing and not checkpoint_blocks(network):
        raise SettingsError(
            f"--activation-checkpointing: {settings.model} is a plain chain of layers, it has no blocks to recompute: "
            "leave it out, and save memory with --micro-batch"
        )
    return network


def check_sync_bn(settings: Settings, device: torch.device) -> None:
    if device.type != "cuda":
        raise SettingsError("--sync-bn: torch's SyncBatchNorm needs GPUs: leave it out on the CPU")
    if settings.parallel == "dp":
        raise SettingsError("--sync-bn: needs one process per GPU: use --parallel ddp instead of dp")


def compiled(module: nn.Module, settings: Settings) -> nn.Module:
    """The same module; its calls go through torch.compile if asked. In place, so that names get no `_orig_mod.`.

    Shapes are static: a run has two, the full batch's and the last one's. Raises SettingsError.
    """
    if settings.compile:
        if settings.parallel == "dp":
            raise SettingsError("--compile: does not go with --parallel dp, whose replicas run in threads: use ddp")
        module.compile(dynamic=False)
    return module


def use_deterministic(settings: Settings) -> None:
    """With --deterministic only kernels that give the same bits every time; others raise, naming themselves.

    To be called before CUDA is first used: cuBLAS reads its workspace's size (a documented condition) once.
    """
    if not settings.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


class Precision:
    """Mixed precision: autocast around the forward pass, and with fp16 a scaler of the loss.

    Weights, gradients and the optimizer stay float32. fp16 works on the CPU, too, but without its instructions is 20
    times slower there than float32: for tests. A step whose gradients overflowed is skipped on all ranks or on none:
    ddp and horovod sum gradients first, so an infinity of one rank is everyone's; where gradients are sharded (fsdp)
    torch takes the worst verdict of all ranks.
    """

    DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def __init__(self, settings: Settings, device: torch.device) -> None:
        """Raises SettingsError."""
        self.device, self.dtype = device, self.DTYPES.get(settings.amp)
        if self.dtype is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
            raise SettingsError(
                f"--amp bf16: {torch.cuda.get_device_name(device)} cannot compute in it: use --amp fp16"
            )
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype is torch.float16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Around forward pass and loss, not around backward."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients in their own size, for clipping: once, after the last backward of a step and its synchronising."""
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step, or none where gradients overflowed; then the scale of the next one."""
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint: scale and its growth; waits for the GPU. None without a scaler."""
        return self.scaler.state_dict() if self.scaler else None

    def load(self, state: dict[str, Any] | None) -> None:
        """A state of another --amp is passed over."""
        if self.scaler and state:
            self.scaler.load_state_dict(state)
