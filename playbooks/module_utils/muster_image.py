"""Brings one image from the blobs on this host into Podman, and keeps the pool of blobs small.

Layers travel as files named by their digest (muster_relay brings them), so what a host has is skipped by name. `check`
says what is missing and whether it fits; `bring` lets Podman read the image from the pool, proves that its id is the
one that was built, names it, and removes blobs and images that nothing needs any more. The ledger (images/ledger.json)
says which image each name stands for: {"images": {ref: {"id", "blobs"}}, "stale": [ids of former images that were in
use when they should have been removed]}. Standard library alone, Python 3.8 and later.

Not for building (containers/image.py) and not for sending.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.muster_host import disk, existing, read, run, write_atomically

LAYOUT = Path("/var/lib/muster/images/oci")
POOL = LAYOUT / "blobs" / "sha256"
LEDGER = LAYOUT.with_name("ledger.json")
SLACK_BYTES = 256 << 20  # left free on every file system that gets something
TEMPORARY = Path("/var/tmp")  # where Podman keeps a layer while it unpacks it
PULL_SECONDS = 1800.0


def missing_blobs(pool: Path, sizes: dict[str, int]) -> list[str]:
    """Blobs that are not in the pool with their full size."""
    present = {entry.name: entry.stat().st_size for entry in os.scandir(pool) if entry.is_file()}
    return [digest for digest, size in sizes.items() if present.get(digest) != size]


def disk_problems(
    needs: list[tuple[str, int]], states: dict[str, tuple[int, int]], slack: int = SLACK_BYTES
) -> list[str]:
    """File systems on which the image does not fit, in words. Pure.

    needs: (folder, bytes that it gets). states: folder -> (device, free bytes); folders on one device share its space.
    """
    problems = []
    for device in dict.fromkeys(device for device, _ in states.values()):
        folders = [(folder, size) for folder, size in needs if states[folder][0] == device and size > 0]
        needed = sum(size for _, size in folders) + slack
        free = min((states[folder][1] for folder, _ in folders), default=needed)
        if free < needed:
            names = ", ".join(dict.fromkeys(folder for folder, _ in folders))
            problems.append(f"too little disk for the image under {names}: {gib(needed)} needed, {gib(free)} free")
    return problems


def gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def unneeded_blobs(ledger: dict[str, Any], present: list[str]) -> list[str]:
    """Names in the pool that no image of the ledger needs; leftovers of cut transfers are among them."""
    needed = {digest for image in ledger["images"].values() for digest in image["blobs"]}
    return [name for name in present if name not in needed]


class Known:
    """Podman's images: the id behind each name, and how many names each id has. One call of Podman."""

    def __init__(self) -> None:
        listed = run(["podman", "images", "--no-trunc", "--format", "json"])
        if listed.rc != 0:
            raise RuntimeError(f"`podman images` failed: {listed.complaint}. Fix: run it by hand on that host")
        self.names: dict[str, str] = {}
        self.name_count: dict[str, int] = {}
        for image in json.loads(listed.out or "[]"):
            identity = image["Id"].split(":")[-1]
            names = image.get("Names") or []
            self.name_count[identity] = len(names)
            self.names.update(dict.fromkeys(names, identity))

    def needed(self, ref: str, identity: str) -> str:
        """What makes `ref` stand for the image: nothing, name or pull."""
        if self.names.get(ref) == identity:
            return "nothing"
        return "name" if identity in self.name_count else "pull"


def unpacked_layers() -> tuple[Path, set[str]]:
    """(folder of Podman's storage, digests of the layers that are unpacked in it)."""
    storage = Path("/var/lib/containers/storage")
    if not list(storage.glob("*-layers")):
        said = run(["podman", "info", "--format", "{{.Store.GraphRoot}}"]).out.strip()
        storage = Path(said) if said else storage
    known: set[str] = set()
    for path in storage.glob("*-layers/layers.json"):
        with contextlib.suppress(ValueError):
            known |= {str(layer.get("diff-digest", "")).split(":")[-1] for layer in json.loads(read(path) or "[]")}
    return storage, known


def check(ref: str, identity: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What is to be done. Raises RuntimeError if the image does not fit on the disk."""
    known = Known()
    plan = {"id": known.names.get(ref, ""), "needed": known.needed(ref, identity), "missing": []}
    if plan["needed"] != "pull":
        return plan
    missing = missing_blobs(POOL, sizes)
    storage, unpacked = unpacked_layers()
    # Layers are not compressed, so a layer's digest is also that of its unpacked content.
    to_unpack = sum(size for digest, size in sizes.items() if digest not in unpacked)
    sent = sum(sizes[digest] for digest in missing)
    needs = [(str(POOL), sent), (str(storage), to_unpack), (str(TEMPORARY), to_unpack)]
    states = {folder: (os.stat(existing(folder)).st_dev, disk(folder)[0]) for folder, _ in needs}
    problems = disk_problems(needs, states)
    if problems:
        raise RuntimeError("; ".join(problems) + ". Fix: free space there (`podman system df`, `du -xsh /*`)")
    return {**plan, "missing": missing}


def bring(ref: str, identity: str, index: str, sizes: dict[str, int]) -> str:
    """Makes `ref` stand for the image. Returns what was needed. Raises RuntimeError with words for the user."""
    known = Known()
    ledger = json.loads(read(LEDGER) or '{"images": {}, "stale": []}')
    # Without names that Podman no longer knows.
    ledger["images"] = {name: image for name, image in ledger["images"].items() if known.names.get(name) == image["id"]}
    former, needed = known.names.get(ref), known.needed(ref, identity)
    if needed == "pull":
        pull(identity, index, sizes)
    if needed != "nothing":
        tagged = run(["podman", "tag", identity, ref])
        if tagged.rc != 0:
            raise RuntimeError(f"podman tag {identity} {ref} failed: {tagged.complaint}")
    ledger["images"][ref] = {"id": identity, "blobs": sorted(sizes)}
    if former and former != identity:
        ledger["stale"].append(former)
    ledger["stale"] = remove_stale(ledger["stale"])
    write_atomically(LEDGER, json.dumps(ledger, indent=2) + "\n")
    for path in (POOL / name for name in unneeded_blobs(ledger, os.listdir(POOL))):
        shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder: rsync's partial transfers
    return needed


def pull(identity: str, index: str, sizes: dict[str, int]) -> None:
    """Lets Podman read the image from the pool. Raises RuntimeError with words for the user."""
    missing = missing_blobs(POOL, sizes)
    if missing:
        raise RuntimeError(f"{len(missing)} layers did not arrive in {POOL}. Fix: run make deploy again")
    write_atomically(LAYOUT / "oci-layout", '{"imageLayoutVersion": "1.0.0"}')
    write_atomically(LAYOUT / "index.json", index)
    pulled = run(["podman", "pull", "--quiet", f"oci:{LAYOUT}"], timeout=PULL_SECONDS)
    if pulled.rc != 0:
        damaged = [name for name in sizes if digest_of(POOL / name) != name]
        for name in damaged:
            (POOL / name).unlink()
        if damaged:
            raise RuntimeError(f"{len(damaged)} damaged layers arrived and are removed. Fix: run make deploy again")
        raise RuntimeError(f"Podman cannot read the image: {pulled.complaint}. Fix: see `podman info` there")
    got = pulled.out.split()[-1].split(":")[-1]
    # Podman names an image after the folder it was read from.
    run(["podman", "untag", got, f"localhost{LAYOUT}:latest"])
    if got != identity:
        raise RuntimeError(f"Podman made image {got} out of layers of {identity}. Fix: report it")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            state.update(block)
    return state.hexdigest()


def remove_stale(stale: list[str]) -> list[str]:
    """Removes former images that no name stands for; returns those that a container still uses, for the next time."""
    if not stale:
        return []
    known, left = Known(), []
    for identity in dict.fromkeys(stale):
        if known.name_count.get(identity) == 0 and run(["podman", "rmi", identity], timeout=120.0).rc != 0:
            left.append(identity)
    return left
