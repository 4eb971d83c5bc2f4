"""`make gather`: fetches runs that have ended unseen, or that could not be gathered whole, from their hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.output import say
from launch.cli.refusal import Refusal, refuse
from launch.cli.signals import undisturbed
from launch.files import runs_dir
from launch.job import outcome
from launch.job.plan import Plan
from launch.run import ask_hosts, closing, find, gather, keep


def fetch(path: Path, run: str, keep_runs: str, console: Console) -> int:
    """Gather RUN=<id>, or all ended runs that are not gathered; returns UNREACHABLE where a host gave nothing.

    Raises Refusal when the run goes on, or is nowhere.
    """
    kept_runs, known = keep.parse(keep_runs), ask_hosts.known(path)
    with ask_hosts.reached(known) as hosts:
        answers = hosts.ask("runs", {"run": run} if run else None)
        failed = ask_hosts.report_failed(answers, path)
        listed = ask_hosts.listed(answers)
        if run and _goes_on(listed.get(run, {})):
            where = ", ".join(host for host, entry in listed[run].items() if find.goes_on(entry))
            fix = f"`make attach RUN={run}` watches it, `make stop RUN={run}` ends it, a frozen one too"
            raise refuse("RUN", f"run {run} has not ended on {where}", fix)
        wanted = [run] if run else [one for one, entries in listed.items() if _wants_gathering(one, entries)]
        for one in () if run else [one for one, entries in listed.items() if _goes_on(entries)]:
            say(name_inventory(f"run {one} has not ended: `make attach RUN={one}` watches it", path))
        for one in wanted:
            entries = answers if run else hosts.ask("runs", {"run": one})
            try:
                plan = find.plan_of(one, entries)
            except Refusal as refusal:
                if run:
                    raise
                say(f"not gathered: {'; '.join(problem.what for problem in refusal.problems)}")
                failed = failed or refusal.status
                continue
            having = ask_hosts.listed(entries)[one]
            documents = [entry.get(name) for entry in having.values() for name in ("state", "exit")]
            first = outcome.results_host(plan.hosts[0].host, documents)
            if not _gather(plan, {host: hosts.machines[host] for host in having}, kept_runs, first):
                failed = exits.UNREACHABLE
        if not wanted and any(not isinstance(answer, BaseException) for answer in answers.values()):
            say("all runs that have ended on the hosts that answered are gathered")
    return failed


def _goes_on(entries: dict[str, dict[str, Any]]) -> bool:
    """Whether a run goes on on a host."""
    return any(find.goes_on(entry) for entry in entries.values())


def _wants_gathering(run: str, entries: dict[str, dict[str, Any]]) -> bool:
    """Whether a run has ended on all hosts that answer, and one of them has what no control machine has fetched; or it
    was started from here, and another machine has fetched it."""
    folder = runs_dir() / run
    ours = (folder / "plan.json").exists() and not (folder / "summary.json").exists()
    return not _goes_on(entries) and (ours or not all(entry.get("gathered") for entry in entries.values()))


def _gather(plan: Plan, machines: dict[str, object], kept_runs: int, first: str) -> bool:
    """Gather one run; returns whether all of it is here."""
    say(f"gathering run {plan.run} of {plan.owner} from {', '.join(machines)}")
    again = f"muster: left; `make gather RUN={plan.run}` goes on where it was"
    with undisturbed(again):
        missing = gather.gather_run(plan, machines, kept_runs, say, first)
        summary = closing.write_summary(plan, missing)
        keep.prune(plan, kept_runs, say)
        closing.close(plan, summary, say)
    return not missing
