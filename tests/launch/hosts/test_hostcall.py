"""Promise: one SSH call asks every host all there is to ask, brings the hosts together, and leaves nothing behind.

Hosts are processes of this machine, with addresses of their own in 127.0.0.0/8, run by Invoke as Fabric runs them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoke.context import Context
from invoke.exceptions import ThreadException
from invoke.util import ExceptionWrapper

from launch.hosts import clustermap, hostcall, ssh
from launch.hosts.hostcall import Answer
from launch.hosts.inventory import Target
from launch.network import measure
from launch.network.measure import NetworkAddresses

SECONDS = 300.0  # for the hosts to meet, and for their answers: more than a busy machine needs


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no start of Python."""
    monkeypatch.setattr(hostcall, "MEET_SECONDS", SECONDS)


class Host:
    """A machine that is this one. `first`: what stands on standard input before what is sent."""

    def __init__(self, name: str, python: str = sys.executable, first: str = "") -> None:
        self.name, self.first = name, first
        self.target = type("Target", (), {"python": python})

    def root(self, command: str, timeout: float, out: Any, stdin: ssh.Input) -> Any:
        if self.first:
            stdin.first(self.first)
        words = f"cd / && {command}"  # no file of ours is on its path
        return Context().run(words, in_stream=stdin, out_stream=out, hide=True, warn=True, timeout=timeout)


def script(path: Path, text: str) -> str:
    """A Python of a host that is a shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def ask(hosts: Sequence[Host], net: str, say: Any = lambda text: None, **more: Any) -> dict[str, Any]:
    """All hosts try each other on one address each."""
    names = [host.name for host in hosts]
    addresses = {name: [f"127.45.{net}.{number}"] for number, name in enumerate(names, 1)}
    meetings = hostcall.meetings(addresses)
    options = {
        name: {"meeting": meetings[name], "reach": {peer: addresses[peer] for peer in names if peer != name}, **more}
        for name in names
    }
    machines: Any = list(hosts)
    return hostcall.call_hosts(machines, options, SECONDS, say)


def listening(net: str) -> list[str]:
    found = subprocess.run(["ss", "-Htln"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if f"127.45.{net}." in line]


def test_hosts_say_what_they_are_and_whom_they_reach_and_leave() -> None:
    answers = ask([Host("h1"), Host("h2"), Host("h3")], "1", survey={"engine": False, "root": "/"})
    for name, answer in answers.items():
        assert isinstance(answer, Answer) and answer.reach is not None and answer.survey is not None
        assert [result["ok"] for result in answer.reach] == [True, True], name
        assert answer.survey["cpus"] >= 1 and answer.links is None
        assert abs(answer.clock_offset) <= answer.clock_error < SECONDS
    assert listening("1") == []


@pytest.mark.slow
def test_links_are_measured_and_their_progress_is_counted() -> None:
    addresses = {"h1": "127.45.2.1", "h2": "127.45.2.2", "h3": "127.45.2.3"}
    network = NetworkAddresses("data", addresses, dict.fromkeys(addresses, 1500))
    machines: Any = [Host(name) for name in addresses]
    measured, _ = measure.measure(machines, [network], 0, lambda text: None)
    found = measured["data"]
    assert len(found) == 6 and all(link.error is None and link.path_mtu == 1500 for link in found)


@pytest.mark.slow
def test_hosts_check_a_sample_of_their_pairs_and_all_meet_the_first_one() -> None:
    addresses = {f"h{number}": f"127.45.6.{number}" for number in range(1, 8)}
    network = NetworkAddresses("data", addresses, dict.fromkeys(addresses, 1500))
    asked, machines = measure.options(list(addresses), [network], 0, sample=True), [Host(name) for name in addresses]
    every: Any = machines
    pairs = measure.asked_pairs(asked)
    found = measure.links(list(addresses), [network], hostcall.call_hosts(every, asked, SECONDS), pairs)["data"]
    assert len(found) == len(pairs) < 7 * 6 and all(link.error is None for link in found)
    own = {(host, pair["peer"]) for host, one in asked.items() for pair in one["links"]["pairs"]}
    assert {(link.source, link.target) for link in found if link.path_mtu == 1500} == own
    assert {(link.source, link.target) for link in found if link.rtt_ms is None} == set(pairs) - own


@pytest.mark.slow
def test_a_host_that_fails_is_named_and_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    broken = Host("h2", script(tmp_path / "python", "echo 'no python here' >&2; exit 1"))
    begun = time.monotonic()
    answers = ask([Host("h1"), broken, Host("h3")], "3")
    assert time.monotonic() - begun < SECONDS
    assert isinstance(answers["h2"], RuntimeError) and str(answers["h2"]) == "no python here"
    by_peer = {result["peer"]: result for result in answers["h1"].reach}
    assert by_peer["h3"]["ok"] and by_peer["h2"]["error"] == "h2 did not take part"


#: The kernel's limit for one argument of a command (MAX_ARG_STRLEN).
ARGUMENT_BYTES = 128 * 1024


@pytest.mark.slow
def test_what_256_hosts_are_asked_stands_on_standard_input_and_is_no_longer_than_a_hosts_own_pairs() -> None:
    hosts = [f"h{number}" for number in range(256)]
    addresses = {host: f"10.0.{number >> 8}.{number & 255}" for number, host in enumerate(hosts)}
    options = measure.options(hosts, [NetworkAddresses("data", addresses, dict.fromkeys(hosts, 1500))], 1)
    sent: dict[str, tuple[str, str]] = {}

    class Remembers:
        def __init__(self, name: str) -> None:
            self.name, self.target = name, Target(name, "10.0.0.1", 22, "me", None, sudo_password="secret")

        def root(self, command: str, timeout: float, out: Any, stdin: ssh.Input) -> Any:
            sent[self.name] = f"{ssh.sudo_prefix(self.target)}sh -c {shlex.quote(command)}", stdin.read(0) or ""
            raise OSError("that is all")

    machines: Any = [Remembers(host) for host in hosts]
    hostcall.call_hosts(machines, options, SECONDS)
    assert len({command for command, _ in sent.values()}) == 1
    (command,) = {command for command, _ in sent.values()}
    assert len(command) < ARGUMENT_BYTES / 32
    for host, (_, told) in sent.items():
        asked = json.loads(told.split(" ", 1)[1])
        assert asked["links"] == options[host]["links"]
        assert len(told) - len(hostcall.program({})) < 256 * 160, host


@pytest.mark.slow
def test_hosts_that_start_late_are_waited_for_and_the_user_sees_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h2 starts when it has been named as the only one that is missing."""
    monkeypatch.setattr(hostcall, "PROGRESS_SECONDS", 0.2)
    named = tmp_path / "named"
    wait_and_start = f"while [ ! -e '{named}' ]; do sleep 0.05; done; exec {sys.executable} \"$@\""
    answers = ask(
        [Host("h1"), Host("h2", script(tmp_path / "python", wait_and_start))],
        "4",
        lambda text: named.touch() if "waiting for h2 (" in text else None,
    )
    assert all(answer.reach[0]["ok"] for answer in answers.values()) and named.exists()


@pytest.mark.slow
def test_a_host_that_never_starts_costs_the_wait_for_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to meet is over when the two others have come. h3 reads until it is given up."""
    calls: list[hostcall._Call] = []

    class Call(hostcall._Call):
        def __init__(self, names: Iterable[str], asked_pairs: int = 0) -> None:
            super().__init__(names, asked_pairs)
            calls.append(self)

    def monotonic() -> float:
        return time.monotonic() + (SECONDS + 1 if len(calls[0].listening) == 2 else 0)

    monkeypatch.setattr(hostcall, "_Call", Call)
    monkeypatch.setattr(hostcall, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    answers = ask([Host("h1"), Host("h2"), Host("h3", script(tmp_path / "python", "cat > /dev/null; exit 1"))], "5")
    by_peer = {result["peer"]: result for result in answers["h1"].reach}
    assert by_peer["h2"]["ok"] and not by_peer["h3"]["ok"]
    assert isinstance(answers["h3"], RuntimeError)


@pytest.mark.slow
def test_sudos_password_and_a_call_larger_than_an_argument_may_be_go_through() -> None:
    """Linux allows 128 KiB for one argument. Where sudo asked for no password, its line is left for the program."""
    many = {f"h{n}": [f"127.45.{n % 251}.{n * 7919 % 253}"] for n in range(3, 4_000)}
    host: Any = Host("h1", first="a password\n")
    options = {"meeting": hostcall.meetings({"h1": ["127.45.6.1"]})["h1"], "reach": many, "survey": None}
    assert len(hostcall.program(options)) > 150_000 and len(hostcall.command("python3")) < 2_000
    answer = hostcall.call_hosts([host], {"h1": options}, SECONDS)["h1"]
    assert isinstance(answer, Answer) and answer.reach is not None and len(answer.reach) == len(many)


@pytest.mark.slow
def test_an_answer_is_found_behind_what_a_shell_prints(tmp_path: Path) -> None:
    chatty = Host("h1", script(tmp_path / "python", f'echo "Welcome! muster:"; exec {sys.executable} "$@"'))
    answers = ask([chatty, Host("h2")], "7")
    assert answers["h1"].reach[0]["ok"] and answers["h2"].reach[0]["ok"]


@pytest.mark.slow
def test_a_host_whose_survey_fails_says_why_in_its_own_words(tmp_path: Path) -> None:
    (answer,) = ask([Host("h1")], "8", survey={"train_network": "no network"}).values()
    assert isinstance(answer, RuntimeError) and "Traceback" not in str(answer) and "ValueError" not in str(answer)


@pytest.mark.slow
def test_hosts_end_when_the_control_machine_has_gone() -> None:
    """In the middle of a measurement: standard input ends, as it does when the SSH connection drops."""
    meeting = hostcall.meetings({"h1": ["127.45.9.1"]})["h1"]
    pair = {"network": 0, "peer": "h2", "calls": False, "own": "127.45.9.1", "theirs": "127.45.9.2", "mtus": {}}
    links = {"pairs": [pair], "seconds": 0, "patience": 300}
    options = {"survey": None, "meeting": meeting, "reach": None, "links": links, "seconds": 300}
    directory = {"h1": {"127.45.9.1": clustermap.REACH_PORTS[0]}, "h2": {"127.45.9.2": 1}}
    process = subprocess.Popen(
        ["sh", "-c", hostcall.command(sys.executable)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(hostcall.program(options))
    process.stdin.flush()
    assert "listening" in json.loads(process.stdout.readline().removeprefix(hostcall.MARK))
    process.stdin.write(json.dumps(directory) + "\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.stdin.close()
    assert process.wait(100) == 0 and process.stdout.read() == ""
    process.stdout.close()


def test_sudos_password_is_sent_first_and_a_dropped_connection_is_an_error_of_its_own_kind() -> None:
    class Connection:
        host = "192.0.2.1"

        def run(self, text: str, in_stream: Any, **options: Any) -> None:
            assert text.startswith("sudo -S -p '' sh -c ")
            assert [in_stream.read(1) for _ in range(4)] == ["secret\n", "program\n", "", None]
            raise ThreadException([ExceptionWrapper({}, OSError, OSError("Socket is closed"), None)])

    target = Target("h1", "192.0.2.1", user="ann", sudo_password="secret")
    with pytest.raises(OSError, match="Socket is closed"):
        ssh.run(Connection(), "true", 1, target, ssh.Input("program\n"))


@pytest.mark.slow
def test_sudo_is_not_left_waiting_for_another_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sudo does with a wrong one: it reads line after line until standard input ends."""
    taken = ssh.Input("wrong\n")
    assert [taken.read(1) for _ in range(3)] == ["wrong\n", "", None]
    monkeypatch.setattr(hostcall, "MEET_SECONDS", 1)
    refuses = Host(
        "h2", script(tmp_path / "python", "cat > /dev/null; echo 'sudo: no password was provided' >&2; exit 1")
    )
    answers = ask([Host("h1"), refuses], "10")
    assert str(answers["h2"]) == "sudo: no password was provided"
