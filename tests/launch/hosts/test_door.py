"""Promise: a host's door opens over its SSH connection, passes on what it says, and closes without leaving a process.

A real connection to an SSH server on loopback, with the door's real sources.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from keeper import lease
from keeper.engines import ROOTS
from keeper.output import Writer
from launch.hosts import ssh
from launch.hosts.connection import Machine
from launch.hosts.door import Door, DoorError, ask
from launch.hosts.inventory import Target
from launch.job.start import pack
from tests.conftest import ROOT
from tests.launch.hosts.sshd import Sshd, user_key

SECONDS = 60.0  # more than a busy machine needs

Connect = Callable[..., Machine]


@pytest.fixture
def server() -> Iterator[Sshd]:
    made = Sshd()
    yield made
    made.close()


@pytest.fixture
def connect(server: Sshd, tmp_path: Path) -> Iterator[Connect]:
    """Connections to the server; as root, so that there is no sudo, unless something else is said."""
    key, known_hosts, made = str(user_key(tmp_path)), tmp_path / "known_hosts", list[Machine]()
    known_hosts.write_text(server.known_hosts_line)

    def connect(**more: Any) -> Machine:
        target = Target(
            "h1", "127.0.0.1", server.port, key_file=key, **{"user": "root", "python": sys.executable, **more}
        )
        made.append(Machine(target, known_hosts, ssh.connect(target, known_hosts)))
        return made[-1]

    yield connect
    for machine in made:
        machine.close()


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Stands before the folders of the host."""
    return str(tmp_path / "host")


def run_on(root: str, **documents: Any) -> Path:
    """The folder of run r1."""
    folder = Path(f"{root}{ROOTS.runs}/r1")
    folder.mkdir(parents=True)
    for name, words in {"plan": {"run": "r1"}, **documents}.items():
        (folder / f"{name}.json").write_text(json.dumps(words))
    (folder / "events.jsonl").write_text('{"event": "lease"}\n')
    return folder


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_host_answers(connect: Connect, root: str) -> None:
    run_on(root)
    machine = connect()
    for _ in range(2):  # over the same connection
        answer = ask(machine, "runs", {"root": root}, SECONDS)
        assert [run["run"] for run in answer["runs"]] == ["r1"]


def test_sudos_password_and_what_a_shell_prints_are_no_part_of_it(
    connect: Connect, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password is read by sudo, or, where it asks for none, left to the door."""
    for number, reads in enumerate(("read password; test \"$password\" = 'a b'", "true")):
        folder = tmp_path / f"bin{number}"
        folder.mkdir()
        script(folder / "sudo", f"printf 'Welcome\\nmuster '; shift 3; {reads} && exec \"$@\"")
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
            assert ask(connect(user="me", sudo_password="a b"), "runs", {"root": root}, SECONDS)["runs"] == []


def test_what_a_host_refuses_is_an_error_with_its_words(connect: Connect, root: str) -> None:
    with pytest.raises(DoorError, match=r"^there is no run r1 on this host$") as raised:
        ask(connect(), "follow", {"run": "r1", "root": root}, SECONDS)
    assert raised.value.words == {"error": "there is no run r1 on this host"}


def test_a_host_without_python_is_an_error_with_its_words(connect: Connect, tmp_path: Path) -> None:
    for text, said in (
        ("echo 'no python here'; exit 127", "no python here"),
        ("exit 3", "exit status 3 without a word"),
    ):
        with pytest.raises(DoorError, match=f"^{said}$"):
            ask(connect(python=script(tmp_path / "python", text)), "runs", {}, SECONDS)


def test_a_host_that_ends_before_it_is_asked_says_why(connect: Connect, tmp_path: Path) -> None:
    with Door(connect(python=script(tmp_path / "python", "echo 'no python here'; exit 127")), "runs", {}) as door:
        while not door._channel.closed:
            time.sleep(0.01)
        door.send({"more": True})
        with pytest.raises(DoorError, match=r"^no python here$"):
            list(door.frames(SECONDS))


def test_bytes_arrive_as_they_are(connect: Connect, root: str) -> None:
    folder, data = run_on(root, exit={"status": "failed"}), os.urandom(3_000_000) + b"\nmuster:{}\n"
    Writer(folder / "output", "rank-0").append(data)
    with Door(connect(), "follow", {"run": "r1", "root": root}) as door:
        frames = list(door.frames(SECONDS))
    assert b"".join(frame.data for frame in frames if frame.words.get("stream") == "rank-0") == data
    assert frames[-1].words == {"end": {"status": "failed"}, "container": None}


def test_the_start_of_ten_thousand_hosts_fits_into_a_question(connect: Connect, root: str) -> None:
    hosts = [{"host": f"h{number}", "command": ["podman"] * 50} for number in range(10_000)]
    packed = pack({"plan": {"run": "../x", "hosts": hosts}})
    with Door(connect(), "start", {"root": root}) as door, pytest.raises(DoorError, match="is no id"):
        door.send({"node_rank": 0, "packed": packed})
        next(door.frames(SECONDS))


def test_a_host_that_says_nothing_is_not_waited_for_without_end(connect: Connect, tmp_path: Path) -> None:
    machine = connect(python=script(tmp_path / "python", "sleep 500"))
    with pytest.raises(TimeoutError, match=r"^h1: nothing came within 0\.5 s$"):
        ask(machine, "runs", {}, 0.5)


def test_a_request_reaches_the_verb(connect: Connect, root: str) -> None:
    with Door(connect(), "queue", {"run": "r1", "owner": "ann", "wait": True, "root": root}) as door:
        frames = door.frames(SECONDS)
        assert next(frames).words == {"proposed": 1}
        door.send({"commit": 1})
        assert next(frames).words["place"] == 1


def following(connect: Connect, root: str) -> tuple[Machine, Door]:
    """A door that has sent its first frame, to a run that goes on."""
    machine = connect()
    door = Door(machine, "follow", {"run": "r1", "root": root})
    assert next(door.frames(SECONDS)).words["stream"] == "events"
    return machine, door


def test_a_door_that_is_closed_leaves_no_process(connect: Connect, root: str, server: Sshd) -> None:
    run_on(root)
    with lease.take(root + ROOTS.lease, {"run": "r1", "owner": "ann"}):
        machine, door = following(connect, root)
        door.close()
        assert server.programs[-1].wait(SECONDS) == 1
        assert ask(machine, "runs", {"root": root}, SECONDS)["lease"]["run"] == "r1"  # the connection is as good as new


def test_a_control_machine_that_is_gone_leaves_no_process(connect: Connect, root: str, server: Sshd) -> None:
    run_on(root)
    with lease.take(root + ROOTS.lease, {"run": "r1", "owner": "ann"}):
        machine, _ = following(connect, root)
        machine.close()
        assert server.programs[-1].wait(SECONDS) == 1


@pytest.mark.parametrize("closed", ["the connection", "the door"])
def test_a_view_whose_connection_ends_does_not_end_as_if_the_run_had(
    connect: Connect, root: str, server: Sshd, closed: str
) -> None:
    run_on(root)
    with lease.take(root + ROOTS.lease, {"run": "r1", "owner": "ann"}):
        _, door = following(connect, root)
        threading.Timer(0.2, server.close if closed == "the connection" else door.close).start()
        with pytest.raises(EOFError, match=r"^h1: "):
            list(door.frames(SECONDS))


def test_a_door_that_is_killed_is_no_end_either(connect: Connect, root: str, server: Sshd) -> None:
    run_on(root)
    with lease.take(root + ROOTS.lease, {"run": "r1", "owner": "ann"}):
        _, door = following(connect, root)
        os.killpg(server.programs[-1].pid, 9)
        with pytest.raises((EOFError, DoorError)):
            list(door.frames(SECONDS))


def test_a_connection_that_has_ended_opens_no_door(connect: Connect, server: Sshd) -> None:
    machine = connect()
    server.close()
    with pytest.raises((paramiko.SSHException, EOFError, OSError)):
        ask(machine, "runs", {}, SECONDS)


#: Follows run r1 in a process of its own and prints how many bytes came, and by how much its memory grew (KiB).
FOLLOWS = """
import re, sys
from pathlib import Path
from launch.hosts import ssh
from launch.hosts.connection import Machine
from launch.hosts.door import Door, ask
from launch.hosts.inventory import Target
port, key, known_hosts, root = sys.argv[1:]
target = Target("h1", "127.0.0.1", int(port), "root", key, python=sys.executable)
machine = Machine(target, Path(known_hosts), ssh.connect(target, Path(known_hosts)))
ask(machine, "runs", {"root": root}, 60)
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
with Door(machine, "follow", {"run": "r1", "root": root}) as door:
    size = sum(len(frame.data) for frame in door.frames(60))
print(size, peak() - before)
machine.close()
"""


@pytest.mark.slow
def test_thirty_mebibytes_arrive_and_the_control_machines_memory_does_not_grow(
    connect: Connect, root: str, server: Sshd, tmp_path: Path
) -> None:
    folder, lines = run_on(root, exit={"status": "succeeded"}), b"a line of output of a rank\n" * 10_000
    for rank in range(2):
        writer = Writer(folder / "output", f"rank-{rank}")
        while writer.end < 15 << 20:
            writer.append(lines)
    words = [
        sys.executable,
        "-c",
        FOLLOWS,
        str(server.port),
        str(tmp_path / "id_test"),
        str(tmp_path / "known_hosts"),
        root,
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    size, grown_kib = map(int, done.stdout.split())
    assert size >= 30 << 20 and grown_kib < 12 << 10
