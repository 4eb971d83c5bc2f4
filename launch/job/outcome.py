"""How a run ended: the failure that came first, and the content of runs/<id>/summary.json. Pure but for one look.

Each host's keeper says how the run ended as it knows it (exit.json; schemas: keeper/__init__.py). Here this becomes one
verdict, with what only the control machine knows: which hosts answer over SSH.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keeper.decide import CONTAINER_ENDED
from launch.cli import exits, units

Words = Mapping[str, Any]

#: What a keeper says of a slow host or rank, in the summary too.
SLOW = ("host", "rank", "step", "times", "seconds", "others_seconds", "reason")
#: What our trainer's result.json says of a run, in its summary too.
FIGURES = ("test_accuracy", "test_top5", "test_loss", "images_per_second", "train_seconds")


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, or the host where no rank can be named."""

    host: str  # a cut pair: both, "h1 and h2"
    rank: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}" if self.rank is None else f"rank {self.rank} on {self.host}: {self.reason}"


@dataclass(frozen=True)
class HostEnd:
    """What is known of how a run ended on one host."""

    host: str
    exit: Words | None = None  # exit.json; None: its keeper wrote none, or the host does not answer
    events: Sequence[Words] = field(default=())
    #: Podman's State, where it ended without a word of its keeper; {}: there is none, or the host does not answer.
    container: Words = field(default_factory=dict)
    answers: bool = True  # over SSH
    ended: bool = True  # false: the run goes on there, as far as is known
    stuck: bool = False  # its keeper says nothing any more, though the host answers

    @property
    def attempt(self) -> int:
        """The number of the newest attempt that this host's keeper knew of."""
        noted = [int(event.get("attempt") or 1) for event in self.events]
        return max([1, *noted, *([int(self.exit.get("attempt") or 1)] if self.exit else [])])

    @property
    def known_attempts(self) -> int:
        """Of how many attempts this host's keeper knew the end."""
        return len((self.exit or {}).get("attempts") or ())

    @property
    def members(self) -> list[str]:
        """The hosts of that attempt, in rank order; none where it is the first one."""
        begun = [event for event in self.events if event.get("event") == "attempt"]
        known = self.exit if self.exit and self.exit.get("hosts") else begun[-1] if begun else {}
        return list(known.get("hosts") or []) if self.attempt > 1 else []

    @property
    def causes(self) -> list[Words]:
        """Why its newest attempt ended, as this host's keeper has learnt, each with `at`: seconds from its start."""
        if self.exit:
            ended = float(self.exit.get("seconds", 0.0))
            return [{**cause, "at": ended - cause.get("age", 0.0)} for cause in self.exit.get("causes") or []]
        noted = [event for event in self.events if event.get("event") == "failed"]
        ours = [event for event in noted if int(event.get("attempt") or 1) == self.attempt]
        return [{**cause, "at": cause.get("after", 0.0) - cause.get("age", 0.0)} for cause in ours]

    @property
    def interface(self) -> str:
        """What was wrong with this host's own network when others fell silent."""
        return next((str(event["reason"]) for event in self.events if event.get("event") == "interface"), "")


@dataclass(frozen=True)
class Verdict:
    """How a run ended."""

    status: str  # succeeded, stopped, failed
    failure: Failure | None = None
    cause: Words | None = None  # CAUSE of keeper/__init__.py, where a keeper gave it
    reason: str | None = None  # why it stopped, or failed
    given_up: str = ""  # why it was not started again; may be empty
    slow: Sequence[Words] = ()  # the hosts and ranks that were slow, as in summary.json
    attempts: Sequence[Words] = ()  # how they ended, as in exit.json: of many the first one, and the latest
    restarts: int = 0
    #: From the start of the first keeper to the end of the last one, as far as is known.
    seconds: float | None = field(default=None, compare=False)


def newest(ends: Sequence[HostEnd]) -> list[HostEnd]:
    """The ends of the hosts of the newest attempt; of all hosts, where that is the first one."""
    latest = max(ends, key=lambda end: end.attempt, default=None)
    if latest is None or not latest.members:
        return list(ends)
    return [end for end in ends if end.host in latest.members]


def results_host(first: str, documents: Iterable[Words | None]) -> str:
    """The host that has a run's results: the master of its newest attempt.

    first: that of the first attempt. documents: exit.json and state.json of the run's hosts, as far as they are there.
    """
    known = [one for one in documents if one and one.get("hosts")]
    last = max(known, key=lambda one: int(one.get("attempt") or 1), default=None)
    return str(last["hosts"][0]) if last else first


def first_cause(ends: Sequence[HostEnd]) -> Words | None:
    """Of all causes that keepers know, one that does not only follow from another, and of these the earliest."""
    causes = [cause for end in ends for cause in end.causes if cause.get("kind") != "stop"]
    return min(causes, key=lambda cause: (bool(cause.get("consequence")), cause["at"]), default=None)


def agreed(ends: Sequence[HostEnd], because: Words, attempt: int) -> tuple[Failure, Words]:
    """The failure that the keepers have agreed on, when the run goes on; with the last lines that one of them knows.

    because: a CAUSE without lines, of the event that this attempt begins.
    """
    same = ("kind", "host", "rank", "other", "reason")
    noted = [event for end in ends for event in end.events if event.get("event") == "failed"]
    noted = [event for event in noted if int(event.get("attempt") or 1) == attempt - 1]
    known = (event for event in noted if all(event.get(key) == because.get(key) for key in same))
    host = because["host"] if because["kind"] != "cut" else " and ".join(sorted((because["host"], because["other"])))
    lost = "the host is lost: " if because["kind"] == "host_lost" else ""
    return Failure(host, because.get("rank"), f"{lost}{because['reason']}"), next(known, because)


def first_failure(ends: Sequence[HostEnd]) -> tuple[Failure, Words | None] | None:
    """What failed first, and its cause where a keeper gave one. None: nothing is known to have failed."""
    cause = first_cause(ends)
    # A host whose keeper left no word, where all that the others know follows from that.
    died = [end for end in ends if end.answers and end.ended and not end.exit]
    if died and (cause is None or cause.get("consequence")):
        return Failure(died[0].host, None, describe_container(died[0].container)), None
    if cause is None:
        return None
    if cause["kind"] == "rank" and cause.get("consequence") and (left := _left_early(cause, ends)):
        return left, {**cause, **vars(left), "consequence": False, "lines": []}
    if cause["kind"] in ("host_lost", "cut") and (down := next((end for end in ends if end.interface), None)):
        words = {**cause, "kind": "host_lost", "host": down.host, "other": "", "reason": down.interface}
        return Failure(down.host, None, down.interface), words
    if cause["kind"] == "host_lost":
        return _silence(cause, ends)
    if cause["kind"] == "cut" and cause.get("other"):
        return Failure(" and ".join(sorted((cause["host"], cause["other"]))), None, cause["reason"]), cause
    if cause["kind"] == "hang" and cause.get("rank") is None:  # whoever said so first is not to blame
        return Failure(", ".join(end.host for end in ends), None, cause["reason"]), cause
    return Failure(cause["host"], cause.get("rank"), cause["reason"]), cause


def _left_early(cause: Words, ends: Sequence[HostEnd]) -> Failure | None:
    """Who had ended by itself, and well, when the rank of this cause lost its peers."""
    noted = [(event.get("after", 0.0), event, end) for end in ends for event in end.events]
    left = [(after, event["rank"], end) for after, event, end in noted if event.get("event") == "rank_ended"]
    if not left:
        return None
    _, rank, end = min(left, key=lambda one: one[0])
    if any(event.get("event") == "ranks_ended" for event in end.events):
        what = f"its ranks ended with status 0 while those on {cause['host']} went on: did they take fewer steps?"
        return Failure(end.host, None, what)
    what = f"it ended with status 0 while rank {cause['rank']} on {cause['host']} went on: did it take fewer steps?"
    return Failure(end.host, int(rank), what)


def _silence(cause: Words, ends: Sequence[HostEnd]) -> tuple[Failure, Words]:
    """Which host is lost, as most of those that can be heard say; or which pair is cut, or which host is cut off."""
    by_host = {end.host: end for end in ends}
    named = {}  # who names whom: each host the first one that it missed
    for end in ends:
        missed = [one for one in end.causes if one["kind"] == "host_lost"]
        if missed:
            named[end.host] = min(missed, key=lambda one: one["at"])
    votes = Counter(one["host"] for one in named.values())
    pair = {host: one["host"] for host, one in named.items()}
    lost = max(votes, key=lambda host: (votes[host], not _answers(by_host, host), host == cause["host"]))
    other = pair.get(lost)
    reason = str(next(one["reason"] for one in named.values() if one["host"] == lost))
    own = by_host.get(lost)
    if own is None or not own.answers:
        return Failure(lost, None, f"the host is lost: {reason}"), {**cause, "host": lost, "reason": reason}
    if reason == CONTAINER_ENDED:  # its keeper may have been started again since
        what = describe_container(own.container) if own.container else reason
        return Failure(lost, None, what), {**cause, "host": lost, "reason": reason}
    if own.stuck:
        what = "its keeper says nothing any more, though the host answers over SSH: the container may be frozen"
        return Failure(lost, None, what), {**cause, "host": lost, "reason": what}
    if not own.exit and own.ended:
        return Failure(lost, None, describe_container(own.container)), {**cause, "host": lost}
    if other and other != lost and pair.get(other) == lost and votes[lost] == 1:
        both = " and ".join(sorted((lost, other)))
        what = "do not hear each other on the training network, though both answer over SSH"
        return Failure(both, None, what), {**cause, "kind": "cut", "host": lost, "other": other, "reason": what}
    who = ", ".join(host for host, one in named.items() if one["host"] == lost and host != lost)
    heard = f"{who} {'does' if ',' not in who else 'do'} not hear it" if who else "it hears no other host"
    what = f"it is cut off on the training network: {heard}, though it answers over SSH"
    return Failure(lost, None, what), {**cause, "host": lost, "reason": what}


def _answers(by_host: Mapping[str, HostEnd], host: str) -> bool:
    return host in by_host and by_host[host].answers


def verdict(ends: Sequence[HostEnd]) -> Verdict:
    """How a run ended, from what is known of all its hosts."""
    latest = max(ends, key=lambda end: (end.attempt, bool(end.exit), end.known_attempts), default=None)
    known = latest.exit if latest and latest.exit else {}
    attempts, given_up = known.get("attempts") or (), str(known.get("given_up") or "")
    restarts = latest.attempt - 1 if latest else 0
    lasted = [seconds for end in ends if end.exit and (seconds := number(end.exit.get("seconds"))) is not None]
    found = replace(_verdict(newest(ends)), seconds=max(lasted, default=None), slow=slow_times(ends))
    return replace(found, attempts=attempts, given_up=given_up, restarts=restarts)


def _verdict(ends: Sequence[HostEnd]) -> Verdict:
    statuses = {str(end.exit["status"]) for end in ends if end.exit}
    away = [end.host for end in ends if not end.exit and not end.answers]
    died = [end for end in ends if not end.exit and end.answers and end.ended]
    if "failed" not in statuses and "stopped" in statuses:
        return Verdict("stopped", reason=stopped_reason(ends))
    silent = [end.host for end in ends if not end.exit and end.answers and not end.ended]
    if statuses == {"succeeded"} and not died:  # a keeper says so of all hosts: all ranks have ended well
        return Verdict("succeeded")
    found = first_failure(ends)
    if found is None:
        what = "no answer over SSH" if away else "its keeper says nothing any more"
        found = Failure(", ".join(away or silent), None, what), None
    failure, cause = found
    return Verdict("failed", failure, cause, failure.reason)


def stopped_reason(ends: Sequence[HostEnd]) -> str:
    """Who stopped the run and how, and where ranks did not end in time."""
    stops = {end.host: end.exit["stop"] for end in ends if end.exit and end.exit.get("stop")}
    by = str(next(iter(stops.values()))["by"]) if stops else "it was stopped"
    late = [host for host, stop in stops.items() if stop.get("killed")]
    return f"{by}; ranks on {', '.join(late)} did not end in time and were killed" if late else by


def slow_times(ends: Sequence[HostEnd]) -> tuple[Words, ...]:
    """Who was slow and when, in the order of time: the keepers' events `slow`, each with the step `until` which it was
    so, or None where it stayed so."""
    found: list[tuple[float, dict[str, Any]]] = []
    for end in ends:
        now: dict[str, Any] = {}
        for event in end.events:
            if event.get("event") == "slow" and not event.get("over"):
                now = {key: event.get(key) for key in ("attempt", *SLOW)} | {"until": None}
                found.append((number(event.get("time")) or 0.0, now))
            elif event.get("event") == "slow" and now.get("attempt") == event.get("attempt"):
                now["until"] = event.get("step")
    return tuple(words for _, words in sorted(found, key=lambda one: one[0]))


def slow_in_words(event: Words) -> str:
    """An event `slow` of a keeper in a line."""
    rank, step, times = event.get("rank"), event.get("step"), number(event.get("times")) or 1.0
    who = str(event.get("host")) if rank is None else f"rank {rank} on {event.get('host')}"
    at = "" if step is None else f" (step {step})"
    if event.get("over"):
        return f"{who} is no longer slow{at}"
    took, others = (units.number(1000 * (number(event.get(name)) or 0.0)) for name in ("seconds", "others_seconds"))
    why = f": {event['reason']}" if event.get("reason") else ""
    return f"{who} is slow: its steps take {times:.1f} times as long as the others', {took} : {others} ms{at}{why}"


def describe_container(state: Words) -> str:
    """How a container ended whose keeper had no time to say why. `state`: Podman's, {} where it is gone."""
    if not state:
        return "the container is gone"
    if state.get("OOMKilled"):
        return "out of memory: the kernel killed the container (exit 137)"
    return describe_status(int(state.get("ExitCode", -1)), "the container")


def describe_status(status: int, what: str) -> str:
    """An exit status, 128 + the number of a signal that killed `what`."""
    if status - 128 in list(signal.Signals):
        return f"{what} was killed by {signal.Signals(status - 128).name}"
    return f"{what} ended with exit status {status}"


def refused_its_settings(failures: Sequence[Words], folder: Path) -> bool:
    """Whether our trainer refused its arguments: it then exits with REFUSED before it writes any metrics."""
    return exits.REFUSED in {one["exitcode"] for one in failures} and not (folder / "metrics.jsonl").exists()


def number(value: Any) -> float | None:
    """A finite number of a document, or None for anything else that stands there."""
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_one and abs(value) <= sys.float_info.max else None


def reached(figures: Words) -> tuple[str, str]:
    """What the last evaluation found, of a summary or an epoch: ("test accuracy", "98.21%"), or the loss where there is
    no accuracy; ("", "") where neither is known."""
    accuracy, loss = number(figures.get("test_accuracy")), number(figures.get("test_loss"))
    if accuracy is not None:
        return "test accuracy", f"{accuracy:.2%}"
    return ("test loss", f"{loss:.4g}") if loss is not None else ("", "")


def in_short(figures: Words) -> str:
    """The same in one word or two: "98.21%", "loss 0.1234"; empty where neither is known."""
    what, figure = reached(figures)
    return f"loss {figure}" if what == "test loss" else figure


def after_restarts(restarts: Any) -> str:
    """What stands behind a run's status: " after 2 restarts"; nothing without one. restarts: a summary's, as read."""
    count = number(restarts) or 0
    return f" after {count:.0f} restart{'s' if count > 1 else ''}" if count > 0 else ""


def summary(
    run: str,
    nodes: int,
    world_size: int,
    master_addr: str,
    ended: Verdict,
    result: Words | None = None,
    refused: bool = False,
    missing: Sequence[str] = (),
) -> dict[str, Any]:
    """runs/<id>/summary.json.

    result: what the trainer left in result.json, of a run that succeeded. refused: whether the trainer refused its
    settings. missing: hosts from which nothing could be gathered yet.
    """
    codes = {"succeeded": exits.SUCCEEDED, "failed": exits.FAILED, "stopped": exits.INTERRUPTED}
    return {
        "run": run,
        "status": ended.status,
        "exit_status": exits.REFUSED if refused else codes[ended.status],
        "nodes": nodes,
        "world_size": world_size,
        "master_addr": master_addr,
        **{key: number((result or {}).get(key)) for key in FIGURES},
        "run_seconds": ended.seconds,
        "failed_rank": ended.failure.rank if ended.failure else None,
        "failed_host": ended.failure.host if ended.failure else None,
        "reason": ended.reason,
        "cause": dict(ended.cause) if ended.cause else None,
        "restarts": ended.restarts,
        "attempts": [dict(attempt) for attempt in ended.attempts],
        "given_up": ended.given_up or None,
        "slow": [dict(slow) for slow in ended.slow],
        "missing_hosts": list(missing),
    }
