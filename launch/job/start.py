"""Starts a run on its hosts, through their doors: on all of them, or on none."""

from __future__ import annotations

import base64
import json
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from launch.cli import exits
from launch.cli.make_variables import name_inventory
from launch.cli.refusal import Problem, Refusal
from launch.hosts import door, ssh
from launch.hosts.connection import LINK_ERRORS, Machine
from launch.hosts.door import Door, DoorError
from launch.job.plan import Plan, document

CONTAINER_SECONDS = 200  # for Podman to start a container and its keeper to take the lease: more than the door allows
DROP_SECONDS = 60
KEY_BYTES = 32  # of the key with which keepers know each other


def start(
    machines: Sequence[Machine],
    plan: Plan,
    private: Mapping[str, bytes] | None = None,
    permit: Callable[[], None] = lambda: None,
    doors: Sequence[Future[Door]] = (),
) -> None:
    """Start the container of every host; when each one holds its host's lease, let the ranks of all of them start.

    private: the files of SECRETS, by name. permit: called in between; raises Refusal where something speaks against
    the run after all. The containers come up, and their launchers load, while it is still being looked at. doors: as
    `doors_of` returns them, for hosts that need not be called first.
    Raises Refusal, naming every host that did not start and why; nothing is left then on the hosts that answer.
    """
    given = {name: base64.b64encode(content).decode() for name, content in (private or {}).items()}
    packed = pack({"plan": document(plan), "key": secrets.token_hex(KEY_BYTES), "secrets": given})
    with ExitStack() as opened:

        def one(pair: tuple[int, Machine]) -> _Started:
            node_rank, machine = pair
            called = doors[node_rank].result() if doors else Door(machine, "start", {})
            opened.callback(called.close)
            return _Started(called, {"node_rank": node_rank, "packed": packed})

        results: list[Any] = ssh.in_parallel(one, enumerate(machines))
        words = [result for result in results if isinstance(result, BaseException)]
        # A host that cannot start says why; what it takes to change that is the check's to say.
        refusal = _refusal(permit) if all(isinstance(error, DoorError) for error in words) else None
        if not words and not refusal:
            results = ssh.in_parallel(_Started.go, results)
    pairs = zip(machines, results, strict=True)
    failed = {machine: result for machine, result in pairs if isinstance(result, BaseException)}
    if not failed and not refusal:
        return
    left = drop(machines, plan.run)
    fix = "fix that" if left else "fix that; no host was left running"
    problems = list(refusal.problems) if refusal else []
    explained = {problem.where for problem in problems}
    problems += [
        Problem(f"host {machine.name}", f"its container did not start: {error}", fix)
        for machine, error in failed.items()
        if f"host {machine.name}" not in explained
    ]
    for host, error in left.items():
        fix = name_inventory(f"`make stop RUN={plan.run}` when it answers again", Path(plan.inventory))
        problems.append(Problem(f"host {host}", f"what was started there could not be ended: {error}", fix))
    raise Refusal(problems, refusal.status if refusal else exits.FAILED)


def pack(words: Mapping[str, Any]) -> str:
    """What all hosts are told, once for all of them: the plan of a thousand hosts is long."""
    return base64.b64encode(zlib.compress(json.dumps(words).encode())).decode()


@contextmanager
def doors_of(machines: Sequence[Machine]) -> Iterator[list[Future[Door]]]:
    """A door of each host that waits for its start: called while it is still being looked at what is to start there."""

    def call(machine: Machine) -> Door:
        door = Door(machine, "start", {})
        opened.callback(door.close)
        return door

    with ExitStack() as opened, ThreadPoolExecutor(len(machines)) as pool:
        yield [pool.submit(call, machine) for machine in machines]


class _Started:
    """A host whose container has started, and whose ranks wait for the word to go. Hanging up takes it back."""

    def __init__(self, door: Door, asked: Mapping[str, Any]) -> None:
        """Returns when the host's keeper has the lease. Raises what launch.hosts.door.ask does."""
        self._door, self._frames = door, door.frames(CONTAINER_SECONDS)
        door.send(asked)
        if next(self._frames, None) is None:
            raise DoorError("it ended without an answer", {})

    def go(self) -> None:
        """Let the ranks start; returns when they may."""
        self._door.send({"go": True})
        for _ in self._frames:
            pass


def _refusal(permit: Callable[[], None]) -> Refusal | None:
    try:
        permit()
    except Refusal as refusal:
        return refusal
    return None


def drop(machines: Sequence[Machine], run: str) -> dict[str, BaseException]:
    """End a run at once and remove all of it on these hosts; why not, by host, where that failed."""

    def one(machine: Machine) -> None:
        try:
            door.ask(machine, "drop", {"run": run}, DROP_SECONDS)
        except TimeoutError:
            raise
        except LINK_ERRORS:
            machine.reconnect()
            door.ask(machine, "drop", {"run": run}, DROP_SECONDS)

    results = ssh.in_parallel(one, machines)
    pairs = zip(machines, results, strict=True)
    return {machine.name: result for machine, result in pairs if isinstance(result, BaseException)}
