"""`make attach`: a run that goes on without a view, or that another control machine started, comes into view here."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from launch.cli.output import say
from launch.files import read_json, runs_dir, shown
from launch.run import ask_hosts, find, keep
from launch.run.train import display_of, parse_view
from launch.run.watch import Watch

EARLIER_LINES = 20  # of each rank's earlier output


def attach(path: Path, run: str, keep_runs: str, view: str, console: Console) -> int:
    """Watch a run from now to its end, as `make train` does; returns the exit status of the run.

    Raises Refusal without RUN, and when no host has the run.
    """
    kept_runs, plain = keep.parse(keep_runs), parse_view(view)
    with find.asked(path, run) as (known, hosts, answers):
        plan = find.plan_of(run, answers)
        summary = read_json(runs_dir() / run / "summary.json")
        if summary and not summary.get("missing_hosts"):
            say(f"run {run} has ended ({summary['status']}) and is gathered: {shown(runs_dir() / run)}")
            return int(summary["exit_status"])
        ask_hosts.report_failed(answers, path)
        say(find.described(plan))
        say("Ctrl-C stops the run; closing the terminal, or `kill`, only leaves the view")
        say(f"first, the last {EARLIER_LINES} lines that each rank has printed, in whatever attempt")
        views = find.views_of(plan, known, hosts)
        having = ask_hosts.listed(answers)[run]
        for one in views:
            one.ended = isinstance(answers[one.host], dict) and one.host not in having  # nothing is left of it there
        return Watch(plan, views, display_of(plan, plain), kept_runs, EARLIER_LINES).run()
