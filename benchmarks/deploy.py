"""`make bench-deploy`: bytes and seconds of a first, a code-only and a no-change deploy to lab hosts.

HOSTS=n lab hosts, 3 by default. What this machine sends in the first deploy is held against the bytes of the image as
it is sent, compressed, to one host. Two more references:

- `podman save | ssh podman load`, which would send all bytes of the image each time. The packages that a bare host
  installs from Debian are part of the first deploy's seconds, but not of its bytes.
- `ansible all -m ping` on the same hosts, the least that Ansible can do there, in turns with the deploys that are
  compared with it: whole commands, TURNS times each, medians. OpenSSH keeps Ansible's connections between them.

The control machine's own work (base image, wheels) counts only if it has not been done before: the phase `image` is the
time waited for it. KILLED=n: then n deploys of a changed file are killed (SIGKILL, whatever they have started, too) at
random moments, each is followed by one that must converge, and that by one that must find nothing to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import FAB, close, environment, fab, lab, whole_number
from launch.deploy import playbook
from launch.hosts import inventory

TURNS = 5
CHANGED = Path("train/__init__.py")
SEED = 13  # of the moments at which deploys are killed


def record(name: str) -> dict[str, Any]:
    """The record of the last deploy: seconds of its phases, bytes of each host."""
    loaded: dict[str, Any] = json.loads((Path("build") / name / "deploy.json").read_text())
    return loaded


def bytes_per_host(found: dict[str, Any]) -> int:
    """Bytes that came to the host to which the most came, from this machine or another host."""
    return max(host["bytes_sent"] for host in found["hosts"].values())


def control_bytes(found: dict[str, Any]) -> int:
    """Bytes of the image that this machine sent, to all hosts together."""
    return sum(host["control_bytes"] for host in found["hosts"].values())


def deploy_seconds(name: str) -> float:
    """How long the whole command takes."""
    begun = time.monotonic()
    fab(name, "deploy")
    return time.monotonic() - begun


def ping_seconds(name: str) -> float:
    """How long Ansible takes to reach all hosts and to do nothing there. Raises CalledProcessError."""
    inv = inventory.read(Path("inventory") / name)
    words = [str(FAB.with_name("ansible")), "all", "-i", str(inv.path), "-m", "ping"]
    begun = time.monotonic()
    subprocess.run(words, env=playbook.environment(inv), check=True, stdout=subprocess.DEVNULL, timeout=300)
    return time.monotonic() - begun


def change(original: bytes, number: int) -> None:
    """Change one file of the image."""
    CHANGED.write_bytes(original + f"# change {number}\n".encode())


def turns(name: str, original: bytes) -> dict[str, list[float]]:
    """Seconds of pings, of deploys after a change of one file, and of those with nothing to do."""
    found: dict[str, list[float]] = {"ping": [], "code only": [], "nothing to do": []}
    for turn in range(TURNS):
        found["ping"].append(ping_seconds(name))
        change(original, turn)
        found["code only"].append(deploy_seconds(name))
        found["nothing to do"].append(deploy_seconds(name))
    return found


def killed(name: str, original: bytes, count: int, seconds: float) -> int:
    """Kill so many deploys, each within `seconds` of its begin; returns how often the next one converged."""
    moments, converged = random.Random(SEED), 0
    for number in range(count):
        change(original, 1000 + number)
        at = moments.uniform(0, seconds)
        process = subprocess.Popen(
            [FAB, "deploy"], env=environment(name), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, process_group=0
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(at)
        _kill(process)
        fab(name, "deploy")
        said = subprocess.run(
            [FAB, "deploy"], env=environment(name), check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        again = "Provisioning" in said or "Distributing" in said
        converged += not again
        print(f"killed after {at:.1f} s: {'there was still something to do' if again else 'converged'}", flush=True)
    return converged


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process, and to all that it has started, whatever process groups these are in."""
    below, waiting = [], [process.pid]
    while waiting:
        pid = waiting.pop()
        below.append(pid)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Run the deploys and print the seconds of their phases."""
    hosts = whole_number("HOSTS", os.environ.get("HOSTS") or "3", 1)
    kills = whole_number("KILLED", os.environ.get("KILLED") or "0", 0)
    found: dict[str, dict[str, Any]] = {}
    original, converged = CHANGED.read_bytes(), 0
    with lab("bench-deploy", hosts) as name:
        try:
            for kind in ("first", "code only", "nothing to do"):
                if kind == "code only":
                    change(original, TURNS)
                fab(name, "deploy")
                found[kind] = record(name)
            compared = turns(name, original)
            median = {kind: statistics.median(seconds) for kind, seconds in compared.items()}
            converged = killed(name, original, kills, median["code only"])
        finally:
            CHANGED.write_bytes(original)
        unpacked = json.loads((Path("build") / name / "cluster.json").read_text())["image"]["bytes"]
    _show(found, compared, hosts)
    image_seconds = [host["seconds"] for host in found["code only"]["hosts"].values()]
    code_only, image_bytes = bytes_per_host(found["code only"]), bytes_per_host(found["first"])
    first_control = control_bytes(found["first"])
    close(
        {
            "hosts": hosts,
            "image_bytes": image_bytes,  # compressed, as it is sent
            "first_control_bytes": first_control,
            "first_control_over_image": round(first_control / image_bytes, 2),
            "first_bytes_per_host": image_bytes,
            "first_seconds": found["first"]["seconds"]["total"],
            "code_only_bytes_per_host": code_only,
            "code_only_image_seconds_per_host": statistics.median(image_seconds),
            "code_only_seconds": round(median["code only"], 2),
            "noop_seconds": round(median["nothing to do"], 2),
            "ping_seconds": round(median["ping"], 2),
            "code_only_over_ping": round(median["code only"] / median["ping"], 2),
            "noop_over_ping": round(median["nothing to do"] / median["ping"], 2),
            "killed": kills,
            "converged": converged,
            "reference": "podman save | ssh podman load sends the whole image each time; ansible all -m ping",
            "reference_bytes_per_host": unpacked,
            "ratio": round(code_only / unpacked, 6),
        }
    )
    if converged < kills:
        sys.exit(1)


def _show(found: dict[str, dict[str, Any]], compared: dict[str, list[float]], hosts: int) -> None:
    phases = list(dict.fromkeys(phase for record in found.values() for phase in record["seconds"]))
    table = Table(title=f"Seconds of each phase, {hosts} lab hosts")
    table.add_column("phase")
    for kind in found:
        table.add_column(kind, justify="right")
    for phase in phases:
        table.add_row(phase, *(f"{record['seconds'].get(phase, 0):.1f}" for record in found.values()))
    table.add_row("MB to each host", *(f"{bytes_per_host(record) / 1e6:.2f}" for record in found.values()))
    table.add_row("MB from this machine", *(f"{control_bytes(record) / 1e6:.2f}" for record in found.values()))
    console = Console(width=100)
    console.print(table)
    for kind, seconds in compared.items():
        console.print(f"{kind}: {', '.join(f'{one:.1f}' for one in seconds)} s", highlight=False)


if __name__ == "__main__":
    main()
