"""`make train RESUME=<run id>|last`: which earlier run a new one continues, and whether it can.

A continued run is a new run: a new id and folder, on any number of hosts. The plan mounts each host's folder of the
earlier run beside it, read-only; the trainer takes the newest checkpoint that is whole on any of the hosts.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.cli import exits
from launch.cli.output import say
from launch.cli.refusal import Refusal, refuse
from launch.files import ROOT, read_json, runs_dir
from launch.hosts.clustermap import MapHost
from launch.hosts.inventory import build_name
from launch.job.plan import SCHEMA, Options, run_dir_on_host
from launch.job.project import parted
from launch.job.trainer_arguments import may_leave_communication_open, without_choice

LAST = "last"
Plans = Mapping[str, Mapping[str, Any]]  # run id -> its plan.json, {} where there is none


@dataclass(frozen=True)
class Earlier:
    """The earlier run, from its plan."""

    run: str
    script: str | None
    args: tuple[str, ...]
    hosts: tuple[str, ...]
    resumed: str | None = None  # the run that it continued itself
    project: bool = False  # our trainer had a project of the user's: parts that `args` name
    image: str = ""  # its id


def find(word: str, inventory: Path) -> Earlier:
    """The run that RESUME names, from the plans in runs/. Raises Refusal where there is none that can be continued."""
    folders = list(runs_dir().glob("*/"))
    if word == LAST:  # not a run that ended before its first step, as its settings were refused
        folders = [one for one in folders if read_json(one / "summary.json").get("exit_status") != exits.REFUSED]
    plans = {folder.name: read_json(folder / "plan.json") for folder in folders}
    return select(word, build_name(inventory), plans)


def select(word: str, inventory: str, plans: Plans) -> Earlier:
    """As `find`, of plans that were read; `inventory` as build_name names it. Raises Refusal as `find`."""
    mine = {r: p for r, p in plans.items() if (path := p.get("inventory")) and build_name(ROOT / path) == inventory}
    newest = sorted(mine, key=lambda run: (str(mine[run].get("created")), run), reverse=True)
    known = f"runs on this inventory, newest first: {', '.join(newest[:5]) or 'none yet'}"
    if word == LAST:
        if not newest:
            raise refuse("RESUME", "RESUME=last, but no run of this inventory is in runs/", "train without RESUME")
        word = newest[0]
    if word not in plans:
        raise refuse("RESUME", f"there is no run {word} in runs/", f"name one, or RESUME=last; {known}")
    plan = plans[word]
    if not plan:
        what = f"run {word} was not made by `make train`: it has no plan.json, and no host has its checkpoints"
        raise refuse("RESUME", what, f"name a run on hosts; {known}")
    if word not in mine:
        what = f"run {word} was on another inventory ({plan.get('inventory', 'not noted')}), on other hosts' disks"
        raise refuse("RESUME", what, f"name its inventory with INVENTORY=..., or another run; {known}")
    if plan.get("schema") != SCHEMA:
        what = f"run {word} was made by another version of Muster: its plan is {plan.get('schema')}, not {SCHEMA}"
        raise refuse("RESUME", what, f"name a newer run; {known}")
    hosts = tuple(str(host["host"]) for host in plan["hosts"])
    has_project, args = parted(plan["script"], plan["args"])
    return Earlier(word, plan["script"], args, hosts, plan.get("resume"), has_project, plan["image"])


def continued(options: Options, earlier: Earlier) -> Options:
    """The options of the run that continues `earlier`, with the arguments of that one.

    Settings in ARGS come behind these and win; a script's own arguments replace those of the earlier run. A run that
    had a project has one again.
    Raises Refusal when the earlier run ran something else.
    """
    if options.script != earlier.script:
        then, now = (script or "Muster's own trainer" for script in (earlier.script, options.script))
        fix = "give the same WORKLOAD and SCRIPT" if earlier.script else "leave out WORKLOAD and SCRIPT"
        raise refuse("RESUME", f"run {earlier.run} ran {then}, not {now}", fix)
    args = options.args or earlier.args if options.script else (*earlier.args, *same_communication(options.args))
    return replace(options, resume=earlier.run, args=args, project=options.project or earlier.project)


def same_communication(args: tuple[str, ...]) -> tuple[str, ...]:
    """New arguments, without a wish to choose --communication, which is only done for a new run; that is said."""
    if not may_leave_communication_open(args, None):
        return args
    kept = without_choice(args)
    if kept != args:
        say("communication: nothing is chosen for a run that continues another; its options count, and those in ARGS")
    return kept


def has_checkpoint_command(earlier: Earlier, host: MapHost) -> str:
    """A shell command that succeeds on a host that holds something to continue from.

    Our trainer's checkpoints exist once their manifest does; a user's script may leave anything.
    """
    folder = shlex.quote(run_dir_on_host(host, earlier.run))
    pattern = f"{folder}/checkpoints/step-*.json" if earlier.script is None else f"{folder}/*"
    return f"ls -d {pattern} >/dev/null 2>&1"


def refusal_of_nothing(earlier: Earlier, asked: Sequence[str]) -> Refusal:
    """The refusal when no host of the new run holds a checkpoint of the earlier one."""
    what = f"run {earlier.run} left no checkpoint on {', '.join(asked)}; it ran on {', '.join(earlier.hosts)}"
    missed = [host for host in earlier.hosts if host not in asked]
    ways = [f"let one of {', '.join(missed)} take part (NODES)"] if missed else []
    ways += [f"continue what it continued: RESUME={earlier.resumed}"] if earlier.resumed else []
    return refuse("RESUME", what, ", or ".join([*ways, "train without RESUME"]))
