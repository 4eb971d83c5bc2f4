"""A run in view, from its start or from any later moment until its end: shown, stopped, gathered, summed up.

The run lives on its hosts. What happens here (a lost link, a closed terminal, a killed command) ends the view alone;
only Ctrl-C is handed on, as a request to stop.
"""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keeper.course import BETWEEN
from keeper.decide import LOST_SECONDS
from keeper.ranks import LAUNCHER
from launch import files
from launch.cli import exits, signals, units
from launch.cli.make_variables import name_inventory
from launch.cli.signals import undisturbed
from launch.cli.units import some
from launch.hosts import door, ssh
from launch.hosts.connection import ANSWER_SECONDS, LINK_SECONDS
from launch.job import outcome
from launch.job.follow import SILENT_SECONDS, Follower, Heard, View
from launch.job.plan import Plan, document
from launch.job.witness import Witness
from launch.run import closing, gather, keep
from launch.run.display import Display, label
from launch.run.progress import Progress

TURN_SECONDS = 0.1  # between two looks at what became due
LIVE_SECONDS = 0.5  # between two forms of the line that says how far the run is
WAITING_SECONDS = 5.0  # between two lines of what is waited for
REPEAT_SECONDS = 60.0  # the same where the run goes on meanwhile, and nothing but a time has changed
SETTLE_SECONDS = 0.3  # after the first word of a failure, for the other hosts to say what they know
SILENCE_SETTLES_SECONDS = 2.0  # the same where a host is silent, which one knows less surely
CAUSE_SECONDS = 6.0  # the same where all that is known only follows from another failure
AWAY_SECONDS = LOST_SECONDS + 2.0  # the same where a host does not answer, which the others know so late for sure
REJOINED_SECONDS = 5.0  # for it to be said why a keeper was gone, before it is said that it is back
HEARD_SECONDS = 2.0  # for the hosts to say what a rank of an earlier attempt printed last
LINES_FOLLOW = "; the last lines of its output:"  # they were shown before, most of them: each begins with `> ` now
END_SECONDS_BEYOND_GRACE = 20.0  # for the hosts of a stopped run to end


#: Kinds of causes that come with the last lines of a rank, or of torchrun.
WITH_LINES = ("rank", "launcher", "hang")


class Watch:
    """One view of a run."""

    def __init__(
        self, plan: Plan, views: Sequence[View], display: Display, kept_runs: int, tail: int | None = None
    ) -> None:
        """kept_runs: KEEP_RUNS. tail: so many lines of each rank's earlier output; None: all of it."""
        self.plan = plan
        self.display = display
        self.kept_runs = kept_runs
        self.views = {view.host: view for view in views}
        witness = Witness(document(plan))
        # A host that has failed so often is left out anyway.
        rejoins = plan.max_host_failures if plan.max_restarts else 0
        self._follower = Follower(plan.run, views, self._show, tail, display.show_earlier, witness, rejoins)
        self._attempt = 1  # the newest one that was shown
        self._over: set[str] = set()  # hosts whose ranks have all ended well
        self._failed_at: float | None = None  # when the first word of a failure came
        self._told = False  # whether the cause was
        self._later: list[tuple[str, Mapping[str, Any]]] = []  # events of attempts that are shown in a moment
        self._later_since = 0.0
        self._rejoined: list[str] = []  # hosts of which it is to be said
        self._rejoined_at = 0.0
        self._progress = Progress()
        self._live_due = 0.0
        self._stopping: float | None = None  # when the run was asked to stop
        self._grace = float(plan.grace)
        self._due = time.monotonic() + WAITING_SECONDS
        self._waiting, self._repeat_at = "", 0.0  # what was waited for at the last look, and when to say it again

    def run(self) -> int:
        """Watch until the end; returns the exit status."""
        try:
            with undisturbed():
                self._follower.start()
            signals.raise_held()
            self._watch()
        except KeyboardInterrupt:
            if signals.first_signal() != signal.SIGINT:
                return self._detach()
            if not self._stop():
                return exits.INTERRUPTED
        finally:
            self.display.status("")
        fetch = f"the hosts keep what is not here yet; {self.command('gather')} fetches it"
        with undisturbed(f"muster: not waited for: run {self.plan.run} has ended; {fetch}"):
            return self._finish()

    def command(self, target: str, variable: str = "RUN") -> str:
        """The command to type for this run."""
        return name_inventory(f"`make {target} {variable}={self.plan.run}`", Path(self.plan.inventory))

    # -- while it goes on ----------------------------------------------------------------------------------------------

    def _watch(self, seconds: float | None = None) -> bool:
        """Show what happens until the run is over, or for so many seconds; returns whether it is over."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._is_over():
            if deadline is not None and time.monotonic() > deadline:
                return False
            with contextlib.suppress(queue.Empty):
                self._take(self._follower.heard.get(timeout=TURN_SECONDS))
            self._look()
        while not self._follower.heard.empty():
            self._take(self._follower.heard.get())
        while self._later:
            self._later_since = float("-inf")  # there is nothing more to be heard
            self._take_later()
        self.display.show_parts(0.0)
        return True

    def _take(self, heard: Heard) -> None:
        words, host = heard.words, heard.host
        if heard.what == "lost":
            self.display.say(f"{host}: no view ({words['reason']}); the run goes on there, as far as is known")
        elif heard.what == "back":
            self.display.say(f"{host}: in view again")
        elif heard.what == "rejoined":
            self._rejoined.append(host)
            self._rejoined_at = time.monotonic()
        elif heard.what == "gone":
            self.display.say(f"{host}: its keeper is gone, and was not started again: {words['reason']}")
        elif heard.what == "skipped":
            lost = units.size(int(words["to"]) - int(words["offset"]))
            self.display.say(f"{label(host, str(words['skipped']))}: {lost} of output were dropped there (size limit)")
        elif heard.what == "event":
            self._take_event(host, words)

    def _show(self, host: str, stream: str, data: bytes) -> None:
        """Output of a stream. torchrun, waiting for other hosts' ranks, says at length that one of them is gone."""
        if stream != LAUNCHER or host not in self._over:
            self.display.show(host, stream, data)

    def _take_event(self, host: str, event: Mapping[str, Any]) -> None:
        name, attempt = event.get("event"), int(event.get("attempt") or 1)
        if attempt > self._attempt and (self._later or (name == "attempt" and not self._has_heard_why(event))):
            self._later_since = self._later_since if self._later else time.monotonic()
            self._later.append((host, event))
        elif name == "attempt" and attempt > self._attempt:
            self._go_on(event)
        elif attempt < self._attempt:
            return  # of one that is over
        elif name == "failed" and self._failed_at is None:
            self._failed_at = time.monotonic()
            self.display.failing()
        elif name == "stop" and self._stopping is None:
            self._stopping, self._grace = time.monotonic(), float(event.get("grace") or self.plan.grace)
            self.display.say(f"{event.get('by')}: the run stops; ranks have {self._grace:.0f} s to finish and save")
        elif name == "killed" and event.get("after_grace"):
            self.display.say(f"{host}: ranks that had not ended were killed")
        elif name == "slow":
            self.display.say(outcome.slow_in_words(event))
        elif name == "ranks_ended":
            self._over.add(host)
        elif name == "output_failed":
            self.display.say(f"{host}: {event.get('reason')}")

    def _has_heard_why(self, event: Mapping[str, Any]) -> bool:
        """Whether the end of the attempt before this one was told, or can be with what its rank printed last.

        Of a run that is attached to late, the hosts' events come one host after the other, also from those that had no
        part in an attempt and know no more of it than its cause.
        """
        because = event.get("because")
        if self._told or not because:
            return True
        _, cause = outcome.agreed([view.end() for view in self.views.values()], because, int(event["attempt"]))
        return cause is not because or because["kind"] not in WITH_LINES

    def _take_later(self) -> None:
        """Show the attempts that were held back, once it is known why they began, or not to be known."""
        if not self._later:
            return
        late = time.monotonic() - self._later_since > HEARD_SECONDS
        if not (late or self._has_heard_why(self._later[0][1])):
            return
        held, self._later = self._later, []
        if late:
            self._go_on(held[0][1])
        for host, event in held:
            self._take_event(host, event)

    def _go_on(self, event: Mapping[str, Any]) -> None:
        """Another attempt begins."""
        if not self._told and event.get("because"):
            ends = [view.end() for view in self.views.values()]
            self._tell_cause(outcome.agreed(ends, event["because"], int(event["attempt"])))
        self._say_rejoined()
        self._attempt, self._failed_at, self._told = int(event["attempt"]), None, False
        self._over.clear()
        self.display.begin_again()
        self.display.say(attempt_line(event))

    def _say_rejoined(self) -> None:
        """Which hosts have their keepers back; after what they were missed for."""
        for host in self._rejoined:
            self.display.say(f"{host}: its keeper was gone, and is started again; it waits for the next attempt")
        self._rejoined.clear()

    def _look(self) -> None:
        now = time.monotonic()
        self.display.show_parts()
        self._take_later()
        if self.display.is_live and now >= self._live_due:
            self._live_due = now + LIVE_SECONDS
            self.display.status(self._progress.line({host: view.state for host, view in self.views.items()}, now))
        if self._failed_at is not None and not self._told:
            self._look_why(now, self._failed_at)
        if self._told or now - self._rejoined_at > REJOINED_SECONDS:
            self._say_rejoined()
        if now >= self._due:
            self._due = now + WAITING_SECONDS
            self._say_waiting(self._waited_for(now), now)

    def _look_why(self, now: float, failed_at: float) -> None:
        """Tell the cause of a failure once it is known, as far as that can be."""
        ends = [view.end() for view in self.views.values()]
        if any(end.attempt > self._attempt for end in ends):
            return  # the event that another attempt begins, which is to be heard in a moment, says why
        cause = outcome.first_cause(ends)
        only_stopped = self._stopping is not None and bool(cause and cause.get("consequence"))
        away = any(self.views[end.host].lost for end in outcome.newest(ends))
        if not only_stopped and now - failed_at > settle_seconds(cause, away):
            self._tell_cause(outcome.first_failure(ends))

    def _say_waiting(self, line: str, now: float) -> None:
        """Say what is waited for, but not again and again where nothing ends."""
        words = _without_seconds(line)
        # Between two attempts there is a limit, but no rank whose end is counted down.
        ends = self._stopping is not None or (self._failed_at is not None and BETWEEN not in line)
        if line and (ends or words != self._waiting or now >= self._repeat_at):
            self.display.say(line)
            self._repeat_at = now + REPEAT_SECONDS
        self._waiting = words

    def _waited_for(self, now: float) -> str:
        """What a start or an end that takes long waits for."""
        lost = self._lost()
        waiting = [view for view in self.views.values() if not (view.ended or view.host in lost)]
        if self._stopping is not None:
            left = ", ".join(filter(None, map(ranks_left, waiting)))
            return f"waiting for {left}: {now - self._stopping:.0f} s of {self._grace:.0f} s" if left else ""
        stuck = [view for view in waiting if view.is_stuck()]
        heard = [view for view in waiting if view.answers() and view not in stuck]
        by_words = {_without_seconds(text): text for view in heard if (text := str(view.state.get("waiting") or ""))}
        said = sorted(by_words.values())
        lines = [f"waiting for {'; '.join(said)}"] if said else []
        if stuck:
            seconds = min(view.stuck_seconds() for view in stuck)
            keepers = f"the keeper of {some([view.host for view in stuck])}"
            silence = f"no word from {keepers} for {seconds:.0f} s: stuck, or it cannot write"
            lines.append(f"{silence}; {self.command('stop')} ends the run")
        return "; ".join(lines)

    def _is_over(self) -> bool:
        """Whether nothing more is to be expected of any host."""
        waiting = [view for view in self.views.values() if not view.ended]
        if not waiting:
            return True
        if len(waiting) == len(self.views) or any(view.answers() and not view.is_stuck() for view in waiting):
            return False
        # The hosts that are heard have ended; the others are silent. One that the run itself counts as lost is.
        quiet = time.monotonic() - max(view.news_at or 0.0 for view in self.views.values())
        lost = self._lost()
        return quiet > (SILENT_SECONDS if all(view.host in lost for view in waiting) else LINK_SECONDS)

    def _lost(self) -> set[str]:
        """Hosts that do not answer here, or whose keeper does not, and that the run counts as lost or has left out."""
        ends = [view.end() for view in self.views.values()]
        causes = [cause for end in ends for cause in end.causes]
        named = {str(cause["host"]) for cause in causes if cause["kind"] in ("host_lost", "start")}
        members = {end.host for end in outcome.newest(ends)}
        silent = {end.host for end in ends if not end.answers or end.stuck}
        return {host for host in silent if host in named or host not in members}

    # -- the ways in which it ends -------------------------------------------------------------------------------------

    def _detach(self) -> int:
        """Leave the view, after a signal that is no Ctrl-C."""
        number = signals.first_signal()
        self._follower.leave()
        self.display.say(f"{signal.Signals(number).name}: {self.goes_on()}")
        return 128 + number

    def goes_on(self) -> str:
        """What is said of a run that goes on without a view."""
        ways = [f"{self.command('attach')} shows it", f"{self.command('stop')} ends it"]
        return (
            f"run {self.plan.run} goes on on its hosts; {', '.join(ways)}, {self.command('gather')} fetches its results"
        )

    def _stop(self) -> bool:
        """Have the run stopped, and wait for it; returns whether it has ended."""
        run = self.plan.run
        later = f"{self.command('attach')} shows the end, {self.command('gather')} fetches the results"
        with undisturbed(f"muster: left; run {run} is being stopped by its hosts; {later}"):
            self._stopping = self._stopping or time.monotonic()
            self._due = time.monotonic() + WAITING_SECONDS
            self.display.say(
                f"stopping the run; ranks have {self._grace:.0f} s to finish their step and save "
                "(Ctrl-C again: leave, its hosts stop it all the same)"
            )
            if failed := stop_everywhere(list(self.views.values()), run, f"Ctrl-C by {ssh.local_user()}"):
                reasons = "; ".join(f"{host}: {error}" for host, error in failed.items())
                self.display.say(f"the run could not be stopped, it goes on: {reasons}; try {self.command('stop')}")
                return False
            if self._watch(self._grace + END_SECONDS_BEYOND_GRACE):
                return True
            left = [view for view in self.views.values() if not view.ended]
            self.display.say(f"run {run} has not ended on {', '.join(view.host for view in left)}; {later}")
            if stuck := [view.host for view in left if view.is_stuck()]:
                self.display.say(f"no keeper answers on {', '.join(stuck)}; {self.command('stop')} kills what is left")
            return False

    def _finish(self) -> int:
        """Gather, sum up, say how it ended."""
        self._follower.leave()
        ends = [view.end() for view in self.views.values()]
        verdict = outcome.verdict(ends)
        if verdict.status == "failed" and not self._told:
            self._tell_cause(outcome.first_failure(ends))
        self.display.release()
        machines = {view.host: view.machine for view in self.views.values() if view.ended}
        try:
            documents = [one for view in self.views.values() for one in (view.state, view.exit)]
            first = outcome.results_host(self.plan.hosts[0].host, documents)
            missing = gather.gather_run(self.plan, machines, self.kept_runs, self.display.say, first)
            summary = closing.summary_of(self.plan, verdict, ends, missing)
            files.write_json(files.runs_dir() / self.plan.run / "summary.json", summary)
            keep.prune(self.plan, self.kept_runs, self.display.say)
        except OSError as error:
            self.display.say(f"{error.filename}: {error.strerror}; {self.command('gather')} when there is room")
            summary = closing.summary_of(self.plan, verdict, ends, list(self.views))
        closing.close(self.plan, summary, self.display.say)
        return int(summary["exit_status"])

    def _tell_cause(self, found: tuple[outcome.Failure, Mapping[str, Any] | None] | None) -> None:
        """The cause, before all of its consequences: who, why, that rank's last words, and what is done."""
        if found is None:
            return
        self._told = True
        self.display.told()
        failure, cause = found
        self.display.show_parts(0.0)
        who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host} failed"
        lines = (cause or {}).get("lines") or []
        self.display.say(f"{who}: {failure.reason}{LINES_FOLLOW if lines else ''}")
        stream = "torchrun" if failure.rank is None else f"rank-{failure.rank}"
        if cause and lines:
            self.display.lines(str(cause["host"]), stream, [f"> {line}" for line in lines])
        self.display.say("the ranks of the run are being ended, on every host")


def _without_seconds(text: str) -> str:
    """A text without its times, by which it is the same as a moment ago."""
    return re.sub(r"\d+ s\b", "", text)


def attempt_line(event: Mapping[str, Any]) -> str:
    """What is said of another attempt that begins. Pure."""
    left_out = [f"{host} is left out: {why}" for host, why in (event.get("left_out") or {}).items()]
    where = f"attempt {event['attempt']} begins, on {', '.join(event['hosts'])}"
    return "; ".join([where, *left_out])


def settle_seconds(cause: Mapping[str, Any] | None, away: bool = False) -> float:
    """How long after the first word of a failure this may count as its cause. away: a host does not answer. Pure."""
    if cause is None or cause.get("consequence"):
        return AWAY_SECONDS if away else CAUSE_SECONDS
    return SILENCE_SETTLES_SECONDS if cause["kind"] in ("host_lost", "cut") else SETTLE_SECONDS


def ranks_left(view: View) -> str:
    """The ranks of a host that have not ended, and what they do: "h2 rank 1 (saving)". Pure."""
    if not view.answers():
        return f"{view.host} (no view)"
    if view.is_stuck():
        return f"the keeper of {view.host} (silent for {view.stuck_seconds():.0f} s)"
    ranks = view.state.get("ranks") or {}
    left = {rank: words for rank, words in ranks.items() if words.get("state") in ("starting", "running", "stopped")}
    if not left:
        return str(view.state.get("waiting") or "") or f"the keeper of {view.host}"
    return ", ".join(f"{view.host} rank {rank} ({_doing(words)})" for rank, words in left.items())


def _doing(words: Mapping[str, Any]) -> str:
    what = str(words.get("phase") or words.get("state"))
    return f"{what}, step {words['step']}" if words.get("step") is not None else what


def stop_everywhere(views: Sequence[View], run: str, by: str, grace: float | None = None) -> dict[str, Exception]:
    """Ask all hosts to stop a run, in `grace` seconds (None: the plan's). Returns when the first one will, as keepers
    tell each other: {}.

    Where none could be asked, and it has ended on none, why not, by host.
    """
    answers: queue.SimpleQueue[tuple[str, bool | Exception]] = queue.SimpleQueue()

    def ask(view: View) -> None:
        try:
            if view.machine is None:
                raise ConnectionError("no SSH connection")
            answer = door.ask(view.machine, "stop", {"run": run, "by": by, "grace": grace}, ANSWER_SECONDS)
            answers.put((view.host, bool(answer["asked"])))
        except Exception as error:
            answers.put((view.host, error))

    for view in views:
        threading.Thread(target=ask, args=(view,), daemon=True).start()
    failed: dict[str, Exception] = {}
    for _ in views:
        host, answer = answers.get()
        if answer is True:
            return {}
        if isinstance(answer, Exception):
            failed[host] = answer
    return failed if len(failed) == len(views) else {}
