"""What is done to a network before a strategy wraps it.

Order: build on the CPU -> `prepare` -> strategy (to the device) -> strategy.compile -> optimizer.
"""

import os

import torch
from torch import nn

from train.model.freeze import freeze
from train.model.recompute import checkpoint_blocks
from train.settings import Settings, SettingsError


def prepare(network: nn.Module, settings: Settings, device: torch.device, world_size: int) -> nn.Module:
    """The network with SyncBatchNorm, frozen parameters, channels_last and activation checkpointing, where asked for;
    names stay plain.

    device: where it will compute. Changes the network in place; returns it, or its replacement. Raises SettingsError.
    """
    if settings.sync_bn:
        check_sync_bn(settings, device)
        if world_size > 1:
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if settings.freeze:
        freeze(network, settings.freeze)
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


def choose_kernels(settings: Settings) -> None:
    """How GPUs compute, for the whole process.

    float32 is float32: torch's own default computes convolutions in TF32. With --tf32 convolutions and matrix products
    do. cuDNN tries its algorithms for each shape of batch and takes the fastest, unless --deterministic: then only
    kernels that give the same bits every time are taken; others raise, naming themselves.
    To be called before CUDA is first used: cuBLAS reads its workspace's size (a documented condition) once.
    """
    torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.backends.cudnn.benchmark = not settings.deterministic
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
