"""Starts the keeper of a host again that has ended with its container, or with the host, while its run goes on.

The key and the secrets of a run are in the memory of its hosts alone: a host that was rebooted is given those of one on
which the run goes on. What its keeper had agreed to is on its disk. It waits there, votes, and joins at the next
attempt: keeper/course.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.hosts import door
from launch.hosts.connection import Machine

GIVE_SECONDS = 20.0  # for a host to give the run's key and secrets
REJOIN_SECONDS = 200.0  # for Podman to start a container and its keeper to take the lease: more than the door allows


def can_go_on(state: Mapping[str, Any]) -> bool:
    """Whether a run goes on where this is a host's state.json, and may have another attempt. Pure."""
    beat = state.get("beat")
    if not beat or beat["over"] or beat["stop"]:
        return False
    return int(beat["attempt"]["number"]) <= int(beat["restarts"])


def rejoin(run: str, machine: Machine, others: Sequence[Machine]) -> None:
    """Start a host's keeper again, with what the first of the others gives that still has the run.

    Raises RuntimeError with the host's own words where it does not start, and OSError where nobody can be asked.
    """
    private: Mapping[str, Any] | None = None
    for other in others:
        try:
            private = door.ask(other, "private", {"run": run}, GIVE_SECONDS)
            break
        except Exception as error:  # the next one may have it
            last = error
    if private is None:
        raise OSError(str(last) if others else "no other host can be asked for the run's key")
    door.ask(machine, "rejoin", {"run": run, **private}, REJOIN_SECONDS)
