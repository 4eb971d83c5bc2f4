"""Trains a torchvision classifier on any number of ranks.  python -m train --help, or on this machine: make local

Reads the settings and calls run.py, which does the work of one rank; with --spawn N it starts N ranks that do so.
Writes settings.json, metrics.jsonl, checkpoints/, tensorboard/, curves.png and, last, result.json in the run's folder.
Also: python -m train export, python -m train predict.
"""

import os
import sys
import time

STARTED = time.monotonic()

# Only what reads the command line is imported here; torch, which takes a second, after that.
from train.settings import Settings, SettingsError, parse, problems, refuse  # noqa: E402


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["export"]:
        from train.inference import export

        return export.main(arguments[1:])
    if arguments[:1] == ["predict"]:
        from train.inference import predict

        return predict.main(arguments[1:])
    world_size = ranks_here()
    settings, complaint = Settings(), ""
    try:
        settings = parse(arguments)
        complaint = "; ".join(problems(settings, settings.spawn or world_size))
    except SettingsError as error:
        complaint = str(error)
    if complaint and world_size == 1:
        return refuse(complaint)
    from train.run import run

    if settings.spawn:
        from train.start.spawn import spawn

        return spawn(run, (settings,), settings.spawn)

    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)(settings, complaint, STARTED) or 0


def ranks_here() -> int:
    """As the launcher says, if there is one: torchrun, horovodrun, mpirun."""
    names = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
    given = [os.environ[name] for name in names if os.environ.get(name, "").isdigit()]
    return int(given[0]) if given else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the loop, which ends its step and writes a checkpoint
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise
        print("train: interrupted before the first step: nothing was trained", file=sys.stderr)
        sys.exit(130)
