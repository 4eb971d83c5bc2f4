"""Which checkpoints are kept: the newest and the best. Those after the step where a run begins are set aside."""

from pathlib import Path

from train.checkpoints import files
from train.checkpoints.files import CheckpointError

ASIDE = "left-"  # before the names of checkpoints that no longer count


def to_keep(metrics: dict[int, float | None], keep: int, written: int) -> set[int]:
    """The steps that stay: the `keep` newest, the one with the highest metric (the newest of equals), and `written`,
    the only one that is known to be intact.
    """
    newest = sorted(metrics)[-max(keep, 1) :]
    measured = [(metric, step) for step, metric in metrics.items() if metric is not None]
    return {*newest, written, *([max(measured)[1]] if measured else [])}


def prune(folder: Path, keep: int, written: int) -> None:
    """Removes the others, and older files whose writer was killed before their manifest. Raises OSError."""
    metrics = {step: metric_of(folder, step) for step in files.saved_steps(folder)}
    unfinished = {step for path in folder.glob("step-*.pt") if (step := files.step_of(path)) is not None}
    unfinished |= files.steps_of_members(folder)
    unfinished = {step for step in unfinished - set(metrics) if step < written}
    for step in sorted(unfinished | set(metrics) - to_keep(metrics, keep, written)):
        files.remove(folder, step)


def metric_of(folder: Path, step: int) -> float | None:
    try:
        metric = files.manifest(folder, step).get("metric")
    except CheckpointError:
        return None
    return float(metric) if isinstance(metric, int | float) else None


def set_aside(folder: Path, after: int) -> None:
    """Renames the checkpoints of steps later than `after` to left-step-<n>: a run that begins at `after` passed them
    over (corrupt) or was told to begin earlier, so they must count neither as newest nor as best. Raises OSError.
    """
    for step in files.saved_steps(folder):
        if step > after:
            path = files.path_of(folder, step)
            for each in (files.manifest_of(path), path, *folder.glob(f"member-*-step-{step}.*")):
                try:
                    each.replace(each.with_name(ASIDE + each.name))
                except FileNotFoundError:  # another host did it, in a shared folder
                    continue
    for step in files.steps_of_members(folder):  # a checkpoint that was never whole
        if step > after:
            files.remove(folder, step)
