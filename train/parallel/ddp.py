"""--parallel ddp: a replica on every rank, gradients averaged by torch's DistributedDataParallel.

Its switches, and why they are set as they are:

- gradient_as_bucket_view=True: gradients lie in the all-reduce buckets themselves: one copy of all gradients less in
  memory and in time. It forbids detach_() on a gradient, which no code here does.
- OWN_BUFFERS, that is forward_sync_buffers=False (formerly broadcast_buffers): rank 0's batch statistics are not sent
  around before every forward, which would throw the other ranks' away and cost a collective in each step. Each rank
  keeps its own; evaluation and checkpoints take their mean (`train.model.running_statistics`). At the start rank 0's
  are everybody's.
- find_unused_parameters only on request: it walks the graph in every step, and hides a layer that was left out by
  mistake. Without it a parameter without a gradient is an error that names it.
- static_graph only on request: it is a promise about the model (the same parameters, used the same way in every step)
  that only its author can make. It allows unused parameters at no cost, and reentrant checkpointing.

- init_sync only where ranks differ: their weights are compared by hash, so that equal ones, which is what a seed or a
  file gives, are not sent around.

One rank alone has nothing to average: it trains without all that, to the same bits (`OneRank`). With --sync-every the
ranks of a host average their gradients, and no others' (train.parallel.exchange).
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.model.plain_names import plain
from train.model.running_statistics import unchanged_buffers
from train.parallel import state
from train.parallel.compress import Compressed, compressed
from train.parallel.members import Group
from train.parallel.single import Single
from train.settings import Settings
from train.start.ddp_times import computed, time_steps
from train.start.group import Place, from_all_ranks
from train.torch_versions import OWN_BUFFERS


def check_gradients(network: nn.Module) -> None:
    """After a backward. Raises RuntimeError where a parameter has no gradient."""
    without = [plain(name) for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        raise RuntimeError(complaint(without))


def complaint(names: list[str]) -> str:
    which = state.few(names) if names else "some parameters"
    return (
        f"no gradient reached {which}: the loss does not depend on them, so the ranks cannot average them. "
        "If that is meant, give --find-unused-parameters (or --static-graph if they are the same in every step); "
        "if not, check the model's forward method"
    )


class OneRank(Single):
    """Without DistributedDataParallel: no hooks on gradients, no buckets, one graph under torch.compile. What DDP would
    refuse is refused here, so that a model that trains alone trains on more ranks, too."""

    def __init__(self, network: nn.Module, device: torch.device, may_lack_gradients: bool) -> None:
        super().__init__(network, device)
        self.may_lack_gradients = may_lack_gradients

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        yield
        if last and not self.may_lack_gradients:
            check_gradients(self.network)


class OneRankOfMany(OneRank):
    """A rank that trains alone between exchanges with others: what it computes is timed, as DDP would."""

    def __init__(self, network: nn.Module, device: torch.device, may_lack_gradients: bool) -> None:
        super().__init__(network, device, may_lack_gradients)
        self.computed, self.passed = 0.0, 0.0

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        begun = time.monotonic()
        with super().passes(last):
            yield
        self.passed += time.monotonic() - begun
        if last:
            self.computed, self.passed = self.passed, 0.0

    def computing_seconds(self) -> float | None:
        return self.computed or None if self.device.type == "cpu" else None  # a GPU's work is not done yet


def have_equal_weights(network: nn.Module, place: Place) -> bool:
    """Whether parameters and buffers are the same bits on all ranks. Collective; sends 32 bytes."""
    total = hashlib.sha256()
    for name, value in state.entries(network):
        total.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        total.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return len(set(from_all_ranks(total.digest(), place))) == 1


@torch.no_grad()
def send_if_unequal(network: nn.Module, place: Place) -> None:
    """Rank 0's weights and buffers to all ranks, but where they have them already. Collective."""
    if not have_equal_weights(network, place):
        for _, value in state.entries(network):
            dist.broadcast(value, 0)


def bucket_cap(bucket_mb: int) -> int | None:
    """DDP's argument for --bucket-mb. None is torch's default: 25 MiB, but 1 MiB for the first bucket, so that sending
    begins early; a size that torch is given, also 25, is the first one's, too."""
    return None if bucket_mb == Settings.bucket_mb else bucket_mb


class Ddp(Single):
    def __init__(
        self,
        network: nn.Module,
        place: Place,
        device: torch.device,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        within: Group = None,
        hook: Compressed | None = None,
        bucket_mb: int = Settings.bucket_mb,
    ) -> None:
        """within: the ranks whose gradients are averaged, which have equal weights; None: all. hook: how it is done.
        bucket_mb: MiB of gradients that are sent together."""
        is_equal = within is not None or have_equal_weights(network, place)
        super().__init__(network, device)
        self.divisor = len(hook.members.ranks) if hook else dist.get_world_size(within)
        self.hook = hook
        self.ddp = DistributedDataParallel(
            self.network,
            process_group=within,
            init_sync=not is_equal,
            device_ids=[device.index] if device.type == "cuda" else None,
            **OWN_BUFFERS,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap(bucket_mb),
        )
        self.module = self.ddp
        if hook:
            self.ddp.register_comm_hook(hook, compressed)
        time_steps(self.ddp, on_gpu=device.type == "cuda")
        # DDP records a static graph in its first backward, which has to be a synchronised one.
        self.always_synchronise = static_graph
        self.unchecked = not (find_unused_parameters or static_graph)

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        quiet = not (last or self.always_synchronise)
        try:
            with self.ddp.no_sync() if quiet else nullcontext():
                yield
        except RuntimeError as error:  # DDP's own message comes a step later and gives only numbers of parameters
            if "Expected to have finished reduction" in str(error):
                raise RuntimeError(complaint(self.numbered(str(error)))) from error
            raise
        if not quiet:
            self.always_synchronise = False
            if self.unchecked:  # once: later steps cost nothing
                self.unchecked = False
                check_gradients(self.network)

    def numbered(self, message: str) -> list[str]:
        """The names of the parameters whose numbers are in DDP's message."""
        named = [plain(name) for name, p in self.network.named_parameters() if p.requires_grad]
        found = re.search(r"did not receive grad for rank \d+:((?: \d+)+)", message)
        return [named[int(number)] for number in found[1].split()] if found else []

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        """A rank that has run out answers the others' all-reduces with zeros until the last one is done."""
        return self.ddp.join(divide_by_initial_world_size=divide_by_initial_world_size)

    def scale(self, global_count: int) -> float:
        # DDP divides the sum of the ranks' gradients by their number, a hook by that of the members.
        return self.divisor / global_count

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        """DDP sorts its buckets again, by the order in which gradients came, after the first backward of a process. On
        three ranks or more that changes the order of the all-reduce's sums, thus bits. A resumed run does its first
        backward here, so that its first step already has the buckets of the unbroken run.
        """
        was_training = self.network.training
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), unchanged_buffers(self.network):
            self.network.train()
            with self.passes(last=True):
                forward().sum().backward()
        self.network.train(was_training)
        for parameter in self.network.parameters():
            parameter.grad = None

    def own_state(self) -> dict[str, Any] | None:
        return self.hook.state() if self.hook else None

    def load_own_state(self, own: dict[str, Any] | None, step: int) -> None:
        if self.hook and own is not None:
            self.hook.load(own)
        elif self.hook:
            self.hook.begin_at(step)

    def close(self) -> None:
        if self.hook:
            self.hook.close()

    def comm_share(self) -> float | None:
        """Of the last step that DDP timed (train/start/ddp_times.py says which)."""
        figures = self.ddp._get_ddp_logging_data()
        return exposed(figures)

    def computing_seconds(self) -> float | None:
        """Forward and backward of the same step."""
        return computed(self.ddp._get_ddp_logging_data()) / 1e9 or None


def exposed(figures: dict[str, float]) -> float | None:
    """From DDP's times of one step (ns): all-reduces after the end of backward, as a part of forward to their end.

    The optimizer's time is not in it.
    """
    communication = figures.get("backward_comm_time", 0)
    hidden = figures.get("backward_compute_comm_overlap_time", 0)
    computing = computed(figures)
    if communication <= 0 or computing <= 0:
        return None
    waiting = max(0, communication - hidden)
    return waiting / (computing + waiting)
