"""What the benchmarks share: a lab of their own, commands as a user types them, the last line of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAB = Path(sys.executable).parent / "fab"
MOST = 10_000  # of anything that is asked for


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


def add_hosts(name: str, hosts: int, disk: Path | None = None) -> None:
    """A lab has so many trusted hosts then; new ones store what they have in `disk`."""
    words = ["up", "--name", name, "--hosts", str(hosts), *(["--disk", str(disk)] if disk else [])]
    subprocess.run([sys.executable, "-m", "containers.lab", *words], check=True)
    fab(name, "trust", YES=1)


@contextlib.contextmanager
def lab(name: str, hosts: int, disk: Path | None = None) -> Iterator[str]:
    """A new lab with trusted hosts, which store what they have in the folder `disk`, if given.

    At the end it is removed, with its cluster map and what else was measured of it.
    """
    fab(name, "lab-down")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it is removed then, too
    try:
        add_hosts(name, hosts, disk)
        yield name
    finally:
        if subprocess.run([FAB, "lab-down"], env=environment(name), check=False).returncode != 0:
            print(f"benchmark: the lab is still there; `make lab-down LAB={name}` removes it")  # the figures count
        shutil.rmtree(Path("build") / name, ignore_errors=True)


SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[2]):
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def awake(hosts: int) -> Iterator[list[int]]:
    """No processor of this machine becomes idle while so many hosts run on it: what time is left goes to processes,
    whose ids these are, that give way to any other at once (SCHED_IDLE). A lab host that has a quota of CPUS stops and
    starts ten times a second. Where its processor is a virtual machine's, that one stops and starts with it, and then,
    with two such hosts, a step takes up to 1.4 times the computing time, for seconds at a time (benchmarks/RESULTS.md,
    2026-11-27, ninth entry). Of more hosts than processors two share one, and steps take a fourth longer while it is
    kept awake (tenth entry; why is not known): none is then."""
    processors = sorted(os.sched_getaffinity(0))
    spinning = [
        subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(processor), str(os.getpid())])
        for processor in processors
        if hosts <= len(processors)
    ]
    try:
        yield [process.pid for process in spinning]
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def take_data_network(name: str) -> None:
    """Make the deploy choose the network that LINK limits. `make lab` rewrites hosts.yml, but not this file."""
    folder = Path("inventory") / name
    address = re.search(r"ansible_host: 10\.77\.(\d+)\.", (folder / "hosts.yml").read_text())
    assert address is not None
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text(f"train_network: 10.78.{address[1]}.0/24\n")


def run_in(printed: str) -> str | None:
    """The id of the run that `make train` began; None: none yet."""
    said = re.search(r"^muster \| run (\S+): ", printed, re.MULTILINE)
    return said[1] if said else None


def whole_number(name: str, text: str, least: int) -> int:
    """A variable as it was typed. Raises SystemExit."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MOST):
        raise SystemExit(f"{name}={text} is not a whole number from {least} to {MOST}: {name}={max(least, 20)}")
    return int(text)


def close(figures: dict[str, Any]) -> None:
    """Print the figures as the last line, one JSON object."""
    print(json.dumps(figures), flush=True)
