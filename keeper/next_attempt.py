"""Which attempt comes after one that has failed, on which hosts, or why none does: the choices of course.py. Pure."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set, Tuple

from keeper import decide as attempts
from keeper.causes import OUT_OF_MEMORY
from keeper.decide import Words
from keeper.known import WITNESS, Attempt, Course, is_majority

NO_STEP_ATTEMPTS = 3  # so many in a row without a new step end the run
SAME_STEPS = 10  # out of memory that close to the step of the time before is out of memory at the same step
READY_SECONDS = 5.0  # for a host that is not lost to be ready for the next attempt
KNOWN_ENDS = 20  # of earlier attempts, in heartbeats and documents: the first one, and the latest


def next_attempt(course: Course, now: float) -> Tuple[Optional[Attempt], str]:
    """The attempt after this one, on the hosts that can take part in it; or None, and why there is none."""
    attempt, rules = course.attempt, course.rules
    ends = ends_of(course)
    hosts, why = chosen_hosts(course, ends, now)
    late = [host for host in why if host not in hosts_that_fail(course, ends) and _may_be_ready_soon(course, host, now)]
    if late and len(hosts) < rules.nodes and course.ended_at is not None and now - course.ended_at < READY_SECONDS:
        return None, f"{late[0]}: {why[late[0]]}"
    if len(hosts) < rules.min_nodes:
        return None, f"{len(hosts)} of its hosts can go on, fewer than MIN_NODES={rules.min_nodes}"
    ports = course.ports if hosts[0] == course.me else course.known[hosts[0]].words["ports"]
    if ports is None:
        return None, f"{hosts[0]} has no free port for the rendezvous"
    left_out = tuple((host, why[host]) for host in course.all_hosts if host in why)
    known_ends = (*ends[:1], *ends[1:][1 - KNOWN_ENDS :])
    master, free = ports
    ballot, decider = 1 + max(known_ballots(course)), chosen_decider(course, hosts, now)
    return Attempt(hosts, (master, free), attempt.number + 1, ballot, known_ends, left_out, decider), ""


def _may_be_ready_soon(course: Course, host: str, now: float) -> bool:
    """Whether a host that is not ready is not known to be lost, or its keeper may be back at once."""
    if host in course.known and not course.known[host].stays:
        return False
    if course.own and host in course.own.peers:
        peer = course.own.peers[host]
        return not peer.lost or (peer.refused_since is not None and course.is_in_view(now))
    return host in course.known and now - course.known[host].at < attempts.LOST_SECONDS


def chosen_hosts(course: Course, ends: Sequence[Words], now: float) -> Tuple[Tuple[str, ...], Dict[str, str]]:
    """(hosts of the next attempt in rank order, why each other one is not among them; spares need no reason).

    Those of the last attempt first, then as many of the others as have left a place; all hear each other.
    """
    ready = {host for host in course.all_hosts if _is_ready(course, host, now)}
    why = {host: why_not_ready(course, host, now) for host in course.all_hosts if host not in ready}
    failed = {host: reason for host, reason in hosts_that_fail(course, ends).items() if host in ready}
    if len(ready - failed.keys()) >= max(1, course.rules.min_nodes):
        why.update(failed)
        ready -= failed.keys()
    members = course.attempt.hosts
    preferred = [host for host in members if host in ready]
    preferred += [host for host in course.all_hosts if host in ready and host not in members]
    chosen: List[str] = []
    for host in preferred:
        deaf = [other for other in chosen if not _hear_each_other(course, host, other, now)]
        if deaf:
            why[host] = f"it and {', '.join(deaf)} do not hear each other"
        elif len(chosen) < course.rules.nodes:
            chosen.append(host)
    return tuple(host for host in course.all_hosts if host in chosen), why


def _is_ready(course: Course, host: str, now: float) -> bool:
    """Whether a host is heard, and its ranks have ended."""
    if host == course.me:
        return course.leaving is None
    known = course.known.get(host)
    if known is None or not known.is_fresh(now) or not known.stays:
        return False
    return known.words["status"] == "waiting" or (
        known.words["status"] == "ended" and known.words["about"] == course.attempt.identity
    )


def why_not_ready(course: Course, host: str, now: float) -> str:
    """Why a host cannot be in the next attempt, in a line."""
    known = course.known.get(host)
    if host == course.me or (known and known.words["leaving"]):
        return attempts.LEAVES
    for cause in course.own.causes if course.own else ():
        if cause.kind in ("host_lost", "start") and cause.host == host:
            return cause.reason
        if cause.kind == "cut" and host in (cause.host, cause.other):
            return cause.reason
    if known is None:
        return "it was never heard"
    return "its ranks have not ended" if known.is_fresh(now) else f"no word from it for {now - known.at:.0f} s"


def hosts_that_fail(course: Course, ends: Sequence[Words]) -> Dict[str, str]:
    """Hosts without which the run is better off, and why."""
    causes = [end["cause"] for end in ends if end["cause"] and not end["cause"]["consequence"]]
    # Of a cut pair, and of ranks that all wait for each other, nobody knows whose fault it is.
    blamed = [one["host"] for one in causes if one["kind"] != "cut" and (one["kind"], one["rank"]) != ("hang", None)]
    often = {host for host in blamed if blamed.count(host) >= course.rules.max_host_failures}
    found = {host: f"{blamed.count(host)} attempts ended because of it" for host in often}
    return {**found, **{str(one["host"]): str(one["reason"]) for one in causes if one["unfit"]}}


def chosen_decider(course: Course, hosts: Sequence[str], now: float) -> str:
    """Who decides best where exactly half of these hosts vote: a spare or a witness that all of them hear."""
    if len(hosts) % 2:
        return hosts[0]
    idle = [host for host in course.all_hosts if host not in hosts and host != course.me]
    idle += sorted(name for name in course.known if name.startswith(WITNESS))
    known = ((name, course.known.get(name)) for name in idle)
    waiting = [name for name, one in known if one and one.is_fresh(now) and one.stays]
    return next((name for name in waiting if all(_hears(course, host, name, now) for host in hosts)), hosts[0])


def known_ballots(course: Course) -> List[int]:
    """Of all that was proposed, as far as this keeper knows."""
    ballots = [course.attempt.ballot, *(vote.ballot for vote in course.votes)]
    for known in course.known.values():
        ballots += [known.attempt.ballot, *(vote.ballot for vote in known.votes)]
    return ballots


def may_suffice(course: Course, now: float) -> bool:
    """Whether there are enough hosts for another attempt, or would be, were those heard again that may be.

    Not to be waited for: a host whose container has ended, as its keeper will not come back, unless a control machine
    that has the run in view starts it again; one that says that for it the run is over; one that is left out anyway.
    """
    peers = course.own.peers if course.own else {}
    in_view, heard = course.is_in_view(now), course.heard(now)
    gone = {host for host, peer in peers.items() if peer.lost and peer.refused_since is not None and not in_view}
    gone |= {host for host, known in course.known.items() if known.words["over"]}
    leaving = {host for host, known in course.known.items() if known.words["leaving"]}
    if course.leaving is not None:
        leaving.add(course.me)
    there = set(course.all_hosts) - gone
    voters = there | ({course.attempt.decider} - gone)  # a witness, too
    # Those that fail or leave may vote, where they are heard.
    failing = hosts_that_fail(course, ends_of(course)).keys() - heard
    return is_majority(voters, course.attempt) and len(there - failing - leaving) >= course.rules.min_nodes


def too_few(course: Course, heard: Set[str]) -> str:
    attempt = course.attempt
    there = [host for host in attempt.hosts if host in heard]
    rest = [host for host in attempt.hosts if host not in heard]
    go = plural(len(rest), "goes", "go")
    decider = "the master" if attempt.decider == attempt.hosts[0] else attempt.decider
    if decider.startswith(WITNESS):
        decider = "the control machine that had the run in view"
    few = f"less than half of its hosts are left, or half without {decider}"
    return f"{', '.join(there)} cannot know whether {', '.join(rest)} {go} on: {few}"


def plural(number: int, one: str, more: str) -> str:
    return one if number == 1 else more


def why_not_again(course: Course) -> str:
    """Why the run is not started again after this attempt; empty where it may be."""
    rules, ends = course.rules, ends_of(course)
    cause = ends[-1]["cause"] or {}
    if cause.get("final") or (cause.get("unfit") and not _others_suffice(course, ends)):
        return "it would end the same way again"
    if len(ends) > 1 and _is_out_of_memory(ends[-1]) and _is_out_of_memory(ends[-2]):
        steps = [end["reached"] or 0 for end in ends[-2:]]
        if abs(steps[1] - steps[0]) <= SAME_STEPS:
            return f"it was out of memory twice at step {steps[1]}"
    if course.attempt.number > rules.max_restarts:
        often = f"{rules.max_restarts} {plural(rules.max_restarts, 'time', 'times')}"
        return f"it was restarted {often}, as often as MAX_RESTARTS allows"
    idle = without_new_step(ends)
    if idle >= NO_STEP_ATTEMPTS and (rules.steps_are_known or any(end["reached"] for end in ends)):
        first = ends[-idle]["cause"] or {}
        where = first.get("host", "") if first.get("rank") is None else f"rank {first['rank']} on {first['host']}"
        return f"{idle} attempts in a row made no new step; the first of them ended so: {where}: {first.get('reason')}"
    return ""


def can_do_without(course: Course, now: float) -> bool:
    """Whether the run may go on when this host leaves it now: it may be started again, and enough others are heard."""
    if course.stop or course.over:
        return False
    others = {host for host, known in course.known.items() if known.is_fresh(now) and known.stays}
    others &= set(course.all_hosts) - hosts_that_fail(course, ends_of(course)).keys()
    if not course.takes_part:
        return bool(others)
    return course.attempt.number <= course.rules.max_restarts and len(others) >= max(1, course.rules.min_nodes)


def _others_suffice(course: Course, ends: Sequence[Words]) -> bool:
    """Whether there are enough hosts beside those that can take no part any more."""
    there = {course.me, *course.known} & set(course.all_hosts)
    return len(there - hosts_that_fail(course, ends).keys()) >= max(1, course.rules.min_nodes)


def _is_out_of_memory(end: Words) -> bool:
    return bool(OUT_OF_MEMORY.search(str((end["cause"] or {}).get("reason", ""))))


def without_new_step(ends: Sequence[Words]) -> int:
    """How many of the last attempts, in a row, came no further than an attempt before them."""
    best, idle = 0, 0
    for end in ends:
        reached = int(end["reached"] or 0)
        idle = 0 if reached > best else idle + 1
        best = max(best, reached)
    return idle


def _hear_each_other(course: Course, one: str, other: str, now: float) -> bool:
    return _hears(course, one, other, now) and _hears(course, other, one, now)


def _hears(course: Course, one: str, other: str, now: float) -> bool:
    """Whether `one` hears `other` now, as far as this keeper knows."""
    if one == course.me:
        return other in course.known and course.known[other].is_fresh(now)
    known = course.known[one]
    age = known.words["hears"].get(other)
    return age is not None and float(age) + now - known.at < attempts.LOST_SECONDS / 2


def ends_of(course: Course) -> List[Words]:
    """How the attempts that this keeper knows of have ended; the last one only where it has."""
    ends = list(course.attempt.ends)
    if course.takes_part and course.has_ended:
        ends.append(_end_of(course))
    return ends


def _end_of(course: Course) -> Words:
    """How the newest attempt has ended, as it stays in mind."""
    cause = attempts.root(course.own) if course.own else None
    kept = {key: value for key, value in cause.words(cause.at).items() if key != "lines"} if cause else None
    attempt = course.attempt
    return {"number": attempt.number, "hosts": list(attempt.hosts), "cause": kept, "reached": course.reached}
