"""Loss, accuracy and gradient norm of each global batch over all ranks, and the stop where they are not finite.

One small all-reduce runs beside the next step and is read only when that step adds its own: the figures come one step
later, and no step waits for a GPU, a network or its logging. Hosts that exchange weights now and then (--sync-every)
get some steps more, so that one which takes longer for a step does not hold up the others. The same sum carries what
one rank knows and all must agree on: that it was asked to stop, and that a checkpoint is due; and how long each rank
computed and waited.
"""

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOSS, CORRECT, NORM, FIRST_RANK = 0, 1, 2, 3
SLOTS = 3  # of each rank: its bits, and the seconds that it computed and waited
NOT_FINITE, STOP, DUE = 1, 2, 4  # bits of a rank's own slot

Pending = tuple[Tensor, Tensor, Any, dict[str, Any]]  # as StepStats._to_host, and what is known of the step


class NonFiniteLoss(Exception):
    """The loss or its gradient became NaN or infinite; the message names epoch and step. Raised on all ranks alike."""


@dataclass(frozen=True)
class StepRecord:
    """What a step did over all ranks."""

    step: int
    epoch: int
    images: int  # of the global batch, without those that were left out
    loss_sum: float
    correct: float
    stop: tuple[int, ...]  # ranks that were asked to stop
    due: bool  # a rank's clock says that a checkpoint is due
    values: dict[str, Any]  # what `add` was given besides
    computing: tuple[float, ...] = ()  # by rank: seconds of the step that it timed last, 0 without news; empty: of none
    waiting: tuple[float, ...] = ()  # by rank: seconds that it waited for the others and the network in that step
    grad_norm: float = 0.0  # before clipping; not finite where the step was skipped for that (fp16)

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.images)

    @property
    def accuracy(self) -> float | None:
        """None where there is none of such outputs and targets: then `correct` is not a number."""
        return None if math.isnan(self.correct) else self.correct / max(1, self.images)


class StepStats:
    """Sums over the ranks, read `behind` steps later. Collective: all ranks call `add` and `flush` at the same places.

    CUDA's path (a side stream, pinned memory, an event) waits for no kernel of the step just enqueued.
    """

    def __init__(self, world_size: int, rank: int, device: torch.device, behind: int = 1) -> None:
        self.world_size, self.rank, self.device, self.behind = world_size, rank, device, behind
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pending = deque[Pending]()
        self.votes: tuple[Tensor, Tensor, Any] | None = None

    def add(
        self,
        step: int,
        epoch: int,
        loss_sum: Tensor,
        correct: Tensor,
        finite: Tensor,
        images: int,
        grad_norm: Tensor | float = 0.0,
        stop: bool = False,
        due: bool = False,
        times: tuple[float, float] | None = None,
        **values: Any,
    ) -> StepRecord | None:
        """Starts the sum of this step; returns the one `behind` steps before it, None at the first ones.

        loss_sum, correct: this rank's sums; finite: bool, of its losses and the gradient; grad_norm: the same on all
        ranks; all on the device, with no dimensions. images: of the global batch. stop: this rank was asked to stop;
        due: its clock says that a checkpoint is due. times: seconds that this rank computed and waited in a step, where
        it has timed one since the last call. Raises NonFiniteLoss where the step that it reads was not finite.
        """
        mine = torch.zeros(FIRST_RANK + SLOTS * self.world_size, dtype=torch.float64, device=self.device)
        mine[LOSS] = loss_sum.detach()
        mine[CORRECT] = correct
        if self.rank == 0:  # the sum is then this one, to the bit
            mine[NORM] = grad_norm
        mine[FIRST_RANK + self.rank] = finite.logical_not() * NOT_FINITE + STOP * stop + DUE * due
        for number, seconds in enumerate(times or (), 1):
            mine[FIRST_RANK + number * self.world_size + self.rank] = seconds
        work = dist.all_reduce(mine, async_op=True) if self.world_size > 1 else None
        about = {"step": step, "epoch": epoch, "images": images, "values": values}
        self.pending.append((*self._to_host(mine, work), about))
        return self._read(self.pending.popleft()) if len(self.pending) > self.behind else None

    def flush(self) -> list[StepRecord]:
        """Those of the last steps, waiting for them: at the end of an epoch and before a checkpoint is written. Raises
        NonFiniteLoss."""
        last, self.pending = self.pending, deque()
        return [self._read(each) for each in last]

    def settle(self) -> None:
        """Waits for the sums under way, of gloo; an error of theirs is left to who reads them."""
        if self.stream is not None:
            return  # of NCCL
        works = [work for _, _, work, _ in self.pending] + ([self.votes[2]] if self.votes else [])
        for work in filter(None, works):
            with suppress(RuntimeError):
                work.wait()

    def vote(self, stop: bool) -> bool:
        """Where there are no steps: starts the sum of whether a rank was asked to stop; returns what all ranks said at
        the call before, False at the first. `no_votes` forgets the last one."""
        mine = torch.full((1,), float(stop), dtype=torch.float64, device=self.device)
        work = dist.all_reduce(mine, async_op=True) if self.world_size > 1 else None
        before = self.votes
        self.votes = self._to_host(mine, work)
        return before is not None and bool(self._ready(before[0], before[2]).item())

    def no_votes(self) -> bool:
        """After the last call of `vote`: what all ranks said at it."""
        before, self.votes = self.votes, None
        return before is not None and bool(self._ready(before[0], before[2]).item())

    def _ready(self, host: Tensor, work: Any) -> Tensor:
        """The sums, when they are there."""
        if work is not None:
            work.synchronize() if self.stream is not None else work.wait()
        return host

    def _to_host(self, sums: Tensor, work: Any) -> tuple[Tensor, Tensor, Any]:
        """(the sums on the host, the sums on the device, what to wait for before reading the first)."""
        if self.stream is None:
            return sums, sums, work
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if work is not None:
                work.wait()  # of NCCL: the side stream waits, the host does not
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return host, sums, event  # the device's tensor is kept until it was copied

    def _read(self, pending: Pending) -> StepRecord:
        host, _, ready, about = pending
        loss_sum, correct, norm, *rest = self._ready(host, ready).tolist()
        slots, *times = (tuple(rest[n * self.world_size : (n + 1) * self.world_size]) for n in range(SLOTS))
        if wrong := [rank for rank, slot in enumerate(slots) if int(slot) & NOT_FINITE]:
            of_gradient = math.isfinite(loss_sum) and not math.isfinite(norm)
            raise NonFiniteLoss(complaint([] if of_gradient else wrong, about["epoch"], about["step"]))
        stop = tuple(rank for rank, slot in enumerate(slots) if int(slot) & STOP)
        due = any(int(slot) & DUE for slot in slots)
        computing, waiting = times if any(times[0]) else ((), ())
        return StepRecord(
            loss_sum=loss_sum, correct=correct, stop=stop, due=due, computing=computing, waiting=waiting,
            grad_norm=norm, **about,
        )  # fmt: skip


def complaint(ranks: list[int], epoch: int, step: int) -> str:
    """ranks: whose loss it was; none: the loss was finite, the gradient was not."""
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    what = f"the loss was not finite on {who}" if ranks else "the loss was finite and its gradient was not,"
    return (
        f"{what} at epoch {epoch}, step {step}: try a smaller --lr, a longer --warmup or "
        "--clip 1; with --amp fp16 try bf16; or check the data of that step"
    )
