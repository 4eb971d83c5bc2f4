"""`make bench-hosts`: deploy to many lab hosts on this machine and run on all of them once. Needs root and Podman.

HOSTS=n lab hosts, 32 by default, each with its own container engine, image and rank. They come to the lab a few at a
time, each time with a deploy, as engines that all unpack the image at once need several times its disk. What they store
lies in one file of build/, in a btrfs that compresses (Debian's btrfs-progs; without it uncompressed, in three times
the disk). Memory and disk are the most that was taken at any moment, over what was taken before, looked at once a
second; memory without the kernel's page cache. The reference of both is a lab of one host, in the same way, in the same
run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import add_hosts, close, fab, lab, whole_number
from containers.engine import BUILD
from launch.files import read_json, runs_dir

DISK_BYTES = 200 << 30  # of the file, which takes what is written to it alone
AT_ONCE = 8  # hosts that are added by one deploy
ARGS = "--model squeezenet1_1 --dataset digits --epochs 2 --batch-size 128"


@contextlib.contextmanager
def compressing_disk(name: str) -> Iterator[Path]:
    """An empty folder on a btrfs that compresses, where there is one."""
    file, folder = BUILD / f"{name}.disk", BUILD / f"{name}-disk"
    folder.mkdir(parents=True)
    mounted = False
    try:
        if shutil.which("mkfs.btrfs", path=f"{os.environ.get('PATH')}:/usr/sbin:/sbin"):
            with file.open("wb") as made:
                made.truncate(DISK_BYTES)
            subprocess.run(["mkfs.btrfs", "--quiet", file], check=True)
            subprocess.run(["mount", "-o", "loop,discard,compress=zstd:1", file, folder], check=True)
            mounted = True
        else:
            print("benchmark: without btrfs-progs the hosts' disks are not compressed")
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        shutil.rmtree(folder)
        file.unlink(missing_ok=True)


class Taken:
    """The most memory and disk that was taken within the block, in bytes."""

    def __init__(self, disk: Path) -> None:
        self.memory = self.disk = 0
        self._disk, self._ended = disk, threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _now(self) -> tuple[int, int]:
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        taken = [int(known[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")]
        state = os.statvfs(self._disk)
        return taken[0] - taken[1], (state.f_blocks - state.f_bfree) * state.f_frsize

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            memory, disk = self._now()
            self.memory = max(self.memory, memory - self._before[0])
            self.disk = max(self.disk, disk - self._before[1])

    def __enter__(self) -> Taken:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def deployed(name: str, hosts: int, disk: Path) -> dict[str, Any]:
    """Add hosts to the lab until it has so many, and deploy each time; the sums of what the deploys took."""
    seconds: list[float] = []
    control_bytes = 0
    for count in [*range(AT_ONCE, hosts, AT_ONCE), hosts]:
        add_hosts(name, count, disk)
        fab(name, "deploy")
        took = json.loads((BUILD / name / "deploy.json").read_text())
        seconds.append(took["seconds"]["total"])
        control_bytes += sum(host["control_bytes"] for host in took["hosts"].values())
    return {"deploy_seconds": round(sum(seconds), 1), "deploys": seconds, "control_bytes": control_bytes}


def measured(name: str, hosts: int) -> dict[str, Any]:
    """Deploy to so many hosts and run on them; returns what it took."""
    with compressing_disk(name) as disk, lab(name, 1, disk):
        with Taken(disk) as deploying:
            deploys = deployed(name, hosts, disk)
        with Taken(disk) as running:
            begun = time.monotonic()
            fab(name, "train", ARGS=ARGS)
            seconds = time.monotonic() - begun
        begun = time.monotonic()
        fab(name, "deploy")
        again = time.monotonic() - begun
    newest = max(runs_dir().iterdir(), key=lambda run: run.stat().st_mtime)
    summary = read_json(newest / "summary.json")
    return {
        "hosts": hosts,
        "world_size": summary["world_size"],
        **deploys,
        "deploy_memory_mb": round(deploying.memory / 1e6),
        "disk_mb": round(deploying.disk / 1e6),
        "run_seconds": round(seconds, 1),
        "run_memory_mb": round(running.memory / 1e6),
        "noop_seconds": round(again, 1),
    }


def main() -> None:
    """One host, then many; print what they took."""
    hosts = whole_number("HOSTS", os.environ.get("HOSTS") or "32", 2)
    one = measured("bench-hosts", 1)
    print(json.dumps(one), flush=True)
    many = measured("bench-hosts", hosts)
    close(
        {
            **many,
            "reference": "one such host",
            "one": one,
            "run_memory_over_one": round(many["run_memory_mb"] / max(one["run_memory_mb"], 1), 1),
            "disk_over_one": round(many["disk_mb"] / one["disk_mb"], 1),
            "ratio": round(many["deploy_seconds"] / one["deploy_seconds"], 1),
        }
    )


if __name__ == "__main__":
    main()
