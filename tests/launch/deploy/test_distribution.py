"""Promises: an image comes to every host that can get it, whatever hosts fail on the way, nothing is sent before every
host has room, and while it is sent each host's rest is said with the time that it will take at the pace so far.

Hosts are processes behind a real SSH server on loopback, with their real sources; each has an address of its own in
127.0.0.0/8 and a folder for a pool. Podman's part is left out: a host has the image when it has the layers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from containers.image import Image, OciExport
from launch.cli.refusal import Refusal
from launch.deploy import distribution, relay
from launch.hosts import ssh
from launch.hosts.connection import Machine
from launch.hosts.inventory import Target
from tests.launch.hosts.sshd import Sshd, user_key

MIB = 2**20
THIRD_BYTE = itertools.count(1)
LAYERS = [random.Random(7).randbytes(6 * MIB + 3) + bytes(20 * MIB), b"{}" * 1000]
BLOBS = {hashlib.sha256(data).hexdigest(): data for data in LAYERS}
IMAGE = Image("localhost/muster/train:latest", "ab" * 32, 5)

#: Stands for a host's Python: replaces what needs root and Podman, then does what it was asked.
HOST = """
import builtins, os, pathlib, sys
pool = pathlib.Path(sys.argv[1])
code, sys.argv = sys.argv[3], ["-c"]
begin, end = code.split("from ansible.module_utils.muster_distribution import run\\n")
exec(begin)
from ansible.module_utils import muster_distribution, muster_image, muster_relay
muster_image.POOL, muster_image.LEDGER = pool, pool.with_name("ledger.json")
muster_distribution.noted = lambda: None
muster_relay.REPORT_SECONDS = 0.05
def check(engine, ref, identity, sizes):
    if (pool / "full").exists():
        raise RuntimeError("too little disk for the image. Fix: free space there")
    missing = muster_image.missing_blobs(pool, sizes)
    return {"id": "", "needed": "pull" if missing else "nothing", "missing": missing}
def bring(engine, ref, identity, index, sizes):
    assert not muster_image.missing_blobs(pool, sizes)
    if (pool / "broken").exists():
        raise RuntimeError("Podman cannot read the image")
muster_image.check, muster_image.bring = check, bring
pool.with_name("pid").write_text(str(os.getpid()))
from ansible.module_utils.muster_distribution import run
exec(end)
"""


class Hosts:
    """Hosts that have nothing, and the image that is brought to them."""

    def __init__(self, folder: Path, net: str, server: Sshd, connect: Callable[[str, str], Machine]) -> None:
        self.folder, self.server, self._connect = folder, server, connect
        self.addresses = {f"h{number}": f"{net}.{number}" for number in range(1, 5)}
        blobs = folder / "control" / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for digest, data in BLOBS.items():
            (blobs / digest).write_bytes(data)
        self.export = OciExport(folder / "control", "{}", {digest: len(data) for digest, data in BLOBS.items()})
        self.said: list[str] = []
        (folder / "host.py").write_text(HOST)
        for name in self.addresses:
            self.pool(name).mkdir(parents=True)

    def pool(self, name: str) -> Path:
        return self.folder / name / "pool"

    def has_all(self, name: str) -> bool:
        return {path.name: path.read_bytes() for path in self.pool(name).iterdir()} == BLOBS

    def pid(self, name: str) -> int:
        return int((self.folder / name / "pid").read_text())

    def signal(self, name: str, number: int) -> None:
        """A signal to all processes of a host."""
        os.killpg(os.getpgid(self.pid(name)), number)

    def bring(self, *names: str, say: Callable[[str], None] | None = None, origin: str = "") -> dict[str, Any]:
        machines = []
        for name in names:
            python = self.folder / f"python-{name}"
            python.write_text(f'#!/bin/sh\nexec {sys.executable} -u {self.folder}/host.py {self.pool(name)} "$@"\n')
            python.chmod(0o755)
            machines.append(self._connect(name, str(python)))
        with contextlib.ExitStack() as opened:
            for machine in machines:
                opened.callback(machine.close)
            built = next((machine for machine in machines if machine.name == origin), None)
            more = [machine for machine in machines if machine is not built]
            told = say or self.said.append
            return distribution.distribute(more, self.addresses, IMAGE, self.export, told, origin=built)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    server = Sshd()
    key, known_hosts = str(user_key(tmp_path)), tmp_path / "known_hosts"
    known_hosts.write_text(server.known_hosts_line)

    def connect(name: str, python: str) -> Machine:
        target = Target(name, "127.0.0.1", server.port, user="root", key_file=key, python=python)
        return Machine(target, known_hosts, ssh.connect(target, known_hosts))

    yield Hosts(tmp_path, f"127.49.{next(THIRD_BYTE)}", server, connect)
    server.close()


@pytest.mark.slow
def test_this_machine_sends_every_byte_once_however_many_hosts_there_are(hosts: Hosts) -> None:
    found = hosts.bring("h1", "h2", "h3", "h4")
    assert all(hosts.has_all(name) for name in found)
    received = {host["bytes_sent"] for host in found.values()}
    assert len(received) == 1 and 6 * MIB < received.pop() < 7 * MIB
    assert [host["control_bytes"] for host in found.values()][1:] == [0, 0, 0]
    assert all(host["id"] == IMAGE.id and host["changed"] for host in found.values())
    assert hosts.said == []
    again = hosts.bring("h1", "h2")
    assert [(host["changed"], host["bytes_sent"]) for host in again.values()] == [(False, 0), (False, 0)]


@pytest.mark.slow
def test_from_a_host_that_has_built_the_image_it_comes_to_the_others_and_nothing_from_this_machine(
    hosts: Hosts,
) -> None:
    found = hosts.bring("h1", "h2", "h3", origin="h2")
    assert all(hosts.has_all(name) for name in ("h1", "h2", "h3"))
    assert [host["control_bytes"] for host in found.values()] == [0, 0, 0]
    assert found["h2"]["bytes_sent"] == 0 and 6 * MIB < found["h1"]["bytes_sent"] < 8 * MIB
    again = hosts.bring("h2", "h3", "h4", origin="h2")
    assert hosts.has_all("h4") and again["h4"]["control_bytes"] == again["h3"]["bytes_sent"] == 0


@pytest.mark.slow
def test_where_the_host_that_has_built_it_lacks_a_layer_or_cannot_be_reached_that_is_said(hosts: Hosts) -> None:
    good = hosts.addresses["h1"]
    hosts.addresses["h1"] = "192.0.2.1"  # no address of that host
    with pytest.raises(Refusal, match=r"nobody to take layers from: h1, on which they were built, does not listen: "):
        hosts.bring("h1", "h2", origin="h1")
    hosts.addresses["h1"] = good
    shutil.rmtree(hosts.pool("h1"))
    hosts.pool("h1").mkdir()
    next((hosts.export.path / "blobs" / "sha256").iterdir()).unlink()
    with pytest.raises(Refusal, match=r"a layer cannot be taken from .* No such file") as refused:
        hosts.bring("h1", "h2", origin="h1")
    assert [problem.where for problem in refused.value.problems] == ["host h1"]


@pytest.mark.slow
def test_nothing_is_sent_before_every_host_was_found_to_have_room(hosts: Hosts) -> None:
    (hosts.pool("h3") / "full").touch()
    with pytest.raises(Refusal, match="too little disk") as refused:
        hosts.bring("h1", "h2", "h3")
    assert [problem.where for problem in refused.value.problems] == ["host h3"]
    assert list(hosts.pool("h1").iterdir()) == list(hosts.pool("h2").iterdir()) == []


@pytest.mark.slow
def test_hosts_that_cannot_be_connected_to_are_passed_by_with_a_word(hosts: Hosts) -> None:
    """h1's address is none of its own; of h2's another program has taken every port."""
    hosts.addresses["h1"] = "192.0.2.1"
    found = hosts.bring("h1", "h2", "h3")
    assert all(hosts.has_all(name) for name in found)
    assert [host["control_bytes"] > 0 for host in found.values()] == [True, True, False]
    assert any(
        said.startswith("h2 takes layers from the control machine, as h1 does not listen: ") for said in hosts.said
    )


def once_begun(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Something happens when the first pieces have been sent."""
    sent = distribution.Frames.get

    def get(frames: distribution.Frames, digest: str, offset: int) -> bytes:
        if offset == 3 * MIB:
            act()
        return sent(frames, digest, offset)

    monkeypatch.setattr(distribution.Frames, "get", get)


@pytest.mark.slow
def test_a_host_that_dies_is_named_and_those_behind_it_go_on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies when the first piece has been sent."""
    once_begun(monkeypatch, lambda: hosts.signal("h2", signal.SIGKILL))
    with pytest.raises(Refusal) as refused:
        hosts.bring("h1", "h2", "h3", "h4")
    assert [problem.where for problem in refused.value.problems] == ["host h2"]
    assert all(hosts.has_all(name) for name in ("h1", "h3", "h4"))
    assert any("h3 takes layers from h1, as h2 " in said for said in hosts.said)


@pytest.mark.slow
def test_a_host_that_stands_still_is_left_and_given_up(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "STANDSTILL_SECONDS", 2.0)
    monkeypatch.setattr(distribution, "HOST_SECONDS", 8.0)
    once_begun(monkeypatch, lambda: hosts.signal("h1", signal.SIGSTOP))
    with pytest.raises(Refusal) as refused:
        hosts.bring("h1", "h2", "h3")
    assert [problem.where for problem in refused.value.problems] == ["host h1"]
    assert hosts.has_all("h2") and hosts.has_all("h3")


@pytest.mark.slow
def test_a_connection_that_breaks_is_made_again_and_the_transfer_goes_on(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first two hosts, in the middle of the large layer."""
    sent, offsets = distribution.Frames.get, list[int]()

    def get(frames: distribution.Frames, digest: str, offset: int) -> bytes:
        offsets.append(offset)
        if offsets.count(8 * MIB) == 1 and offset == 8 * MIB:
            for transport in hosts.server._transports[:2]:
                transport.close()
        return sent(frames, digest, offset)

    monkeypatch.setattr(distribution.Frames, "get", get)
    found = hosts.bring("h1", "h2", "h3")
    assert all(hosts.has_all(name) and host["id"] for name, host in found.items())
    assert offsets.count(0) < 2 * len(BLOBS)  # of the layers none was begun again from its start
    assert max(offsets) > 8 * MIB


@pytest.mark.slow
def test_what_podman_refuses_on_one_host_keeps_no_other_from_the_image(hosts: Hosts) -> None:
    (hosts.pool("h1") / "broken").touch()
    with pytest.raises(Refusal, match="Podman cannot read the image") as refused:
        hosts.bring("h1", "h2", "h3")
    assert [problem.where for problem in refused.value.problems] == ["host h1"]
    assert hosts.has_all("h2") and hosts.has_all("h3")
    (hosts.pool("h1") / "broken").unlink()
    assert hosts.has_all("h1")


@pytest.mark.slow
def test_a_distribution_waits_until_an_earlier_one_has_ended_there(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distribution, "PROGRESS_SECONDS", 0.5)
    lock = (hosts.folder / "h1" / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def say(words: str) -> None:
        hosts.said.append(words)
        if "an earlier distribution" in words:
            lock.close()

    assert hosts.bring("h1", say=say)["h1"]["changed"] and hosts.has_all("h1")
    assert "waiting for h1: an earlier distribution has not ended there" in hosts.said


@pytest.mark.slow
def test_no_process_stays_on_a_host(hosts: Hosts) -> None:
    hosts.bring("h1", "h2")
    ended = threading.Event()
    for _ in range(600):
        if not any(Path(f"/proc/{hosts.pid(name)}").exists() for name in ("h1", "h2")):
            return
        ended.wait(0.1)
    pytest.fail("a host's process is still there")


def test_the_time_left_follows_from_two_reports() -> None:
    assert distribution._words("h2", (110.0, 60 * MIB), None) == "h2: 60.0 MiB to send"
    assert distribution._words("h2", (110.0, 60 * MIB), (100.0, 80 * MIB)) == "h2: 60.0 MiB to send, about 30 s"
    assert distribution._words("h2", (110.0, 60 * MIB), (100.0, 60 * MIB)) == "h2: 60.0 MiB to send"
    assert distribution._words("h2", (110.0, 0), (100.0, 60 * MIB)) == "h2 has all"
