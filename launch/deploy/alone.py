"""One deploy, teardown or `make data` at a time on a host, from whatever machine: a second one is refused, naming the
first."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import ssh
from launch.hosts.connection import ANSWER_SECONDS, LINK_ERRORS, Machine
from launch.hosts.door import Door, DoorError

PRESENCE_SECONDS = 15.0  # a door that hears nothing for four times as long gives the host free (keeper/door.py)


@contextmanager
def alone(machines: Sequence[Machine], what: str) -> Iterator[None]:
    """Have all hosts refuse other deploys. what: deploy, teardown or data transfer. Raises Refusal where a host is
    not free."""
    machines = sorted(machines, key=lambda machine: (machine.target.address, machine.target.port))
    with ExitStack() as opened:

        def take(machine: Machine) -> Door:
            door = Door(machine, "deploy", {"by": ssh.local_user(), "what": what})
            opened.callback(door.close)
            if next(door.frames(ANSWER_SECONDS), None) is None:
                raise DoorError("it ended without an answer", {})
            return door

        # One host first: of two that begin at once over the same hosts, one gets it and with it all of them.
        doors = ssh.in_parallel(take, machines[:1])
        doors += ssh.in_parallel(take, machines[1:]) if isinstance(doors[0], Door) else []
        held = [door for door in doors if isinstance(door, Door)]
        failed = [
            (machine, result) for machine, result in zip(machines, doors, strict=False) if not isinstance(result, Door)
        ]
        if failed:
            busy = all(isinstance(result, DoorError) for _, result in failed)
            fix = f"wait until that has ended, then `make {what.split()[0]}` again"
            problems = [Problem(f"host {machine.name}", str(result), fix) for machine, result in failed]
            raise Refusal(problems, exits.REFUSED if busy else exits.UNREACHABLE)
        ended = threading.Event()

        def ping() -> None:
            while not ended.wait(PRESENCE_SECONDS):
                for door in held:
                    with suppress(*LINK_ERRORS):  # a host that is gone: what comes next says so
                        door.send({"ping": True})

        thread = threading.Thread(target=ping, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
