"""The files into which torchrun writes the output of each rank, renamed by rank."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path


def flatten(folder: Path, ranks: Sequence[int]) -> None:
    """Rename torchrun's <id>/attempt_0/<local rank>/stdout.log and stderr.log to rank-<rank>.out and rank-<rank>.err.

    `folder` holds torchrun's logs of one host; `ranks` are the host's ranks, by local rank.
    """
    for local_rank, rank in enumerate(ranks):
        for kind, suffix in (("stdout.log", "out"), ("stderr.log", "err")):
            for file in sorted(folder.glob(f"*/attempt_*/{local_rank}/{kind}")):
                file.rename(folder / f"rank-{rank}.{suffix}")
    for attempt in folder.glob("*/attempt_*/"):
        shutil.rmtree(attempt.parent, ignore_errors=True)
