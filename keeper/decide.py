"""What a keeper does next: `decide(state, event) -> (state, actions)`. Pure; __main__.py does what it says.

One run has a keeper on each host. Each tells each other one, once a second and at once when something changed, how it
stands (`beat`). From that, and from what happens on its own host, it decides alone, so that no message is ever waited
for without end:

- Every keeper that learns of a failure, its own or another host's, ends its ranks. Causes travel with the beats, so
  that all hosts come to name the same one.
- A host that was heard and then is silent for LOST_SECONDS is lost; one whose keeper refuses connections is lost
  sooner. If somebody else hears it, the two are a cut pair. Who hears nobody at all is cut off itself.
- A keeper leaves when its ranks have ended and it knows the same, or the loss, of every other host.

Times are seconds of this host's monotonic clock; what other hosts say of time comes as an age, so clocks may differ.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Sequence

from keeper.causes import EXIT_STOPPED

START_SECONDS = 60.0  # for every keeper to be heard once
LOST_SECONDS = 10.0  # of silence after which a host is lost
REFUSED_SECONDS = 2.0  # of refused connections after which a keeper that was heard is gone
FRESH_SECONDS = 3.0  # a beat this old still says how things stand
LINGER_SECONDS = 3.0  # for the others to learn that this host's ranks have ended
AFTER_DEATH_SECONDS = 0.2  # from SIGTERM to SIGKILL for the ranks when there is nothing left to save
DONE_SECONDS = 30.0  # for torchrun to end when all ranks of the run have ended well
LAST_WORDS_SECONDS = 2.0  # for ranks to end by themselves when another one has: they may have more to say
CONTAINER_ENDED = "its container has ended, and not because the run has"
LEAVES = "its container was asked to end, by `podman stop` or as the host is shut down"
CAUSE_SECONDS = 6.0  # the same when all that is known only follows from another failure: its rank may still be ending

Words = Dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Why a run ends. Kinds and the document: keeper/__init__.py."""

    kind: str
    host: str
    rank: int | None
    reason: str
    at: float  # this host's monotonic clock
    consequence: bool = False  # it only follows from another failure
    other: str = ""  # the second host of a cut pair
    lines: tuple[str, ...] = ()  # what that rank printed last
    patience: float = 0.0  # seconds for other ranks to end by themselves, before they are ended
    final: bool = False  # started again, it would end the same way
    unfit: bool = False  # so it would on this host: its disk is full

    def words(self, now: float) -> Words:
        """As it travels: with its age, as clocks differ."""
        found = {"kind": self.kind, "host": self.host, "rank": self.rank, "reason": self.reason, "other": self.other}
        more = {"consequence": self.consequence, "lines": list(self.lines), "patience": self.patience}
        return {**found, **more, "final": self.final, "unfit": self.unfit, "age": round(now - self.at, 3)}


def cause_of(words: Words, now: float) -> Cause:
    """A cause that another host speaks of, on this host's clock."""
    rank = words["rank"]
    lines = tuple(str(line) for line in words["lines"])
    return Cause(
        kind=str(words["kind"]),
        host=str(words["host"]),
        rank=None if rank is None else int(rank),
        reason=str(words["reason"]),
        at=now - float(words["age"]),
        consequence=bool(words["consequence"]),
        other=str(words["other"]),
        lines=lines,
        patience=float(words["patience"]),
        final=bool(words.get("final")),
        unfit=bool(words.get("unfit")),
    )


@dataclass(frozen=True)
class Stop:
    """Somebody asked for the end of the run."""

    by: str
    grace: float  # seconds from SIGTERM to SIGKILL for the ranks
    at: float


@dataclass(frozen=True)
class Peer:
    """What is known of another host."""

    last: float | None = None  # when its newest beat came; None: never
    beat: Words = field(default_factory=dict)
    refused_since: float | None = None
    lost: bool = False

    @property
    def ended(self) -> bool:
        return self.beat.get("status") == "ended"

    @property
    def done(self) -> bool:
        """Whether all its ranks have ended well, though its torchrun may still wait for the other hosts."""
        return self.ended or bool(self.beat.get("done"))

    def is_fresh(self, now: float) -> bool:
        """Whether it was heard a moment ago."""
        return self.last is not None and now - self.last <= FRESH_SECONDS


@dataclass(frozen=True)
class State:
    """What one keeper knows. `peers`: the other hosts of the run."""

    me: str
    peers: dict[str, Peer]
    began: float
    grace: float
    status: str = "starting"  # starting, running, ending, ended
    attempt: int = 1
    causes: tuple[Cause, ...] = ()  # in the order in which they were learnt
    stop: Stop | None = None
    terminate_at: float | None = None  # when ranks get SIGTERM; None: it is not to come, or they have
    kill_at: float | None = None  # when ranks that are still there are killed
    terminated: bool = False  # ranks have got SIGTERM: however they end now, it is not their doing
    killed: bool = False
    done: bool = False  # this host's ranks have ended well; torchrun waits for those of the other hosts
    all_done_at: float | None = None  # when it became known that all ranks of the run have ended well
    exit_status: int | None = None  # torchrun's, when it has ended
    all_ended_at: float | None = None  # when the last host's end became known
    left: bool = False


@dataclass(frozen=True)
class Tick:
    """Time passed."""

    now: float


@dataclass(frozen=True)
class Heard:
    """A beat of another host has come."""

    now: float
    host: str
    words: Words


@dataclass(frozen=True)
class Refused:
    """Another host refuses connections: it is up, but no keeper of this run listens there."""

    now: float
    host: str


@dataclass(frozen=True)
class Started:
    """torchrun has started this host's ranks."""

    now: float


@dataclass(frozen=True)
class Done:
    """All ranks of this host have ended with status 0. torchrun waits for the other hosts' before it ends."""

    now: float


@dataclass(frozen=True)
class Failed:
    """Something failed on this host."""

    now: float
    cause: Cause


@dataclass(frozen=True)
class StopAsked:
    """The run is to end. `grace`: None for the plan's."""

    now: float
    by: str
    grace: float | None = None


@dataclass(frozen=True)
class Ended:
    """torchrun has ended with `status` (128 + n: killed by signal n); its ranks are gone."""

    now: float
    status: int


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM to torchrun, which sends it to its ranks."""


@dataclass(frozen=True)
class Kill:
    """Kill every process of the run on this host."""


@dataclass(frozen=True)
class Tell:
    """Send a beat to all now."""


@dataclass(frozen=True)
class Leave:
    """The keeper's work is done."""


@dataclass(frozen=True)
class Note:
    """Write an event. attempt: which it is about; None: the one that goes on then."""

    name: str
    words: Words
    attempt: int | None = None


Actions = List[Any]


def decide(state: State, event: Any) -> tuple[State, Actions]:
    """The next state, and what is to be done, in order."""
    if state.left:
        return state, []
    actions: Actions = []
    now = event.now
    if isinstance(event, Heard):
        state = _hear(state, event, actions)
    elif isinstance(event, Refused):
        state = _refused(state, event)
    elif isinstance(event, Started):
        if state.status == "starting":
            state = replace(state, status="running")
            actions.append(Tell())
    elif isinstance(event, Done):
        state = replace(state, done=True)
        actions.extend([Note("ranks_ended", {}), Tell()])
    elif isinstance(event, Failed):
        state = _learn(state, event.cause, now, actions)
    elif isinstance(event, StopAsked):
        grace = state.grace if event.grace is None else event.grace
        state = _stop(state, Stop(event.by, grace, now), now, actions)
    elif isinstance(event, Ended):
        state = _ended(state, event, actions)
    elif isinstance(event, Tick):  # not before: words that came earlier may be waiting to be heard
        state = _end_idle_torchrun(_find_lost(state, now, actions), now)
    state = _terminate_when_due(state, now, actions)
    state = _kill_what_is_late(state, now, actions)
    return _maybe_leave(state, now, actions), actions


def beat(state: State, now: float) -> Words:
    """What this keeper tells the others."""
    hears = {host: round(now - peer.last, 3) for host, peer in state.peers.items() if peer.last is not None}
    return {
        "status": state.status,
        "attempt": state.attempt,
        "done": state.done,
        "hears": hears,
        "ended": sorted(host for host, peer in state.peers.items() if peer.ended),
        "causes": [cause.words(now) for cause in state.causes[-8:]],
        "stop": {"by": state.stop.by, "grace": state.stop.grace, "age": now - state.stop.at} if state.stop else None,
    }


def root(state: State) -> Cause | None:
    """The cause of the end, as far as it is known here: one that is no consequence, and then the earliest."""
    return first(state.causes)


def first(found: Sequence[Cause]) -> Cause | None:
    """Of these causes one that is no consequence, and then the earliest."""
    return min(found, key=lambda cause: (cause.consequence, cause.at), default=None)


def verdict(state: State) -> str:
    """How the run ended, as this keeper knows it: succeeded, stopped or failed."""
    cause = root(state)
    if state.stop and (cause is None or cause.consequence or state.stop.at <= cause.at):
        return "stopped"
    return "failed" if cause else "succeeded"


def waited_for(state: State, now: float) -> str:
    """What this keeper waits for now, or nothing."""
    silent = [host for host, peer in state.peers.items() if peer.last is None]
    if state.status in ("starting", "running") and silent:
        return "the first word of " + ", ".join(sorted(silent))
    if state.status == "ending":
        left = 0.0 if state.kill_at is None else state.kill_at - now
        killed = f"; they are killed in {left:.0f} s" if left > 0.5 else ""
        return f"the ranks of {state.me} to end{killed}"
    if state.status != "ended" and not state.done:
        return ""
    others = [host for host, peer in state.peers.items() if not (peer.done or peer.lost)]
    return "the ranks of " + ", ".join(sorted(others)) if others else ""


def _hear(state: State, event: Heard, actions: Actions) -> State:
    before = state.peers.get(event.host)
    if before is None:
        return state
    if before.last is None:
        actions.append(Note("heard", {"host": event.host}))
    ended_before = before.ended
    state = _with_peer(state, event.host, replace(before, last=event.now, beat=event.words, refused_since=None))
    if not ended_before and state.peers[event.host].ended:
        actions.append(Tell())  # so that it need not wait for us to know
    for words in event.words.get("causes", ()):
        state = _learn(state, cause_of(words, event.now), event.now, actions)
    asked = event.words.get("stop")
    if asked:
        stop = Stop(str(asked["by"]), float(asked["grace"]), event.now - float(asked["age"]))
        state = _stop(state, stop, event.now, actions)
    return state


def _refused(state: State, event: Refused) -> State:
    peer = state.peers.get(event.host)
    if peer is None or peer.last is None or peer.refused_since is not None:
        return state
    return _with_peer(state, event.host, replace(peer, refused_since=event.now))


def _with_peer(state: State, host: str, peer: Peer) -> State:
    return replace(state, peers={**state.peers, host: peer})


def _same(one: Cause, other: Cause) -> bool:
    pairs = ({one.host, one.other}, {other.host, other.other})
    return one.kind == other.kind and one.rank == other.rank and pairs[0] == pairs[1]


def _learn(state: State, cause: Cause, now: float, actions: Actions) -> State:
    if any(_same(cause, known) for known in state.causes):
        return state
    if cause.kind in ("rank", "launcher") and state.terminated and cause.host == state.me:
        cause = replace(cause, consequence=True)
    state = replace(state, causes=(*state.causes, cause))
    actions.append(Note("failed", cause.words(now)))
    actions.append(Tell())
    # Where nothing has failed the ranks can save what they have.
    return _end_ranks(state, now + cause.patience, state.grace if cause.kind == "leaves" else AFTER_DEATH_SECONDS)


def _stop(state: State, stop: Stop, now: float, actions: Actions) -> State:
    if state.stop:
        return state
    state = replace(state, stop=stop)
    actions.append(Note("stop", {"by": stop.by, "grace": stop.grace}))
    actions.append(Tell())
    return _end_ranks(state, now, stop.grace)


def _end_ranks(state: State, terminate_at: float, grace: float) -> State:
    """Let the ranks get SIGTERM at this time and, `grace` seconds later, SIGKILL; or sooner, as decided before."""
    if state.status == "ended":
        return state
    kill_at = min([terminate_at + grace, *([state.kill_at] if state.kill_at is not None else [])])
    if not state.terminated:
        terminate_at = min([terminate_at, *([state.terminate_at] if state.terminate_at is not None else [])])
        state = replace(state, terminate_at=terminate_at)
    return replace(state, status="ending", kill_at=kill_at)


def _terminate_when_due(state: State, now: float, actions: Actions) -> State:
    if state.terminate_at is None or now < state.terminate_at or state.status != "ending":
        return state
    actions.append(Terminate())
    return replace(state, terminate_at=None, terminated=True)


def _ended(state: State, event: Ended, actions: Actions) -> State:
    if state.status == "ended":
        return state
    asked = state.stop is not None or event.status == EXIT_STOPPED
    bad = event.status != 0 and not state.causes and not asked and not state.done
    if event.status == EXIT_STOPPED and not state.stop and not state.terminated:
        state = _stop(state, Stop(f"a signal to a rank on {state.me}, not from Muster", state.grace, event.now),
                      event.now, actions)  # fmt: skip
    if bad:
        reason = f"torchrun {describe_status(event.status)}"
        # Ranks to which torchrun sends its SIGTERM may save and stop, which then counts.
        asked_to_end = event.status == 128 + signal.SIGTERM
        cause = Cause("launcher", state.me, None, reason, event.now, consequence=asked_to_end)
        state = _learn(state, cause, event.now, actions)
    state = replace(state, status="ended", exit_status=event.status, terminate_at=None, kill_at=None)
    actions.extend([Kill(), Note("ended", {"status": event.status}), Tell()])  # what ranks left behind goes, too
    return state


def describe_status(status: int) -> str:
    """An exit status in words, e.g. "was killed by SIGKILL"."""
    if status - 128 in list(signal.Signals):
        return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"


def _find_lost(state: State, now: float, actions: Actions) -> State:
    if state.status == "ended" and state.all_ended_at is not None:
        return state
    silent = [host for host, peer in state.peers.items() if _is_silent(state, peer, now)]
    for host in silent:
        state = _with_peer(state, host, replace(state.peers[host], lost=True))
    alone = len(state.peers) > 1 and not any(peer.ended or peer.is_fresh(now) for peer in state.peers.values())
    for host in silent:
        state = _learn(state, _why_silent(state, host, now, alone), now, actions)
    return state


def _is_silent(state: State, peer: Peer, now: float) -> bool:
    if peer.lost or peer.ended:
        return False
    if peer.last is None:
        return now - state.began > START_SECONDS
    refused = peer.refused_since is not None and now - peer.refused_since > REFUSED_SECONDS
    return refused or now - peer.last > LOST_SECONDS


def _why_silent(state: State, host: str, now: float, alone: bool) -> Cause:
    peer = state.peers[host]
    if peer.refused_since is not None:
        return Cause("host_lost", host, None, CONTAINER_ENDED, now)
    last = state.began if peer.last is None else peer.last
    silence = f"{now - last:.0f} s"
    hearing = [name for name, other in state.peers.items() if name != host and _hears(other, host, now)]
    if hearing:
        what = f"do not hear each other for {silence}, though {', '.join(sorted(hearing))} hears both"
        return Cause("cut", state.me, None, what, last, other=host)
    if peer.last is None:
        what = f"its keeper was not heard within {START_SECONDS:.0f} s of the start"
        return Cause("start", host, None, what, now, consequence=bool(state.causes))
    if alone:
        return Cause("host_lost", state.me, None, f"it hears no other host for {silence}", last)
    return Cause("host_lost", host, None, f"no word from it for {silence}", last)


def _hears(peer: Peer, host: str, now: float) -> bool:
    """Whether another host, which is heard itself, hears `host` now."""
    if peer.last is None or not peer.is_fresh(now):
        return False
    age = peer.beat.get("hears", {}).get(host)
    return age is not None and float(age) + now - peer.last < LOST_SECONDS / 2


def _end_idle_torchrun(state: State, now: float) -> State:
    """torchrun learns from its store that the other hosts' ranks have ended. Where that connection broke unseen, as
    behind a firewall that forgets idle ones, it shall not wait for ever."""
    if state.status != "running" or not state.done or not all(peer.done for peer in state.peers.values()):
        return state
    if state.all_done_at is None:
        return replace(state, all_done_at=now)
    return _end_ranks(state, now, AFTER_DEATH_SECONDS) if now - state.all_done_at > DONE_SECONDS else state


def _kill_what_is_late(state: State, now: float, actions: Actions) -> State:
    if state.status != "ending" or state.kill_at is None or now < state.kill_at:
        return state
    cause = root(state)
    late = state.stop is not None and (cause is None or cause.consequence)
    actions.extend([Note("killed", {"after_grace": late}), Kill()])
    return replace(state, kill_at=None, killed=late or state.killed)


def _maybe_leave(state: State, now: float, actions: Actions) -> State:
    """Leave when every host's end is known, and known to be known, or nobody is left to be told."""
    if state.status != "ended":
        return state
    if state.all_ended_at is None:  # once it is known it stays so, though an older beat may come after
        if not all(peer.ended or peer.lost for peer in state.peers.values()):
            return state
        state = replace(state, all_ended_at=now)
        actions.append(Tell())
    ours_known = all(state.me in peer.beat.get("ended", ()) for peer in state.peers.values() if not peer.lost)
    assert state.all_ended_at is not None
    if ours_known or now - state.all_ended_at > LINGER_SECONDS:
        actions.append(Leave())
        return replace(state, left=True)
    return state
