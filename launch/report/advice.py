"""What to do next with a run, as commands to type. Pure, but that it looks which files there are."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from keeper.decide import CONTAINER_ENDED
from launch.cli.make_variables import name_inventory
from launch.files import shown
from launch.job.outcome import number
from launch.report.documents import Run

#: What helps against each kind of cause (keeper/__init__.py).
_FIXES = {
    "launcher": "What torchrun said is in `{logs}/torchrun.log`.",
    "host_lost": "`make check` says whether the host answers, and what is wrong with its network.",
    "cut": "`make check` measures every pair of hosts; TCP ports 29400 to 29415 must be open between them.",
    "hang": "Where each rank stood is in `{logs}/stacks/`; what it printed, in `{logs}/`.",
    "start": "`make check` looks at every host; what this one said is in `{logs}/`.",
    "lease": "`make status` shows whose run holds the host; WAIT=1 waits for the turn.",
    "leaves": "`journalctl` on the host says who stopped its container, or shut it down.",
    "rank": "All that the rank printed is in `{logs}/`.",
}


@dataclass(frozen=True)
class Step:
    """One thing to do: a command, and what it does."""

    command: str
    what: str


def steps(run: Run) -> list[Step]:
    """What to do next, the most likely first."""
    made = _resumption(run) if run.status in ("failed", "stopped") else _use(run)
    if run.status == "unknown" and not run.is_local:
        made = [
            Step(f"make attach RUN={run.name}", "shows the run while it goes on"),
            Step(f"make gather RUN={run.name}", "fetches what there is of it once it has ended"),
        ]
    elif run.missing_hosts:
        what = f"fetches what is not here yet, from {', '.join(run.missing_hosts)}"
        made.append(Step(f"make gather RUN={run.name}", what))
    if (run.folder / "tensorboard").is_dir():
        made.append(
            Step(f"make tensorboard RUN={run.name}", "shows its curves in TensorBoard, beside those of other runs")
        )
    inventory = Path(str(run.plan["inventory"])) if run.plan.get("inventory") else None
    return [Step(name_inventory(f"`{one.command}`", inventory).strip("`"), one.what) for one in made]


def _use(run: Run) -> list[Step]:
    """Of a run that succeeded, or of which nothing is known."""
    if run.script:
        return [
            Step(
                _again(run),
                "starts the script anew with this run's arguments; it finds this run's files in $MUSTER_RESUME_DIR",
            )
        ]
    epochs = number(run.settings.get("epochs"))
    folder, python = shown(run.folder), ".venv/bin/python -m train"
    made = []
    if run.checkpoints:
        own = _project(run)
        own = f"--project {own} " if own else ""
        if not any(":" in str(run.settings.get(part) or "") for part in ("dataset", "transform")):
            what = "says what the model sees in pictures"
            made.append(Step(f"{python} predict {own}--checkpoint {folder} IMAGES", what))
        whose = "" if ":" in str(run.settings.get("model") or "") else "torchvision "
        what = f"writes the weights as a plain {whose}state_dict, .pt and .safetensors"
        made.append(Step(f"{python} export {own}{folder}", what))
    if run.checkpoints and epochs:
        more = f"--epochs {2 * epochs:.0f}"
        command = (
            f'make local {_own(run)}ARGS="--resume {folder} {more} ..."'
            if run.is_local
            else f'make train RESUME={run.name} ARGS="{more}"'
        )
        settings = "; ...: the settings of this run" if run.is_local else ""
        made.append(Step(command, f"trains on, to twice as many epochs{settings}"))
    return made


def _resumption(run: Run) -> list[Step]:
    if run.script:
        return [
            Step(
                _again(run),
                "starts the script anew with this run's arguments; it finds this run's files in $MUSTER_RESUME_DIR",
            )
        ]
    if not run.checkpoints:
        return []
    last = f"from its last checkpoint, of step {run.checkpoints[-1]['step']:.0f}"
    if run.is_local:
        return [
            Step(
                f'make local {_own(run)}ARGS="--resume {shown(run.folder)} ..."',
                f"goes on {last}; ...: the settings of this run",
            )
        ]
    return [Step(f"make train RESUME={run.name}", f"goes on {last}, with the same settings")]


def _own(run: Run) -> str:
    """The project of a run of `make local`, as a word of the command line and the blank behind it."""
    return f"PROJECT={_project(run)} " if _project(run) else ""


def _project(run: Run) -> str:
    """The folder of a run's project as a word of the command line; DIR where that is a container's; else nothing."""
    project = run.settings.get("project")
    return (shlex.quote(shown(Path(str(project)))) if run.is_local else "DIR") if project else ""


def _again(run: Run) -> str:
    return f"make train RESUME={run.name} WORKLOAD=... SCRIPT={run.script}"


def fix(run: Run) -> str:
    """What helps against the cause of a failure; what is in backticks can be typed or opened. Empty: nothing known."""
    host = str(run.cause.get("host") or run.summary.get("failed_host") or "")
    logs = shown(run.folder / "logs" / host) if host and not run.is_local else shown(run.folder / "logs")
    if run.status != "failed":
        return ""
    if run.cause.get("reason") == CONTAINER_ENDED:
        return f"`journalctl` on {host} says what ended its container: a person, a lack of memory, a reboot."
    return _FIXES.get(str(run.cause.get("kind") or "rank"), "").format(logs=logs)
