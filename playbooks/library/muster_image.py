#!/usr/bin/python3
"""Brings one image from the blobs on this host into Podman, and keeps the pool of blobs small.

Layers travel as files named by their digest (playbooks/distribute.yml sends them with rsync), so what a host has is
skipped by name. state=check says what is missing and whether it fits; state=present lets Podman read the image from
the pool, proves that its id is the one that was built, names it, and removes blobs and images that nothing needs any
more. The ledger (images/ledger.json) says which image each name stands for: {"images": {ref: {"id", "blobs"}},
"stale": [ids of former images that were in use when they should have been removed]}.

Not for building (containers/image.py) and not for sending.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_host import disk, find_command, read, run, write_atomically

DOCUMENTATION = r"""
module: muster_image
short_description: Bring an image from the blobs on this host into Podman
options:
  state:
    description: V(check) looks only and fails if the disk is too small. V(present) does it.
    type: str
    choices: [check, present]
    required: true
  ref:
    description: The image's name.
    type: str
    required: true
  id:
    description: The image's id, 64 hexadecimal digits.
    type: str
    required: true
  index:
    description: Text of an OCI index.json that names this image alone.
    type: str
    required: true
  manifest:
    description: Text of the image's OCI manifest.
    type: str
    required: true
  root:
    description: Muster's folder on the host.
    type: path
    default: /var/lib/muster
author: [Muster]
"""

RETURN = r"""
needed:
  description: nothing (the image is there under its name), name (it is there, but not so named) or pull.
  returned: always
  type: str
id:
  description: The id of the image that has the name now; empty if there is none.
  returned: always
  type: str
missing:
  description: Digests (64 hexadecimal digits) of the blobs to be sent first.
  returned: when state is check
  type: list
started:
  description: Unix time at which the module began.
  returned: always
  type: float
ended:
  description: Unix time at which it was done.
  returned: always
  type: float
"""

SLACK_BYTES = 256 << 20  # left free on every file system that gets something
TEMPORARY = Path("/var/tmp")  # where Podman keeps a layer while it unpacks it
PULL_SECONDS = 1800.0


def blob_sizes(index: str, manifest: str) -> dict[str, int]:
    """Digest (hexadecimal) -> bytes of all blobs of the image: manifest, config, layers."""
    described = json.loads(manifest)
    entries = [json.loads(index)["manifests"][0], described["config"], *described["layers"]]
    return {entry["digest"].split(":", 1)[1]: int(entry["size"]) for entry in entries}


def layer_digests(manifest: str) -> list[str]:
    """Digests of the layers. They are not compressed, so a layer's digest is also that of its unpacked content."""
    return [entry["digest"].split(":", 1)[1] for entry in json.loads(manifest)["layers"]]


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


class Images:
    """The pool of blobs and the ledger in Muster's folder on this host."""

    def __init__(self, root: Path) -> None:
        self.layout = root / "images" / "oci"
        self.pool = self.layout / "blobs" / "sha256"
        self.ledger_path = root / "images" / "ledger.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One deploy at a time changes what is on this host."""
        with open(self.ledger_path.with_name("lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def ledger(self, known: Known) -> dict[str, Any]:
        """The ledger without names that Podman no longer knows."""
        ledger = json.loads(read(self.ledger_path) or '{"images": {}, "stale": []}')
        ledger["images"] = {
            ref: image for ref, image in ledger["images"].items() if known.names.get(ref) == image["id"]
        }
        return ledger

    def check(self, ref: str, identity: str, sizes: dict[str, int], layers: list[str]) -> dict[str, Any]:
        """What is to be done. Raises RuntimeError if the image does not fit on the disk."""
        known = Known()
        plan = {"id": known.names.get(ref, ""), "needed": "nothing", "missing": []}
        if known.names.get(ref) == identity:
            return plan
        if identity in known.name_count:
            return {**plan, "needed": "name"}
        missing = missing_blobs(self.pool, sizes)
        storage, unpacked = unpacked_layers()
        to_unpack = sum(sizes[layer] for layer in layers if layer not in unpacked)
        sent = sum(sizes[digest] for digest in missing)
        needs = [(str(self.pool), sent), (str(storage), to_unpack), (str(TEMPORARY), to_unpack)]
        problems = disk_problems(needs, {folder: (device(folder), disk(folder)[0]) for folder, _ in needs})
        if problems:
            raise RuntimeError("; ".join(problems) + ". Fix: free space there (`podman system df`, `du -xsh /*`)")
        return {**plan, "needed": "pull", "missing": missing}

    def bring(self, ref: str, identity: str, index: str, sizes: dict[str, int]) -> str:
        """Makes `ref` stand for the image. Returns what was needed. Raises RuntimeError with words for the user."""
        known = Known()
        ledger = self.ledger(known)
        former = known.names.get(ref)
        needed = "nothing" if former == identity else "name" if identity in known.name_count else "pull"
        if needed == "pull":
            self._pull(identity, index, sizes)
        if needed != "nothing":
            tagged = run(["podman", "tag", identity, ref])
            if tagged.rc != 0:
                raise RuntimeError(f"podman tag {identity} {ref} failed: {tagged.complaint}")
        ledger["images"][ref] = {"id": identity, "blobs": sorted(sizes)}
        if former and former != identity:
            ledger["stale"].append(former)
        ledger["stale"] = remove_stale(ledger)
        write_atomically(self.ledger_path, json.dumps(ledger, indent=2) + "\n")
        for name in unneeded_blobs(ledger, os.listdir(self.pool)):
            remove_path(self.pool / name)
        return needed

    def _pull(self, identity: str, index: str, sizes: dict[str, int]) -> None:
        missing = missing_blobs(self.pool, sizes)
        if missing:
            raise RuntimeError(f"{len(missing)} layers did not arrive in {self.pool}. Fix: run make deploy again")
        write_atomically(self.layout / "oci-layout", '{"imageLayoutVersion": "1.0.0"}')
        write_atomically(self.layout / "index.json", index)
        pulled = run(["podman", "pull", "--quiet", f"oci:{self.layout}"], timeout=PULL_SECONDS)
        if pulled.rc != 0:
            damaged = [name for name in sizes if digest_of(self.pool / name) != name]
            for name in damaged:
                (self.pool / name).unlink()
            if damaged:
                raise RuntimeError(f"{len(damaged)} damaged layers arrived and are removed. Fix: run make deploy again")
            raise RuntimeError(f"Podman cannot read the image: {pulled.complaint}. Fix: see `podman info` there")
        got = pulled.out.split()[-1].split(":")[-1]
        # Podman names an image after the folder it was read from.
        run(["podman", "untag", got, f"localhost{self.layout}:latest"])
        if got != identity:
            raise RuntimeError(f"Podman made image {got} out of layers of {identity}. Fix: report it")


def device(folder: str) -> int:
    """The device of a folder, or of its nearest parent that exists."""
    path = Path(folder)
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            state.update(block)
    return state.hexdigest()


def remove_stale(ledger: dict[str, Any]) -> list[str]:
    """Removes former images that no name stands for; returns those that a container still uses, for the next time."""
    if not ledger["stale"]:
        return []
    known, left = Known(), []
    for identity in dict.fromkeys(ledger["stale"]):
        if known.name_count.get(identity) == 0 and run(["podman", "rmi", identity], timeout=120.0).rc != 0:
            left.append(identity)
    return left


def remove_path(path: Path) -> None:
    """Removes a file, or a folder of files (rsync's folder of partial transfers)."""
    if path.is_dir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    else:
        path.unlink()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["check", "present"], "required": True},
            "ref": {"type": "str", "required": True},
            "id": {"type": "str", "required": True},
            "index": {"type": "str", "required": True},
            "manifest": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/var/lib/muster"},
        },
        supports_check_mode=True,
    )
    started = time.time()
    options = module.params
    sizes = blob_sizes(options["index"], options["manifest"])
    images = Images(Path(options["root"]))
    if find_command("podman") is None or not images.pool.is_dir():
        module.fail_json(msg=f"Podman or {images.pool} is missing on this host. Fix: run make deploy")
    try:
        if options["state"] == "check" or module.check_mode:
            plan = images.check(options["ref"], options["id"], sizes, layer_digests(options["manifest"]))
            changed = options["state"] == "present" and plan["needed"] != "nothing"
            module.exit_json(changed=changed, started=started, ended=time.time(), **plan)
        with images.locked():
            needed = images.bring(options["ref"], options["id"], options["index"], sizes)
        identity = Known().names.get(options["ref"], "")
        changed = needed != "nothing"
        module.exit_json(changed=changed, id=identity, needed=needed, started=started, ended=time.time())
    except RuntimeError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
