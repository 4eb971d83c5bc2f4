"""--profile STEPS: a trace of some steps by torch.profiler, in profile/ of the run's folder. On every rank.

Every rank, because one that alone is slowed down by being traced makes the others wait for it, and the traces would
show that. The traces are Chrome's format: https://ui.perfetto.dev and TensorBoard's profiler plugin open them. Those of
the first host's ranks are gathered with the run; those of other hosts stay there.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, schedule

WAIT_STEPS = 3  # in which memory is allocated and torch compiles
WARM_UP_STEPS = 2  # in which the profiler runs, and what it finds is thrown away
ROWS = 25  # of the table of operations
FOLDER = "profile"


def trace_name(rank: int) -> str:
    return f"rank-{rank}.pt.trace.json.gz"


class Profile:
    """Traces `steps` steps, of the `left` that the run has, after the first few; nothing with 0. Changes no figure of
    the training but its speed in these steps.

    settle: returns when the sums of the steps' figures have ended, which go on in gloo's threads beside the next step.
    These note the end of what began while steps were traced where the profiler had its notes: after the trace that
    memory is another's (torch 2.13: a broken heap, and now and then a rank that dies of SIGSEGV). After an exception
    amid a step other collectives may still go on.
    written: the trace's path from the run's folder; complaint: why there is none. Both are empty before the end.
    """

    def __init__(
        self, folder: Path, rank: int, steps: int, left: int, device: torch.device, settle: Callable[[], None]
    ) -> None:
        self.folder, self.rank, self.device, self.settle = folder / FOLDER, rank, device, settle
        self.written = self.complaint = ""
        self.profiler: Any = None
        if not steps:
            return
        steps = min(steps, max(1, left - 1))
        wait = min(WAIT_STEPS, max(0, left - steps - 1))
        warm_up = min(WARM_UP_STEPS, max(0, left - steps - wait))
        self.steps = wait + warm_up + steps  # to come, until the trace is written
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warm_up, active=steps, repeat=1),
            on_trace_ready=self.write,
            record_shapes=True,
        )

    def __enter__(self) -> "Profile":
        if self.profiler:
            self.profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def step(self) -> bool:
        """After each optimizer step. True when the trace has just been written, or could not be."""
        if not self.profiler:
            return False
        self.steps -= 1
        if not self.steps:
            return self.end()
        self.profiler.step()
        return False

    def end(self) -> bool:
        """Also amid the steps: what is traced until then is written. True as of `step`."""
        profiler, self.profiler = self.profiler, None
        if not profiler:
            return False
        self.settle()
        profiler.__exit__(None, None, None)
        return bool(self.written or self.complaint)

    def write(self, profiler: Any) -> None:
        """A disk without room for it does not end the training."""
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        path = self.folder / trace_name(self.rank)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
            (self.folder / f"rank-{self.rank}.txt").write_text(table + "\n", encoding="utf-8")
            profiler.export_chrome_trace(str(path))
            self.written = f"{FOLDER}/{path.name}"
        except (OSError, RuntimeError) as error:
            self.complaint = " ".join(str(error).split())
            with suppress(OSError):
                path.unlink(missing_ok=True)
