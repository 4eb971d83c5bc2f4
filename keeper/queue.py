"""The host's half of the queue of starts: first come, first served, over several hosts without a coordinator.

The other half is launch/job/queue.py. The order is Skeen's, as in ISIS (Birman and Joseph, "Reliable Communication in
the Presence of Failures", ACM TOCS 5(1), 1987, ABCAST): a start puts a ticket on every host that it needs; each host
proposes a number greater than those of all tickets there; the start takes the greatest proposal and commits it on all
its hosts. Committed numbers (ties: by run id) are one order for all hosts and need no clock, so no two starts ever wait
for each other. A ticket is first on a host when it is committed and every other live ticket there has a greater number;
one that is not committed yet counts with its proposal, which its final number is never below. Whoever comes later gets
a greater number, so a ticket that is first stays first. A start may go when it is first on all its hosts and all leases
are free. The lease itself decides (lease.py): a queue that failed makes a start fail, it never makes two runs share a
host.

A ticket is a file in the folder `queue` of the lease's folder; it lives as long as the door's process has it locked,
and that process ends with its standard input. Tickets are read and written under one lock of the folder, held for
microseconds. A number need not outlive its ticket: the order is among live ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

from keeper import engines, lease

PLACE_SECONDS = 0.2  # between two looks at the places
CALLER_SILENT_SECONDS = 60  # without a word the caller is gone (power, network), and its place with it
ALONE_SECONDS = 10  # how long the folder's lock, which is held for microseconds, may be held by others


def queue(options: dict[str, Any], requests: int, send: Callable[[dict[str, Any]], None]) -> None:
    """The door's verb: a ticket of one start on this host, until the end of `requests`.

    `options`: {"run", "owner", "wait": whether the start waits for its turn, "root": what stands before the
    lease's folder (tests)}. `requests`: a descriptor with JSON objects, one a line: {"commit": number}; {"starts":
    true} when the start goes; {"ping": anything} at least each CALLER_SILENT_SECONDS. `send` takes the frames:

    {"proposed": number}                first
    {"place": k, "ahead": [...], "lease": words of the lease's holder or null}
                                        from the commit on, when it changed. k: 1 is first; ahead: as `waiting` returns
    {"alive": true}                     for each ping

    Raises TimeoutError when the caller is silent, and OSError.
    """
    folder = options.get("root", "") + engines.place().lease
    ticket = Ticket(folder, options["run"], options["owner"], bool(options.get("wait")))
    with contextlib.closing(ticket):
        send({"proposed": ticket.number})
        said, heard = None, time.monotonic()
        for request in _requests(requests):
            if request is not None:
                heard = time.monotonic()
                ticket.hear(request)
                if "ping" in request:
                    send({"alive": True})
            elif time.monotonic() > heard + CALLER_SILENT_SECONDS:
                raise TimeoutError(f"the control machine has said nothing for {CALLER_SILENT_SECONDS} s")
            if ticket.committed:
                place = ticket.place()
                if _lasting(place) != said:
                    send(place)
                    said = _lasting(place)


def waiting(folder: str) -> list[dict[str, Any]]:
    """The live tickets of this host, in order: [{"run", "owner", "since": seconds, "state"}, ...].

    state: "undecided" (its place is not settled, or it has not decided whether to go), "waits", "starts".
    """
    if not os.path.isdir(_tickets(folder)):
        return []
    with _alone(folder):
        return [_shown(ticket) for ticket in _live(folder)]


class Ticket:
    """One start's ticket on this host, until `close` or the end of this process."""

    def __init__(self, folder: str, run: str, owner: str, wait: bool) -> None:
        self.folder = folder
        os.makedirs(_tickets(folder), mode=0o700, exist_ok=True)
        with _alone(folder):
            number = 1 + max([ticket["number"] for ticket in _live(folder)], default=0)
            self._path = os.path.join(_tickets(folder), f"ticket-{os.urandom(8).hex()}")
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._words: dict[str, Any] = {
                **{"run": run, "owner": owner, "wait": wait, "number": number},
                # All readers are processes of this host, whose monotonic clocks are one.
                **{"committed": False, "starts": False, "taken": time.monotonic()},
            }
            lease.lock(self._fd, 0)
            self._write()

    @property
    def number(self) -> int:
        """The number that this host proposes; from the commit on, the one that holds on all hosts."""
        return int(self._words["number"])

    @property
    def committed(self) -> bool:
        """Whether the number holds on all hosts."""
        return bool(self._words["committed"])

    def hear(self, request: dict[str, Any]) -> None:
        """Write down what the start says: {"commit": number}, {"starts": true}; anything else changes nothing."""
        if "commit" in request:
            self._words.update(number=request["commit"], committed=True)
        elif "starts" in request:
            self._words.update(starts=True)
        else:
            return
        with _alone(self.folder):
            self._write()

    def place(self) -> dict[str, Any]:
        """What `queue` sends of this ticket, which is committed, and of the lease."""
        with _alone(self.folder):
            ahead = [_shown(ticket) for ticket in _live(self.folder) if _order(ticket) < _order(self._words)]
        # The lease is looked at last: a start keeps its ticket until its lease is taken, so one of them is seen.
        return {"place": 1 + len(ahead), "ahead": ahead, "lease": lease.holder(self.folder)}

    def close(self) -> None:
        """Give the place back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._fd)

    def _write(self) -> None:
        """In place, as the lock is the file's. The folder's lock is held; a process that dies here loses its ticket."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(self._words).encode(), 0)


def _requests(fd: int) -> Iterator[dict[str, Any] | None]:
    """Each request; None after each PLACE_SECONDS without one. Ends with the input."""
    part = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(int(PLACE_SECONDS * 1000)):
            yield None
            continue
        got = os.read(fd, 1 << 16)
        if not got:
            return
        *lines, part = (part + got).split(b"\n")
        for line in lines:
            yield json.loads(line)


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """No other process is in here at the same time. Raises TimeoutError where one has stayed for ALONE_SECONDS."""
    fd = os.open(os.path.join(_tickets(folder), "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        begun = time.monotonic()
        while not lease.lock(fd, 0):
            if time.monotonic() > begun + ALONE_SECONDS:
                raise TimeoutError(f"a stopped process holds {_tickets(folder)}/lock")
            time.sleep(0.001)
        yield
    finally:
        os.close(fd)


def _live(folder: str) -> list[dict[str, Any]]:
    """The live tickets in order; removes those whose process has ended. The folder's lock is held."""
    found = []
    for name in os.listdir(_tickets(folder)):
        if name.startswith("ticket-"):
            with contextlib.suppress(FileNotFoundError):  # given back just now
                ticket = _read(os.path.join(_tickets(folder), name))
                if ticket is not None:
                    found.append(ticket)
    return sorted(found, key=_order)


def _read(path: str) -> dict[str, Any] | None:
    """A live ticket; one that is not is removed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if lease.is_locked(fd, 0):
            ticket: dict[str, Any] = json.loads(os.pread(fd, 1 << 16, 0))
            return ticket
        os.unlink(path)
        return None
    finally:
        os.close(fd)


def _order(ticket: dict[str, Any]) -> tuple[Any, ...]:
    return ticket["number"], ticket["run"]


def _shown(ticket: dict[str, Any]) -> dict[str, Any]:
    state = "starts" if ticket["starts"] else "waits" if ticket["wait"] and ticket["committed"] else "undecided"
    since = time.monotonic() - ticket["taken"]
    return {"run": ticket["run"], "owner": ticket["owner"], "since": since, "state": state}


def _lasting(place: dict[str, Any]) -> tuple[Any, ...]:
    """What of a place does not change by the mere passing of time."""
    return [(one["run"], one["state"]) for one in place["ahead"]], (place["lease"] or {}).get("run")


def _tickets(folder: str) -> str:
    return os.path.join(folder, "queue")
