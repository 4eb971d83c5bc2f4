"""How a run ended, from what was gathered of it: runs/<id>/summary.json, and the last lines that a command says.

Keys of the document: launch/job/outcome.py, and the README.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import files
from launch.cli.make_variables import name_inventory
from launch.job import outcome
from launch.job.outcome import HostEnd, Verdict
from launch.job.plan import Plan
from launch.report import ending
from launch.run import origin
from launch.run.compare import compare
from launch.run.gather import CONTAINER, OURS


def end_of(plan: Plan, host: str, answers: bool) -> HostEnd:
    """How a run ended on a host, from what was gathered of it."""
    logs = files.runs_dir() / plan.run / "logs" / host
    events = []
    if (path := logs / "events.jsonl").exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:  # its end: the keeper was killed while it wrote
                break
    end, container = files.read_json(logs / "exit.json"), files.read_json(logs / CONTAINER)
    return HostEnd(host, end or None, tuple(events), container, answers)


def write_summary(plan: Plan, missing: Sequence[str]) -> dict[str, Any]:
    """Write runs/<id>/summary.json from what was gathered, and return it. missing: hosts that gave nothing yet.

    A verdict with a cause stays: what a host that was lost says later, after it was started anew, changes nothing.
    """
    folder = files.runs_dir() / plan.run
    before = files.read_json(folder / "summary.json")
    if before.get("cause"):
        summary = {**before, "missing_hosts": list(missing)}
    else:
        ends = [end_of(plan, host_plan.host, host_plan.host not in missing) for host_plan in plan.hosts]
        verdict = outcome.verdict(ends)
        summary = summary_of(plan, verdict, ends, missing)
    files.write_json(folder / "summary.json", summary)
    return summary


def summary_of(plan: Plan, verdict: Verdict, ends: Sequence[HostEnd], missing: Sequence[str]) -> dict[str, Any]:
    """The content of summary.json."""
    folder = files.runs_dir() / plan.run
    failures = [failure for end in ends if end.exit for failure in end.exit.get("failures") or []]
    refused = verdict.status == "failed" and plan.script is None and outcome.refused_its_settings(failures, folder)
    ours = verdict.status == "succeeded" and plan.script is None  # a script may write anything under that name
    result = files.read_json(folder / "result.json") if ours else {}
    begun = origin.read(folder)
    compared = compare(files.runs_dir() / begun.reproduces, folder) if begun and begun.reproduces else None
    where = (plan.run, sum(bool(one.ranks) for one in plan.hosts), plan.world_size, plan.master_addr)
    summary = outcome.summary(*where, verdict, result, refused, missing)
    if begun and compared:
        summary["reproduces"] = {"run": begun.reproduces, "same": compared.same, "said": list(compared.lines)}
    return summary


def close(plan: Plan, summary: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """The last lines: the result, where everything is, how the run ended."""
    folder = files.runs_dir() / plan.run
    rate, seconds = (outcome.number(summary[key]) for key in ("images_per_second", "train_seconds"))
    what, figure = outcome.reached(summary)
    if what and rate is not None and seconds is not None:
        of, whole = "", outcome.number(summary.get("run_seconds"))
        if summary.get("restarts") and whole is not None:
            of = f" in the last attempt, {whole:.1f} s from the run's start to its end"
        say(f"{what} {figure}, {rate:.0f} images/s, {seconds:.1f} s of training{of}")
    if (folder / "curves.png").exists():
        say(f"curves: {files.shown(folder / 'curves.png')}")
    if page := ending.write(folder, say):
        say(f"report: {files.shown(page)}")
    if plan.script is None:
        more = ", metrics and checkpoint" if (folder / "metrics.jsonl").exists() else ""
        say(f"logs{more}: {files.shown(folder)}")
    else:
        names = {path.name for path in folder.iterdir()} - (set(OURS) - {"hosts"})
        written = folder / "workload" if names == {"workload"} else folder
        wrote = f"; what the script wrote: {files.shown(written)}" if names else ""
        say(f"logs: {files.shown(folder / 'logs')}{wrote}")
    for line in (summary.get("reproduces") or {}).get("said") or ():
        say(line)
    if summary["status"] != "succeeded" and any((folder / "checkpoints").glob("step-*.json")):
        again = name_inventory(f"`make train RESUME={plan.run}`", Path(plan.inventory))
        say(f"it continues from its last checkpoint with {again}")
    if summary["status"] == "failed":
        failure = outcome.Failure(summary["failed_host"], summary["failed_rank"], summary["reason"])
        if summary.get("given_up"):
            say(f"it was not started again: {summary['given_up']}")
        say(f"run {plan.run} FAILED: {failure}")
    else:
        why = f": {summary['reason']}" if summary["reason"] else ""
        again = outcome.after_restarts(summary.get("restarts"))
        missing = f"; not gathered yet: {', '.join(summary['missing_hosts'])}"
        say(f"run {plan.run} {summary['status']}{again}{why}{missing if summary['missing_hosts'] else ''}")
