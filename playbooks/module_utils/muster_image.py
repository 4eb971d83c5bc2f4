"""Brings one image from the blobs on this host into its container engine, and keeps the pool of blobs small.

Layers travel as files named by their digest (muster_relay brings them), so what a host has is skipped by name. `check`
says what is missing and whether it fits; `bring` lets the engine read the image from the pool, proves that its id is
the one that was built, names it, and removes blobs and images that nothing needs any more. The ledger
(images/ledger.json) says which image each name stands for: {"images": {ref: {"id", "blobs"}}, "stale": [ids of former
images that were in use when they should have been removed]}. Standard library alone, Python 3.8 and later.

Not for building (containers/image.py) and not for sending.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils import muster_docker, muster_podman
from ansible.module_utils.muster_engines import Engine, Images, place
from ansible.module_utils.muster_host import disk, existing, read, run, write_atomically

LAYOUT = Path(place().folder, "images", "oci")
POOL = LAYOUT / "blobs" / "sha256"
LEDGER = LAYOUT.with_name("ledger.json")
SLACK_BYTES = 256 << 20  # left free on every file system that gets something
PULL = {"podman": muster_podman.pull, "docker": muster_docker.pull}
LAYERS = {"podman": muster_podman.layers, "docker": muster_docker.layers}


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


def known_images(of: Engine) -> Images:
    """Raises RuntimeError with words for the user."""
    listed = run(of.image_words)
    if listed.rc != 0:
        raise RuntimeError(f"`{of.name} images` failed: {listed.complaint}. Fix: run it by hand on that host")
    return of.read_images(listed.out)


def needed(known: Images, ref: str, identity: str) -> str:
    """What makes `ref` stand for the image: nothing, name or pull. Pure."""
    if known.names.get(ref) == identity:
        return "nothing"
    return "name" if identity in known.ids else "pull"


def check(of: Engine, ref: str, identity: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What is to be done. Raises RuntimeError if the image does not fit on the disk."""
    known = known_images(of)
    plan = {"id": known.names.get(ref, ""), "needed": needed(known, ref, identity), "missing": []}
    if plan["needed"] != "pull":
        return plan
    missing = missing_blobs(POOL, sizes)
    try:
        about = of.read_about(run(of.about_words).out)
    except (ValueError, KeyError):
        raise RuntimeError(f"{of.name} does not answer. Fix: run `{of.name} info` by hand on that host") from None
    storage = about.storage
    unpacked = LAYERS[of.name](storage)
    # Layers are not compressed, so a layer's digest is also that of its unpacked content.
    to_unpack = about.copies * sum(size for digest, size in sizes.items() if digest not in unpacked)
    sent = sum(sizes[digest] for digest in missing)
    needs = [(str(POOL), sent), (storage, to_unpack), (of.temporary or storage, to_unpack if of.temporary else 0)]
    states = {folder: (os.stat(existing(folder)).st_dev, disk(folder)[0]) for folder, _ in needs}
    problems = disk_problems(needs, states)
    if problems:
        raise RuntimeError("; ".join(problems) + f". Fix: free space there (`{of.name} system df`, `du -xsh /*`)")
    return {**plan, "missing": missing}


def bring(of: Engine, ref: str, identity: str, index: str, sizes: dict[str, int]) -> str:
    """Makes `ref` stand for the image. Returns what was needed. Raises RuntimeError with words for the user."""
    known = known_images(of)
    ledger = json.loads(read(LEDGER) or '{"images": {}, "stale": []}')
    kept = {name: image for name, image in ledger["images"].items() if known.names.get(name) == image["id"]}
    # Images that have lost their names: to another one that was built here, or as somebody removed them.
    former = {image["id"] for name, image in ledger["images"].items() if name not in kept}
    former |= {one for one in known.by_id if not known.ids[one]}  # or never had one, as a deploy was killed before
    former = (former | {known.names.get(ref)}) - {None, identity}
    ledger["images"] = kept
    wanted = needed(known, ref, identity)
    if wanted == "pull":
        pull(of, identity, index, sizes)
    if wanted != "nothing":
        tagged = run([of.name, "tag", of.image(identity), ref])
        if tagged.rc != 0:
            raise RuntimeError(f"{of.name} tag {identity} {ref} failed: {tagged.complaint}")
    ledger["images"][ref] = {"id": identity, "blobs": sorted(sizes)}
    ledger["stale"] += sorted(former)
    ledger["stale"] = remove_stale(of, ledger["stale"])
    write_atomically(LEDGER, json.dumps(ledger, indent=2) + "\n")
    for path in (POOL / name for name in unneeded_blobs(ledger, os.listdir(POOL))):
        shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder: rsync's partial transfers
    return wanted


def pull(of: Engine, identity: str, index: str, sizes: dict[str, int]) -> None:
    """Lets the engine read the image from the pool. Raises RuntimeError with words for the user."""
    missing = missing_blobs(POOL, sizes)
    if missing:
        raise RuntimeError(f"{len(missing)} layers did not arrive in {POOL}. Fix: run make deploy again")
    try:
        PULL[of.name](LAYOUT, identity, index)
    except RuntimeError as error:
        damaged = [name for name in sizes if digest_of(POOL / name) != name]
        for name in damaged:
            (POOL / name).unlink()
        if damaged:
            what = f"{len(damaged)} damaged layers arrived and are removed"
            raise RuntimeError(f"{what}. Fix: run make deploy again") from None
        raise RuntimeError(f"{of.name} cannot read the image: {error}. Fix: see `{of.name} info` there") from None


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            state.update(block)
    return state.hexdigest()


def remove_stale(of: Engine, stale: list[str]) -> list[str]:
    """Removes former images that no name stands for; returns those that a container still uses, for the next time."""
    if not stale:
        return []
    known, left = known_images(of), []
    for identity in dict.fromkeys(stale):
        if known.ids.get(identity) == 0 and run([of.name, "rmi", of.image(identity)], timeout=120.0).rc != 0:
            left.append(identity)
    return left
