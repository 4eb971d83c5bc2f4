"""`make bench-data`: a dataset to lab hosts, then a changed one, then an unchanged one, against rsync to each in turn.

HOSTS=n lab hosts, 3 by default, and a folder of FILES random files of FILE_BYTES and one of LARGE_BYTES. rsync -a, over
the same SSH, brings the same folder to another place of each host, one host after another, as people do by hand. Each
pair of commands is of the same run; whole commands are timed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import close, fab, lab, whole_number
from launch.hosts import inventory

FILES, FILE_BYTES, LARGE_BYTES = 5000, 40_000, 200 << 20
NAME = "bench"
WHAT = ("first", "changed", "same")


def make_files(folder: Path) -> None:
    """Random bytes, as of JPEG files: nothing of it shrinks."""
    for number in range(FILES):
        path = folder / f"class{number % 100}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    (folder / "large").write_bytes(os.urandom(LARGE_BYTES))


def rsync(name: str, folder: Path) -> None:
    """The folder to each host, one after another. Raises CalledProcessError."""
    inv = inventory.read(Path("inventory") / name)
    for host in inv.hosts:
        target, known = host.target, inventory.known_hosts_path(inv.path)
        ssh = ["ssh", "-i", str(target.key_file), "-p", str(target.port), "-o", f"UserKnownHostsFile={known}"]
        there = f"{target.user}@{target.address}:/var/lib/muster/rsync/"
        subprocess.run(["rsync", "-a", "--delete", "-e", shlex.join(ssh), f"{folder}/", there], check=True)


def seconds(work: Callable[[], None]) -> float:
    """How long it takes."""
    begun = time.monotonic()
    work()
    return round(time.monotonic() - begun, 2)


def measure(name: str, folder: Path) -> dict[str, float]:
    """The seconds of all commands on a deployed lab."""
    found: dict[str, float] = {}
    for what in WHAT:
        if what == "changed":
            (folder / "class0" / "0.jpg").write_bytes(os.urandom(FILE_BYTES))
        found[f"{what}_seconds"] = seconds(lambda: fab(name, "data", SRC=folder, NAME=NAME))
        found[f"{what}_rsync_seconds"] = seconds(lambda: rsync(name, folder))
    return found


def main() -> int:
    hosts = whole_number("HOSTS", os.environ.get("HOSTS", "3"), 2)
    with tempfile.TemporaryDirectory() as made, lab("bench-data", hosts) as name:
        make_files(Path(made))
        fab(name, "deploy")
        found = measure(name, Path(made))
    ratios = {f"{what}_ratio": round(found[f"{what}_seconds"] / found[f"{what}_rsync_seconds"], 3) for what in WHAT}
    size = FILES * FILE_BYTES + LARGE_BYTES
    close(
        {"hosts": hosts, "files": FILES + 1, "bytes": size, **found, **ratios, "reference": "rsync -a to each in turn"}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
