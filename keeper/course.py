"""How a run goes on when an attempt of it has failed: `decide(course, event) -> (course, actions)`. Pure.

An attempt is one start of torchrun on some of the run's hosts; what happens within it is decide.py's. This goes round
it. When an attempt has failed and its ranks have ended, the first of its hosts that can be heard proposes the next one,
on the hosts that it hears. Keepers vote in their heartbeats, and an attempt begins when enough have voted for it.

Two halves of a run that do not hear each other must never both go on. So:

- Proposals have ballots, numbers that only grow. A keeper votes for one proposal of a ballot and for none of a lower
  one afterwards, and only when its own ranks have ended.
- A proposal is accepted when all of its hosts have voted for it, and a majority of the hosts of the last attempt that
  any voter knows, and of each one that any voter has voted for since: such a one may have been accepted unheard.
- A majority is more than half, or exactly half with the attempt's decider. That is its master; but of an even number
  of hosts one that only waits is better, as it does not fall with one half: a spare, or a witness. While an attempt
  trains, its master proposes a change of the decider as a new ballot of the same attempt, and all of its hosts vote.

A witness is a control machine that has the run in view: it hears, votes and remembers as a spare does, and is never
chosen. Its memory is that of one view, so each view is another witness.

Any two majorities share a keeper, and an attempt makes no step without all of its hosts: so there is one attempt that
can make steps, and each knows of the one before it. What is not in the majority waits, and joins at the next attempt
where it is heard again in time. Hosts that are not in the attempt, spares among them, vote and wait as well.

A keeper that ends with its container or its host may be started again while the run goes on (launch/job/rejoin.py). It
keeps its promises: the attempt and the votes that it told others of were on its disk before (`promises`). Its ranks are
gone; it waits, votes, and joins at the next attempt (`come_back`).

A run without restarts (`Rules.max_restarts` 0) has one attempt, and all of this says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, Mapping, Sequence, Tuple

from keeper import decide as attempts
from keeper.decide import Actions, Cause, Heard, Leave, Note, StopAsked, Tell, Tick, Words
from keeper.known import WITNESS, Attempt, Course, Known, Over, Rules, attempt_of, is_majority
from keeper.next_attempt import (
    can_do_without,
    chosen_decider,
    known_ballots,
    may_suffice,
    next_attempt,
    too_few,
    why_not_again,
)

VOTE_SECONDS = 3.0  # for a proposal to be accepted; then another one is made
MINORITY_SECONDS = 30.0  # for hosts that are missing to be heard again, before a run gives up or a host leaves
BETWEEN_SECONDS = 90.0  # from the end of a host's ranks to the next attempt, whatever happens
BETWEEN = "to begin"  # what is said to be waited for between two attempts
LEAVING_SECONDS = 5.0  # beyond the ranks' grace, for the others to agree on an attempt without a host that leaves
MOST_WAITS = 3  # a proposal that is not accepted gives the next one longer, up to so many times VOTE_SECONDS


@dataclass(frozen=True)
class Ports:
    """Free ports of this host, should it become the master."""

    now: float
    ports: Tuple[int, int]


@dataclass(frozen=True)
class Stepped:
    """A rank of this host has said that it trains, after this step."""

    now: float
    step: int


@dataclass(frozen=True)
class LeaveAsked:
    """This host's container is asked to end. by: how; it stops the run where that cannot go on without the host."""

    now: float
    by: str


@dataclass(frozen=True)
class Resumable:
    """A rank has said that it can go on where it was when it is started again."""

    now: float


@dataclass(frozen=True)
class Start:
    """Start this host's ranks of the attempt that has begun."""

    attempt: Attempt


def begin(me: str, all_hosts: Sequence[str], rules: Rules, first: Attempt, now: float, grace: float) -> Course:
    """The course of a run that starts."""
    course = Course(me, tuple(all_hosts), rules, first, grace)
    return _with_own(course, now) if me in first.hosts else course


def of_plan(plan: Mapping[str, Any], me: str, now: float) -> Course:
    """The course of a run that starts as its plan (plan.json) says, for a host of it or a witness."""
    members = [str(host["host"]) for host in plan["hosts"] if host["ranks"]]
    rules = Rules(
        nodes=len(members),
        max_restarts=int(plan["max_restarts"]),
        min_nodes=int(plan["min_nodes"]),
        max_host_failures=int(plan["max_host_failures"]),
        steps_are_known=plan["script"] is None,
    )
    first = Attempt(tuple(members), (int(plan["master_port"]), int(plan["free_port"])))
    return begin(me, [str(host["host"]) for host in plan["hosts"]], rules, first, now, float(plan["grace"]))


def promises(course: Course) -> Words:
    """What a keeper must not forget: it is on the disk before anybody hears it."""
    votes = [vote.words() for vote in course.votes]
    return {"attempt": course.attempt.words(), "votes": votes, "restarts": course.rules.max_restarts}


def come_back(course: Course, kept: Mapping[str, Any], now: float) -> Course:
    """The course of a keeper that is started again. course: of_plan's; kept: the promises of the one before it."""
    attempt, votes = attempt_of(kept["attempt"]), tuple(attempt_of(vote) for vote in kept["votes"])
    rules = replace(course.rules, max_restarts=int(kept["restarts"]))
    course = replace(course, rules=rules, attempt=attempt, votes=votes, own=None, own_attempt=0)
    if course.me not in attempt.hosts:
        return course
    course = _with_own(course, now)
    assert course.own is not None
    gone = Cause("host_lost", course.me, None, attempts.CONTAINER_ENDED, now)
    return replace(course, own=replace(course.own, status="ended", causes=(gone,)))


def decide(course: Course, event: Any) -> Tuple[Course, Actions]:
    """The next course, and what is to be done, in order."""
    if course.left:
        return course, []
    actions: Actions = []
    now = event.now
    if isinstance(event, Heard):
        course = _hear(course, event, actions)
    elif isinstance(event, Ports):
        course = replace(course, ports=event.ports)
    elif isinstance(event, Stepped):
        course = replace(course, reached=max(event.step, course.reached or 0))
    elif isinstance(event, Resumable):
        course = replace(course, rules=resumable(course.rules))
    else:
        if isinstance(event, LeaveAsked):
            course, event = _asked_to_leave(course, event)
        if isinstance(event, StopAsked):
            course = _stopped(course, event, actions)
        course = _within(course, event, actions)
    course = _learn_stop(course)
    if course.restarts:
        course = _go_on(course, event, actions)
    elif course.own is None:
        course = _leave_unused(course, now, actions)
    return course, actions


def beat(course: Course, now: float) -> Words:
    """What this keeper tells the others."""
    within = attempts.beat(course.own, now) if course.own else {"causes": []}
    hears = {host: round(now - known.at, 3) for host, known in course.known.items()}
    stop = course.stop
    return {
        **within,
        "status": course.status,
        "about": course.own_attempt,  # the attempt that status, causes and progress are about
        "attempt": course.attempt.words(),
        "votes": [vote.words() for vote in course.votes],
        "hears": hears,
        "ports": list(course.ports) if course.ports else None,
        "reached": course.reached,
        "stop": {"by": stop.by, "grace": stop.grace, "age": now - stop.at} if stop else within.get("stop"),
        "leaving": course.leaving is not None,
        "over": {key: value for key, value in vars(course.over).items() if key != "at"} if course.over else None,
        "restarts": course.rules.max_restarts,
    }


def verdict(course: Course) -> str:
    """How the run ended, as this keeper knows it: succeeded, stopped or failed."""
    if course.over:
        return course.over.status
    if course.takes_part and course.own:
        return attempts.verdict(course.own)
    return "stopped" if course.stop else "failed"


def waited_for(course: Course, now: float) -> str:
    """What this keeper waits for now, or nothing."""
    if course.over is None and course.restarts and course.status in ("ended", "waiting"):
        if not course.takes_part or not course.known:
            others = [host for host in course.attempt.hosts if host != course.me]
            return "" if _heard_members(course, now) else f"a word of {', '.join(others)}"
        if _has_failed(course):
            return f"attempt {course.attempt.number + 1} {BETWEEN}: {_what_is_missing(course, now)}"
    return attempts.waited_for(course.own, now) if course.own else ""


def _what_is_missing(course: Course, now: float) -> str:
    """Why the next attempt has not begun, and for how long at most that is waited for."""
    peers = course.own.peers if course.own else {}
    working = sorted(host for host, peer in peers.items() if not (peer.ended or peer.lost))
    heard = course.heard(now)
    if working:
        what = f"the ranks of {', '.join(working)} have not ended"
    elif not is_majority(heard, course.attempt):
        what = too_few(course, heard)
    else:
        what = next_attempt(course, now)[1]
    most = MINORITY_SECONDS if what else BETWEEN_SECONDS
    return f"{what or 'its hosts have not agreed yet'}; that may take {most:.0f} s at most"


def resumable(rules: Rules) -> Rules:
    """The same rules where it turns out that the ranks can go on when they are started again."""
    return replace(rules, max_restarts=-rules.max_restarts) if rules.max_restarts < 0 else rules


# -- what others say ---------------------------------------------------------------------------------------------------


def _hear(course: Course, event: Heard, actions: Actions) -> Course:
    if event.host == course.me or not (event.host in course.all_hosts or event.host.startswith(WITNESS)):
        return course
    votes = tuple(attempt_of(vote) for vote in event.words["votes"])
    known = Known(event.now, event.words, attempt_of(event.words["attempt"]), votes)
    is_new = event.host in course.all_hosts and event.host not in course.known
    if is_new and not (course.own and event.host in course.own.peers):
        actions.append(Note("heard", {"host": event.host}))
    course = replace(course, known={**course.known, event.host: known})
    if known.words["restarts"] > 0:
        course = replace(course, rules=resumable(course.rules))
    if course.restarts:
        course = _adopt(course, known.attempt, event.now, actions)
    if known.words["about"] == course.attempt.identity and known.words["reached"] is not None:
        course = replace(course, reached=max(int(known.words["reached"]), course.reached or 0))
    over = known.words["over"]
    if over and not over["alone"] and course.over is None and known.attempt.identity >= course.attempt.identity:
        course = replace(course, over=Over(str(over["status"]), str(over["reason"]), event.now))
        actions.append(Tell())
    if (asked := known.words["stop"]) and course.stop is None:
        stop = attempts.Stop(str(asked["by"]), float(asked["grace"]), event.now - float(asked["age"]))
        course = replace(course, stop=stop)
        course = _within(course, StopAsked(event.now, stop.by, stop.grace), actions)
    if course.own and event.host in course.own.peers:
        # What it says of another attempt is a sign of life, no more.
        same = known.words["about"] == course.own_attempt
        words = event.words if same else {"status": "starting", "hears": event.words["hears"]}
        course = _within(course, replace(event, words=words), actions)
    return course


def _adopt(course: Course, attempt: Attempt, now: float, actions: Actions) -> Course:
    """Take note of an attempt that was accepted, if it is a newer one; begin it where this host is in it."""
    newest_vote = max((vote.ballot for vote in course.votes), default=0)
    if attempt.ballot <= course.attempt.ballot or attempt.ballot < newest_vote:
        return course  # who has voted since has promised to begin nothing older
    if attempt.identity == course.attempt.identity:
        actions.extend([Note("decider", {"host": attempt.decider}), Tell()])
        return replace(course, attempt=attempt, votes=())
    course = replace(course, attempt=attempt, votes=(), reached=None, ended_at=None, alone_since=None)
    because = attempt.ends[-1]["cause"] if attempt.ends else None
    words = {"hosts": list(attempt.hosts), "master": attempt.hosts[0], "left_out": dict(attempt.left_out)}
    actions.append(Note("attempt", {**words, "because": because}))
    if course.me in attempt.hosts and course.has_ended and not (course.stop or course.over):
        course = _with_own(course, now)
        actions.append(Start(attempt))
    elif not course.has_ended:  # it was not heard for long, and its ranks are of an attempt that is over
        reason = f"the run goes on without it: attempt {attempt.number} is on {', '.join(attempt.hosts)}"
        gone = Cause("host_lost", course.me, None, reason, now, consequence=True)
        course = _within(course, attempts.Failed(now, gone), actions)
    actions.append(Tell())
    return course


def _with_own(course: Course, now: float) -> Course:
    """This host takes part in the attempt, from now on."""
    others = [host for host in course.attempt.hosts if host != course.me]
    peers = {host: attempts.Peer(last=course.known[host].at if host in course.known else None) for host in others}
    own = attempts.State(course.me, peers, now, course.grace, attempt=course.attempt.number)
    return replace(course, own=own, own_attempt=course.attempt.identity)


def _within(course: Course, event: Any, actions: Actions) -> Course:
    """Let the attempt decide what is its own."""
    if course.own is None or (course.own.status == "ended" and not course.takes_part):
        return course
    own, more = attempts.decide(course.own, event)
    leaves = any(isinstance(action, Leave) for action in more)
    more = [replace(action, attempt=own.attempt) if isinstance(action, Note) else action for action in more]
    actions.extend(action for action in more if not (isinstance(action, Leave) and course.restarts))
    return replace(course, own=own, left=leaves and not course.restarts)


def _stopped(course: Course, event: StopAsked, actions: Actions) -> Course:
    if course.stop:
        return course
    grace = course.grace if event.grace is None else event.grace
    if course.own is None:
        actions.extend([Note("stop", {"by": event.by, "grace": grace}), Tell()])
    return replace(course, stop=attempts.Stop(event.by, grace, event.now))


def _asked_to_leave(course: Course, event: LeaveAsked) -> Tuple[Course, Any]:
    """The end of this host's part in the run where others can go on, else the end of the run: the course, and what has
    happened then."""
    now = event.now
    if course.leaving is not None or not can_do_without(course, now):
        return course, StopAsked(now, event.by)
    return replace(course, leaving=now), attempts.Failed(now, Cause("leaves", course.me, None, attempts.LEAVES, now))


def _learn_stop(course: Course) -> Course:
    """A stop that the attempt has learnt by itself (ranks that saved and stopped) is the run's."""
    if course.stop is None and course.own and course.own.stop:
        return replace(course, stop=course.own.stop)
    return course


# -- after an attempt --------------------------------------------------------------------------------------------------


def _go_on(course: Course, event: Any, actions: Actions) -> Course:
    """Vote, propose, accept, or give up: whatever is due."""
    now = event.now
    if course.has_ended and course.ended_at is None:
        course = replace(course, ended_at=now)
    course = _conclude(course, now, actions)
    if course.over is None:
        course = _vote(course, now, actions)
        course = _accept(course, now, actions)
        if isinstance(event, Tick):  # not before: words that came earlier may be waiting to be heard
            course = (_propose if course.has_ended else _propose_decider)(course, now, actions)
            course = _accept(course, now, actions)
            course = _give_up_late(course, now, actions)
        course = _leave_the_others(course, now, actions)
    return _leave(course, now, actions)


def _has_failed(course: Course) -> bool:
    return course.own is not None and bool(course.own.causes) and attempts.verdict(course.own) == "failed"


def _conclude(course: Course, now: float, actions: Actions) -> Course:
    """The run is over where its attempt ended well, or was stopped."""
    if course.over or not course.has_ended:
        return course
    if course.stop and (course.own is None or not course.takes_part or _all_have_ended(course) or _has_failed(course)):
        return _over(course, "stopped", "", now, actions)
    if course.takes_part and course.own and course.own.all_ended_at is not None and not _has_failed(course):
        return _over(course, attempts.verdict(course.own), "", now, actions)
    return course


def _all_have_ended(course: Course) -> bool:
    return course.own is not None and all(peer.ended or peer.lost for peer in course.own.peers.values())


def _over(course: Course, status: str, reason: str, now: float, actions: Actions, alone: bool = False) -> Course:
    actions.append(Tell())
    if reason:
        actions.append(Note("given_up", {"reason": reason, "alone": alone}))
    return replace(course, over=Over(status, reason, now, alone))


def _vote(course: Course, now: float, actions: Actions) -> Course:
    """Vote for the newest proposal that is heard, if this keeper may."""
    newest = max((vote.ballot for vote in course.votes), default=course.attempt.ballot)
    heard = [vote for known in course.known.values() if known.is_fresh(now) for vote in known.votes]
    better = [vote for vote in heard if vote.ballot > newest and _may_vote_for(course, vote)]
    if not better or course.stop:
        return course
    actions.append(Tell())
    return replace(course, votes=(*course.votes, max(better, key=lambda vote: vote.ballot)), voted_at=now)


def _may_vote_for(course: Course, proposal: Attempt) -> bool:
    if proposal.identity == course.attempt.identity:
        return _trains(course)
    if course.takes_part:
        return proposal.number > course.attempt.number and course.has_ended and _has_failed(course)
    # Also for another one of the same number: its hosts may have promised not to begin the one that is known here.
    return proposal.number >= course.attempt.number and course.has_ended


def _trains(course: Course) -> bool:
    """Whether this host is in an attempt that nothing has ended, as far as is known."""
    return course.takes_part and course.own is not None and course.own.status in ("starting", "running")


def _accept(course: Course, now: float, actions: Actions) -> Course:
    """Begin an attempt that enough have voted for."""
    found = [*course.votes, *(vote for known in course.known.values() for vote in known.votes)]
    newer = [vote for vote in found if vote.ballot > course.attempt.ballot]
    accepted = next((vote for vote in newer if _is_accepted(course, vote)), None)
    return _adopt(course, accepted, now, actions) if accepted else course


def _is_accepted(course: Course, proposal: Attempt) -> bool:
    votes = {host: known.votes for host, known in course.known.items()}
    accepted = {host: known.attempt for host, known in course.known.items()}
    votes[course.me], accepted[course.me] = course.votes, course.attempt
    voters = {host for host, own in votes.items() if proposal in own}
    if not voters.issuperset(proposal.hosts):
        return False
    last = max((accepted[host] for host in voters), key=lambda attempt: attempt.ballot)
    since = [vote for host in voters for vote in votes[host] if last.ballot < vote.ballot < proposal.ballot]
    return all(is_majority(voters, attempt) for attempt in [last, *since])


def _heard_members(course: Course, now: float) -> List[str]:
    """Hosts of the attempt that are heard now and go on."""
    known = ((host, course.known.get(host)) for host in course.attempt.hosts)
    return [host for host, one in known if one and one.is_fresh(now) and not one.words["over"]]


def _propose(course: Course, now: float, actions: Actions) -> Course:
    """As the first host of the attempt that is heard: propose the next one, or say why there is none."""
    if not _has_failed(course) or not course.takes_part or course.stop or course.over or course.own is None:
        return course
    before = course.attempt.hosts[: course.attempt.hosts.index(course.me)]
    if set(_heard_members(course, now)) & set(before):
        return course
    if _is_voting(course, now):
        return course
    late = course.ended_at is not None and now - course.ended_at > MINORITY_SECONDS
    if not late and not all(peer.ended or peer.lost for peer in course.own.peers.values()):
        return course
    heard = course.heard(now)
    alone = not is_majority(heard, course.attempt)
    if not alone and (reason := why_not_again(course)):
        return _over(course, "failed", reason, now, actions)
    proposal, missing = (None, too_few(course, heard)) if alone else next_attempt(course, now)
    if proposal is None:
        waits = not late and may_suffice(course, now)
        return course if waits else _over(course, "failed", missing, now, actions, alone)
    actions.append(Tell())
    return replace(course, votes=(*course.votes, proposal), voted_at=now)


def _is_voting(course: Course, now: float) -> bool:
    """Whether the latest proposal may still be accepted. Each one has longer, as a witness answers less quickly."""
    patience = VOTE_SECONDS * min(len(course.votes), MOST_WAITS)
    return course.voted_at is not None and now - course.voted_at < patience


def _propose_decider(course: Course, now: float, actions: Actions) -> Course:
    """As the master of an attempt that trains: propose another decider, where there is a better one."""
    attempt = course.attempt
    if attempt.hosts[0] != course.me or not _trains(course) or course.stop or _is_voting(course, now):
        return course
    if len(_heard_members(course, now)) < len(attempt.hosts) - 1:
        return course
    decider = course.known.get(attempt.decider)
    if decider and not decider.words["over"] and now - decider.at < attempts.LOST_SECONDS:
        return course
    better = chosen_decider(course, attempt.hosts, now)
    if better == attempt.decider:
        return course
    ballot = 1 + max(known_ballots(course))
    proposal = replace(attempt, decided_by=better, ballot=ballot, first_ballot=attempt.identity)
    actions.append(Tell())
    return replace(course, votes=(*course.votes, proposal), voted_at=now)


# -- the end -----------------------------------------------------------------------------------------------------------


def _give_up_late(course: Course, now: float, actions: Actions) -> Course:
    """Nobody waits for ever: not for a majority, nor for hosts that do not agree."""
    if course.over or not course.has_ended or (course.takes_part and not _has_failed(course)):
        return course
    if course.me not in course.all_hosts:  # a witness has nothing to give up
        return course
    if _heard_members(course, now):
        course = replace(course, alone_since=None)
        late = course.takes_part and course.ended_at is not None and now - course.ended_at > BETWEEN_SECONDS
        reason = f"its hosts have not agreed on another attempt within {BETWEEN_SECONDS:.0f} s"
        return _over(course, "failed", reason, now, actions, alone=True) if late else course
    since = now if course.alone_since is None else course.alone_since
    course = replace(course, alone_since=since)
    # Before the first word the others may take as long to start as this one; who heard them give up need not wait.
    patience = MINORITY_SECONDS if course.known.keys() & set(course.all_hosts) else attempts.START_SECONDS
    if any(course.known[host].words["over"] for host in course.attempt.hosts if host in course.known):
        patience = attempts.LINGER_SECONDS
    if now - since <= patience:
        return course
    reason = f"it hears none of {', '.join(host for host in course.attempt.hosts if host != course.me)}"
    return _over(course, "failed", reason, now, actions, alone=True)


def _leave(course: Course, now: float, actions: Actions) -> Course:
    """Leave when the run is over, and all who can be heard know it."""
    if course.over is None or not course.has_ended:
        return course
    hosts = (course.known[host] for host in course.all_hosts if host in course.known)
    unaware = [known for known in hosts if known.is_fresh(now) and not known.words["over"]]
    if unaware and now - course.over.at <= attempts.LINGER_SECONDS:
        return course
    actions.append(Leave())
    return replace(course, left=True)


def _leave_the_others(course: Course, now: float, actions: Actions) -> Course:
    """A host that was asked to leave votes for an attempt without it; it is gone when that has begun, or is late."""
    if course.leaving is None or course.over or not course.has_ended:
        return course
    if course.takes_part and now - course.leaving < course.grace + LEAVING_SECONDS:
        return course
    return _over(course, "failed", attempts.LEAVES, now, actions, alone=True)


def _leave_unused(course: Course, now: float, actions: Actions) -> Course:
    """A host that is in no attempt goes with the last host of a run that is not started again."""
    ends = [known.words["status"] == "ended" for host, known in course.known.items() if host in course.attempt.hosts]
    course = _leave_the_others(_give_up_late(course, now, actions), now, actions)
    if course.rules.max_restarts and not course.over and not course.stop and not (ends and all(ends)):
        return course
    actions.append(Leave())
    return replace(course, left=True)
