"""Writes checkpoints in the background: training waits for a copy in memory, not for the disk."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from train.checkpoints import files
from train.checkpoints.durable import clear_drafts
from train.checkpoints.files import CheckpointError, State
from train.checkpoints.prune import prune
from train.checkpoints.snapshot import Snapshot

NICE = 10  # the background takes what the training leaves of the cores


class Writer:
    """One per host: its local rank 0.

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
        clear_drafts(folder)

    def reserve(self, state: State) -> None:
        """Gets the memory for the copies ready beside the training, for a state of this structure: else the first
        save() takes ten times as long as the others. Best called after the first optimizer step, when the optimizer
        has its state. The values that it reads meanwhile do not matter.
        """
        if not self.blocking:
            self.wait()
            self.pending = self.background.submit(self.touch, state)

    def touch(self, state: State) -> None:
        self.snapshot.take(state)

    def save(self, step: int, state: State, metric: float | None = None) -> None:
        """Copies the state, which may change as soon as this returns, and has it written.

        Raises CheckpointError: what was wrong with the one before (then this one is not written), or this state holds
        more than tensors and plain values.
        """
        begun = time.monotonic()
        try:
            self.wait()
            copy = self.snapshot.take(state)
            if self.blocking:
                self.write(step, copy, metric)
            else:
                self.pending = self.background.submit(self.write, step, copy, metric)
        finally:
            self.lost += time.monotonic() - begun

    def wait(self) -> None:
        """Until all is on the disk. Raises CheckpointError, once, for a checkpoint that could not be written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, then ends the background. Raises CheckpointError as wait() does."""
        try:
            self.wait()
        finally:
            self.background.shutdown()

    def write(self, step: int, copy: dict[str, Any], metric: float | None) -> None:
        path = files.path_of(self.folder, step)
        try:
            files.write(self.folder, step, copy, metric)
            prune(self.folder, self.keep, step)
        except CheckpointError:
            raise
        except Exception as error:  # whatever ended it, training must hear of it
            raise files.cannot_write(path, error) from error


def yield_to_training() -> None:
    """Linux has priorities for each thread; elsewhere, or where forbidden, the background competes as an equal."""
    with suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
