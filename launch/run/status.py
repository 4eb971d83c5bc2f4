"""`make status`: the runs on the hosts of an inventory, who waits for them, and the newest runs gathered here."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.cli import units
from launch.cli.make_variables import name_inventory
from launch.files import read_json, runs_dir
from launch.job.outcome import Failure, after_restarts, in_short, number
from launch.run import ask_hosts
from launch.run.find import goes_on
from launch.run.progress import position

SHOWN_RUNS = 10
MOMENT_SECONDS = 30.0  # after its end a run may be in the hands of whoever watched it

Entries = Mapping[str, Mapping[str, Any]]  # host -> how a run is there (keeper/door.py, runs)


def status(path: Path, console: Console) -> int:
    """Show the runs on every host that are not gathered, who waits, and the newest runs gathered here.

    Returns UNREACHABLE when a host did not answer (the others are shown all the same).
    """
    known = ask_hosts.known(path)
    with ask_hosts.reached(known) as hosts:
        answers = hosts.ask("runs")
    table = Table(title=f"Runs on {known.inventory}")
    for column in ("run", "hosts", "state", "owner", "age"):
        table.add_column(column)
    # The hosts' own clock: they may be apart from this machine's.
    now = max((number(answer.get("time")) or 0.0 for answer in answers.values() if isinstance(answer, dict)), default=0)
    for run, entries in ask_hosts.listed(answers).items():
        if what := state_of(run, entries, now):
            one = next(iter(entries.values()))
            age = _age(str(one.get("created") or ""))
            owner = escape(str(one.get("owner") or "?"))
            table.add_row(run, ", ".join(entries), escape(name_inventory(what, path)), owner, age)
    failed = ask_hosts.report_failed(answers, path)
    answered = sum(isinstance(answer, dict) for answer in answers.values())
    share = f"{answered} of {len(known.targets)}"
    nothing = f"Nothing runs on the hosts that answered ({share}), and all that they had is gathered."
    if not answered:
        nothing = f"No host answered ({share}): what runs there is not known."
    console.print(table if table.row_count else nothing)
    for line in waiting(answers):
        console.print(line, highlight=False, markup=False)
    _show_gathered(console)
    return failed


def state_of(run: str, entries: Entries, now: float = math.inf) -> str:
    """How a run stands, in words; nothing where it has ended and is gathered. Pure.

    now: Unix time, by which one that ended a moment ago is known: whoever watches it fetches it just then.
    """
    going = [host for host, entry in entries.items() if goes_on(dict(entry))]
    if going:
        states = {host: entries[host].get("state") or {} for host in going}
        waiting = [host for host in going if states[host].get("status") == "waiting"]
        at_work = [host for host in going if host not in waiting] or going
        over = [host for host in entries if host not in going]
        others = [f"ended on {', '.join(over)}"] if over else []
        others += [f"not in this attempt: {', '.join(waiting)}"] if waiting and at_work != going else []
        where = position([states[host] for host in at_work])
        return "; ".join([f"{where} on {', '.join(at_work)}", *others]) if others else where
    if all(entry.get("gathered") for entry in entries.values()):
        return ""
    statuses = _last_statuses(entries)
    worst = next(one for one in ("died", "failed", "stopped", "succeeded", *statuses) if one in statuses)
    ended = max((number((entry.get("exit") or {}).get("time")) or 0.0 for entry in entries.values()), default=0.0)
    if now - ended < MOMENT_SECONDS:
        return f"{worst} a moment ago: who watches it gathers it, else `make gather RUN={run}`"
    return f"{worst}, ended unseen: `make gather RUN={run}`"


def _last_statuses(entries: Entries) -> set[str]:
    """How it ended on the hosts of its newest attempt: one that was lost before says nothing of the run's end."""
    exits_known = [found for entry in entries.values() if isinstance(found := entry.get("exit"), dict)]
    newest = max(exits_known, key=lambda one: int(one.get("attempt") or 1), default={})
    again = int(newest.get("attempt") or 1) > 1
    members = [host for host in newest.get("hosts") or () if host in entries] if again else []
    return {str(entries[host]["status"]) for host in members or entries}


def waiting(answers: Mapping[str, Any], only: str = "") -> list[str]:
    """A line for each start that waits for its turn, or for this run's alone. Pure."""
    found: dict[str, dict[str, Any]] = {}
    for host, answer in answers.items():
        for ticket in answer.get("queue") or [] if isinstance(answer, dict) else []:
            one = found.setdefault(ticket["run"], {**ticket, "hosts": []})
            one["hosts"].append(host)
    return [
        f"Waiting: run {run} of {one['owner']} for {', '.join(one['hosts'])}, {units.age(one['since'])} so far"
        for run, one in found.items()
        if only in ("", run)
    ]


def _why(summary: Mapping[str, Any]) -> str:
    """Why a run did not succeed, and where."""
    reason, host, rank = (summary.get(key) for key in ("reason", "failed_host", "failed_rank"))
    return str(Failure(host, rank, reason)) if host and reason else str(reason or "")


def _age(created: str) -> str:
    try:
        return units.age(max(0.0, time.time() - datetime.datetime.fromisoformat(created).timestamp()))
    except ValueError:
        return "?"


def _show_gathered(console: Console) -> None:
    found = sorted(runs_dir().glob("*/summary.json"), reverse=True)[:SHOWN_RUNS]
    if not found:
        return
    table = Table(title="Newest runs gathered in runs/")
    for column in ("run", "status", "ranks", "result", "images/s", "reason"):
        table.add_column(column, justify="right" if column in ("ranks", "result", "images/s") else "left")
    for file in found:
        known = read_json(file)
        rate = number(known.get("images_per_second"))
        missing = known.get("missing_hosts")
        left = f"; not gathered: {', '.join(map(str, missing))}" if missing and isinstance(missing, list) else ""
        again = after_restarts(known.get("restarts"))
        table.add_row(
            file.parent.name,
            escape(f"{known.get('status', '?')}{again}{left}"),
            escape(str(known.get("world_size", "?"))),
            in_short(known),
            "" if rate is None else f"{rate:.0f}",
            escape(_why(known)),
        )
    console.print(table)
