"""What the benchmarks share: a lab of their own, commands as a user types them, the last line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAB = Path(sys.executable).parent / "fab"


def environment(name: str, **variables: object) -> dict[str, str]:
    """The environment of a command on lab `name`, as make would pass it on."""
    given = {"INVENTORY": f"inventory/{name}", "LAB": name} | {key: str(value) for key, value in variables.items()}
    return os.environ | {"PYTHONUNBUFFERED": "1"} | given


def fab(name: str, task: str, **variables: object) -> None:
    """Run one command on lab `name`; its output is shown.

    Raises:
        SystemExit: the command failed.
    """
    done = subprocess.run([FAB, task], env=environment(name, **variables), check=False)
    if done.returncode != 0:
        raise SystemExit(f"benchmark: `fab {task}` ended with {done.returncode}")


@contextlib.contextmanager
def lab(name: str, hosts: int) -> Iterator[str]:
    """A new lab with trusted hosts. At the end it is removed, with its cluster map and what else was measured of it."""
    fab(name, "lab-down")
    try:
        fab(name, "lab", HOSTS=hosts)
        fab(name, "trust", YES=1)
        yield name
    finally:
        if subprocess.run([FAB, "lab-down"], env=environment(name), check=False).returncode != 0:
            print(f"benchmark: the lab is still there; `make lab-down LAB={name}` removes it")  # the figures count
        shutil.rmtree(Path("build") / name, ignore_errors=True)


def close(figures: dict[str, Any]) -> None:
    """Print the figures as the last line, one JSON object."""
    print(json.dumps(figures), flush=True)
