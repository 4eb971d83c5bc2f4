"""Promise: what ranks print arrives once and whole, however often the connection drops; a slow reader holds it up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from launch.hosts import ssh
from launch.hosts.door import Frame
from launch.job import follow
from launch.job.follow import Follower
from tests.launch import fake_hosts
from tests.launch.fake_hosts import DROP, Host, end, output, refusal, state
from tests.processes import GUARD_SECONDS

hosts = fake_hosts.hosts


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AGAIN_SECONDS", 0.0)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def followed(host: Host, tail: int | None = None) -> tuple[Follower, list[bytes]]:
    """A host's stream to its end, and what was shown of it."""
    shown: list[bytes] = []
    follower = Follower("some-run", [host.view()], lambda name, stream, data: shown.append(data), tail)
    follower.start()
    until(lambda: not follower.waiting)
    return follower, shown


def messages(follower: Follower) -> list[str]:
    found = []
    while not follower.heard.empty():
        found.append(follower.heard.get().what)
    return found


def test_a_dropped_connection_neither_loses_nor_repeats_a_byte(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(output("rank-0", 0, b"one\ntw"), DROP, DROP, output("rank-0", 6, b"o\n"), end())
    follower, shown = followed(host)
    assert shown == [b"one\ntw", b"o\n"]
    assert [asked["offsets"] for asked in host.follows] == [{}, {"rank-0": 6}, {"rank-0": 6}]
    assert messages(follower) == ["lost", "back", "end"]  # said once, however many attempts it takes


def test_what_was_shown_already_is_not_shown_again(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(output("rank-0", 0, b"one\n"), DROP, output("rank-0", 0, b"one\ntwo\n"), end())
    assert followed(host)[1] == [b"one\n", b"two\n"]


def test_a_stream_that_begins_while_there_is_no_view_comes_from_its_first_byte(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(output("rank-0", 500, b"last\n"), DROP, output("rank-1", 0, b"first\n"), end())
    followed(host, tail=20)
    assert [asked["tail"] for asked in host.follows] == [20, None]


def test_where_a_stream_begins_is_kept_even_if_nothing_was_printed_there(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(output("rank-0", 500, b""), DROP, output("rank-0", 500, b"new\n"), end())
    followed(host, tail=20)
    assert host.follows[1]["offsets"] == {"rank-0": 500}


def test_events_in_pieces_are_read_once(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(
        output("events", 0, b'{"event": "lease"}\n{"eve'), DROP, output("events", 24, b'nt": "started"}\n'), end()
    )
    follower, _ = followed(host)
    assert [event["event"] for event in follower.views["h1"].events] == ["lease", "started"]


def test_what_was_dropped_on_the_host_is_reported(hosts: dict[str, Host]) -> None:
    skipped = Frame({"skipped": "rank-0", "offset": 4, "to": 900}, b"")
    host = hosts["h1"].say(output("rank-0", 0, b"one\n"), skipped, DROP, output("rank-0", 900, b"two\n"), end())
    follower, shown = followed(host)
    assert shown == [b"one\n", b"two\n"] and "skipped" in messages(follower)
    assert host.follows[1]["offsets"] == {"rank-0": 900}


def test_a_host_that_cannot_be_reached_is_tried_again_for_ever(
    hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, attempts = hosts["h1"].say(DROP, end()), [0]

    def connect(target: Any, known_hosts: Any) -> Any:
        attempts[0] += 1
        if attempts[0] < 50:
            raise OSError("no route to host")
        return host

    monkeypatch.setattr(ssh, "connect", connect)
    follower, _ = followed(host)
    assert attempts[0] == 50 and messages(follower) == ["lost", "back", "end"]


def test_the_hosts_own_words_do_not_cost_the_connection(hosts: dict[str, Host]) -> None:
    host = hosts["h1"].say(refusal("sudo: a password is required"), end())
    follower, _ = followed(host)
    assert host.closed == 0 and messages(follower)[0] == "lost"


def test_while_nothing_can_be_shown_nothing_is_read(hosts: dict[str, Host]) -> None:
    host, room = hosts["h1"], threading.Event()
    host.say(*(output("rank-0", 10 * number, b"0123456789") for number in range(100)), end())
    shown: list[bytes] = []

    def show(name: str, stream: str, data: bytes) -> None:
        shown.append(data)
        room.wait(60)

    follower = Follower("some-run", [host.view()], show)
    follower.start()
    until(lambda: shown)
    assert len(shown) == 1 and host.frames.qsize() == 100  # all others are still the host's
    assert follower.views["h1"].answers()  # it is this side that waits
    room.set()
    until(lambda: not follower.waiting)
    assert b"".join(shown) == b"0123456789" * 100


def test_whether_a_host_answers_is_known_by_its_states(hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower("some-run", [hosts["h1"].view()], None)
    follower.start()
    view = follower.views["h1"]
    assert not view.answers()
    hosts["h1"].say(state(rank_0={"phase": "training", "step": 3}))
    until(lambda: view.state)
    assert view.answers() and hosts["h1"].follows[0]["streams"] == "events"
    monkeypatch.setattr(follow, "SILENT_SECONDS", 0.0)
    assert not view.answers()
    follower.leave()
    until(lambda: not any(thread.is_alive() for thread in follower._threads))
    assert not view.ended
