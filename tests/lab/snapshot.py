"""Snapshots of deployed lab hosts: a lab of provisioned hosts that hold the image starts from them in seconds.

A snapshot is an image of each host (`podman commit`) and a copy of its volumes. It holds for what the hosts were made
from (`key`); the deploy that follows every start brings them up to date with everything else. There is one at a time.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from containers import lab, lab_host
from containers.engine import BUILD, CommandFailed, image_label, podman
from containers.files import write_whole
from containers.lab_host import Host

IMAGE = "localhost/muster/lab-snapshot"
LABEL = "muster.snapshot"  # its value is the key
NOTES = BUILD / "lab-snapshot.json"
LOCK = BUILD / "lab-snapshot.lock"
#: What provisions a host, and what the first layers of the training image are made from.
SOURCES = ("playbooks", "containers", "pyproject.toml")
STOP_SECONDS = 5
#: Where Podman, Docker and Muster have the layers of images, in their volumes.
LAYERS = ("storage/overlay", "overlay2", "images/oci/blobs")


def key(engines: Mapping[str, str]) -> str:
    """Of hosts with these container engines. Builds the image of lab hosts where there is none."""
    parts = [lab_host.ensure_image(lambda line: None), json.dumps(engines)]
    for source in SOURCES:
        path = Path(source)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        parts += [f"{one}\0{one.read_text()}" for one in files if one.is_file() and "__pycache__" not in one.parts]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find(wanted: str) -> dict[str, Any] | None:
    """The notes of the snapshot with this key, as `take` was given them; None if there is no such snapshot."""
    try:
        notes: dict[str, Any] = json.loads(NOTES.read_text())
    except (OSError, ValueError):
        return None
    there = {image_label(_image(host), LABEL) for host in notes["hosts"]}
    return notes if notes["key"] == wanted and there == {wanted} else None


def take(name: str, wanted: str, notes: Mapping[str, Any]) -> None:
    """Stop the hosts of a lab, keep what they are as the snapshot instead of an earlier one, and start them again."""
    NOTES.unlink(missing_ok=True)
    hosts = [entry["Labels"][lab_host.HOST_LABEL] for entry in lab.labs()[name]]
    containers = [f"muster-{name}-{host}" for host in hosts]
    podman("stop", f"--time={STOP_SECONDS}", *containers)
    for host, container in zip(hosts, containers, strict=True):
        podman("commit", "--quiet", f"--change=LABEL={LABEL}={wanted}", container, _image(host))
        for kind in lab_host.VOLUMES:
            _remove(_volume(host, kind))
            podman("volume", "create", _volume(host, kind))
            _copy(f"{container}-{kind}", _volume(host, kind))
    lab.up(name, len(hosts))
    write_whole(NOTES, json.dumps({**notes, "key": wanted, "hosts": hosts}))


def start(name: str, hosts: int) -> None:
    """Bring up a lab whose hosts start from the snapshot."""

    def fill(host: Host) -> None:
        for kind in lab_host.VOLUMES:
            _copy(_volume(host.name, kind), f"{host.container}-{kind}")

    lab.up(name, hosts, create=lambda host, _, disk: lab_host.create(host, _image(host.name), disk, fill))


def _image(host: str) -> str:
    return f"{IMAGE}:{host}"


def _volume(host: str, kind: str) -> str:
    return f"muster-snapshot-{host}-{kind}"


def _remove(volume: str) -> None:
    try:
        podman("volume", "rm", volume)
    except CommandFailed:  # there was none
        return


def _copy(source: str, target: str) -> None:
    """Layers, which nobody changes once they are there, are hard links; everything else is copied."""
    folders = [podman("volume", "inspect", "--format={{.Mountpoint}}", volume).strip() for volume in (source, target)]
    layers = [path for path in LAYERS if Path(folders[0], path).is_dir()]
    leave_out = [f"--exclude=./{path}" for path in layers]
    copy = f"tar -C {folders[0]} {' '.join(leave_out)} -cpf - . | tar -C {folders[1]} -xpf -"
    links = (f"mkdir -p {folders[1]}/{path} && cp -al {folders[0]}/{path}/. {folders[1]}/{path}" for path in layers)
    subprocess.run(["bash", "-euo", "pipefail", "-c", "; ".join((copy, *links))], check=True, timeout=600)
