"""The page of one run: everything that is known of it, put together and written to runs/<id>/report.html."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.job.outcome import Failure, number
from launch.page import render
from launch.report import about, advice, curves, documents, ranks, timeline
from launch.report.documents import Run, Words
from launch.report.timeline import TimeLine
from launch.report.words import cause_in_words, duration

TEMPLATE = Path(__file__).parent / "templates" / "run.html"
#: Events in the list; of more, those in the middle are left out.
LISTED_EVENTS = 400


def write(folder: Path) -> Path:
    """Write the page of the run in `folder`; returns its path. Raises OSError when it cannot be written."""
    path = folder / documents.PAGE
    render.write(path, TEMPLATE, content(documents.read(folder)))
    return path


def content(run: Run) -> dict[str, Any]:
    """What the template shows."""
    line = timeline.of_run(run)
    drawn = curves.figures(run.metrics) if run.metrics else []
    by_rank = ranks.figures(run)
    cluster = about.cluster_of(run)
    return {
        "run": run,
        "what": what_ran(run),
        "about": list(filter(None, headline(run))),
        "tiles": tiles(run, line),
        "failure": failure_of(run),
        "last_lines": [str(one) for one in documents.listed(run.cause, "lines")],
        "fix": advice.fix(run),
        "steps": advice.steps(run),
        "timeline": timeline.figure(line) if line.rows else None,
        "lines": shortened([[f"{one.at:.1f}", one.host, str(one.attempt), one.what] for one in line.lines]),
        "attempts": attempts(run, line),
        "given_up": str(run.summary.get("given_up") or ""),
        "curves": drawn,
        "by_rank": by_rank,
        "slowest": ranks.slowest(ranks.times(run)) if by_rank else "",
        "hosts": filled(about.HOST_COLUMNS, about.hosts(run, cluster)),
        "deployed": str(cluster.get("created") or "")[:16].replace("T", " "),
        "plan": about.plan_facts(run),
        "commands": about.commands(run),
        "versions": about.versions(run),
        "settings": about.settings(run),
        "check": about.check_before(run),
        "files": files(run),
        "missing": missing(run, line, bool(drawn), bool(by_rank)),
        "drawings": bool(line.rows or drawn or by_rank),
    }


def what_ran(run: Run) -> str:
    """The model and its data, or the script."""
    if run.script:
        return run.script
    model, dataset = run.settings.get("model"), run.settings.get("dataset")
    return f"{model} on {dataset}" if model else "training"


def headline(run: Run) -> list[str]:
    """The facts below the page's title."""
    hosts, world = (
        sum(bool(part.ranks) for part in run.hosts),
        number(run.summary.get("world_size")) or number(run.plan.get("world_size")),
    )
    spares = len(run.hosts) - hosts
    where = counted(hosts, "host") + (f" and {counted(spares, 'spare')}" if spares else "") if hosts else "this machine"
    return [
        str(run.plan.get("owner") or ""),
        moment(str(run.plan.get("created") or "")) or started(run),
        f"{counted(int(world), 'rank')} on {where}" if world else where,
        f"continues {run.plan['resume']}" if run.plan.get("resume") else "",
        f"ended by --early-stop after epoch {early:.0f}" if (early := number(run.result.get("early_stop"))) else "",
    ]


def counted(number_of: int, what: str) -> str:
    return f"{number_of} {what}{'' if number_of == 1 else 's'}"


def moment(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return ""


def started(run: Run) -> str:
    """When a run without a plan began."""
    if not (run.metrics and run.metrics.starts):
        return ""
    return f"{datetime.fromtimestamp(run.metrics.starts[-1]['time']):%Y-%m-%d %H:%M}"


def tiles(run: Run, line: TimeLine) -> list[tuple[str, str, str]]:
    """The figures on top: name, figure, and a line about it."""
    figures = {name: number(run.summary.get(name)) for name in ("images_per_second", "train_seconds")}
    metrics, made = run.metrics, list[tuple[str, str, str]]()
    epochs = metrics.epochs if metrics else []
    made += tested(run, epochs)
    if (speed := figures["images_per_second"]) is None and epochs:
        speed = number(epochs[-1].get("images_per_second"))
    if speed is not None:
        world = number(run.result.get("world_size")) or _ranks_at_last(run)
        made.append(("images/s", f"{speed:.0f}", f"{speed / world:.0f} by rank" if world and world > 1 else ""))
    if metrics and metrics.steps["step"]:
        last, known = metrics.steps["step"][-1], number(run.settings.get("epochs"))
        steps = known * metrics.steps_per_epoch if known and metrics.steps_per_epoch else None
        of = f"of {steps:.0f}" if steps else ""
        made.append(("steps", f"{last:.0f}", f"{of}, epoch {metrics.steps['epoch'][-1]:.0f}".removeprefix(", ")))
    if (seconds := run.seconds or line.seconds) and run.hosts:
        training = figures["train_seconds"]
        of = " in the last attempt" if len(run.attempts) > 1 else ""
        made.append(("duration", duration(seconds), f"training {duration(training)}{of}" if training else ""))
    elif training := figures["train_seconds"]:
        made.append(("training time", duration(training), ""))
    if len(run.attempts) > 1:
        made.append(("attempts", f"{max(len(run.attempts), 1 + (number(run.summary.get('restarts')) or 0)):.0f}", ""))
    for name, key in (("waiting for data", "data_wait"), ("communication", "comm")):
        if epochs and (share := number(epochs[-1].get(key))) is not None:
            made.append((name, f"{share:.0%}", "of the last epoch"))
    return made


def tested(run: Run, epochs: Sequence[Words]) -> list[tuple[str, str, str]]:
    """The tiles of the last evaluation: accuracies, or the loss where there is no accuracy."""
    last = next((one for one in reversed(epochs) if number(one.get("test_loss")) is not None), {})

    def figure(name: str) -> float | None:
        said = (number(one.get(name)) for one in (run.summary, run.result, last))
        return next((value for value in said if value is not None), None)

    after = f"after epoch {last['epoch']:.0f}" if last else ""
    accuracy, top5, loss = figure("test_accuracy"), figure("test_top5"), figure("test_loss")
    made = []
    if accuracy is not None:
        best = number(run.result.get("best_accuracy"))
        made.append(("test accuracy", f"{accuracy:.2%}", f"best {best:.2%}" if best and best > accuracy else after))
    elif loss is not None:
        best = number(run.result.get("best_loss"))
        lower = best is not None and best < loss
        made.append(("test loss", f"{loss:.4g}", f"lowest {best:.4g}" if lower else after))
    if top5 is not None:
        made.append(("test top-5", f"{top5:.2%}", "right among the first five"))
    return made


def _ranks_at_last(run: Run) -> float | None:
    """How many ranks the trainer had at its last start."""
    starts = run.metrics.starts if run.metrics else []
    return (number(starts[-1].get("world_size")) if starts else None) or number(run.summary.get("world_size"))


def failure_of(run: Run) -> str:
    """Who failed and why, or why the run was stopped; empty for others."""
    reason, host = run.summary.get("reason"), run.summary.get("failed_host")
    if run.status == "failed" and host:
        return str(Failure(str(host), run.summary.get("failed_rank"), str(reason)))
    return str(reason or "")


def attempts(run: Run, line: TimeLine) -> list[list[str]]:
    """A row for each attempt, where there was more than one: number, hosts, last step, how long, why it ended."""
    rows = []
    for one in run.attempts if len(run.attempts) > 1 else ():
        cause, step, count = one.get("cause"), number(one.get("reached")), number(one.get("number")) or 0
        begun = line.attempts.get(int(count))
        seconds = None if begun is None else line.attempts.get(int(count) + 1, line.seconds) - begun
        rows.append(
            [
                str(one.get("number")),
                ", ".join(map(str, documents.listed(one, "hosts"))),
                "" if step is None else f"{step:.0f}",
                "" if seconds is None else duration(seconds),
                cause_in_words(cause) if isinstance(cause, dict) else "",
            ]
        )
    return rows


def filled(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """A table, its heads first, without the columns in which nothing is known; empty without rows."""
    known = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    return [[row[number] for number in known] for row in (columns, *rows)] if rows else []


def shortened(rows: Sequence[list[str]]) -> list[list[str]]:
    """The first and the last of very many rows."""
    half = LISTED_EVENTS // 2
    if len(rows) <= LISTED_EVENTS:
        return list(rows)
    return [*rows[:half], ["", "", "", f"{len(rows) - 2 * half} more, in logs/<host>/events.jsonl"], *rows[-half:]]


def files(run: Run) -> list[tuple[str, list[str]]]:
    """What else is in the run's folder: a heading, and paths from there."""
    logs = sorted(
        str(path.relative_to(run.folder))
        for path in run.folder.glob("logs/**/*")
        if path.is_file() and path.suffix in (".log", ".out", ".err", ".txt")
    )
    names = ("metrics.jsonl", "result.json", "settings.json", "summary.json", "plan.json", "curves.png")
    written = [name for name in names if (run.folder / name).is_file()]
    folders = [
        f"{name}/"
        for name in ("checkpoints", "tensorboard", "profile", "workload", "hosts")
        if (run.folder / name).is_dir()
    ]
    return [(name, paths) for name, paths in (("output", logs), ("documents", written), ("folders", folders)) if paths]


def missing(run: Run, line: TimeLine, drawn: bool, by_rank: bool) -> list[str]:
    """What the page lacks, and why: a line each."""
    made = []
    if not line.rows:
        why = (
            "nothing was gathered of its course"
            if run.hosts
            else "a run on this machine alone has no keeper, and this one no step"
        )
        made.append(f"No time line: {why}.")
    if run.script:
        made.append("No curves, and no times of ranks: a script of one's own keeps its figures where it likes.")
    elif not drawn:
        made.append("No curves: there is no step in `metrics.jsonl`.")
    elif not by_rank:
        made.append(
            "No times of ranks: there is one rank, or `--parallel` is not ddp or horovod, which alone time their steps."
        )
    if run.is_local:
        made.append("No plan, hosts and check: the run was on this machine alone.")
    return made
