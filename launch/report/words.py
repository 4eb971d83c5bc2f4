"""What a run's page says in words: events of keepers (keeper/__init__.py), causes of failures, spans of time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keeper.known import WITNESS
from launch.job.outcome import number, slow_in_words
from launch.report.documents import Words, listed


def event_in_words(event: Words) -> str:
    """What an event says, in a line; one of another version, its name."""
    get = event.get
    ranks = ", ".join(map(str, get("pids") or {})) if isinstance(get("pids"), Mapping) else ""
    plain = {
        "lease": "the host is this run's now",
        "returned": "its keeper was gone, and was started again: it waits for the next attempt",
        "decider": f"{_decider(str(get('host')))} decides from now on where half of the hosts are left",
        "heard": f"first heartbeat of {get('host')}",
        "started": f"started rank{'s' if ',' in ranks else ''} {ranks}",
        "interface": f"{get('reason')}",
        "waiting": f"waits for {get('for')}",
        "killed": "ranks that had not ended in time were killed" if get("after_grace") else "ranks were killed",
        "left": f"processes that do not end: {get('pids')}",
        "rank_ended": f"rank {get('rank')} ended with status 0",
        "ranks_ended": "all ranks of this host have ended",
        "ended": f"torchrun ended with status {get('status')}",
        "output_failed": f"{get('reason')}",
        "given_up": f"not started again{' on this host' if get('alone') else ''}: {get('reason')}",
        "exit": f"the run ended here: {get('status')}",
    }
    if get("event") == "failed":
        return cause_in_words(event)
    if get("event") == "slow":
        return slow_in_words(event)
    if get("event") == "stop":
        grace = number(get("grace"))
        return f"asked to stop: {get('by')}" + (f"; {grace:.0f} s for the ranks to save" if grace else "")
    if get("event") == "attempt":
        return _attempt_in_words(event)
    return plain.get(str(get("event")), str(get("event")))


def _decider(host: str) -> str:
    return "a control machine that has the run in view" if host.startswith(WITNESS) else host


def cause_in_words(cause: Words) -> str:
    """A CAUSE of keeper/__init__.py in a line."""
    rank, host = cause.get("rank"), cause.get("host")
    where = f"{host} and {cause['other']}" if cause.get("other") else f"{host}"
    who = where if rank is None else f"rank {rank} on {where}"
    return f"{who}: {cause.get('reason')}" + (" (follows from another failure)" if cause.get("consequence") else "")


def _attempt_in_words(event: Words) -> str:
    parts = [f"attempt {event.get('attempt')} on {', '.join(map(str, listed(event, 'hosts')))}"]
    left_out: Any = event.get("left_out")
    if isinstance(left_out, Mapping) and left_out:
        parts.append("without " + ", ".join(f"{host} ({why})" for host, why in left_out.items()))
    if isinstance(event.get("because"), Mapping):
        parts.append(f"because of {cause_in_words(event['because'])}")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """ "4.2 s", "3:05 min", "2:10:00 h" """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
