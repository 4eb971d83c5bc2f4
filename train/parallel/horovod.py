"""--parallel horovod: a replica on every rank, gradients summed by Horovod's DistributedOptimizer.

As in a tutorial (hvd.init, broadcast_parameters, DistributedOptimizer), except for three things:

- op=Sum, and each rank's loss divided by the samples of all ranks: a mean of the ranks' means would weight samples
  unequally where ranks have different numbers of them.
- Gradients go in fixed groups of about GROUP_BYTES, last layers first. By itself Horovod fuses what happens to be
  ready, and on three ranks or more another fusion sums in another order: two equal runs would differ in bits.
- synchronize() is called before the step, because clipping needs whole gradients, and not again within it.

Where Horovod was built without CUDA, gradients on a GPU go through the host's memory.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.model.plain_names import plain
from train.parallel import state
from train.parallel.horovod_start import start
from train.parallel.single import Single
from train.parallel.strategy import Groups
from train.settings import Settings, SettingsError
from train.start.group import Place

GROUP_BYTES = 16 << 20  # Horovod fuses at most 128 MB
LEAVE_SECONDS = 10.0


class ThroughHost:
    """A Horovod compressor that only carries a GPU's gradients to the host and back."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.device]:
        return tensor.cpu(), tensor.device

    @staticmethod
    def decompress(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device)


class Horovod(Single):
    """Raises SettingsError, on all ranks, where one has no Horovod (see train.parallel.horovod_start)."""

    def __init__(
        self, network: nn.Module, place: Place, device: torch.device, timeout_seconds: float = Settings.timeout
    ) -> None:
        self.hvd = start(place, timeout_seconds)
        self.timeout = timeout_seconds
        self.hvd.broadcast_parameters(network.state_dict(), root_rank=0)  # still on the CPU
        super().__init__(network, device)
        self.distributed: Any = None  # the optimizer, once there is one
        self.without_own_synchronize = ExitStack()
        self.unchecked, self.summed = True, False  # summed: this step's all-reduces are on their way
        self.waited, self.stepped = 0.0, (0.0, 0.0)  # of the last step: s waited; its begin and end

    def optimizer(self, make: Callable[[Groups], Optimizer], groups: Groups) -> Optimizer:
        """The optimizer that Horovod makes of `make(groups)`: of its class, with its groups."""
        direct = self.device.type == "cpu" or self.hvd.cuda_built()
        self.distributed = self.hvd.DistributedOptimizer(
            make(groups),
            named_parameters=[(plain(name), p) for name, p in self.network.named_parameters()],
            compression=self.hvd.Compression.none if direct else ThroughHost,
            op=self.hvd.Sum,
            groups=fixed_groups(self.network, GROUP_BYTES),
        )
        self.distributed.zero_grad = MethodType(zero_grad, self.distributed)
        self.leave_synchronize_to_us()
        optimizer: Optimizer = self.distributed
        return optimizer

    def leave_synchronize_to_us(self) -> None:
        """step() must not sum a second time; loading a state makes the optimizer forget that."""
        self.without_own_synchronize.close()
        self.without_own_synchronize.enter_context(self.distributed.skip_synchronize())

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        # Horovod counts backward passes down and sends a gradient at 0: the last is 1 from there, the others never are.
        self.distributed.set_backward_passes_per_step(1 if last else 2)
        yield
        self.summed = last
        if last and self.unchecked:
            self.check()

    def check(self) -> None:
        """After the first whole backward, once. Horovod would send zeros, which weight decay and momentum take up."""
        self.unchecked = False
        named = self.network.named_parameters()
        without = [plain(name) for name, p in named if p.requires_grad and p.grad is None]
        if without:
            raise RuntimeError(
                f"no gradient reached {state.few(without)}: the loss does not depend on them. If that is meant, take "
                "--parallel ddp --find-unused-parameters; if not, check the model's forward method"
            )

    def add_nothing(self) -> None:
        """For a rank without a sample in this step: zeros, by the same hooks and in the same groups as the others'."""
        with self.passes(last=True):
            torch.stack([p.sum() * 0 for p in self.network.parameters() if p.requires_grad]).sum().backward()

    def before_step(self) -> None:
        if not self.summed:
            self.add_nothing()
        self.summed = False
        begun = time.monotonic()
        with self.limited():
            self.distributed.synchronize()
        ended = time.monotonic()
        self.waited, self.stepped = ended - begun, (self.stepped[1] or begun, ended)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Ends a wait for the other ranks' gradients with an error after `timeout_seconds`.

        Horovod 0.28.1 by itself waits for ever for a rank that is merely busy: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS did
        nothing when tried. shutdown() drops what is waited for, but may then wait for that rank as well, also when
        Python ends: so this process has LEAVE_SECONDS left to report what happened.
        """

        def give_up() -> None:
            leave = threading.Timer(LEAVE_SECONDS, os._exit, (1,))
            leave.daemon = True
            leave.start()
            self.hvd.shutdown()

        deadline = threading.Timer(self.timeout, give_up)
        deadline.daemon = True
        deadline.start()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # HorovodInternalError; a handle that was dropped
            raise RuntimeError(
                f"--parallel horovod: a rank has ended, or did not come to this step within {self.timeout:g} s "
                f"(--timeout): {error}"
            ) from error
        finally:
            deadline.cancel()

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        raise SettingsError("--parallel horovod: every rank needs the same number of steps: take --parallel ddp")

    def load(self, model: dict[str, Tensor], optimizer: Optimizer | None, saved: dict[str, Any] | None) -> None:
        super().load(model, optimizer, saved)
        if self.distributed is not None:
            self.leave_synchronize_to_us()

    def comm_share(self) -> float | None:
        """Of the last step, from the end of the all-reduces before it to the end of its own."""
        whole = self.stepped[1] - self.stepped[0]
        return self.waited / whole if whole > self.waited > 0 else None

    def computing_seconds(self) -> float | None:
        """Of the last step."""
        return max(0.0, self.stepped[1] - self.stepped[0] - self.waited) or None


def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Horovod's own takes no argument. Call it when no all-reduce is under way: not between backward and step."""
    torch.optim.Optimizer.zero_grad(self, set_to_none)


def fixed_groups(network: nn.Module, limit: int) -> list[list[nn.Parameter]]:
    """The trained parameters, in about the order in which backward reaches them, cut where `limit` bytes are full."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed([p for p in network.parameters() if p.requires_grad]):
        size = parameter.numel() * parameter.element_size()
        if size > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(parameter)
        room -= size
    return groups
