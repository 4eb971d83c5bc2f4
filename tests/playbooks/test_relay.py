"""Promise: hosts pass layers on as they come, to hosts of this distribution alone, and take nothing that is wrong.

Real processes, sockets and files: each host has an address of its own in 127.0.0.0/8. The test is the control machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_relay
from ansible.module_utils.muster_relay import CHUNK_BYTES, CONTROL, HEADER, pack

from launch.deploy import distribution, relay

SECONDS = 100.0  # more than a busy machine needs
SECRET = bytes(range(32))
PORTS = [29600, 29603]
THIRD_BYTE = itertools.count(1)
DATA = random.Random(5).randbytes(2 * CHUNK_BYTES + 5) + bytes(CHUNK_BYTES)
DIGEST = hashlib.sha256(DATA).hexdigest()
SMALL = b"{}"
BLOBS = {DIGEST: DATA, hashlib.sha256(SMALL).hexdigest(): SMALL}

PROGRAM = """
import json, os, pathlib, sys
sys.path.insert(0, sys.argv[1])
import muster_relay
given = json.loads(sys.argv[2])
vars(muster_relay).update(given["values"])
say = lambda words: os.write(1, json.dumps(words).encode() + b"\\n")  # whole lines, from two threads
store = muster_relay.Store(pathlib.Path(given["pool"]), given["sizes"], bytes.fromhex(given["options"]["secret"]))
muster_relay.run(store, given["options"], say, lambda: say({"whole": True}))
"""


class Host:
    """A host's process; `said`: all that it has said."""

    def __init__(self, pool: Path, address: str, file_bytes: int | None = None, **values: Any) -> None:
        pool.mkdir(exist_ok=True)
        self.pool, self.address, self.said = pool, address, list[dict[str, Any]]()
        self._changed = threading.Condition()
        self._offset: dict[str, int] = {}
        options = {"secret": SECRET.hex(), "address": address, "ports": PORTS}
        sizes = {digest: len(data) for digest, data in BLOBS.items()}
        given = {"pool": str(pool), "sizes": sizes, "options": options, "values": {"REPORT_SECONDS": 0.05, **values}}

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        words = [sys.executable, "-c", PROGRAM, str(Path(muster_relay.__file__).parent), json.dumps(given)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limit)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port: int = self.wait("listening")["listening"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.said.append(json.loads(line))
                self._changed.notify()

    def wait(self, key: str, condition: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
        """The latest words that have this key and are as they should be; waits for them."""

        def found() -> dict[str, Any] | None:
            return next((words for words in reversed(self.said) if key in words and condition(words[key])), None)

        with self._changed:
            assert self._changed.wait_for(found, SECONDS), self.said[-5:]
            return found() or {}

    def send(self, words: dict[str, Any], data: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n" + data)
        self.process.stdin.flush()

    def take_from(self, source: Host | Fake | None) -> None:
        where = {"address": source.address, "port": source.port} if source else {}
        self.send({"source": {"name": source.address if source else CONTROL, **where}})

    def serve(self, digest: str, offset: int, count: int = 99, data: bytes | None = None) -> None:
        """Send so many frames of a blob, as the control machine."""
        for at in range(offset, len(BLOBS[digest]), CHUNK_BYTES)[:count]:
            frame = pack(SECRET, digest, at, (data or BLOBS[digest])[at : at + CHUNK_BYTES], 1)
            self.send({"frame": len(frame)}, frame)

    def serve_all(self) -> None:
        """Be its source until it has all."""
        for digest in BLOBS:
            self.serve(digest, self.wait("get", lambda asked, digest=digest: asked == digest)["from"])  # type: ignore[misc]

    def has_all(self) -> bool:
        self.wait("whole")
        files = {path.name: path.read_bytes() for path in self.pool.iterdir()}
        return files == BLOBS

    def end(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        self.process.stdout.close()
        return status


class Fake:
    """A source that does as the test says, once it has answered one caller's challenge: `talk` gets the connection."""

    def __init__(self, address: str, talk: Callable[[socket.socket, Any], None]) -> None:
        self.address = address
        self._listener = socket.create_server((address, 0))
        self.port: int = self._listener.getsockname()[1]
        self._released = threading.Event()

        def work() -> None:
            caller, _ = self._listener.accept()
            with caller, caller.makefile("rb") as lines:
                caller.sendall(b"ab\n")
                assert lines.readline() and lines.readline()  # its proof, and what it asks for
                talk(caller, lines)

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()


Make = Callable[..., Host]


@pytest.fixture
def net() -> str:
    return f"127.48.{next(THIRD_BYTE)}"


@pytest.fixture
def make(tmp_path: Path, net: str) -> Iterator[Make]:
    made: list[Host] = []

    def host(number: int, **more: Any) -> Host:
        made.append(Host(tmp_path / f"h{number}", f"{net}.{number}", **more))
        return made[-1]

    yield host
    for one in made:
        if one.process.poll() is None:
            one.end()


def some(lacks: int) -> bool:
    """Whether a host has got something, and not all."""
    return 0 < lacks < sum(map(len, BLOBS.values()))


@pytest.mark.slow
def test_a_layer_goes_down_the_chain_before_it_is_whole_and_the_control_machine_sends_it_once(make: Make) -> None:
    h1, h2, h3 = make(1), make(2), make(3)
    h1.take_from(None)
    h2.take_from(h1)
    h3.take_from(h2)
    asked = h1.wait("get")
    h1.serve(asked["get"], asked["from"], 1)
    h3.wait("lacks", some)
    assert not (h1.pool / DIGEST).exists() and (h3.pool / f".{DIGEST}.part").stat().st_size == CHUNK_BYTES
    h1.serve(asked["get"], CHUNK_BYTES)
    h1.serve(h1.wait("get", lambda digest: digest != DIGEST)["get"], 0)
    assert h1.has_all() and h2.has_all() and h3.has_all()
    assert [words for host in (h2, h3) for words in host.said if "get" in words or "trouble" in words] == []
    assert h1.wait("lacks")["received"] == h3.wait("lacks")["received"] < len(DATA)
    assert [host.end() for host in (h1, h2, h3)] == [0, 0, 0]


@pytest.mark.slow
def test_who_has_all_serves_it_though_nothing_is_kept_in_memory(make: Make) -> None:
    h1, h2 = make(1, RECENT_BYTES=0), make(2)
    h1.take_from(None)
    h1.serve_all()
    assert h1.has_all()
    h2.take_from(h1)
    assert h2.has_all()


@pytest.mark.slow
def test_a_cut_transfer_goes_on_where_it_stopped(make: Make, net: str, tmp_path: Path) -> None:
    def talk(caller: socket.socket, lines: Any) -> None:
        caller.sendall(pack(SECRET, DIGEST, 0, DATA[:CHUNK_BYTES], 1) + b"cut")

    source = Fake(f"{net}.9", talk)
    h1 = make(1)
    h1.take_from(source)
    assert h1.wait("trouble") == {"trouble": source.address, "why": "it closed the connection"}
    h1.take_from(None)
    assert h1.wait("get")["from"] == CHUNK_BYTES
    h1.serve(DIGEST, CHUNK_BYTES, 1)
    h1.wait("lacks", lambda lacks: lacks < len(DATA) - CHUNK_BYTES)
    assert h1.end() == 0
    again = make(1)  # another deploy
    again.take_from(None)
    assert again.wait("get")["from"] == 2 * CHUNK_BYTES
    again.serve_all()
    assert again.has_all()
    source.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (pack(bytes(32), DIGEST, 0, DATA[:CHUNK_BYTES], 1), "it sent something else than what it was asked for"),
        (pack(SECRET, DIGEST, CHUNK_BYTES, DATA[:CHUNK_BYTES], 1), "it sent something else than what it was asked for"),
        (pack(SECRET, DIGEST, 0, DATA[:CHUNK_BYTES] + b"x", 1), "it sent a piece of another length"),
        (HEADER.pack(0, 1 << 31, bytes(32)), "it sent something else than what it was asked for"),
    ],
    ids=["by a stranger", "another piece", "too long", "endless"],
)
def test_what_is_not_the_layer_is_not_written(make: Make, net: str, frame: bytes, why: str) -> None:
    def talk(caller: socket.socket, lines: Any) -> None:
        caller.sendall(frame)
        lines.read()

    source = Fake(f"{net}.9", talk)
    h1 = make(1)
    h1.take_from(source)
    assert h1.wait("trouble")["why"] == why
    assert (h1.pool / f".{DIGEST}.part").stat().st_size == 0
    source.close()


@pytest.mark.slow
def test_a_draft_that_was_damaged_begins_again_and_never_gets_the_layers_name(make: Make, tmp_path: Path) -> None:
    (tmp_path / "h1").mkdir()
    (tmp_path / "h1" / f".{DIGEST}.part").write_bytes(bytes(CHUNK_BYTES + 7))
    h1 = make(1)
    h1.take_from(None)
    h1.serve(DIGEST, h1.wait("get", lambda digest: digest == DIGEST)["from"])
    assert h1.wait("get")["from"] in (0, CHUNK_BYTES)
    h1.wait("lacks", lambda lacks: lacks == len(DATA) + len(SMALL))
    assert not (h1.pool / DIGEST).exists()
    h1.serve_all()
    assert h1.has_all()


@pytest.mark.slow
def test_a_layer_that_is_always_wrong_fails_the_host(make: Make) -> None:
    h1 = make(1, ATTEMPTS=1)
    h1.take_from(None)
    h1.wait("get")
    h1.serve(DIGEST, 0, data=bytes(len(DATA)))
    assert "wrong digest" in h1.wait("error")["error"]
    assert h1.process.wait(SECONDS) == 1 and os.listdir(h1.pool) == []


@pytest.mark.slow
def test_a_full_disk_is_said_as_such(make: Make) -> None:
    h1 = make(1, file_bytes=CHUNK_BYTES + 10)
    h1.take_from(None)
    h1.wait("get")
    h1.serve(DIGEST, 0, 2)
    assert h1.wait("error")["error"].startswith(f"cannot write {h1.pool}/.{DIGEST}.part: ")
    assert h1.process.wait(SECONDS) == 1


def test_only_who_knows_the_secret_is_answered_and_nobody_can_write(make: Make) -> None:
    h1 = make(1)
    h1.take_from(None)
    h1.serve_all()
    assert h1.has_all()

    def ask(secret: bytes, *questions: dict[str, Any]) -> bytes:
        with socket.create_connection((h1.address, h1.port), SECONDS) as caller, caller.makefile("rb") as lines:
            proof = muster_relay._proof(secret, lines.readline().decode().strip())
            try:
                for words in ({"proof": proof}, *questions):
                    caller.sendall(json.dumps(words).encode() + b"\n")
                caller.shutdown(socket.SHUT_WR)
                return lines.read()
            except OSError:  # it has hung up
                return b""

    small = hashlib.sha256(SMALL).hexdigest()
    question = {"get": small, "from": 0}
    answer = ask(SECRET, question)
    assert muster_relay.unpack(SECRET, small, 0, len(SMALL), answer) == SMALL
    assert ask(b"another", question) == b""
    assert ask(SECRET, {"get": "../h1", "from": 0}) == ask(SECRET, {"get": small, "from": 1}) == b""
    assert ask(SECRET, {"put": small, "from": 0}) == ask(SECRET, {"get": DIGEST, "from": -CHUNK_BYTES}) == b""
    assert ask(SECRET, {"get": [small], "from": 0}) == ask(SECRET, {"get": small, "from": "0"}) == b""
    assert h1.has_all() and h1.process.poll() is None


@pytest.mark.slow
def test_a_source_that_has_nothing_yet_is_waited_for_and_one_that_is_silent_is_not(make: Make, net: str) -> None:
    h1 = make(1, SIGN_SECONDS=0.05)
    h2 = make(2, SIGNLESS_SECONDS=1.0)
    h2.take_from(h1)
    with pytest.raises(subprocess.TimeoutExpired):
        h2.process.wait(2)
    assert not any("trouble" in words for words in h2.said)
    silent = Fake(f"{net}.9", lambda caller, lines: lines.read())
    h2.take_from(silent)
    assert h2.wait("trouble")["trouble"] == silent.address
    assert "no answer in time" in h2.wait("trouble")["why"]
    h2.take_from(None)
    h2.serve_all()
    assert h2.has_all()
    silent.close()


@pytest.mark.slow
def test_where_nothing_listens_the_host_says_so_and_takes_another_source(make: Make) -> None:
    h1, h2 = make(1), make(2)
    h1.end()
    h2.take_from(h1)
    assert h2.wait("trouble")["why"] == "Connection refused"
    h2.take_from(None)
    h2.serve_all()
    assert h2.has_all()


@pytest.mark.slow
def test_the_first_free_port_is_taken_and_a_host_without_one_still_gets_all(make: Make, net: str) -> None:
    held = [
        socket.create_server((f"{net}.{host}", port))
        for host, ports in ((1, PORTS[:1]), (2, range(29600, 29604)))
        for port in ports
    ]
    assert make(1).port == PORTS[0] + 1
    h2 = make(2)
    assert h2.port is None and h2.wait("listening")["why"] == "no port from 29600 to 29603 is free"
    h2.take_from(None)
    h2.serve_all()
    assert h2.has_all()
    for one in held:
        one.close()


@pytest.mark.slow
def test_a_host_ends_when_the_control_machine_says_nothing_any_more(make: Make) -> None:
    assert make(1, ABSENT_SECONDS=0.5).process.wait(SECONDS) == 1


def test_control_machine_and_hosts_mean_the_same_frame() -> None:
    data = b"abc" * 100
    piece = zlib.compress(data, 1)
    assert distribution.frame(SECRET, DIGEST, CHUNK_BYTES, piece) == pack(SECRET, DIGEST, CHUNK_BYTES, data, 1)
    assert (distribution.CHUNK_BYTES, relay.CONTROL) == (CHUNK_BYTES, CONTROL)


@pytest.mark.parametrize(
    ("data", "worthwhile"),
    [(bytes(CHUNK_BYTES), True), (DATA[:CHUNK_BYTES], False), (DATA[: 1 << 19] + bytes(1 << 19), True)],
)
def test_what_does_not_shrink_is_passed_on_as_it_is(data: bytes, worthwhile: bool) -> None:
    """JPEG files, say: compressing them costs a processor more than the line gives."""
    assert muster_relay.shrinks(data) == distribution.shrinks(data) == worthwhile
    assert (len(pack(SECRET, DIGEST, 0, data, 1)) < len(data)) == worthwhile
