"""Which hosts' firewalls a deploy changes, and how it is said when one cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from launch.cli.refusal import Refusal
from launch.deploy import firewalls
from launch.hosts.inventory import Host, Target


def hosts(**settings: dict[str, Any]) -> list[Host]:
    return [Host(Target(name, f"192.0.2.{number}"), own) for number, (name, own) in enumerate(settings.items(), 1)]


def facts(*addresses: str, firewalls: Any = None) -> dict[str, Any]:
    nic = {"name": "eno1", "refused": None, "speed_mbits": None, "mtu": 1500}
    listed = [{"address": one, "prefix": 24} for one in (*addresses, "fe80::1")]
    return {"nics": [{**nic, "addresses": listed}], "firewalls": firewalls}


def test_only_what_is_not_as_it_should_be_is_changed() -> None:
    three = hosts(h1={}, h2={}, h3={})
    known = {"h1": facts("10.0.0.1", "10.1.0.1"), "h2": facts("10.0.0.2"), "h3": facts("10.0.0.3", firewalls={})}

    def wanted(opened: Any) -> Any:
        return firewalls.unsettled(three, {**known, "h2": facts("10.0.0.2", firewalls=opened)})

    others = {"10.0.0.1": True, "10.1.0.1": True, "10.0.0.3": True}
    assert wanted(None) == wanted({}) == wanted({"ufw": others}) == {}
    for opened in ({}, {**others, "10.0.0.1": False}, {**others, "10.0.0.9": True}, None):
        assert wanted({"ufw": others, "firewalld": opened}) == {"h2": ["10.0.0.1", "10.0.0.3", "10.1.0.1"]}


def test_a_host_without_our_firewall_is_left_alone_but_for_what_we_have_opened() -> None:
    two = hosts(h1={"firewall": False}, h2={})

    def wanted(opened: Any) -> Any:
        return firewalls.unsettled(two, {"h1": facts("10.0.0.1", firewalls=opened), "h2": facts("10.0.0.2")})

    assert wanted({"ufw": {}}) == wanted({"ufw": None}) == {}
    assert wanted({"ufw": {"10.0.0.2": True}}) == {"h1": []}


class FakeMachine:
    """A host that says something, and can be reached anew or not."""

    def __init__(self, name: str, printed: str, reachable: bool = True) -> None:
        self.name, self.target, self.commands = name, Target(name, "192.0.2.1"), list[str]()
        self._printed, self._reachable = printed, reachable

    def root(self, command: str, timeout: float, stdin: Any) -> Any:
        return type("Done", (), {"stdout": self._printed, "stderr": "", "exited": 0})()

    def reconnect(self) -> None:
        if not self._reachable:
            raise OSError("no route to host")

    def answer(self, command: str, timeout: float) -> str:
        self.commands.append(command)
        return ""


def test_a_change_is_kept_by_who_logs_in_anew() -> None:
    said = 'muster:{"changed": ["ufw"], "undo": "/kept"}'
    there, gone = FakeMachine("h1", f"a profile's words\n{said}\n"), FakeMachine("h2", said, reachable=False)
    firewalls.close([there])  # type: ignore[list-item]
    assert there.commands == ["rm -r /kept"]
    broken = FakeMachine("h3", 'muster:{"error": "ufw could not be changed: it is broken"}')
    with pytest.raises(Refusal) as refusal:
        firewalls.close([there, gone, broken])  # type: ignore[list-item]
    assert [problem.where for problem in refusal.value.problems] == ["host h2", "host h3"]
    assert "it is broken" in refusal.value.problems[1].what and gone.commands == []
