"""Promise: a host whose keeper is gone gets it back while the run goes on elsewhere, or it is said why it does not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from launch.job import follow
from launch.job.follow import Follower
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, died, end, output, refusal, state
from tests.launch.job.test_follow import until

hosts = fake_hosts.hosts

GOES_ON = {"restarts": 3, "attempt": {"number": 1}, "over": None, "stop": None}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AGAIN_SECONDS", 0.0)


def followed(hosts: dict[str, Host], beat: dict[str, Any], rejoins: int, *then: Any) -> list[tuple[str, Any]]:
    """The keeper of h1 is gone, while h2 says this; `then` is what h1's stream says afterwards."""
    views = [hosts[name].view() for name in ("h1", "h2")]
    follower = Follower("some-run", views, lambda *shown: None, rejoins=rejoins)
    hosts["h2"].say(state(beat))
    others = set(threading.enumerate())  # of other tests
    follower.start()
    (thread,) = (one for one in set(threading.enumerate()) - others if one.name == "follow-h1")
    until(lambda: views[1].state)
    hosts["h1"].say(output("rank-0", 0, b"one\n"), died(ExitCode=137), *then)
    until(lambda: not thread.is_alive())  # nothing more comes from it
    hosts["h2"].say(end())
    until(lambda: not follower.waiting)
    found = []
    while not follower.heard.empty():
        heard = follower.heard.get()
        found.append((heard.host, heard.what if heard.what != "gone" else heard.words["reason"]))
    return found


def test_a_keeper_that_is_gone_is_started_again_and_followed_from_where_it_was(hosts: dict[str, Host]) -> None:
    found = followed(hosts, GOES_ON, 2, state(GOES_ON), end())
    assert [what for host, what in found if host == "h1"] == ["end", "rejoined", "end"]
    assert hosts["h2"].asked == [("private", {"run": "some-run"})]
    assert hosts["h1"].asked == [("rejoin", {"run": "some-run", "key": "ab12", "secrets": {}})]
    assert [asked["offsets"] for asked in hosts["h1"].follows] == [{}, {"rank-0": 4}]


@pytest.mark.parametrize(
    ("beat", "rejoins"),
    [
        (GOES_ON, 0),
        ({**GOES_ON, "restarts": 0}, 2),
        ({**GOES_ON, "attempt": {"number": 4}}, 2),  # there is none after it
        ({**GOES_ON, "restarts": -3}, 2),  # a script that has not said that it can go on
        ({**GOES_ON, "stop": {"by": "ann"}}, 2),
        ({**GOES_ON, "over": {"status": "succeeded"}}, 2),
    ],
)
def test_it_is_not_where_the_run_does_not_go_on(hosts: dict[str, Host], beat: dict[str, Any], rejoins: int) -> None:
    found = followed(hosts, beat, rejoins)
    assert [what for host, what in found if host == "h1"] == ["end"] and not hosts["h1"].asked


def test_it_is_said_why_it_is_not_there_again(hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["rejoin"] = refusal("run r2 of bob@desk is in progress there")
    assert ("h1", "run r2 of bob@desk is in progress there") in followed(hosts, GOES_ON, 2)


def test_a_run_that_no_host_has_any_more_is_not_joined(hosts: dict[str, Host]) -> None:
    hosts["h2"].answers["private"] = refusal("the run ends here")
    assert ("h1", "the run ends here") in followed(hosts, GOES_ON, 2)
    assert not hosts["h1"].asked


def test_a_keeper_that_ends_again_and_again_is_left(hosts: dict[str, Host]) -> None:
    found = followed(hosts, GOES_ON, 2, died(ExitCode=1), died(ExitCode=1))
    assert [what for host, what in found if host == "h1"] == ["end", "rejoined", "end", "rejoined", "end"]
