"""Brings an image to the hosts through playbooks/distribute.yml, and says how far that has got."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from containers import image as images
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.cli.units import age, size
from launch.deploy import playbook
from launch.files import read_json
from launch.hosts import clustermap, inventory, ssh
from launch.hosts.connection import connected

PROGRESS_SECONDS = 10.0  # between two reports; a change of code alone has arrived before the first one
#: Prints size and name of each file: a layer, one that rsync writes (`.DIGEST.suffix`), or a part of an earlier try.
_LIST = "cd /var/lib/muster/images/oci/blobs/sha256 && find . -type f -printf '%s %f\\n'"


def distribute(
    inv: inventory.Inventory,
    image: images.Image,
    export: images.OciExport,
    say: Callable[[str], None],
    hosts: Sequence[str],
) -> dict[str, Any]:
    """Bring an image to these hosts; only missing layers travel. Returns host -> record.

    Raises Refusal when a host does not end up with this very image.
    """
    folder = str(export.path.resolve())
    described = {"ref": image.ref, "id": image.id, "oci_dir": folder, "index": export.index, "blobs": export.blobs}
    output = clustermap.path_of(inv.path).with_name("distribute.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    with _progress(inv, export.blobs, say, hosts):
        playbook.run("distribute", inv, hosts, {"muster_image": described, "muster_output": str(output.resolve())})
    placed: dict[str, Any] = read_json(output).get("hosts", {})
    held = {name: placed.get(name, {}).get("id", "none") for name in hosts}
    problems = [
        Problem(f"host {name}", f"holds image {there}, not {image.id}", "run `make deploy` again")
        for name, there in held.items()
        if there != image.id
    ]
    if problems:
        raise Refusal(problems, exits.DEPLOY_FAILED)
    return placed


@contextmanager
def _progress(
    inv: inventory.Inventory, blobs: Mapping[str, int], say: Callable[[str], None], hosts: Sequence[str]
) -> Iterator[None]:
    """Say every PROGRESS_SECONDS what each host still lacks, and how long that will take at the pace so far."""
    targets = [host.target for host in inv.hosts if host.name in hosts]
    ended = threading.Event()

    def report() -> None:
        last: dict[str, tuple[float, int]] = {}
        if ended.wait(PROGRESS_SECONDS):
            return
        # What keeps a host from answering, Ansible says.
        with contextlib.suppress(Exception), connected(targets, inventory.known_hosts_path(inv.path)) as machines:
            while not ended.is_set():
                answers = ssh.in_parallel(lambda machine: missing_bytes(machine.answer(_LIST), blobs), machines)
                known = zip(targets, answers, strict=True)
                now = {host.name: (time.monotonic(), lacks) for host, lacks in known if isinstance(lacks, int)}
                if not any(lacks for _, lacks in now.values()):
                    return
                if not ended.is_set():
                    say("; ".join(_words(name, now[name], last.get(name)) for name in now))
                last = now
                ended.wait(PROGRESS_SECONDS)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def missing_bytes(listing: str, blobs: Mapping[str, int]) -> int:
    """How many bytes of `blobs` (digest -> bytes) a host lacks, from what _LIST prints there. Pure."""
    there: dict[str, int] = {}
    for line in listing.splitlines():
        length, name = line.split(" ", 1)
        digest = name.lstrip(".").split(".")[0]
        there[digest] = max(there.get(digest, 0), int(length))
    return sum(max(0, length - there.get(digest, 0)) for digest, length in blobs.items())


def _words(host: str, now: tuple[float, int], before: tuple[float, int] | None) -> str:
    """`h2: 210.0 MiB to send, about 40 s`. The pairs are (time.monotonic(), bytes that the host lacks)."""
    if not now[1]:
        return f"{host} has all"
    pace = (before[1] - now[1]) / (now[0] - before[0]) if before else 0.0  # bytes/s
    return f"{host}: {size(now[1])} to send" + (f", about {age(now[1] / pace)}" if pace > 0 else "")
