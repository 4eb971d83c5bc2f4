"""Promise: a run starts on all its hosts or on none; its secrets travel to its hosts and stand in no document."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Any

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal, refuse
from launch.job.start import start
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, plan, refusal

hosts = fake_hosts.hosts


def two(hosts: dict[str, Host]) -> Any:
    return [hosts["h1"], hosts["h2"]]


def test_every_host_gets_the_plan_its_place_and_the_same_new_key(hosts: dict[str, Host]) -> None:
    for _ in range(2):
        start(two(hosts), plan(1, 2))
    asked = [options for host in two(hosts) for verb, options in host.asked if verb == "start"]
    assert [options["node_rank"] for options in asked] == [0, 0, 1, 1]
    assert all(options["plan"] == asdict(plan(1, 2)) for options in asked)
    keys = [options["key"] for options in asked]
    assert keys[0] == keys[2] != keys[1] == keys[3] and len(bytes.fromhex(keys[0])) == 32
    assert all(key not in json.dumps(options["plan"]) for key, options in zip(keys, asked, strict=True))


def test_no_rank_starts_before_all_hosts_have_and_nothing_speaks_against_it(hosts: dict[str, Host]) -> None:
    def permit() -> None:
        assert [host.verbs() for host in two(hosts)] == [["start"]] * 2

    start(two(hosts), plan(1, 1), permit=permit)
    assert [(host.verbs(), host.taken_back) for host in two(hosts)] == [(["start", "go"], 0)] * 2


def test_what_speaks_against_a_run_after_all_leaves_nothing_on_any_host(hosts: dict[str, Host]) -> None:
    def permit() -> None:
        raise refuse("host h1", "its GPU is busy", "wait", exits.UNREACHABLE)

    with pytest.raises(Refusal, match="its GPU is busy") as refused:
        start(two(hosts), plan(1, 1), permit=permit)
    assert refused.value.status == exits.UNREACHABLE and len(refused.value.problems) == 1
    assert [(host.verbs(), host.taken_back) for host in two(hosts)] == [(["start", "drop"], 1)] * 2
    hosts["h2"].answers["start"] = refusal("podman: no space left on device")
    with pytest.raises(Refusal, match=r"(?s)its GPU is busy.*h2: its container did not start") as refused:
        start(two(hosts), plan(1, 1), permit=permit)
    hosts["h1"].answers["start"] = refusal("podman: no such device")  # the same in other words
    with pytest.raises(Refusal) as refused:
        start(two(hosts), plan(1, 1), permit=permit)
    assert [problem.where for problem in refused.value.problems] == ["host h1", "host h2"]
    hosts["h2"].answers["start"] = OSError("no route to host")  # then it is not asked, which would only take time
    with pytest.raises(Refusal, match="no route to host") as refused:
        start(two(hosts), plan(1, 1), permit=permit)
    assert "its GPU is busy" not in str(refused.value) and refused.value.status == exits.FAILED


def test_ranks_that_cannot_all_be_let_go_are_ended(hosts: dict[str, Host]) -> None:
    hosts["h2"].goes = OSError("the SSH connection was lost")
    with pytest.raises(Refusal, match="h2: its container did not start: the SSH connection was lost") as refused:
        start(two(hosts), plan(1, 1))
    assert refused.value.status == exits.FAILED
    assert [host.verbs() for host in two(hosts)] == [["start", "go", "drop"], ["start", "drop"]]


def test_secrets_are_in_no_plan(hosts: dict[str, Host]) -> None:
    start(two(hosts), plan(1, 1), {"token": b"s3cret\x00"})
    for host in two(hosts):
        (_, options) = host.asked[0]
        assert options["secrets"] == {"token": base64.b64encode(b"s3cret\x00").decode()}
        assert "s3cret" not in json.dumps(options["plan"])


def test_one_host_that_does_not_start_leaves_nothing_on_any(hosts: dict[str, Host]) -> None:
    hosts["h2"].answers["start"] = refusal("podman: no space left on device")
    with pytest.raises(Refusal, match="host h2: its container did not start: podman: no space left") as refused:
        start(two(hosts), plan(1, 1))
    assert refused.value.status == exits.FAILED
    assert [host.verbs() for host in two(hosts)] == [["start", "drop"]] * 2  # the host that failed too: it may be late


def test_a_host_whose_connection_broke_is_asked_again_to_end_what_it_started(hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["start"] = EOFError("h1: the SSH connection was lost")
    broken: list[Exception] = [EOFError("h1: the SSH connection was lost")]

    def drop(options: dict[str, Any]) -> dict[str, Any]:
        if broken:
            raise broken.pop()
        return {"dropped": True}

    hosts["h1"].answers["drop"] = drop
    with pytest.raises(Refusal) as refused:
        start(two(hosts), plan(1, 1))
    assert "could not be ended" not in str(refused.value) and "no host was left running" in str(refused.value)
    assert hosts["h1"].verbs() == ["start", "drop", "drop"] and hosts["h1"].closed == 1


def test_what_could_not_be_ended_is_said(hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["start"] = TimeoutError("h1: no answer within 200 s")
    hosts["h1"].answers["drop"] = OSError("no route to host")
    with pytest.raises(Refusal, match=r"there could not be ended: no route(.|\n)*make stop") as refused:
        start(two(hosts), plan(1, 1))
    assert "no host was left running" not in str(refused.value)
    assert hosts["h2"].verbs() == ["start", "drop"]
