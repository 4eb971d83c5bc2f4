"""A user's own Horovod script under torchrun.  python -P -m train.parallel.horovod_script SCRIPT [argument ...]

The script calls hvd.init() by itself; here it finds the environment that horovodrun would give it. Rank 0 runs the
server through which the ranks meet until its end: nobody knows when the script calls it.

-P: where it is started, and beside the script, there may be a train.py or keeper.py of the user's. Here they must not
be found in the place of ours, and by the script they must.
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

OURS = ("train", "keeper")  # packages that a script may have modules of the same name as


def main(arguments: list[str]) -> int:
    script, *rest = arguments
    with ExitStack() as held:
        try:
            prepare(Place.from_environment(), held)
        except SettingsError as error:
            return refuse(str(error))
        run_script(script, rest)
    return 0


def run_script(script: str, arguments: list[str]) -> None:
    """Run it as `python script` does: it imports what lies beside it. What of ours is loaded keeps working."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


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
