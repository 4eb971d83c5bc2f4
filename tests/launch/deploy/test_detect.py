"""Promise: deploy goes on only when every host has answered and no fact forbids training; a refusal names each host."""

from __future__ import annotations

import pytest

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.deploy import detect
from launch.hosts.hostcall import Answer
from launch.hosts.inventory import Host, Target
from tests.launch.samples import facts, nic


def host(name: str) -> Host:
    return Host(Target(name, f"192.0.2.{name[1:]}"), {})


def test_every_host_that_did_not_answer_is_named_with_its_reason() -> None:
    answer = Answer({}, None, None, None, 0.0, 0.0)
    assert detect._all_answers({"h1": answer}) == {"h1": answer}
    lost = {"h2": TimeoutError("no answer within 60 s"), "h3": RuntimeError("`ip -j -d addr show` failed")}
    with pytest.raises(Refusal) as caught:
        detect._all_answers({"h1": answer, **lost})
    said = str(caught.value)
    assert "h2" in said and "no answer within 60 s" in said and "h3" in said and "`ip -j -d addr show` failed" in said
    assert caught.value.status == exits.DEPLOY_FAILED and "h1" not in said


def test_a_machine_under_two_names_and_a_broken_gpu_are_refused_at_once() -> None:
    hosts = [host("h1"), host("h2"), host("h3")]
    known = {
        "h1": facts(nic("eno1", "10.0.0.1/24", mac="02:00:00:00:00:01")),
        "h2": facts(nic("eth0", "10.0.0.1/24", mac="02:00:00:00:00:01")),
        "h3": facts(nic("eth0", "10.0.0.3/24", mac="02:00:00:00:00:03"), problem="driver mismatch"),
    }
    with pytest.raises(Refusal) as caught:
        detect.check_facts(hosts, known)
    assert "h2: is the same machine as h1" in str(caught.value) and "driver mismatch" in str(caught.value)
