"""`make bench-deploy`: bytes per host and seconds of a first, a code-only and a no-change deploy to three lab hosts.

The reference is what `podman save | ssh podman load` would send each time: all bytes of the image. The packages that a
bare host installs from Debian are part of the first deploy's seconds, but not of its bytes. The control machine's own
work (base image, wheels) counts only if it has not been done before: the phase `image` is the time waited for it.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import close, fab, lab

HOSTS = 3
CHANGED = Path("train/__init__.py")


def record(name: str) -> dict[str, Any]:
    """The record of the last deploy: seconds of its phases, bytes of each host."""
    loaded: dict[str, Any] = json.loads((Path("build") / name / "deploy.json").read_text())
    return loaded


def bytes_per_host(found: dict[str, Any]) -> int:
    """Bytes sent to the host that was sent the most."""
    return max(host["bytes_sent"] for host in found["hosts"].values())


def main() -> None:
    """Run the three deploys and print the seconds of their phases."""
    found: dict[str, dict[str, Any]] = {}
    original = CHANGED.read_bytes()
    with lab("bench-deploy", HOSTS) as name:
        try:
            for kind in ("first", "code only", "nothing to do"):
                if kind == "code only":
                    CHANGED.write_bytes(original + b"# one line more\n")
                fab(name, "deploy")
                found[kind] = record(name)
        finally:
            CHANGED.write_bytes(original)
        image_bytes = json.loads((Path("build") / name / "cluster.json").read_text())["image"]["bytes"]
    _show(found)
    image_seconds = [host["seconds"] for host in found["code only"]["hosts"].values()]
    code_only = bytes_per_host(found["code only"])
    close(
        {
            "hosts": HOSTS,
            "first_bytes_per_host": bytes_per_host(found["first"]),
            "first_seconds": found["first"]["seconds"]["total"],
            "code_only_bytes_per_host": code_only,
            "code_only_seconds": found["code only"]["seconds"]["total"],
            "code_only_image_seconds_per_host": statistics.median(image_seconds),
            "noop_seconds": found["nothing to do"]["seconds"]["total"],
            "reference": "podman save | ssh podman load sends the whole image each time",
            "reference_bytes_per_host": image_bytes,
            "ratio": round(code_only / image_bytes, 6),
        }
    )


def _show(found: dict[str, dict[str, Any]]) -> None:
    phases = list(dict.fromkeys(phase for record in found.values() for phase in record["seconds"]))
    table = Table(title=f"Seconds of each phase, {HOSTS} lab hosts")
    table.add_column("phase")
    for kind in found:
        table.add_column(kind, justify="right")
    for phase in phases:
        table.add_row(phase, *(f"{record['seconds'].get(phase, 0):.1f}" for record in found.values()))
    table.add_row("MB to each host", *(f"{bytes_per_host(record) / 1e6:.2f}" for record in found.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
