"""A user's own Horovod script under torchrun.  python -m train.parallel.horovod_script SCRIPT [argument ...]

The script calls hvd.init() by itself; here it finds the environment that horovodrun would give it. Rank 0 runs the
server through which the ranks meet until its end: nobody knows when the script calls it.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from train.parallel import horovod_start
from train.settings import Settings, SettingsError, refuse
from train.start import group
from train.start.group import Place


def main(arguments: list[str]) -> int:
    script, *rest = arguments
    with ExitStack() as held:
        try:
            prepare(Place.from_environment(), held)
        except SettingsError as error:
            return refuse(str(error))
        sys.argv = [script, *rest]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    return 0


def prepare(place: Place, held: ExitStack) -> None:
    """Set Horovod's environment (collective); `held` keeps the server. Raises SettingsError, on all ranks alike."""
    with group.process_group(place, torch.device("cpu"), Settings.timeout, "gloo"):
        complaint, here = "", ("", "")
        try:
            horovod_start.module()
            here = horovod_start.interface(place)
        except SettingsError as error:
            complaint = str(error)
        if complaint := group.first_complaint(complaint, place):
            raise SettingsError(complaint)
        local_ranks = group.from_all_ranks(place.local_rank, place)
        address = held.enter_context(horovod_start.server(place, here[1]))
        os.environ.update(horovod_start.limits(Settings.timeout))
        os.environ.update(horovod_start.variables(place, local_ranks, here[0], address))
        if place.world_size > 1:
            dist.barrier()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
