"""Ways of data parallelism (`--parallel`) behind one interface, strategy.Strategy, one small module each.

May import: train.start, train.model, settings, order. Reads and writes no document; `state` says in which form a
checkpoint holds model and optimizer.

Order of construction: network on the CPU; SyncBatchNorm, activation checkpointing, memory format; `make`, which
moves it to the device; `Strategy.compile`; then parameter groups of `Strategy.network` and `Strategy.optimizer`
(fsdp puts new parameters in place of those it is given).
"""

import torch
from torch import nn

from train.model.precision import Precision
from train.parallel.members import find_members, group_within
from train.parallel.strategy import Strategy
from train.settings import Settings, SettingsError, compression
from train.start.group import Place

__all__ = ["Strategy", "make"]


def make(settings: Settings, network: nn.Module, place: Place, device: torch.device, steps: int = 0) -> Strategy:
    """The strategy of `settings.parallel`, with `network` moved to the device (collective). steps: of the whole run.

    Raises SettingsError for ways that do not go with this number of ranks, this torch, these GPUs.
    """
    name = settings.parallel
    if name in ("none", "dp") and place.world_size > 1:
        raise SettingsError(
            f"--parallel {name}: it is one process, and these are {place.world_size} ranks: --parallel ddp"
        )
    match name:  # each is imported only where it is asked for: fsdp and horovod take a while
        case "none":
            from train.parallel.single import Single

            return Single(network, device)
        case "ddp":
            from train.parallel.ddp import OneRank

            if place.world_size == 1:
                return OneRank(network, device, settings.find_unused_parameters or settings.static_graph)
            return make_ddp(settings, network, place, device, steps)
        case "dp":
            from train.parallel.dp import make_dp

            return make_dp(network, device, settings.batch_size, settings.gpu0_batch)
        case "fsdp":
            from train.parallel.fsdp import Fsdp

            return Fsdp(network, place, device, Precision.DTYPES.get(settings.amp))
        case "horovod":
            from train.parallel.horovod import Horovod

            return Horovod(network, place, device, settings.timeout)
    raise SettingsError(f"--parallel {name}: it is none of ddp, dp, fsdp, horovod, none")


def make_ddp(settings: Settings, network: nn.Module, place: Place, device: torch.device, steps: int) -> Strategy:
    """On more than one rank; with what the group "slow links" of the settings says."""
    from train.parallel.compress import Compressed
    from train.parallel.ddp import Ddp, OneRankOfMany, send_if_unequal

    how, unused, static = compression(settings.compress), settings.find_unused_parameters, settings.static_graph
    if settings.sync_every:
        send_if_unequal(network, place)
        members = find_members(place)
        within = group_within(members, device, settings.timeout)
        if len(members.here) == 1:
            return OneRankOfMany(network, device, unused or static)
        return Ddp(network, place, device, unused, static, within, bucket_mb=settings.bucket_mb)
    hook = None
    if how.kind != "none":
        hook = Compressed(how, find_members(place), device, settings.timeout, steps)
    return Ddp(network, place, device, unused, static, hook=hook, bucket_mb=settings.bucket_mb)
