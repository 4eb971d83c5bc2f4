"""The two files of a checkpoint: step-<n>.pt and, written after it, step-<n>.json, its manifest.

The manifest holds {"schema", "file", "step", "bytes", "sha256", "metric": float, the higher the better, or null,
"time": unix seconds}, and, some time later, "evaluation": what an evaluation of the checkpoint has found. A checkpoint
without a manifest does not exist; one that does not match its manifest is never unpacked. What is unpacked goes through
torch.load(weights_only=True): no pickled code runs. The .pt file is torch.save's, without its own check sums.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

import torch

from train.whole_files import Draft, one_at_a_time, write_json

MANIFEST_SCHEMA = 2
READABLE = (1, 2)
State = dict[str, Any]
Manifest = dict[str, Any]
ADVICE = re.compile(r"weights_only|trust|documentation")  # in torch.load's messages
FILE_NAME = re.compile(r"step-(\d+)\.(pt|json)")


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says what, where and what to do."""


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.pt"


def manifest_of(path: Path) -> Path:
    return path.with_suffix(".json")


def step_of(path: Path) -> int | None:
    """The n of a file named step-<n>.pt or step-<n>.json."""
    match = FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def saved_steps(folder: Path) -> list[int]:
    """The optimizer steps of which there is a checkpoint with a manifest, ascending; not verified."""
    steps = [step_of(path) for path in folder.glob("step-*.json")]
    return sorted(step for step in steps if step is not None and path_of(folder, step).is_file())


def write(folder: Path, step: int, state: State, metric: float | None = None) -> Path:
    """Writes the checkpoint of this optimizer step, on the disk when it returns. Returns the .pt file.

    `state` holds tensors and plain values only. Raises CheckpointError, with no half file left.
    """
    path = path_of(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Draft(path) as draft:
            with without_crc32():
                torch.save(state, cast(IO[bytes], draft))  # torch needs write() and flush()
            commit(draft, step, metric)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


@contextmanager
def without_crc32() -> Iterator[None]:
    """torch.save leaves the check sums out that torch.load does not look at (`unzip` would): the manifest has a better
    one, and they take a fifth of the time that a checkpoint takes from the cores."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def commit(draft: Draft, step: int, metric: float | None, evaluation: dict[str, Any] | None = None) -> None:
    """The draft and its manifest become the checkpoint of this step. Raises OSError, with neither of them left.

    Hosts that share the folder do it one after the other: no file gets another one's manifest.
    """
    path = draft.path
    draft.sync()  # which may take long, at once on all hosts
    with one_at_a_time(path):
        manifest_of(path).unlink(missing_ok=True)  # of an older checkpoint of this step, or of another host's
        try:
            draft.commit()
            write_manifest(path, step, draft.bytes, draft.sha256(), metric, evaluation)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def write_manifest(
    path: Path, step: int, size: int, sha256: str, metric: float | None, evaluation: dict[str, Any] | None = None
) -> None:
    """From here on the checkpoint exists. Raises OSError."""
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "file": path.name,
        "step": step,
        "bytes": size,
        "sha256": sha256,
        "metric": finite(metric),
        "time": time.time(),
    }
    write_json(manifest_of(path), manifest | ({"evaluation": evaluation} if evaluation else {}))


def finite(metric: float | None) -> float | None:
    return metric if metric is not None and math.isfinite(metric) else None


def add_evaluation(folder: Path, step: int, metric: float, evaluation: dict[str, Any]) -> None:
    """Notes in the manifest what an evaluation of this checkpoint has found, unless another host of a shared folder has
    removed it meanwhile. Raises OSError, CheckpointError."""
    path = path_of(folder, step)
    with one_at_a_time(path):  # the hosts of a shared folder each note it
        if not manifest_of(path).exists():
            return
        write_json(manifest_of(path), manifest(folder, step) | {"metric": finite(metric), "evaluation": evaluation})


def cannot_write(path: Path, error: Exception) -> CheckpointError:
    try:
        free = f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "its folder cannot be read"
    reason = getattr(error, "strerror", None) or error
    closed = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
    is_closed = getattr(error, "errno", None) in closed
    fix = f"make {path.parent} a folder that is writable ({free})" if is_closed else f"{free}; make room"
    return CheckpointError(
        f"cannot write the checkpoint {path} ({reason}): {fix}, or choose another folder with --run-dir"
    )


def remove(folder: Path, step: int) -> None:
    """Raises OSError."""
    path = path_of(folder, step)
    with one_at_a_time(path):  # another host of a shared folder may note an evaluation
        manifest_of(path).unlink(missing_ok=True)  # first: from here on the checkpoint does not exist
        path.unlink(missing_ok=True)


def manifest(folder: Path, step: int) -> Manifest:
    """The content of the manifest. Raises CheckpointError where it is missing or not of this trainer."""
    path = path_of(folder, step)
    try:
        content = json.loads(manifest_of(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no checkpoint {path} (missing: {error.filename}){others(folder, step)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {manifest_of(path)}: {error}{others(folder, step)}") from error
    if not isinstance(content, dict) or content.get("schema") not in READABLE:
        raise CheckpointError(f"{manifest_of(path)} is no manifest of schema {READABLE}{others(folder, step)}")
    if content.get("step") != step:
        raise CheckpointError(f"{manifest_of(path)} belongs to step {content.get('step')}{others(folder, step)}")
    return content


def verify(folder: Path, step: int) -> Manifest:
    """Compares the file with its manifest, which it returns. Raises CheckpointError if missing, torn or altered."""
    content = manifest(folder, step)
    with opened(folder, step) as file:
        compare(file, content, folder, step)
    return content


def load(folder: Path, step: int, device: torch.device | str = "cpu") -> State:
    """Reads the checkpoint of this step, verified against its manifest before anything is unpacked.

    Its tensors are on `device`. Raises CheckpointError if it is missing, torn, altered, or holds anything but tensors
    and plain values.
    """
    content = manifest(folder, step)
    with opened(folder, step) as file:
        compare(file, content, folder, step)
        try:
            state = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # torch raises UnpicklingError, RuntimeError and others here
            raise CheckpointError(
                f"{path_of(folder, step)} holds more than tensors and plain values, which could run code when it is "
                f"read, and is refused ({reason_of(error)}): this trainer did not write it{others(folder, step)}"
            ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path_of(folder, step)} holds no state but a {type(state).__name__}")
    return state


def reason_of(error: Exception) -> str:
    """What torch.load could not read, without its advice to read it all the same."""
    lines = [line.rpartition("WeightsUnpickler error:")[2].strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not ADVICE.search(line)]
    return re.split(r" was not an allowed|\. (?=[A-Z])|\.$", said[0])[0] if said else type(error).__name__


def load_path(path: Path, device: torch.device | str = "cpu") -> State:
    """`load` for a file named on the command line. Raises CheckpointError, also for a file of another program."""
    step = step_of(path)
    if step is None or path.suffix != ".pt":
        raise CheckpointError(f"{path} is not named step-<n>.pt: it is none of this trainer's checkpoints")
    return load(path.parent, step, device)


def opened(folder: Path, step: int) -> BufferedReader:
    try:
        return path_of(folder, step).open("rb")
    except OSError as error:
        raise CheckpointError(f"no checkpoint {path_of(folder, step)} ({error}){others(folder, step)}") from error


def compare(file: BufferedReader, content: Manifest, folder: Path, step: int) -> None:
    """The open file against its manifest; leaves it at its beginning."""
    path, rest = path_of(folder, step), others(folder, step)
    size = os.fstat(file.fileno()).st_size
    if size != content.get("bytes"):
        raise CheckpointError(f"{path} is torn: {size} bytes, written were {content.get('bytes')}{rest}")
    try:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}{rest}") from error
    if found != content.get("sha256"):
        raise CheckpointError(f"{path} was altered since it was written (SHA-256 differs){rest}")
    file.seek(0)


def others(folder: Path, step: int) -> str:
    """The other checkpoints in the folder, for the end of a message."""
    return f"; other checkpoints there: {[s for s in saved_steps(folder) if s != step] or 'none'}"
