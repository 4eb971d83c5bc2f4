"""--parallel none: one process, one device. Also the base class of the other ways."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.parallel import state
from train.parallel.strategy import Groups


class Single:
    """`train.parallel.Strategy` of one process; the base of those whose model lies whole on every rank."""

    equal_passes = False

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network = network.to(device)
        self.module: nn.Module = self.network
        self.device = device
        self.note = ""

    def compile(self, **options: Any) -> None:
        # The module's own compile(), unlike torch.compile(module), puts no `_orig_mod.` before the names. Under
        # DistributedDataParallel the inner module is the one to compile: torch then cuts the graph at the buckets.
        self.network.compile(**options)

    def optimizer(self, make: Callable[[Groups], Optimizer], groups: Groups) -> Optimizer:
        return make(groups)

    def passes(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, divide_by_initial_world_size: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def scale(self, global_count: int) -> float:
        return 1 / global_count

    def before_step(self) -> None:
        pass

    def gradient_norm(self) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.network.parameters(), max_norm)

    def model_state(self) -> dict[str, Tensor]:
        return state.model_state(self.network)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return state.optimizer_state(self.network, optimizer)

    def load(self, model: dict[str, Tensor], optimizer: Optimizer | None, saved: dict[str, Any] | None) -> None:
        state.load_model(self.network, model)
        if optimizer is not None and saved is not None:
            state.load_optimizer(self.network, optimizer, saved)

    def warm_up(self, forward: Callable[[], Tensor]) -> None:
        pass

    def own_state(self) -> dict[str, Any] | None:
        return None

    def load_own_state(self, own: dict[str, Any] | None, step: int) -> None:
        pass

    def close(self) -> None:
        pass

    def comm_share(self) -> float | None:
        return None

    def computing_seconds(self) -> float | None:
        return None
