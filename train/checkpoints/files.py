"""The two files of a checkpoint: step-<n>.pt and, written after it, step-<n>.json, its manifest.

The manifest holds {"schema", "file", "step", "bytes", "sha256", "metric": float, the higher the better, or null,
"time": unix seconds}, and, some time later, "evaluation": what an evaluation of the checkpoint has found. A checkpoint
without a manifest does not exist; one that does not match its manifest is never unpacked. What is unpacked goes through
torch.load(weights_only=True): no pickled code runs. The .pt file is torch.save's, without its own check sums.

Where hosts have what the others do not know (--sync-every, --compress powersgd), each has two more files of the step,
member-<k>-step-<n>.pt and its manifest, written before the checkpoint's, which is the same on all hosts. Each manifest
of such a step has "members", how many they are. They are no checkpoints: a step that lacks them can be read, and a run
that goes on from it says what it lost.
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
from typing import IO, Any, NamedTuple, cast

import torch

from train.whole_files import Draft, one_at_a_time, write_json

MANIFEST_SCHEMA = 2
READABLE = (1, 2)
State = dict[str, Any]
Manifest = dict[str, Any]
ADVICE = re.compile(r"weights_only|trust|documentation")  # in torch.load's messages
FILE_NAME = re.compile(r"step-(\d+)\.(pt|json)")
OF_MEMBER = re.compile(r"member-(\d+)-step-(\d+)\.pt")


class Member(NamedTuple):
    """One of those that have files of their own: its number, from 0, and how many they are."""

    number: int
    of: int


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says what, where and what to do."""


def path_of(folder: Path, step: int, member: int | None = None) -> Path:
    """member: whose own file is meant; None: the checkpoint."""
    return folder / (f"step-{step}.pt" if member is None else f"member-{member}-step-{step}.pt")


def members_of(folder: Path, step: int, of: int) -> list[int]:
    """The members, of so many, of which there is a file of this step with a manifest, ascending; not verified."""
    found = [match for path in folder.glob(f"member-*-step-{step}.pt") if (match := OF_MEMBER.fullmatch(path.name))]
    return sorted(number for number in (int(match[1]) for match in found) if has_manifest(folder, step, number, of))


def steps_of_members(folder: Path) -> set[int]:
    """The steps of which there is a member's own file, with a manifest or without."""
    return {int(match[2]) for path in folder.glob("member-*.pt") if (match := OF_MEMBER.fullmatch(path.name))}


def has_manifest(folder: Path, step: int, member: int, of: int) -> bool:
    try:
        return bool(manifest(folder, step, member).get("members") == of)
    except CheckpointError:
        return False


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


def write(
    folder: Path,
    step: int,
    state: State,
    metric: float | None = None,
    member: int | None = None,
    members: int | None = None,
) -> Path:
    """Writes the checkpoint of this optimizer step, or a member's own file, on the disk when it returns. Returns the
    .pt file. members: how many have own files of this step.

    `state` holds tensors and plain values only. Raises CheckpointError, with no half file left.
    """
    path = path_of(folder, step, member)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Draft(path) as draft:
            with without_crc32():
                torch.save(state, cast(IO[bytes], draft))  # torch needs write() and flush()
            commit(draft, step, metric, {"members": members} if members else None)
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


def commit(draft: Draft, step: int, metric: float | None, more: dict[str, Any] | None = None) -> None:
    """The draft and its manifest, in which `more` stands, too, become the checkpoint of this step. Raises OSError, with
    neither of them left.

    Hosts that share the folder do it one after the other: no file gets another one's manifest.
    """
    path = draft.path
    draft.sync()  # which may take long, at once on all hosts
    with one_at_a_time(path):
        manifest_of(path).unlink(missing_ok=True)  # of an older checkpoint of this step, or of another host's
        try:
            draft.commit()
            write_manifest(path, step, draft.bytes, draft.sha256(), metric, more)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def write_manifest(
    path: Path, step: int, size: int, sha256: str, metric: float | None, more: dict[str, Any] | None = None
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
    write_json(manifest_of(path), manifest | (more or {}))


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
        for each in (path, *folder.glob(f"member-*-step-{step}.pt")):
            manifest_of(each).unlink(missing_ok=True)  # first: from here on the checkpoint does not exist
            each.unlink(missing_ok=True)


def remove_without_checkpoint(folder: Path, step: int) -> None:
    """Members' own files of a step whose checkpoint is not there. Raises OSError."""
    if step not in saved_steps(folder):
        remove(folder, step)


def manifest(folder: Path, step: int, member: int | None = None) -> Manifest:
    """The content of the manifest. Raises CheckpointError where it is missing or not of this trainer."""
    path = path_of(folder, step, member)
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


def verify(folder: Path, step: int, member: int | None = None) -> Manifest:
    """Compares the file with its manifest, which it returns. Raises CheckpointError if missing, torn or altered."""
    content = manifest(folder, step, member)
    with opened(folder, step, member) as file:
        compare(file, content, folder, step, member)
    return content


def load(folder: Path, step: int, device: torch.device | str = "cpu", member: int | None = None) -> State:
    """Reads the checkpoint of this step, or a member's own file, verified against its manifest before anything is
    unpacked.

    Its tensors are on `device`. Raises CheckpointError if it is missing, torn, altered, or holds anything but tensors
    and plain values.
    """
    content, path = manifest(folder, step, member), path_of(folder, step, member)
    with opened(folder, step, member) as file:
        compare(file, content, folder, step, member)
        try:
            state = torch.load(file, map_location=device, weights_only=True)
        except Exception as error:  # torch raises UnpicklingError, RuntimeError and others here
            raise CheckpointError(
                f"{path} holds more than tensors and plain values, which could run code when it is "
                f"read, and is refused ({reason_of(error)}): this trainer did not write it{others(folder, step)}"
            ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state but a {type(state).__name__}")
    return state


def refuse_member(path: Path) -> None:
    """Raises CheckpointError for a member's own file, where a checkpoint is wanted."""
    if match := OF_MEMBER.fullmatch(path.with_suffix(".pt").name):
        whole = path_of(path.parent, int(match[2]))
        raise CheckpointError(f"{path} is what one host alone knew beside a checkpoint: give {whole}")


def reason_of(error: Exception) -> str:
    """What torch.load could not read, without its advice to read it all the same."""
    lines = [line.rpartition("WeightsUnpickler error:")[2].strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not ADVICE.search(line)]
    return re.split(r" was not an allowed|\. (?=[A-Z])|\.$", said[0])[0] if said else type(error).__name__


def load_path(path: Path, device: torch.device | str = "cpu") -> State:
    """`load` for a file named on the command line. Raises CheckpointError, also for a file of another program."""
    refuse_member(path)
    step = step_of(path)
    if step is None or path.suffix != ".pt":
        raise CheckpointError(f"{path} is not named step-<n>.pt: it is none of this trainer's checkpoints")
    return load(path.parent, step, device)


def opened(folder: Path, step: int, member: int | None = None) -> BufferedReader:
    path = path_of(folder, step, member)
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"no checkpoint {path} ({error}){others(folder, step)}") from error


def compare(file: BufferedReader, content: Manifest, folder: Path, step: int, member: int | None = None) -> None:
    """The open file against its manifest; leaves it at its beginning."""
    path, rest = path_of(folder, step, member), others(folder, step)
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
