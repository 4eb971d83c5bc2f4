"""What came of a run that repeats another, beside that one: the same to the bit, or where they first differ.

Both folders are here; neither needs torch: losses are compared as they stand in metrics.jsonl, which holds all digits,
and checkpoints by the bytes of their tensors. What a host or a script wrote may be anything.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.cli.units import some
from launch.job.outcome import number
from launch.report import documents
from launch.report.documents import Metrics, Run
from launch.run import origin
from launch.run.gather import OURS

#: What of a step and of an epoch is the same in the same training; times and rates are not.
STEP_FIGURES = ("loss", "lr", "images")
EPOCH_FIGURES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")

NAMED_FILES = 5
_TENSOR = re.compile(r"[^/]+/data/\d+")  # in a file of torch.save
_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True)
class Compared:
    """What two runs have in common. `same`: None where nothing of both can be compared."""

    same: bool | None
    lines: Sequence[str] = field(default=())


def compare(then: Path, now: Path) -> Compared:
    """Compare what two runs left in their folders; `now` repeats `then`."""
    if not then.is_dir():
        return Compared(None, [f"run {then.name} is not here any more: the results are not compared"])
    runs = [documents.read(folder) for folder in (then, now)]
    found = _files(then, now) if runs[0].script else _trained(*runs)
    if all(is_same is None for is_same, _ in found):
        return Compared(None, [f"nothing is there by which this run could be compared with run {then.name}"])
    same = all(is_same is not False for is_same, _ in found)
    head = f"the same as run {then.name} to the bit" if same else f"not the same as run {then.name}"
    lines = [f"{head}: {'; '.join(line for is_same, line in found if is_same == same)}"]
    if not same:
        lines += [f"the same in both: {line}" for is_same, line in found if is_same]
        lines += [f"which can come of this: {reason}" for reason in reasons(*runs)]
    return Compared(same, lines + [line for is_same, line in found if is_same is None])


Finding = tuple[bool | None, str]  # whether a part is the same (None: not compared), and what is said of it


def _trained(then: Run, now: Run) -> list[Finding]:
    """Steps, epochs and the last checkpoint of which both runs have something."""
    found: list[Finding | None] = []
    if then.metrics and now.metrics:
        found += [steps(then.metrics, now.metrics), epochs(then.metrics.epochs, now.metrics.epochs)]
    return [*(one for one in found if one), _checkpoints(then.folder, now.folder)]


def steps(then: Metrics, now: Metrics) -> Finding | None:
    """The steps that both runs made: whether all are the same, or the first one that differs. Pure."""
    before, after = _by_step(then), _by_step(now)
    both = sorted(before.keys() & after.keys())
    if not both:
        return None
    for step in both:
        pairs = zip(STEP_FIGURES, before[step], after[step], strict=True)
        if other := [f"{name} {old!r} then, {new!r} now" for name, old, new in pairs if old != new]:
            known = f", after {both.index(step)} that are the same" if step != both[0] else ""
            return False, f"the first step that differs is {step}{known}: {', '.join(other)}"
    parts = (
        "" if len(before) == len(after) == len(both) else f" that both made, of {len(before)} then, {len(after)} now"
    )
    return True, f"the loss of {_many(len(both), 'step')}{parts}"


def _by_step(run: Metrics) -> dict[int, tuple[float, ...]]:
    """STEP_FIGURES of each step."""
    columns = (run.steps[name] for name in ("step", *STEP_FIGURES))
    return {int(step): tuple(values) for step, *values in zip(*columns, strict=True)}


def epochs(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Finding | None:
    """The same of the epochs that both runs ended. Pure."""
    before, after = ({int(one["epoch"]): one for one in listed} for listed in (then, now))
    both = sorted(before.keys() & after.keys())
    for epoch in both:
        pairs = ((name, number(before[epoch].get(name)), number(after[epoch].get(name))) for name in EPOCH_FIGURES)
        if other := [f"{name} {old!r} then, {new!r} now" for name, old, new in pairs if old != new]:
            return False, f"the first epoch that differs is {epoch}: {', '.join(other)}"
    accuracy = number(after[both[-1]].get("test_accuracy")) if both else None
    reached = f", {accuracy:.2%} in the last of them" if accuracy is not None else ""
    return (True, f"losses and accuracy of {_many(len(both), 'epoch')}{reached}") if both else None


def _checkpoints(then: Path, now: Path) -> Finding:
    """The tensors (weights, optimizer, averages) of the newest checkpoint of the same step that is here of both."""
    before, after = ({path.name for path in (one / "checkpoints").glob("step-*.pt")} for one in (then, now))
    if not before & after:
        return None, "weights are not compared: the two runs have no checkpoint of the same step here"
    newest = max(before & after, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))
    old, new = (tensors(one / "checkpoints" / newest) for one in (then, now))
    if old is None or new is None:
        return None, f"weights are not compared: {newest} of run {(now if old else then).name} cannot be read"
    differ = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    where = f"of the checkpoint {newest} (weights and optimizer)"
    if differ:
        return False, f"{len(differ)} of {len(old.keys() | new.keys())} tensors {where} differ"
    whole = hashlib.sha256("".join(f"{name}{old[name]}" for name in sorted(old)).encode()).hexdigest()
    return True, f"all {len(old)} tensors {where}, SHA-256 {whole[:12]}"


def tensors(path: Path) -> dict[str, str] | None:
    """SHA-256 of each tensor's bytes in a file of torch.save, by its name there; None for anything else.

    What else is in it, such as the seconds that were trained, is not looked at.
    """
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if _TENSOR.fullmatch(entry.filename) and entry.compress_type == zipfile.ZIP_STORED:
                    total = hashlib.sha256()
                    entry.CRC = None  # type: ignore[assignment]  # our trainer's files have none
                    with archive.open(entry) as file:
                        while block := file.read(_BLOCK):
                            total.update(block)
                    found[entry.filename.partition("/")[2]] = total.hexdigest()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    return found or None


def _files(then: Path, now: Path) -> list[Finding]:
    """What a script wrote: files of both, and of one of them."""
    before, after = _written(then), _written(now)
    everything = sorted(before.keys() | after.keys())
    if not everything:
        return []
    differ = [name for name in everything if before.get(name) != after.get(name)]
    same = len(everything) - len(differ)
    equal: list[Finding] = [(True, f"{_many(same, 'file')} that the script wrote")] if same else []
    if not differ:
        return equal
    of_all = f"{len(differ)} of {_many(len(everything), 'file')}"
    return [*equal, (False, f"{of_all} that the script wrote: {some(differ, NAMED_FILES)}")]


def _written(folder: Path) -> dict[str, str]:
    """SHA-256 of each file that a script wrote, by its path; of the first host alone."""
    paths = [one for name in sorted(folder.iterdir()) if name.name not in OURS for one in (name, *name.rglob("*"))]
    return {str(one.relative_to(folder)): _sha256(one) for one in paths if one.is_file() and not one.is_symlink()}


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def reasons(then: Run, now: Run) -> list[str]:
    """Why the same run may come out otherwise in the last digits, or altogether. Pure but for the origin's document."""
    begun = origin.read(now.folder)
    found = list(begun.differences) if begun else []
    for run in (then, now):
        if restarts := number(run.summary.get("restarts")):
            what = f"run {run.name} was restarted {_many(int(restarts), 'time')}, maybe on other hosts"
            found.append(f"{what}: sums in another order")
    if then.settings.get("shares") == "auto":
        found.append("--shares auto measures the ranks' speed, and cuts batches by it: sums in another order")
    devices = [str(start.get("device")) for run in (then, now) for start in _starts(run)]
    if any(device.startswith("cuda") for device in devices) and not then.settings.get("deterministic"):
        found.append("some kernels of GPUs add in any order, unless --deterministic is given")
    return found


def _starts(run: Run) -> Sequence[Mapping[str, Any]]:
    return run.metrics.starts if run.metrics else ()


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
