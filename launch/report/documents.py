"""What is in runs/<id>/ of a run. Nothing in it is taken for granted: hosts and scripts wrote it.

The documents' schemas: launch/job/plan.py, launch/job/outcome.py, keeper/__init__.py, train/reporting/metrics.py.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keeper.host import is_name
from launch.cli.refusal import refuse
from launch.files import read_json, runs_dir, shown
from launch.job.outcome import number

Words = Mapping[str, Any]

PAGE = "report.html"
#: The fields of a step's event that are kept of all steps.
STEP_FIELDS = ("step", "epoch", "loss", "lr", "images", "seconds", "time")


@dataclass
class Metrics:
    """metrics.jsonl of our trainer. It may have millions of steps: their figures are in columns."""

    starts: list[Words] = field(default_factory=list)
    steps: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in STEP_FIELDS})
    epochs: list[Words] = field(default_factory=list)
    checkpoints: list[Words] = field(default_factory=list)
    #: The same of the steps that say the norm of their gradient, which a run of before does not.
    norms: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in ("step", "norm")})
    timed: list[Words] = field(default_factory=list)  # the events of steps with the ranks' times, of the last start

    def add(self, event: Words) -> None:
        """One event. One that lacks what every event of its name has is passed over."""
        if number(event.get("time")) is None:
            return
        if event.get("event") == "start":
            self.starts.append(event)
            self.timed.clear()  # the ranks may be on other hosts now
        elif event.get("event") == "epoch" and _has(event, "epoch", "step"):
            self.epochs.append(event)
        elif event.get("event") == "checkpoint" and _has(event, "step"):
            self.checkpoints.append(event)
        elif event.get("event") == "step" and _has(event, *STEP_FIELDS):
            for name, column in self.steps.items():
                column.append(event[name])
            if (norm := number(event.get("grad_norm"))) is not None:
                self.norms["step"].append(event["step"])
                self.norms["norm"].append(norm)
            if event.get("computing"):
                self.timed.append(event)

    @property
    def steps_per_epoch(self) -> float | None:
        """None until an epoch has ended."""
        return self.epochs[-1]["step"] / self.epochs[-1]["epoch"] if self.epochs and self.epochs[-1]["epoch"] else None


@dataclass(frozen=True)
class HostPart:
    """What was gathered from one host."""

    host: str
    ranks: Sequence[int]  # in the first attempt; none: it was a spare
    nproc: int  # ranks that it has when it takes part
    address: str
    interface: str
    events: Sequence[Words]
    exit: Words  # {} where its keeper left none
    state: Words  # how things stood when its keeper last wrote so


@dataclass(frozen=True)
class Run:
    """One run, from its folder; {} and () stand for what there is not."""

    folder: Path
    plan: Words
    summary: Words
    settings: Words  # of our trainer
    result: Words
    hosts: Sequence[HostPart]  # in rank order
    metrics: Metrics | None
    checkpoints: Sequence[Words]  # the manifests of those that are kept, by step

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def script(self) -> str | None:
        """The user's own script; None: our trainer."""
        return self.plan.get("script") or None

    @property
    def is_local(self) -> bool:
        """Whether `make local` ran it."""
        return not self.plan

    @property
    def status(self) -> str:
        """succeeded, failed or stopped; unknown: it goes on, or is not gathered."""
        return str(self.summary.get("status") or "unknown")

    @property
    def cause(self) -> Words:
        """The CAUSE of a failure (keeper/__init__.py); {} where no keeper gave one."""
        found = self.summary.get("cause")
        return found if isinstance(found, dict) else {}

    @property
    def attempts(self) -> list[Words]:
        """How the attempts ended, as in exit.json (keeper/__init__.py) of the host that knows most of them."""
        said = (self.summary, *(part.exit for part in self.hosts))
        most = max((listed(one, "attempts") for one in said), key=len)
        return [one for one in most if isinstance(one, dict)]

    @property
    def missing_hosts(self) -> list[str]:
        """The hosts from which nothing was gathered."""
        return list(map(str, listed(self.summary, "missing_hosts")))

    @property
    def host_of(self) -> dict[int, str]:
        """Each rank's host in the last attempt."""
        by_name = {part.host: part for part in self.hosts}
        names = listed(self.attempts[-1], "hosts") if self.attempts else ()
        members = [by_name[name] for name in names if name in by_name] or [one for one in self.hosts if one.ranks]
        return dict(enumerate(part.host for part in members for _ in range(part.nproc)))

    @property
    def seconds(self) -> float | None:
        """From the start of the first keeper to the end of the last one; of a run without keepers, of training."""
        ended = [found for part in self.hosts if (found := number(part.exit.get("seconds"))) is not None]
        return max(ended) if ended else number(self.summary.get("train_seconds"))


def read(folder: Path, whole: bool = True) -> Run:
    """The run of a folder. whole: with its metrics and events, which a list of runs does not need."""
    plan = read_json(folder / "plan.json")
    ours = not plan.get("script")  # a script may write anything under these names
    manifests = [read_json(path) for path in (folder / "checkpoints").glob("step-*.json")]
    return Run(
        folder=folder,
        plan=plan,
        summary=read_json(folder / "summary.json"),
        settings=read_json(folder / "settings.json") if ours else {},
        result=read_json(folder / "result.json") if ours else {},
        hosts=[_host(folder, host, whole) for host in plan.get("hosts") or []],
        metrics=_metrics(folder / "metrics.jsonl") if whole and ours else None,
        checkpoints=sorted((one for one in manifests if _has(one, "step", "time")), key=lambda one: one["step"]),
    )


def folders() -> list[Path]:
    """The folders of all runs here, the newest first."""
    names = ("plan.json", "summary.json")
    found = [folder for folder in runs_dir().glob("*/") if any((folder / name).exists() for name in names)]
    return sorted(found, reverse=True)


def find(run: str) -> Path:
    """The folder of a run that is here. Raises Refusal."""
    folder, known = runs_dir() / run, folders()
    if is_name(run) and folder in known:
        return folder
    names = ", ".join(one.name for one in known[:5])
    here = f"the newest here: {names}" if names else "no run is here yet"
    fix = f"`make gather RUN={run}` fetches it from its hosts" if is_name(run) else "give the id of a run"
    raise refuse("RUN", f"there is no run {run} in {shown(runs_dir())}", f"{fix}; {here}")


def lines_of(path: Path) -> Iterator[Words]:
    """The JSON objects of a file with one in each line; lines that are torn or something else are passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def listed(document: Words, name: str) -> Sequence[Any]:
    """A list in a document; () where it holds something else."""
    found = document.get(name)
    return found if isinstance(found, list) else ()


def _host(folder: Path, host: Words, whole: bool) -> HostPart:
    logs = folder / "logs" / str(host["host"])
    events = [event for event in lines_of(logs / "events.jsonl") if _has(event, "time", "after")] if whole else []
    return HostPart(
        host=str(host["host"]),
        ranks=listed(host, "ranks"),
        nproc=int(number(host.get("nproc_per_node")) or 0),
        address=str(host.get("address", "")),
        interface=str(host.get("interface", "")),
        events=events,
        exit=read_json(logs / "exit.json"),
        state=read_json(logs / "state.json"),
    )


def _metrics(path: Path) -> Metrics | None:
    found = Metrics()
    for event in lines_of(path):
        found.add(event)
    return found if found.starts or found.steps["step"] else None


def _has(document: Words, *names: str) -> bool:
    """Whether these fields of a document are numbers."""
    return all(number(document.get(name)) is not None for name in names)
