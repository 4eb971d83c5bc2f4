"""`make stop`: ends a run on all its hosts, and says what it waits for until it has ended."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.refusal import refuse
from launch.hosts import door, ssh
from launch.job.follow import Follower
from launch.job.plan import parse_grace
from launch.run import ask_hosts, find, status
from launch.run.ask_hosts import Answers, Hosts
from launch.run.watch import END_SECONDS_BEYOND_GRACE, TURN_SECONDS, WAITING_SECONDS, ranks_left, stop_everywhere

KILLING_SECONDS = 60.0  # for a host to kill a container
OVER_SECONDS = 10.0  # for its door to say then that the run is over there


def stop(path: Path, run: str, console: Console, grace: str = "") -> int:
    """Stop a run and wait for its end; who watches it elsewhere sees it end as `stopped`, and gathers it.

    grace: GRACE as typed; empty: that of the run's start.

    Where a keeper says nothing any more after that time, its container is killed.

    Returns UNREACHABLE when a host did not answer, or has not ended in time. Raises Refusal without RUN, and when no
    host that answered runs it.
    """
    seconds = float(parse_grace(grace)) if grace.strip() else None
    with find.asked(path, run) as (known, hosts, answers):
        failed = ask_hosts.report_failed(answers, path)
        entries = ask_hosts.listed(answers).get(run, {})
        going = [host for host, entry in entries.items() if find.goes_on(entry)]
        if not going and not entries and (cleared := _clear(hosts, answers, run)):
            console.print(f"Removed what was left of run {run} on {', '.join(cleared)}.", highlight=False)
            return failed
        if not going:
            where = "no host that answered" if failed else "no host"
            ended = ", ".join(sorted({entry["status"] for entry in entries.values()}))
            what = f"{where} runs {run}" + (f"; it has ended ({ended})" if ended else "")
            raise refuse("RUN", what, _instead(run, entries, status.waiting(answers, run)), failed or exits.REFUSED)
        plan = find.plan_of(run, answers)
        views = [view for view in find.views_of(plan, known, hosts) if view.host in going]
        if refused := stop_everywhere(views, run, f"make stop by {ssh.local_user()}", seconds):
            ask_hosts.report_failed(refused, path)
            return exits.UNREACHABLE
        follower = Follower(run, views, None)
        follower.start()
        _wait(follower, plan.grace if seconds is None else seconds, console)
        _kill_stuck(follower, run, console)
        follower.leave()
        left = [view.host for view in follower.waiting]
    stopped = [view.host for view in views if view.ended]
    if stopped:
        gather = name_inventory(f"`make gather RUN={run}`", path)
        console.print(f"Stopped run {run} on {', '.join(stopped)}.", highlight=False)
        console.print(f"Who watches it gathers it; if nobody does: {gather}.", highlight=False)
    if left or failed:
        where = ", ".join([*left, *(host for host, answer in answers.items() if not isinstance(answer, dict))])
        console.print(f"Run {run} may go on on {where}.", highlight=False)
    return exits.UNREACHABLE if left else failed


def _instead(run: str, entries: Mapping[str, Mapping[str, Any]], waiting: Sequence[str]) -> str:
    """What there is to do about a run that does not go on. waiting: its line where it waits for its turn. Pure."""
    if not entries:
        wait = [f"{line}: Ctrl-C where it was started takes it back" for line in waiting]
        return wait[0] if wait else "`make status` shows what runs now"
    gathered = [entry["gathered"]["by"] for entry in entries.values() if entry.get("gathered")]
    if len(gathered) < len(entries):
        return f"`make gather RUN={run}` fetches its results"
    return f"{gathered[0]} has fetched its results to runs/{run}; `make logs RUN={run}` shows its output there"


def _clear(hosts: Hosts, answers: Answers, run: str) -> list[str]:
    """Remove containers of a run that no host knows (a leftover), by its label alone; returns where there were some."""
    asked = {"run": run}
    answered = [machine for name, machine in hosts.machines.items() if isinstance(answers[name], dict)]
    results = ssh.in_parallel(lambda machine: door.ask(machine, "drop", asked), answered)
    pairs = zip(answered, results, strict=True)
    return [machine.name for machine, result in pairs if isinstance(result, dict) and result.get("dropped")]


def _kill_stuck(follower: Follower, run: str, console: Console) -> None:
    """Kill the containers of hosts whose keeper says nothing any more, and wait until the run has ended there."""
    asked = {"run": run, "by": f"make stop by {ssh.local_user()}", "grace": None, "kill": True}
    stuck = [(view, view.machine) for view in follower.waiting if view.is_stuck() and view.machine]
    results = ssh.in_parallel(lambda pair: door.ask(pair[1], "stop", asked, KILLING_SECONDS), stuck)
    for (view, _), result in zip(stuck, results, strict=True):
        if isinstance(result, BaseException):
            how = f"its container could not be killed: {result}"
        else:
            how = "its container was killed" if result.get("killed") else "there is no container of it that lives"
        console.print(f"{view.host}: its keeper did not answer; {how}", highlight=False, markup=False)
    deadline = time.monotonic() + OVER_SECONDS
    while not all(view.ended for view, _ in stuck) and time.monotonic() < deadline:
        time.sleep(TURN_SECONDS)


def _wait(follower: Follower, grace: float, console: Console) -> None:
    """Wait until the run has ended on all hosts, or should have."""
    begun = said = time.monotonic()
    while follower.waiting and time.monotonic() - begun < grace + END_SECONDS_BEYOND_GRACE:
        with contextlib.suppress(queue.Empty):
            follower.heard.get(timeout=TURN_SECONDS)
        now = time.monotonic()
        if follower.waiting and now - said >= WAITING_SECONDS:
            said = now
            ranks = ", ".join(map(ranks_left, follower.waiting))
            console.print(f"Waiting for {ranks}: {now - begun:.0f} s of {grace:.0f} s", highlight=False)
