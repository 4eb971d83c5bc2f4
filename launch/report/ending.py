"""The page of a run that has ended, written where the run is closed. Imports nothing that draws until then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def write(folder: Path, say: Callable[[str], object]) -> Path | None:
    """Write the page of the run in `folder`; where that fails, for whatever reason, say so and return None.

    What hosts and scripts wrote may be anything, the disk full, a package missing: a run's result does not depend on
    its page.
    """
    try:
        from launch.report import run_page  # here: commands have to start fast

        return run_page.write(folder)
    except Exception as error:
        say(f"no report: {type(error).__name__}: {error}; `make report RUN={folder.name}` tries again")
        return None
