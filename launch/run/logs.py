"""`make logs`: all output of a run, labelled by host and rank: from runs/<id>/logs, or from the hosts."""

from __future__ import annotations

import queue
from pathlib import Path

from rich.console import Console

from launch.cli import exits
from launch.cli.output import nobody_reads, say
from launch.cli.refusal import refuse
from launch.cli.signals import undisturbed
from launch.files import runs_dir, shown
from launch.job import outcome
from launch.job.follow import Follower, Heard
from launch.run import ask_hosts, find
from launch.run.display import Display
from launch.run.train import display_of, parse_view
from launch.run.watch import attempt_line

TURN_SECONDS = 0.1  # between two looks whether there is still somebody who reads
BLOCK_BYTES = 262144  # read at once


def logs(path: Path, run: str, view: str, console: Console) -> int:
    """Print a run's output, labelled: from runs/<id>/logs when it is gathered, from the hosts while it goes on.

    Raises Refusal when no such run is known here or on the hosts, and KeyboardInterrupt when the user leaves a live
    view, with the message that the run continues.
    """
    plain = parse_view(view)
    if run and (runs_dir() / run / "summary.json").exists():
        return _gathered(runs_dir() / run / "logs", plain)
    with find.asked(path, run) as (known, hosts, answers):
        plan = find.plan_of(run, answers)
        failed = ask_hosts.report_failed(answers, path)
        display = display_of(plan, plain)
        follower = Follower(run, find.views_of(plan, known, hosts), display.show)
        try:
            say(f"{find.described(plan)}; Ctrl-C only leaves the view")
            with undisturbed(then_interrupt=True):
                follower.start()
            _until_the_end(follower, display)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"left the view; run {run} goes on, `make stop RUN={run}` ends it") from None
        finally:
            follower.leave()
    away = [view.host for view in follower.waiting if view.lost]
    return failed if not away else exits.UNREACHABLE


def _until_the_end(follower: Follower, display: Display) -> None:
    """Print until the run has ended on every host that answers, or nobody reads."""
    attempt = 1
    while any(view.answers() or not view.lost for view in follower.waiting) and not nobody_reads():
        try:
            attempt = _say(follower.heard.get(timeout=TURN_SECONDS), attempt, display)
        except queue.Empty:
            display.show_parts()
    while not follower.heard.empty():
        attempt = _say(follower.heard.get(), attempt, display)
    display.show_parts(0.0)
    display.release()


def _say(heard: Heard, attempt: int, display: Display) -> int:
    """Say what else happened than output. attempt: the newest one that was said; returns which that is then."""
    if heard.what == "lost":
        display.say(f"{heard.host}: no view ({heard.words['reason']}); trying again")
    if heard.words.get("event") == "slow":
        display.say(outcome.slow_in_words(heard.words))
    if heard.words.get("event") != "attempt" or int(heard.words["attempt"]) <= attempt:
        return attempt
    if because := heard.words.get("because"):
        display.say(str(outcome.agreed((), because, int(heard.words["attempt"]))[0]))
    display.say(attempt_line(heard.words))
    return int(heard.words["attempt"])


def _gathered(folder: Path, plain: bool) -> int:
    """Print what is here: host by host and rank by rank."""
    # A run on hosts keeps each rank's output in its host's folder; a run on this machine, output and errors apart.
    files = sorted(folder.glob("*/*.log"), key=_order) or sorted(folder.glob("rank-*.*"))
    if not files:
        raise refuse("RUN", f"there is no output in {shown(folder)}", "see what else there is of it")
    display = Display([file.parent.name for file in files], 0, False if plain else None)
    for file in files:
        host = file.parent.name if file.parent != folder else file.stem
        with file.open("rb") as content:
            while data := content.read(BLOCK_BYTES):
                display.show(host, file.stem if file.parent != folder else "", data)
                if nobody_reads():
                    return exits.SUCCEEDED
        display.show_parts(0.0)
        display.release()
    return exits.SUCCEEDED


def _order(file: Path) -> tuple[str, int]:
    rank = file.stem.removeprefix("rank-")
    return file.parent.name, int(rank) if rank.isdigit() else -1
