"""Trains a torchvision classifier on any number of ranks.  python -m train --help, or on this machine: make local

Reads the settings and calls run.py, which does the work of one rank; with --spawn N it starts N ranks that do so.
Writes settings.json, metrics.jsonl, checkpoints/, tensorboard/, curves.png and, last, result.json in the run's folder;
with --profile also profile/.
Also: python -m train export, python -m train predict, python -m train verify-data.
"""

import json
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

STARTED: float = globals().get("STARTED") or time.monotonic()  # a forked rank knows better: train.start.forked
INTERRUPTED = "train: interrupted before the first step: nothing was trained"

# Only what reads the command line is imported here; torch, which takes a second, after that.
from train import own_parts  # noqa: E402
from train.settings import EXIT_REFUSED, Settings, SettingsError, as_document, parse, problems, refuse  # noqa: E402


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["export"]:
        from train.inference import export

        return export.main(arguments[1:])
    if arguments[:1] == ["predict"]:
        from train.inference import predict

        return predict.main(arguments[1:])
    if arguments[:1] == ["verify-data"]:
        from train.datasets import verify

        return verify.main(arguments[1:])
    only_check = arguments[:1] == ["--check-settings"]  # what launch/ asks before it starts a rank
    world_size = ranks_here()
    settings, complaint = Settings(), ""
    try:
        settings = parse(arguments[only_check:])
        complaint = "; ".join([*problems(settings, settings.spawn or world_size), *own_parts.problems(settings)])
    except SettingsError as error:
        complaint = str(error)
    if complaint and (only_check or world_size == 1):
        return refuse(complaint)
    if only_check:
        print(json.dumps(as_document(settings)))
        return 0
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, exit_at_once)
    from torch.distributed.elastic.multiprocessing.errors import record

    from train.run import run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if settings.spawn:
        from train.start.spawn import spawn

        return spawn(run, (settings,), settings.spawn)

    return record(run)(settings, complaint, STARTED) or 0


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """For Ctrl-C during imports: libraries can swallow an exception there, or leave a module incomplete."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(130)


def ranks_here() -> int:
    """As the launcher says, if there is one: torchrun, horovodrun, mpirun."""
    names = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
    given = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(given[0]) if given else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as missing:
        if missing.name not in ("numpy", "torch", "torchvision", "yaml", "safetensors"):
            raise
        print(f"train: {missing.name} is not installed in this environment; `make local` installs it", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:  # before the loop, which ends its step and writes a checkpoint
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
