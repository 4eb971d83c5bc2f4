"""For test_group.py: ranks that join a process group and sum the ranks over it.

python -m tests.train.group_rank spawn N [what]          N ranks by train.start.spawn
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from train.settings import Settings, SettingsError
from train.start.group import Place, process_group
from train.start.rendezvous import RendezvousError
from train.start.spawn import spawn


def join(init: str, timeout: float, die: bool) -> int:
    """One rank, its place from the environment; it prints the sum. `die`: it closes nothing, as in a crash."""
    try:
        place = Place.from_environment()
        with process_group(place, torch.device("cpu"), timeout, init=init):
            total = torch.tensor([float(place.rank)])
            dist.all_reduce(total)
            print(f"sum {total.item():.0f}\n", end="", flush=True)  # in one piece: other ranks print, too
            if die:
                os._exit(9)
    except (SettingsError, RendezvousError) as error:
        print(error, flush=True)
        return 2
    return 0


def spawned(what: str) -> int:
    place = Place.from_environment()
    if what == "fails" and place.rank == 1:
        return 7
    if what == "raises in a group":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a training, which looks for it after its step
        with process_group(place, torch.device("cpu"), 60):
            dist.barrier()
            if place.rank == 1:
                raise ValueError("a fault")
            dist.all_reduce(torch.zeros(1))
    if what == "stops":
        return stops(place)
    if what == "killed" and place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("fails", "killed", "waits"):
        if what == "waits":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            helper = os.fork()  # as a loader's worker, that would outlive its rank
            if helper == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.pause()
            Path(os.environ["OUT"], f"rank-{place.rank}").write_text(f"{os.getpid()} {helper}")
            print("waiting\n", end="", flush=True)
        while True:
            time.sleep(0.1)  # until a signal comes; one that came just before a sleep is seen after it
    return join("env://", 60, False)


def stops(place: Place) -> int:
    """A training that is asked to stop after its third step, on a disk that takes far longer than the grace."""
    from train import run, trainer
    from train import step as step_module
    from train.checkpoints import files

    made, written, steps = step_module.optimizer_step, files.write, [0]

    def step(*arguments: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3 and place.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return made(*arguments)

    def write(*arguments: Any, **named: Any) -> Any:
        time.sleep(4)
        return written(*arguments, **named)

    with mock.patch.object(trainer, "optimizer_step", step), mock.patch.object(files, "write", write):
        out = Path(os.environ["OUT"])
        return run.run(Settings(model="squeezenet1_1", dataset="fake", image_size=32, loggers="none", run_dir=out))


def main() -> int:
    what = (sys.argv[3:] or [""])[0]
    # Ranks that are asked to end get the time for it on a busy machine too; the others do not end by themselves.
    return spawn(spawned, (what,), int(sys.argv[2]), grace_seconds=60.0 if what == "waits" else 1.0)


if __name__ == "__main__":
    sys.exit(main())
