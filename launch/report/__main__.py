"""`make report`: writes the page of RUN=<id>, or without RUN the page of all runs, and prints its path.

    python -m launch.report

Pages of runs that have none, or are older than what was gathered of the run, are written with the page of all runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launch.cli import command, exits
from launch.cli.output import say
from launch.cli.refusal import refuse
from launch.files import runs_dir, shown
from launch.report import all_runs, documents, ending, run_page


def main() -> int:
    """Run `make report`; returns the exit status."""
    return command.run(lambda: report(os.environ.get("RUN", "").strip()))


def report(run: str) -> int:
    """Write the page of this run, or of all; returns the exit status. Raises Refusal when the run is not here."""
    try:
        path = run_page.write(documents.find(run)) if run else write_all()
    except OSError as error:
        what = f"the page cannot be written: {error.strerror or error}"
        fix = "make room, or see who may write there"
        raise refuse(str(error.filename or runs_dir()), what, fix, exits.FAILED) from error
    print(f"report: {shown(path)}", flush=True)
    return exits.SUCCEEDED


def write_all() -> Path:
    """The page of all runs, and of each run whose own is not there or older than its summary."""
    for folder in documents.folders():
        page, summary = folder / documents.PAGE, folder / "summary.json"
        newest = max(path.stat().st_mtime for path in (summary, folder / "plan.json") if path.exists())
        if not page.exists() or page.stat().st_mtime < newest:
            ending.write(folder, say)
    return all_runs.write()


if __name__ == "__main__":
    sys.exit(main())
