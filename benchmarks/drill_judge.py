"""Whether the runs of `make drill FAULTS=` are as they must be: their samples, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from train import order
from train.checkpoints import CheckpointError, load, manifest, saved_steps

STATES = ("model", "rank_buffers", "optimizer", "scaler", "ema")  # of a checkpoint; the rest has times in it
SHOWN = 5  # of many things that differ

Words = Mapping[str, Any]


def planned_steps(samples: int, batch_size: int, epochs: int) -> list[tuple[int, int, int]]:
    """(step, epoch, samples in it) of all steps of a training, counted from 1."""
    per_epoch = order.steps_per_epoch(samples, batch_size)
    sizes = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    return [(epoch * per_epoch + number, epoch + 1, size)
            for epoch in range(epochs) for number, size in enumerate(sizes, 1)]  # fmt: skip


def wrong_samples(events: Sequence[Words], planned: Sequence[tuple[int, int, int]]) -> list[str]:
    """Where the steps in a run's metrics.jsonl are not the planned ones, each once and in order."""
    seen = [(int(one["step"]), int(one["epoch"]), int(one["images"])) for one in events if one["event"] == "step"]
    if seen == list(planned):
        return []
    missing = [step for step, *_ in planned if step not in {step for step, *_ in seen}]
    extra = [one for one in seen if one not in set(planned)]
    found = [f"{len(seen)} steps for {len(planned)}, {sum(size for *_, size in seen)} samples for "
             f"{sum(size for *_, size in planned)}"]  # fmt: skip
    found += [f"missing: steps {missing[:SHOWN]} of {len(missing)}"] if missing else []
    found += [f"not planned: {extra[:SHOWN]} of {len(extra)}"] if extra else []
    return [*found, *(["steps twice, or not in order"] if not (missing or extra) else [])]


def differing(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """The names of what two states (of tensors and plain values) do not have in common to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or one.contiguous().numpy().tobytes() != other.contiguous().numpy().tobytes():
            yield name
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}, key=str):
            inner = f"{name}.{key}".lstrip(".")
            if key in one and key in other:
                yield from differing(one[key], other[key], inner)
            else:
                yield inner
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differing(left, right, f"{name}.{number}".lstrip("."))
    elif type(one) is not type(other) or one != other:
        yield name


def weights_of(folder: Path, step: int) -> dict[str, Any]:
    """What the training has made by this step, from a run's folder. Raises CheckpointError."""
    state = load(folder / "checkpoints", step)
    metric = manifest(folder / "checkpoints", step).get("metric")
    return {**{name: state[name] for name in STATES}, "metric": metric}


def kept_all_hosts(attempts: Sequence[Words], hosts: Sequence[str]) -> bool:
    """Whether every attempt that made steps had all hosts. attempts: as in summary.json."""
    return all(list(one["hosts"]) == list(hosts) for one in attempts if one["reached"] is not None)


def unreadable(folder: Path) -> tuple[int, list[str]]:
    """(checkpoints in a folder, those that cannot be read as a run that goes on would read them, and why)."""
    steps, wrong = saved_steps(folder), []
    for step in steps:
        try:
            load(folder, step)
        except CheckpointError as error:
            wrong.append(str(error))
    return len(steps), wrong
