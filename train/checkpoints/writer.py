"""Writes checkpoints in the background: the training waits for a copy in memory, not for the disk."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from train.checkpoints import files
from train.checkpoints.files import CheckpointError, Member, State
from train.checkpoints.prune import prune
from train.checkpoints.snapshot import Snapshot
from train.whole_files import clear_drafts

SWITCH_SECONDS = 2e-5  # turns of the interpreter's lock while a checkpoint is pickled and written
NICE = 10  # so that the background takes only what the training leaves of the cores


@dataclass(frozen=True)
class Own:
    """What only one member has."""

    member: Member
    state: State


class Writer:
    """One per host: its local rank 0; and one on each other rank that is a member of its own (train.parallel.members),
    for what only that has.

    `keep` newest checkpoints stay in `folder`, and the one with the highest metric. `blocking`: save() returns when
    all is on the disk. At most one checkpoint is being written: a save() that comes sooner waits, none is dropped.
    """

    def __init__(self, folder: Path, keep: int = 2, blocking: bool = False) -> None:
        self.folder = folder
        self.keep = keep
        self.blocking = blocking
        self.lost = 0.0  # seconds that training waited in save()
        self.snapshot = Snapshot()
        self.background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=yield_to_training)
        self.pending: Future[None] | None = None
        self.copying: Future[None] | None = None
        self.optimizer: Optimizer | None = None
        clear_drafts(folder)

    def reserve(self, state: State | None, own: Own | None = None) -> None:
        """Prepares the memory for the copies in the background, for a state of this structure: else the first
        save() takes ten times as long as the others. Best called after the first optimizer step, when the optimizer
        has its state. The values that it reads do not matter.
        """
        if not self.blocking:
            self.wait()
            self.pending = self.background.submit(self.touch, {"state": state, "own": own.state if own else None})

    def touch(self, states: dict[str, Any]) -> None:
        self.snapshot.take(states)

    def guard(self, optimizer: Optimizer) -> None:
        """Lets the background copy parameters and optimizer state on the CPU, too: they do not change before the next
        optimizer.step(), which now waits for the copy. Whoever else changes them (an average swapped in for an
        evaluation, load_state_dict) calls settle() before. CUDA tensors are copied in save() all the same.
        """
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self.settle())

    def guarded(self) -> set[int]:
        """Addresses of the tensors that only the guarded optimizer changes."""
        if self.optimizer is None or self.blocking:
            return set()
        tensors = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        tensors += [each for state in self.optimizer.state.values() for each in state.values()]
        return {each.data_ptr() for each in tensors if isinstance(each, Tensor) and each.is_cpu}

    def settle(self) -> None:
        """Waits until the background has copied what save() left to it."""
        copying, self.copying = self.copying, None
        if copying is not None and not copying.done():
            begun = time.monotonic()
            wait([copying])
            self.lost += time.monotonic() - begun

    def save(self, step: int, state: State | None, metric: float | None = None, own: Own | None = None) -> None:
        """Copies the state, which may change as soon as this returns (but see guard()), and has it written. own: what
        only this member has, beside the checkpoint; state: None where another rank writes that.

        Raises CheckpointError: what was wrong with the one before (then this one is not written), or this state holds
        more than tensors and plain values.
        """
        begun = time.monotonic()
        try:
            self.wait()
            taken = self.snapshot.take({"state": state, "own": own.state if own else None}, self.guarded())
            copies = taken["state"], Own(own.member, taken["own"]) if own else None
            if self.blocking:
                self.write(step, copies, metric)
            else:
                self.copying = self.background.submit(self.snapshot.finish)
                self.pending = self.background.submit(self.write, step, copies, metric, self.copying)
        finally:
            self.lost += time.monotonic() - begun

    def evaluated(self, step: int, metric: float, evaluation: dict[str, Any]) -> None:
        """Notes with the checkpoint of this step, which was saved before, what its evaluation has found."""
        if self.blocking:
            self.note(step, metric, evaluation)
        else:
            self.pending = self.background.submit(self.note, step, metric, evaluation, self.pending)

    def wait(self) -> None:
        """Waits until all is on the disk. Raises CheckpointError, once, for a checkpoint that could not be written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def idle(self) -> bool:
        """Whether nothing is left to write, or it has failed: wait() then returns or raises at once."""
        return self.pending is None or self.pending.done()

    def close(self) -> None:
        """Waits, then ends the background. Raises CheckpointError as wait() does."""
        try:
            self.wait()
        finally:
            self.background.shutdown()

    def note(self, step: int, metric: float, evaluation: dict[str, Any], written: Future[None] | None = None) -> None:
        try:
            if written is not None:
                written.result()
            files.add_evaluation(self.folder, step, metric, evaluation)
            prune(self.folder, self.keep, step)  # another one may be the best now
        except CheckpointError:
            raise
        except Exception as error:
            raise files.cannot_write(files.manifest_of(files.path_of(self.folder, step)), error) from error

    def write(
        self,
        step: int,
        copies: tuple[State | None, Own | None],
        metric: float | None,
        copied: Future[None] | None = None,
    ) -> None:
        path, (state, own) = files.path_of(self.folder, step), copies
        try:
            if copied is not None:
                copied.result()
            with short_turns():
                members = own.member.of if own else None
                if own is not None:
                    files.write(self.folder, step, own.state, member=own.member.number, members=members)
                if state is not None:
                    files.write(self.folder, step, state, metric, members=members)
            if state is not None:
                prune(self.folder, self.keep, step)
            elif max(files.saved_steps(self.folder), default=step) > step:
                files.remove_without_checkpoint(self.folder, step)  # its checkpoint may be gone already
        except CheckpointError:
            raise
        except Exception as error:  # the training must learn of any failure
            raise files.cannot_write(path, error) from error


@contextmanager
def short_turns() -> Iterator[None]:
    """The interpreter's lock changes hands sooner: else each of the training's operations waits up to 5 ms for the
    background while that pickles. With 0.2 ms a checkpoint of ResNet-50 still took 10 to 15 ms more from the training.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def yield_to_training() -> None:
    """Linux has priorities for each thread; elsewhere, or where forbidden, the background competes as an equal."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
