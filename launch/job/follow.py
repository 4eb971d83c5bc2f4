"""What happens on the hosts of a run, read through their doors: output, events, states and ends. Prints nothing.

Each host has a thread, which reads one stream of its door and opens it again whenever it breaks, from the offsets that
it has reached: nothing comes twice, nothing is missed, and the run does not notice. Output is handed on by that thread
itself; while it cannot be shown the thread reads nothing, and the door on the host waits.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.hosts import ssh
from launch.hosts.connection import Machine
from launch.hosts.door import Door, Frame
from launch.hosts.inventory import Target
from launch.job.outcome import HostEnd
from launch.job.rejoin import can_go_on, rejoin
from launch.job.witness import Witness

IDLE_SECONDS = 30.0  # without a frame, of which a run in progress gives one each second, a door is opened anew
SILENT_SECONDS = 5.0  # without a frame a host counts as one that does not answer
KEEPER_SILENT_SECONDS = 5.0  # without a word of its keeper, which gives one each second, that one counts as stuck
AGAIN_SECONDS = 2.0  # between two attempts to reach a host

Show = Callable[[str, str, bytes], None]  # host, stream ("rank-3", "torchrun"), output


@dataclass(frozen=True)
class Heard:
    """Something about a host. what: "event" (words: the event), "skipped", "end", "lost" (reason), "back", "rejoined"
    (its keeper was gone, and is there again), "gone" (reason: why it is not)."""

    host: str
    what: str
    words: Mapping[str, Any] = field(default_factory=dict)


class View:
    """What is known of one host of the run; its thread writes it, all may read it."""

    def __init__(self, target: Target, known_hosts: Path, machine: Machine | None) -> None:
        self.target = target
        self.known_hosts = known_hosts
        self.machine = machine  # None: not connected
        self.door: Door | None = None
        self.offsets: dict[str, int] = {}
        self.state: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.exit: dict[str, Any] | None = None
        self.container: dict[str, Any] = {}
        self.ended = False
        self.lost = False  # whether it was said that there is no view of it
        self.earlier: set[str] = set()  # streams whose next piece was printed before there was a view
        self.showing = False  # whether its output waits to be shown
        self.heard_at: float | None = None  # time.monotonic() of its last word
        self.news_at: float | None = None  # of its keeper's last word, which gives one each second
        self._part = b""  # of an event's line

    @property
    def host(self) -> str:
        return self.target.name

    def answers(self) -> bool:
        """Whether the host answers over SSH: it has said something a moment ago."""
        if self.ended or self.showing:
            return True
        return not self.lost and self.heard_at is not None and time.monotonic() - self.heard_at < SILENT_SECONDS

    def is_stuck(self) -> bool:
        """Whether its keeper says nothing any more, though the host answers."""
        return self.stuck_seconds() > 0

    def stuck_seconds(self) -> float:
        """For how long its keeper has said nothing, where it is stuck; else 0."""
        if self.ended or self.showing or self.news_at is None or not self.answers():
            return 0.0
        silent = time.monotonic() - self.news_at
        return silent if silent > KEEPER_SILENT_SECONDS else 0.0

    def end(self) -> HostEnd:
        """What is known of how the run ended there."""
        known = (self.host, self.exit, tuple(self.events), self.container)
        return HostEnd(*known, self.answers(), self.ended, self.is_stuck())

    def new_events(self, data: bytes) -> list[dict[str, Any]]:
        """The events whose lines end in `data`, the next piece of events.jsonl."""
        *lines, self._part = (self._part + data).split(b"\n")
        found = [json.loads(line) for line in lines if line]
        self.events += found
        return found


class Follower:
    """Follows every host of a run from `start` until its end or `leave`."""

    def __init__(
        self,
        run: str,
        views: Sequence[View],
        show: Show | None,
        tail: int | None = None,
        show_earlier: Show | None = None,
        witness: Witness | None = None,
        rejoins: int = 0,
    ) -> None:
        """show: takes output, in the host's thread; None: it is not wanted. tail: of earlier output so many lines.

        show_earlier: takes these; None: `show` does. witness: votes with the run's keepers while they are followed.
        rejoins: so often a host's keeper that is gone is started again while the run goes on.
        """
        self.run = run
        self.views = {view.host: view for view in views}
        self.heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._show = show
        self._show_earlier = show_earlier or show
        self._tail = tail
        self._witness = witness
        self._rejoins = dict.fromkeys(self.views, rejoins)
        self._left = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(view,), daemon=True, name=f"follow-{view.host}")
            for view in views
        ]

    def start(self) -> None:
        """Start the threads. A signal must not interrupt that."""
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Read no more. The hosts notice; nothing happens to the run."""
        self._left.set()
        for view in self.views.values():
            if view.door:
                view.door.close()

    @property
    def waiting(self) -> list[View]:
        """The hosts on which the run has not ended, as far as is known."""
        return [view for view in self.views.values() if not view.ended]

    def _tell(self, view: View, what: str, words: Mapping[str, Any] | None = None) -> None:
        self.heard.put(Heard(view.host, what, words or {}))

    def _follow(self, view: View) -> None:
        while not (self._left.is_set() or view.ended):
            try:
                self._read(view)
                if view.ended:
                    if not self._rejoin(view):
                        return
                    view.ended = False
                    continue
                reason = "the connection ended"
            except Exception as error:  # whatever it is: the run goes on, and so does the attempt to see it
                reason = str(error) or type(error).__name__
                if self._left.is_set():  # what is left here may be asked for something else
                    return
                if not isinstance(error, RuntimeError) and view.machine:  # RuntimeError: the host's own words
                    view.machine.close()
                    view.machine = None
            if not view.lost:
                view.lost = True
                self._tell(view, "lost", {"reason": reason})
            self._left.wait(AGAIN_SECONDS)

    def _rejoin(self, view: View) -> bool:
        """Start a host's keeper again that has gone without a word while the run goes on; whether it is there."""
        others = [one for one in self.views.values() if one.machine and one.answers() and not one.ended]
        others = [one for one in others if can_go_on(one.state)]
        if view.exit is not None or view.machine is None or not others or not self._rejoins[view.host]:
            return False
        self._rejoins[view.host] -= 1
        try:
            rejoin(self.run, view.machine, [one.machine for one in others if one.machine])
        except Exception as error:
            self._tell(view, "gone", {"reason": str(error) or type(error).__name__})
            return False
        self._tell(view, "rejoined")
        return True

    def _read(self, view: View) -> None:
        """Read a host's stream until it ends or breaks."""
        if view.machine is None:
            connection = ssh.connect(view.target, view.known_hosts)
            view.machine = Machine(view.target, view.known_hosts, connection)
        # Only at first: a stream that begins while there is no view is wanted from its first byte.
        tail = self._tail if view.heard_at is None else None
        options = {"run": self.run, "offsets": view.offsets, "tail": tail}
        if self._show is None:
            options["streams"] = "events"
        if self._witness:
            options["witness"] = self._witness.id
        view.door = door = Door(view.machine, "follow", options)
        try:
            for frame in door.frames(IDLE_SECONDS):
                if self._left.is_set():
                    return
                self._take(view, frame)
                if view.ended:
                    return
        finally:
            door.close()

    def _take(self, view: View, frame: Frame) -> None:
        view.heard_at = time.monotonic()
        if "alive" not in frame.words:
            view.news_at = view.heard_at
        if view.lost:
            view.lost = False
            self._tell(view, "back")
        words = frame.words
        if "stream" in words:
            self._take_data(view, str(words["stream"]), int(words["offset"]), frame.data)
        elif "skipped" in words:
            view.offsets[words["skipped"]] = int(words["to"])
            self._tell(view, "skipped", words)
        elif "state" in words:
            view.state = words["state"] or {}
            if self._witness and view.door and (said := self._witness.answer(view.host, view.state)):
                view.door.send(said)
        elif "end" in words:
            view.exit, view.container = words["end"], words.get("container") or {}
            view.ended = True
            self._tell(view, "end")

    def _take_data(self, view: View, stream: str, offset: int, data: bytes) -> None:
        if not data and stream not in view.offsets:  # a tail begins there
            view.earlier.add(stream)
        known, end = view.offsets.get(stream, offset), offset + len(data)
        data = data[max(0, known - offset) :]  # without what an earlier connection has brought
        if stream == "events":
            for event in view.new_events(data):
                self._tell(view, "event", event)
        elif self._show and self._show_earlier:
            show = self._show_earlier if stream in view.earlier else self._show
            if data:
                view.earlier.discard(stream)
            view.showing = True
            try:
                show(view.host, stream, data)
            finally:
                view.showing = False
                view.heard_at = time.monotonic()
        view.offsets[stream] = max(known, end)
