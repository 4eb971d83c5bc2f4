"""Promises of the heartbeats: they come at once and again, from keepers of the same run alone, and outlive a link."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keeper import beats as heartbeats
from keeper.beats import LONGEST_LINE, RETRY_SECONDS, STUCK_SECONDS, Beats, signed
from tests.processes import GUARD_SECONDS

KEY = b"a key of this run"
OWN, OTHER = "127.0.0.1", "127.0.0.2"

Heard = queue.Queue[tuple[str, Any]]


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as made:
        port: int = made.getsockname()[1]
        return port


class Pair:
    """h1 as Beats; h2 by hand or as Beats."""

    def __init__(self) -> None:
        self.port, self.other_port = free_port(OWN), free_port(OTHER)
        self.heard: Heard = queue.Queue()
        self.refused: queue.Queue[str] = queue.Queue()
        self.made: list[Beats] = []

    def h1(self) -> Beats:
        return self._beats("h1", (OWN, self.port), {"h2": (OTHER, self.other_port)})

    def h2(self, key: bytes = KEY, run: str = "run") -> Beats:
        return self._beats("h2", (OTHER, self.other_port), {"h1": (OWN, self.port)}, key, run, lambda host, words: None)

    def _beats(
        self,
        me: str,
        own: tuple[str, int],
        others: dict[str, tuple[str, int]],
        key: bytes = KEY,
        run: str = "run",
        heard: Callable[[str, Any], None] | None = None,
    ) -> Beats:
        take = heard or (lambda host, words: self.heard.put((host, words)))
        made = Beats(run, me, key, own, others, take, self.refused.put)
        self.made.append(made)
        return made

    def send(self, *lines: bytes) -> socket.socket:
        made = socket.create_connection((OWN, self.port))
        for line in lines:
            made.sendall(line)
        return made

    def line(self, number: int, words: Any, **other: str) -> bytes:
        return signed(KEY, {"run": "run", "from": "h2", "to": "h1", "number": number, "words": words} | other)

    def nothing_heard(self) -> bool:
        with contextlib.suppress(queue.Empty):
            self.heard.get(timeout=0.3)
            return False
        return True


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for beats in made.made:
        beats.close()


@pytest.mark.slow
def test_words_come_at_once_and_again_each_second(pair: Pair) -> None:
    pair.h1()
    pair.h2().tell({"step": 1})
    times = []
    for _ in range(5):
        assert pair.heard.get(timeout=GUARD_SECONDS) == ("h2", {"step": 1})
        times.append(time.monotonic())
    assert times[4] - times[0] > 1.0  # about 4 s, but where this process or the sender has to wait for a processor


def test_new_words_do_not_wait_for_their_second(pair: Pair) -> None:
    pair.h1()
    sender = pair.h2()
    for step in range(5):
        sender.tell({"step": step})
        while pair.heard.get(timeout=GUARD_SECONDS) != ("h2", {"step": step}):
            pass


def test_a_host_that_starts_later_is_heard_and_until_then_it_refuses(pair: Pair) -> None:
    pair.h1().tell({})
    assert pair.refused.get(timeout=GUARD_SECONDS) == "h2"
    pair.h2().tell({"step": 1})
    assert pair.heard.get(timeout=GUARD_SECONDS)[0] == "h2"


def test_a_keeper_that_was_told_nothing_waits_without_computing(pair: Pair) -> None:
    pair.h1()
    pair.h2()
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.25


@pytest.mark.slow
@pytest.mark.parametrize(("key", "run"), [(b"another key", "run"), (KEY, "another run")])
def test_keepers_of_another_run_are_not_heard(pair: Pair, key: bytes, run: str) -> None:
    pair.h1()
    pair.h2(key, run).tell({"step": 1})
    time.sleep(3 * RETRY_SECONDS)
    assert pair.nothing_heard()


@pytest.mark.parametrize(
    "line",
    [
        b"not even a line\n",
        b"x" * (LONGEST_LINE + 10),
        b"\xff\xfe {}\n",
        signed(KEY, {"run": "run"}),
    ],
)
def test_what_is_no_heartbeat_ends_its_connection_and_nothing_else(pair: Pair, line: bytes) -> None:
    pair.h1()
    with pair.send(line) as made:
        made.settimeout(GUARD_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert made.recv(1) == b""
    with pair.send(pair.line(1, "still here")):
        assert pair.heard.get(timeout=GUARD_SECONDS) == ("h2", "still here")


@pytest.mark.slow
def test_a_line_that_was_changed_on_its_way_does_not_count(pair: Pair) -> None:
    pair.h1()
    with pair.send(pair.line(1, "true").replace(b"true", b"lies")):
        assert pair.nothing_heard()


def test_old_lines_do_not_overtake_newer_ones(pair: Pair) -> None:
    pair.h1()
    with pair.send(pair.line(2, "new")):
        assert pair.heard.get(timeout=GUARD_SECONDS) == ("h2", "new")
    with pair.send(pair.line(1, "old"), pair.line(2, "again")):
        assert pair.nothing_heard()


def test_lines_for_another_host_do_not_count(pair: Pair) -> None:
    pair.h1()
    with pair.send(pair.line(1, "for h3", to="h3")):
        assert pair.nothing_heard()


@pytest.mark.slow
def test_a_receiver_that_takes_nothing_is_connected_anew(pair: Pair) -> None:
    with socket.create_server((OTHER, pair.other_port)) as server:
        pair.h1().tell({"long": "x" * (LONGEST_LINE - 200)})
        server.settimeout(GUARD_SECONDS)
        stuck, _ = server.accept()  # and is never read
        again, _ = server.accept()
        again.settimeout(GUARD_SECONDS)
        assert again.recv(100)
        stuck.close()
        again.close()
    assert STUCK_SECONDS < 5


@pytest.mark.slow
def test_a_keeper_that_says_nothing_new_for_long_falls_silent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread hangs: the others shall not take it for a host that keeps its run."""
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "HUNG_SECONDS", 1.0)
    other = pair.h2()
    pair.h1()
    other.tell("running")
    assert pair.heard.get(timeout=GUARD_SECONDS) == ("h2", "running")
    deadline = time.monotonic() + GUARD_SECONDS
    while not pair.nothing_heard():
        assert time.monotonic() < deadline
    other.tell("again")
    while pair.heard.get(timeout=GUARD_SECONDS) != ("h2", "again"):
        pass  # a sender that waits for a processor is silent, too
