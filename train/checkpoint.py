"""Checkpoints that are whole or absent: step-<n>.pt and, written after it, step-<n>.json, its manifest.

Every host keeps its own copy, written by its local rank 0 (DDP's replicas are equal, so it costs no network).
A file is written under a temporary name, synced and renamed; the manifest comes last and holds size and
SHA-256, so a checkpoint without a manifest does not exist and one that does not match its manifest is never
read. What is read goes through torch.load(weights_only=True): no pickled code runs.
"""

import hashlib
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from train.metrics import write_json

SCHEMA = 1
KEPT = 2  # the newest one, and the one before it should the disk have spoilt that
PIECE = 1 << 22
State = dict[str, Any]


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says what, where and what to do."""


def save(folder: Path, step: int, state: State) -> Path:
    """Writes the checkpoint of this optimizer step, then removes all but the newest KEPT. Returns the .pt
    file.

    `state` holds tensors and plain values only (see `train.trainer`). Raises CheckpointError, with no file
    left behind.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    path = folder / f"step-{step}.pt"
    draft = folder / f".{path.name}.tmp"
    manifest = {
        "schema": SCHEMA,
        "file": path.name,
        "step": step,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "time": time.time(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest_of(path).unlink(missing_ok=True)
        write_synced(draft, data)
        draft.replace(path)
        write_json(manifest_of(path), manifest)
        sync_folder(folder)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write the checkpoint {path} ({error.strerror or error}): it needs "
            f"{len(data) / 1e6:.0f} MB, {free_megabytes(folder)}; "
            "make room, or choose another folder with --run-dir"
        ) from error
    for old in sorted(saved_steps(folder))[:-KEPT]:
        remove(folder, old)
    return path


def write_synced(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with open(descriptor, "wb", buffering=0) as file:
        os.fchmod(descriptor, 0o644)  # whatever the umask is: others gather it
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes the renames themselves survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_megabytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB are free there"
    except OSError:
        return "the folder cannot be read"


def manifest_of(path: Path) -> Path:
    return path.with_suffix(".json")


def remove(folder: Path, step: int) -> None:
    path = folder / f"step-{step}.pt"
    manifest_of(path).unlink(missing_ok=True)  # first: from here on the checkpoint does not exist
    path.unlink(missing_ok=True)


def saved_steps(folder: Path) -> list[int]:
    """The optimizer steps of which there is a checkpoint with a manifest, ascending; not verified."""
    names = [path.stem.removeprefix("step-") for path in folder.glob("step-*.json")]
    return sorted(int(name) for name in names if name.isdigit() and (folder / f"step-{name}.pt").is_file())


def load(folder: Path, step: int, device: torch.device | str = "cpu") -> State:
    """Reads the checkpoint of this step, verified against its manifest before anything is unpacked.

    Raises CheckpointError if it is missing, torn, altered, or holds anything but tensors and plain values.
    """
    path = folder / f"step-{step}.pt"
    other = f"; other checkpoints there: {[s for s in saved_steps(folder) if s != step] or 'none'}"
    try:
        manifest = json.loads(manifest_of(path).read_text(encoding="utf-8"))
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint {path} (missing: {error.filename}){other}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}{other}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CheckpointError(f"{manifest_of(path)} is not a manifest of schema {SCHEMA}{other}")
    if len(data) != manifest.get("bytes"):
        raise CheckpointError(f"{path} is torn: {len(data)} bytes, written were {manifest.get('bytes')}{other}")
    if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
        raise CheckpointError(f"{path} was altered since it was written (SHA-256 differs){other}")
    try:
        state = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception as error:  # torch raises UnpicklingError, RuntimeError and others here
        raise CheckpointError(f"{path} holds more than tensors and plain values, refused: {error}{other}") from error
    return dict(state)
