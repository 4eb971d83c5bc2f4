"""KEEP_RUNS: how many gathered runs of an inventory stay in runs/; older ones are removed, and that is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from launch.cli.refusal import refuse
from launch.files import read_json, runs_dir
from launch.job.plan import Plan

KEPT_RUNS = 20  # where KEEP_RUNS is not given; the README says so


def parse(text: str) -> int:
    """KEEP_RUNS as typed; 0 keeps all. Raises Refusal when it is no such number."""
    if not text.strip():
        return KEPT_RUNS
    if not (text.isascii() and text.isdigit()):
        raise refuse("KEEP_RUNS", f"KEEP_RUNS={text} is not a number of runs", "give one, or 0 to keep all")
    return int(text)


def prune(plan: Plan, kept_runs: int, say: Callable[[str], None]) -> None:
    """Remove the oldest gathered runs of this plan's inventory beyond `kept_runs` (0: none), and say which.

    Runs that are not gathered whole stay, so do runs of `make local`, which have no plan, what a kept run resumed, and
    this plan's own, which may be an old one that was fetched just now.
    """
    if not kept_runs:
        return
    plans = {folder: read_json(folder / "plan.json") for folder in runs_dir().glob("*/")}
    mine = sorted((folder for folder, found in plans.items() if found.get("inventory") == plan.inventory), reverse=True)
    summaries = {folder: read_json(folder / "summary.json") for folder in mine}
    whole = [folder for folder in mine if summaries[folder] and not summaries[folder].get("missing_hosts")]
    old = whole[kept_runs:]
    resumed = {plans[folder].get("resume") for folder in mine if folder not in old}
    removed = [folder for folder in old if folder.name not in (*resumed, plan.run)]
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
    if removed:
        say(f"removed from runs/, as KEEP_RUNS={kept_runs}: {', '.join(folder.name for folder in reversed(removed))}")
