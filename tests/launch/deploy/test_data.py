"""Promises: a dataset comes to all hosts, each byte once from this machine; of another version only what differs; after
a kill it goes on; a damaged file is found and mended; a version is there whole or not at all; a run's is left alone.

Hosts are processes behind a real SSH server on loopback; each has an address of its own in 127.0.0.0/8 and a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.cli.refusal import Refusal
from launch.deploy import data, distribution
from launch.hosts import clustermap, ssh
from launch.hosts.connection import Machine
from launch.hosts.door import Call
from launch.hosts.inventory import Target
from tests.launch.hosts.sshd import Sshd, user_key
from tests.launch.samples import cluster

THIRD_BYTE = itertools.count(1)
MIB = 2**20

#: Stands for a host's Python: has a folder of its own, then does what it was asked.
HOST = """
import os, pathlib, sys
root = pathlib.Path(sys.argv[1])
code, sys.argv = sys.argv[3], ["-c"]
begin, end = code.split("from ansible.module_utils.muster_data import run\\n")
exec(begin)
from ansible.module_utils import muster_survey
muster_survey.DATASETS = root / "data"
from ansible.module_utils import muster_data, muster_relay
muster_relay.REPORT_SECONDS, muster_relay.ABSENT_SECONDS = 0.05, 8.0
os.sync = lambda: None
(root / "pid").write_text(str(os.getpid()))
if (root / "full").exists():
    muster_data.SLACK_BYTES = 1 << 60
from ansible.module_utils.muster_data import run
exec(end)
"""


class Hosts:
    """h1 and h2 with nothing on them, their cluster map, and a folder of files to bring there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, server: Sshd) -> None:
        self.folder, self.src, self.runs = folder, folder / "src", list[str]()
        self.said = folder / "said"
        net, key, known = f"127.51.{next(THIRD_BYTE)}", str(user_key(folder)), folder / "known_hosts"
        known.write_text(server.known_hosts_line)
        (folder / "host.py").write_text(HOST)
        names = ("h1", "h2")
        self.machines = []
        for name in names:
            (folder / name).mkdir()
            python = folder / f"python-{name}"
            python.write_text(f'#!/bin/sh\nexec {sys.executable} -u {folder}/host.py {folder}/{name} "$@"\n')
            python.chmod(0o755)
            target = Target(name, "127.0.0.1", server.port, user="root", key_file=key, python=str(python))
            self.machines.append(Machine(target, known, ssh.connect(target, known)))

        made = cluster(1, 1)
        hosts = [
            dataclasses.replace(host, name=name, address=f"{net}.{number}", data_dir=None)
            for number, (host, name) in enumerate(zip(made.hosts, names, strict=True), 1)
        ]
        self.map = dataclasses.replace(made, hosts=hosts)
        self.placed: dict[str, Any] = {}

        @contextlib.contextmanager
        def opened(*_: Any) -> Iterator[list[Machine]]:
            yield self.machines

        def written(_: Path, changed: clustermap.ClusterMap) -> None:
            self.map = changed

        def noted(*arguments: Any) -> dict[str, Any]:
            self.placed = distributed(*arguments)
            return self.placed

        distributed = data._distribute
        monkeypatch.setattr(data, "_distribute", noted)
        monkeypatch.setattr(distribution, "SIGN_OF_LIFE_SECONDS", 1.0)
        monkeypatch.setattr(data, "machines", opened)
        monkeypatch.setattr(data, "alone", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(data, "_runs", lambda _: self.runs)
        monkeypatch.setattr(clustermap, "read", lambda _: self.map)
        monkeypatch.setattr(clustermap, "write", written)
        monkeypatch.setattr(clustermap, "path_of", lambda _: folder / "build" / "cluster.json")

    def make(self, **asked: Any) -> str:
        self.placed = {}
        with self.said.open("w") as file:
            data.data(data.Request(Path("inventory"), name="pics", **asked), Console(file=file, width=200))
        return self.said.read_text()

    def bring(self, **more: Any) -> str:
        return self.make(src=str(self.src), **more)

    def tree(self, host: str) -> Path:
        """The version that runs see."""
        used = json.loads((self.folder / host / "data" / "used.json").read_text())
        return self.folder / host / "data" / used["name"] / used["version"]

    def have_all(self) -> bool:
        return all(contents(self.tree(host)) == contents(self.src) for host in ("h1", "h2"))


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    server, draw = Sshd(), random.Random(3)
    made = Hosts(tmp_path, monkeypatch, server)
    (made.src / "train" / "empty").mkdir(parents=True)
    for number in range(50):
        (made.src / "train" / f"{number}.jpg").write_bytes(draw.randbytes(draw.randrange(30_000)))
    (made.src / "big").write_bytes(draw.randbytes(2 * MIB + 7))
    (made.src / "big again").write_bytes((made.src / "big").read_bytes())
    (made.src / "nothing").touch()
    yield made
    for machine in made.machines:
        machine.close()
    server.close()


@pytest.mark.slow
def test_all_hosts_get_all_once_then_only_what_differs_and_runs_see_the_new_version(hosts: Hosts) -> None:
    hosts.bring()
    assert hosts.have_all()
    sizes = {host["bytes_sent"] for host in hosts.placed.values()}
    assert len(sizes) == 1 and 2 * MIB < sizes.pop() < 4 * MIB
    assert [host["control_bytes"] > 0 for host in hosts.placed.values()] == [True, False]
    first = hosts.map.hosts[0].data_dir
    assert first and clustermap.dataset_in(first) == "pics" and {host.data_dir for host in hosts.map.hosts} == {first}
    assert "Nothing had to be sent" in hosts.bring() and hosts.map.hosts[0].data_dir == first

    inode = (hosts.tree("h1") / "big").stat().st_ino
    (hosts.src / "train" / "7.jpg").write_bytes(b"changed")
    (hosts.src / "train" / "8.jpg").unlink()
    hosts.bring()
    assert hosts.have_all() and (hosts.tree("h1") / "big").stat().st_ino == inode
    assert all(0 < host["bytes_sent"] < 200 for host in hosts.placed.values())
    assert hosts.map.hosts[1].data_dir != first
    assert len(list((hosts.folder / "h2" / "data" / "pics").iterdir())) == 3  # the tree, its manifest and its note


@pytest.mark.slow
def test_the_inventorys_data_dir_stays_and_is_named(hosts: Hosts) -> None:
    own = dataclasses.replace(hosts.map.hosts[1], data_dir="/srv/data")
    hosts.map = dataclasses.replace(hosts.map, hosts=[hosts.map.hosts[0], own])
    assert "h2 keeps /srv/data" in hosts.bring()
    assert hosts.map.hosts[1].data_dir == "/srv/data" and hosts.map.hosts[0].data_dir


def test_a_host_without_room_is_named_before_anything_is_sent(hosts: Hosts) -> None:
    (hosts.folder / "h2" / "full").touch()
    with pytest.raises(Refusal, match="too little disk") as refused:
        hosts.bring()
    assert [problem.where for problem in refused.value.problems] == ["host h2"]
    assert not hosts.placed and not (hosts.folder / "h1" / "data" / "used.json").exists()


@pytest.mark.slow
def test_what_a_killed_host_has_is_not_sent_again_and_the_old_version_stays_until_all_have_the_new_one(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.bring()
    before = contents(hosts.src)
    (hosts.src / "big").write_bytes(random.Random(4).randbytes(9 * MIB))
    (hosts.src / "more").write_bytes(random.Random(5).randbytes(3 * MIB))
    sent: Callable[..., bytes] = distribution.Frames.get

    def arrived() -> int:
        with contextlib.suppress(FileNotFoundError):  # it got its name
            return sum(part.stat().st_size for part in hosts.folder.glob("h1/**/.*.parts/*"))
        return 0

    def get(frames: distribution.Frames, digest: str, offset: int) -> bytes:
        if offset == 6 * MIB:
            deadline = time.monotonic() + 3  # or it came by way of h2
            while time.monotonic() < deadline and arrived() < 5 * MIB:
                time.sleep(0.02)
            os.killpg(os.getpgid(int((hosts.folder / "h1" / "pid").read_text())), signal.SIGKILL)
            raise RuntimeError("interrupted")
        return sent(frames, digest, offset)

    monkeypatch.setattr(distribution.Frames, "get", get)
    with pytest.raises(Refusal):
        hosts.bring()
    assert all(contents(hosts.tree(host)) == before for host in ("h1", "h2"))
    monkeypatch.setattr(distribution.Frames, "get", sent)
    hosts.bring()
    assert hosts.have_all()
    assert hosts.placed["h1"]["bytes_sent"] < 9 * MIB  # of 12: what had come before was kept


@pytest.mark.slow
def test_a_host_that_is_given_up_while_it_is_called_again_is_hung_up_on(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for a word for a minute, and with it who comes next."""
    calls, breaks, over = list[Call](), [hosts.machines[0].close], threading.Event()
    connect_again, sent = distribution.Host._connect_again, distribution.Frames.get

    class Slow(Call):
        def __init__(self, machine: Machine, command: str, question: bytes) -> None:
            is_first = machine is hosts.machines[0]
            assert not (is_first and calls) or over.wait(60)
            super().__init__(machine, command, question)
            calls.extend([self] if is_first else [])

    def given_up(host: distribution.Host) -> bool:
        connected = connect_again(host)
        host.fail(RuntimeError("given up"))
        return connected

    def get(frames: distribution.Frames, digest: str, offset: int) -> bytes:
        with contextlib.suppress(IndexError):
            breaks.pop()()  # once
        return sent(frames, digest, offset)

    monkeypatch.setattr(distribution, "Call", Slow)
    monkeypatch.setattr(distribution.Host, "_connect_again", given_up)
    monkeypatch.setattr(distribution.Frames, "get", get)
    with pytest.raises(Refusal, match="given up"):
        hosts.bring()
    over.set()
    for _ in range(200):
        if len(calls) == 2 and not calls[1].is_open:
            return
        time.sleep(0.1)
    pytest.fail("it was not called again, or the call is still open")


@pytest.mark.slow
def test_a_damaged_file_and_a_strange_one_are_found_on_demand_and_mended(hosts: Hosts) -> None:
    hosts.bring()
    damaged, strange = hosts.tree("h1") / "big", hosts.tree("h2") / "strange"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    strange.touch()
    assert "Nothing had to be sent" in hosts.bring() and not hosts.have_all()
    hosts.bring(verify=True)
    assert hosts.have_all() and sorted(hosts.placed) == ["h1", "h2"]


@pytest.mark.slow
def test_a_version_that_a_run_may_read_stays_until_the_next_time(hosts: Hosts) -> None:
    hosts.bring()
    old, before = hosts.tree("h1"), contents(hosts.src)
    (hosts.src / "more").write_bytes(b"more")
    hosts.runs = ["a-run"]
    assert "run a-run is in progress" in hosts.bring()
    assert hosts.have_all() and contents(old) == before
    with pytest.raises(Refusal, match="is in progress and may read it"):
        hosts.make(remove=True)
    hosts.runs = []
    hosts.bring()
    assert hosts.have_all() and not old.exists()


@pytest.mark.slow
def test_a_dataset_is_used_again_by_its_name_and_removed(hosts: Hosts) -> None:
    hosts.bring()
    first = hosts.map.hosts[0].data_dir
    data.data(data.Request(Path("inventory"), src=str(hosts.src / "train"), name="other"), Console(quiet=True))
    assert hosts.map.hosts[0].data_dir != first
    hosts.make()
    assert hosts.map.hosts[0].data_dir == first
    assert data.held(hosts.machines)[1].startswith("pics (")
    hosts.make(remove=True)
    assert hosts.map.hosts[0].data_dir is None and not (hosts.folder / "h1" / "data" / "pics").exists()
    with pytest.raises(Refusal, match="no host has it"):
        hosts.make(remove=True)
    with pytest.raises(Refusal, match="has no dataset pics"):
        hosts.make()


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({"src": "."}, ["SRC"]),
        ({"src": "/nowhere", "name": "a"}, ["SRC"]),
        ({"name": "../x"}, ["NAME"]),
        ({"name": "a", "src": ".", "remove": True}, ["REMOVE"]),
        ({"remove": True, "verify": True}, ["REMOVE", "VERIFY"]),
    ],
)
def test_a_bad_request_is_refused_whole(asked: dict[str, Any], wrong: Sequence[str]) -> None:
    with pytest.raises(Refusal) as refused:
        data.data(data.Request(Path("inventory"), **asked), Console(quiet=True))
    assert [problem.where for problem in refused.value.problems] == wrong
