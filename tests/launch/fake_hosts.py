"""Hosts with doors, for tests of the control side: what each door answers is in the test's hands, step by step."""

from __future__ import annotations

import base64
import json
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.hosts import door, ssh
from launch.hosts.door import DoorError, Frame
from launch.hosts.inventory import Target
from launch.job import follow, start
from launch.job.follow import View
from launch.job.plan import Options, Plan, Ports, make_plan
from tests.launch.samples import cluster
from tests.processes import GUARD_SECONDS


def ports(hosts: int) -> Ports:
    """Free ports of so many hosts."""
    return Ports(29500, 29501, tuple(range(29400, 29400 + hosts)))


def plan(*nprocs: int, run: str = "some-run", **options: Any) -> Plan:
    """A plan with one host for each number of ranks."""
    return make_plan(
        cluster(*nprocs), Options(**options), run, ports(len(nprocs)), "me@here", "2026-01-01T00:00:00+00:00"
    )


def output(stream: str, offset: int, data: bytes) -> Frame:
    """A piece of a stream."""
    return Frame({"stream": stream, "offset": offset, "bytes": len(data)}, data)


def state(beat: dict[str, Any] | None = None, **ranks: Any) -> Frame:
    """A host's state, which it gives each second: `state(rank_0={"phase": "saving"})`."""
    words = {name.removeprefix("rank_"): {"state": "running", **words} for name, words in ranks.items()}
    more = {"beat": beat} if beat else {}
    return Frame({"state": {"status": "running", "ranks": words, "waiting": "", **more}}, b"")


def cause(
    host: str, kind: str = "rank", rank: int | None = None, reason: str = "killed by SIGKILL", **more: Any
) -> Any:
    """A cause as keepers tell it."""
    plain = {"kind": kind, "host": host, "rank": rank, "reason": reason, "other": "", "consequence": False}
    return {**plain, "lines": [], "age": 0.0, **more}


def exit_words(status: str = "succeeded", *causes: Any, **more: Any) -> dict[str, Any]:
    """An exit.json."""
    first = next(iter(causes), None)
    words = {"status": status, "exit_status": 0, "cause": first, "causes": list(causes), "stop": None, "failures": []}
    return {**words, "seconds": 10.0, "time": 0.0, **more}


def end(status: str = "succeeded", *causes: Any, **more: Any) -> Frame:
    """The last frame of a run that ended with its keeper's word."""
    return Frame({"end": exit_words(status, *causes, **more), "container": None}, b"")


def died(**container: Any) -> Frame:
    """The last frame of a run whose keeper left no word."""
    return Frame({"end": None, "container": {"Status": "exited", **container}}, b"")


DROP = EOFError("the SSH connection was lost")


class Host:
    """One host. `say` puts frames, or an exception, into the stream that follows the run there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.target = Target(name, f"192.0.2.{name[1:]}")
        self.known_hosts = Path("known_hosts")
        self.frames: queue.SimpleQueue[Frame | Exception] = queue.SimpleQueue()
        self.follows: list[dict[str, Any]] = []  # the options of each `follow`
        self.said: list[dict[str, Any]] = []  # what these were sent while they went on
        self.asked: list[tuple[str, dict[str, Any]]] = []  # every other verb, with its options
        self.answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]] | Exception] = {
            "stop": lambda options: {"asked": True},
            "start": lambda options: {"started": "c0ffee"},
            "private": lambda options: {"key": "ab12", "secrets": {}},
            "rejoin": lambda options: {"rejoined": "c0ffee"},
            "drop": lambda options: {"documents": {}},
            "offer": lambda options: {"exit": {}, "container": None, "node_rank": 0, "written": []},
            "seal": lambda options: {"left": {}, "cleared": True, "removed": []},
            "runs": lambda options: {"runs": [], "lease": None, "queue": [], "time": 0},
        }
        self.closed = 0
        self.goes: Exception | None = None  # what comes of letting its ranks start
        self.taken_back = 0  # starts that were hung up before

    def say(self, *frames: Frame | Exception) -> Host:
        for frame in frames:
            self.frames.put(frame)
        return self

    def view(self) -> View:
        made: Any = self
        return View(self.target, self.known_hosts, made)

    def verbs(self) -> list[str]:
        """The verbs that were asked, in order."""
        return [verb for verb, _ in self.asked]

    def reconnect(self) -> None:
        ssh.connect(self.target, self.known_hosts)
        self.close()

    def close(self) -> None:
        self.closed += 1


class FakeDoor:
    """In the place of launch.hosts.door.Door."""

    def __init__(self, machine: Any, verb: str, options: dict[str, Any]) -> None:
        assert verb == "follow"
        self._host: Host = machine
        self._host.follows.append(json.loads(json.dumps(options)))
        self._closed = threading.Event()

    def send(self, words: dict[str, Any]) -> None:
        self._host.said.append(json.loads(json.dumps(words)))

    def frames(self, idle_timeout: float | None) -> Iterator[Frame]:
        while True:
            if self._closed.is_set():
                raise EOFError("closed")
            try:
                frame = self._host.frames.get(timeout=0.01)
            except queue.Empty:
                continue
            if isinstance(frame, Exception):
                raise frame
            yield frame
            if "end" in frame.words:
                return

    def close(self) -> None:
        self._closed.set()


class FakeStart:
    """In the place of launch.hosts.door.Door for a start, which waits for the word to go."""

    def __init__(self, machine: Any, verb: str, options: dict[str, Any]) -> None:
        assert (verb, options) == ("start", {})
        self._host: Host = machine
        self._words: dict[str, Any] = {}
        self._gone = self._closed = False

    def __enter__(self) -> FakeStart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._words and not self._gone and not self._closed:
            self._host.taken_back += 1
        self._closed = True

    def send(self, words: dict[str, Any]) -> None:
        if words != {"go": True}:
            common = json.loads(zlib.decompress(base64.b64decode(words["packed"])))
            self._words = ask(self._host, "start", {**common, "node_rank": words["node_rank"]})
        elif isinstance(self._host.goes, Exception):
            raise self._host.goes
        else:
            self._gone = True
            self._host.asked.append(("go", {}))

    def frames(self, idle_timeout: float | None) -> Iterator[Frame]:
        yield Frame(self._words, b"")
        assert self._gone
        yield Frame({"went": True}, b"")


def ask(machine: Any, verb: str, options: dict[str, Any], timeout: float = 0) -> dict[str, Any]:
    """In the place of launch.hosts.door.ask."""
    host: Host = machine
    host.asked.append((verb, dict(options)))
    answer = host.answers[verb]
    if isinstance(answer, Exception):
        raise answer
    return answer(options)


def refusal(words: str) -> DoorError:
    """A host's own words why it did not do what was asked."""
    return DoorError(words, {"error": words})


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Host]:
    """Three hosts, h1 to h3; what connects to one of them finds it."""
    made = {name: Host(name) for name in ("h1", "h2", "h3")}
    monkeypatch.setattr(follow, "Door", FakeDoor)
    monkeypatch.setattr(start, "Door", FakeStart)
    monkeypatch.setattr(door, "ask", ask)
    monkeypatch.setattr(ssh, "connect", lambda target, known_hosts: made[target.name])
    monkeypatch.setattr(follow, "Machine", lambda target, known_hosts, connection: connection)
    return made


def when(condition: Callable[[], object], do: Callable[[], object]) -> threading.Thread:
    """Do something, in another thread, once something is so."""

    def wait() -> None:
        deadline = time.monotonic() + GUARD_SECONDS
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread
