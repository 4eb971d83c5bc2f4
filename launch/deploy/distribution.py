"""Brings an image, or a dataset, to hosts: only what a host lacks travels, from host to host (relay.py); one SSH call
to each.

What the hosts do and say: playbooks/module_utils/muster_distribution.py, muster_data.py and muster_relay.py.
"""

from __future__ import annotations

import bz2
import collections
import hashlib
import hmac
import os
import queue
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from containers import image as images
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.cli.units import age, size
from launch.deploy import relay
from launch.hosts import clustermap, hostcall
from launch.hosts.connection import LINK_ERRORS, Machine
from launch.hosts.door import Call
from launch.network.links import Link

PROGRESS_SECONDS = 10.0  # between two reports; a change of code alone has arrived before the first one
HOST_SECONDS = 90.0  # without a word, after which a host has failed: its Podman may take a minute to say what is there
SIGN_OF_LIFE_SECONDS = 10.0  # between two words to a host; without any it ends (ABSENT_SECONDS of muster_relay)
LISTENING_SECONDS = 20.0  # for a host to say whether it listens
CALLS = 3  # of a host whose SSH connection breaks again and again
STEP_SECONDS = 1.0  # between two looks at how far all hosts are

BLOBS = "blobs/sha256"  # in an export's folder
CHUNK_BYTES = 1 << 20  # of a layer in one frame; as muster_relay has it, like the frame itself
HEADER = struct.Struct(">QI32s")
SMALL_BYTES = 16 << 20  # of a layer that may be compressed slowly: one of code alone
LEVEL, SMALL_LEVEL = 2, 9  # of zlib; on a core, 2 makes of libtorch 85 MB/s (to 1/3.4), 4 makes 59 MB/s (to 1/3.6)
SAMPLE_BYTES, WORTHWHILE = 1 << 13, 0.95  # as muster_relay has them
FRAMES_KEPT, FRAMES_AHEAD = 64, 4


def distribute(
    machines: Sequence[Machine],
    addresses: Mapping[str, str],
    image: images.Image,
    export: images.OciExport,
    say: Callable[[str], None],
    links: Sequence[Link] = (),
    origin: Machine | None = None,
) -> dict[str, dict[str, Any]]:
    """Bring an image to these hosts. Returns host -> {"id", "changed", "seconds", "bytes_sent" (that came to it, from
    whomever), "control_bytes" (of these, what this machine sent)}.

    addresses: of all hosts, on the training network; links: what was measured there. origin: the host that has built
    the image and has its layers in the export's folder; this machine then sends none. It gets the image, too.

    Raises Refusal when a host does not end up with this very image; before anything is sent, where one has no room.
    """
    machines = [*([origin] if origin else []), *(one for one in machines if not origin or one.name != origin.name)]
    options = {"ref": image.ref, "id": image.id, "index": export.index, "blobs": export.blobs}
    folder = export.path / BLOBS

    def read(digest: str, offset: int, length: int) -> bytes:
        with (folder / digest).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    blobs = Blobs(export.blobs, read, SMALL_BYTES)
    first, own = (origin.name, {origin.name: {"built": str(folder)}}) if origin else (relay.CONTROL, {})
    return pass_on(machines, addresses, "muster_distribution", options, blobs, say, links, "layers", first, own)


def pass_on(
    machines: Sequence[Machine],
    addresses: Mapping[str, str],
    module: str,
    options: Mapping[str, Any],
    blobs: Blobs,
    say: Callable[[str], None],
    links: Sequence[Link],
    what: str,
    origin: str = relay.CONTROL,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Bring blobs to these hosts, which run `module` of playbooks/module_utils; the rest is as of `distribute`.

    options: the module's, but `relay`; more: further ones of some hosts. what: what the blobs are, for people. origin:
    the one of the hosts that has them all, where that is not this machine.
    """
    order = relay.chain([machine.name for machine in machines if machine.name != origin], links)
    secret = secrets.token_bytes(32)
    changed = threading.Condition()
    with Frames(blobs, secret) as frames:
        hosts: dict[str, Host] = {}
        for machine in machines:
            own = {"secret": secret.hex(), "address": addresses[machine.name], "ports": clustermap.REACH_PORTS}
            asked = {**options, "relay": own, **(more or {}).get(machine.name, {})}
            hosts[machine.name] = Host(machine, module, asked, frames, changed)
        try:
            _wait_for_needs(hosts, say, changed)
            _refuse_failed(hosts)  # nothing was sent yet
            frames.bz2 = all(host.has_bz2 for host in hosts.values())
            for host in hosts.values():
                host.begin()
            lacking = [name for name in order if hosts[name].needed == "pull"]
            first = [origin] if origin in hosts else []
            _Distribution([*first, *lacking], hosts, addresses, say, changed, what, origin).run()
            _refuse_failed(hosts)
        finally:
            for host in hosts.values():
                host.close()
    return {
        name: {
            "id": host.holds,
            "changed": host.needed != "nothing",
            "seconds": host.seconds,
            "bytes_sent": host.received,
            "control_bytes": host.control_bytes,
        }
        for name, host in hosts.items()
    }


def _wait_for_needs(hosts: Mapping[str, Host], say: Callable[[str], None], changed: threading.Condition) -> None:
    """Wait until every host has said what it needs, or has failed."""
    said = time.monotonic()
    with changed:
        while waiting := [host for host in hosts.values() if not (host.needed or host.state.gone)]:
            changed.wait(STEP_SECONDS)
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                say("; ".join(f"waiting for {host.name}{host.why and ': '}{host.why}" for host in waiting))


def _refuse_failed(hosts: Mapping[str, Host]) -> None:
    """Raises one Refusal for all hosts that have failed."""
    failed = {name: host.failure for name, host in hosts.items() if host.failure}
    if failed:
        fix = "fix what it names and run the same command again: it goes on where it stopped"
        problems = [Problem(f"host {name}", str(error) or type(error).__name__, fix) for name, error in failed.items()]
        lost = all(isinstance(error, LINK_ERRORS) for error in failed.values())
        raise Refusal(problems, exits.UNREACHABLE if lost else exits.DEPLOY_FAILED)


@dataclass(frozen=True)
class Blobs:
    """What is sent: digest -> bytes, and a function of digest, offset and length that gives a piece.

    small_bytes: of a blob that may be compressed slowly.
    """

    sizes: Mapping[str, int]
    read: Callable[[str, int, int], bytes]
    small_bytes: int = 0


class Frames:
    """The blobs in frames, compressed a few ahead, on all processors; hosts that take the same get the same."""

    def __init__(self, blobs: Blobs, secret: bytes) -> None:
        self.sizes, self._blobs, self._secret = blobs.sizes, blobs, secret
        self.bz2 = False  # whether all hosts can read it
        self._kept: collections.OrderedDict[tuple[str, int], Future[bytes]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def get(self, digest: str, offset: int) -> bytes:
        """The frame that begins there."""
        with self._lock:
            ahead = range(offset, self.sizes[digest], CHUNK_BYTES)[: FRAMES_AHEAD + 1]
            futures = [self._kept.get((digest, at)) or self._begin(digest, at) for at in ahead]
            while len(self._kept) > FRAMES_KEPT:
                self._kept.popitem(last=False)
        return futures[0].result()

    def _begin(self, digest: str, offset: int) -> Future[bytes]:
        self._kept[digest, offset] = future = self._pool.submit(self._pack, digest, offset)
        return future

    def _pack(self, digest: str, offset: int) -> bytes:
        data = self._blobs.read(digest, offset, min(CHUNK_BYTES, self.sizes[digest] - offset))
        if self.sizes[digest] > self._blobs.small_bytes:
            return frame(self._secret, digest, offset, zlib.compress(data, LEVEL if shrinks(data) else 0))
        return frame(self._secret, digest, offset, bz2.compress(data) if self.bz2 else zlib.compress(data, SMALL_LEVEL))


def shrinks(data: bytes) -> bool:
    """Whether compressing is worth its while, by samples: JPEG files do not shrink. As in muster_relay."""
    sample = b"".join(data[at : at + SAMPLE_BYTES] for at in range(0, len(data), CHUNK_BYTES // 4))
    return len(zlib.compress(sample, 1)) < WORTHWHILE * len(sample)


def frame(secret: bytes, digest: str, offset: int, piece: bytes) -> bytes:
    """A frame of a compressed piece, as muster_relay makes it: launch imports nothing of playbooks."""
    mac = hmac.digest(secret, digest.encode() + offset.to_bytes(8, "big") + piece, hashlib.sha256)
    return HEADER.pack(offset, len(piece), mac) + piece


class Host:
    """One host's call: what it has said so far, and what it is sent. `changed` is notified of every word."""

    def __init__(
        self, machine: Machine, module: str, options: Mapping[str, Any], frames: Frames, changed: threading.Condition
    ) -> None:
        self.name = machine.name
        self.state = relay.State(lacks=0)
        self.needed: str | None = None
        self.has_bz2 = False
        self.holds = ""  # the image or the dataset, when it has all of it
        self.is_ready = False  # to be named a source
        self.port: int | None = None
        self.why = ""  # it waits, has lost its source, or does not listen
        self.last_source: str | None = None
        self.failure: BaseException | None = None
        self.received = self.control_bytes = 0
        self.seconds = 0.0
        self._machine, self._module, self._frames, self._changed = machine, module, frames, changed
        self._moved = self._begun = time.monotonic()
        self._lacked = 0
        self._may_begin = False
        self._call: Call | None = None
        self._to_send: queue.Queue[dict[str, Any] | None] = queue.Queue()  # of this call
        self._question = hostcall.program(options).encode()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self) -> None:
        """Have the host get what it lacks: every host has room."""
        self._may_begin = True
        self._to_send.put({"begin": True})

    def name_source(self, name: str, port: int | None, address: str | None) -> None:
        """Have the host take from this source."""
        self.state, self.last_source = replace(self.state, source=name), name
        self._moved = time.monotonic()
        self._to_send.put({"source": {"name": name, "address": address, "port": port}})

    def look(self) -> None:
        """Bring what follows from the time that has passed into `state`."""
        now = time.monotonic()
        pace = (self._lacked - self.state.lacks) / max(self._moved - self._begun, 0.1) if self._lacked else None
        self.state = replace(self.state, quiet_seconds=now - self._moved, pace=pace)
        if self.state.listens is None and now - self._begun > LISTENING_SECONDS:
            self.state = replace(self.state, listens=False)

    def fail(self, error: BaseException) -> None:
        """Give the host up; where it has all, that is no failure."""
        if not self.holds:
            self.failure = self.failure or error
        self.close()

    def close(self) -> None:
        """Hang up. The host's part ends."""
        with self._changed:
            self.state = replace(self.state, gone=True)
            self._to_send.put(None)
        if self._call:
            self._call.close()

    def _listen(self) -> None:
        """All calls to their end: another one where the connection broke, which goes on where the last one stopped."""
        for calls_left in reversed(range(CALLS)):
            try:
                self._hear()
            except TimeoutError as error:
                return self._end(error)
            except LINK_ERRORS as error:
                if self.holds or self.state.gone or not calls_left or not self._connect_again():
                    return self._end(error)
            except Exception as error:
                return self._end(error)

    def _hear(self) -> None:
        """One call. Raises what ended it."""
        to_send = self._to_send
        with Call(self._machine, hostcall.command(self._machine.target.python, self._module), self._question) as call:
            self._call = call
            if self.state.gone:  # given up while this call was made: `close` has not seen it
                raise EOFError(f"{self.name} was given up")
            talking = None
            for said in call.frames(HOST_SECONDS):
                if not talking:  # what comes before the first word would be lost with the question
                    talking = threading.Thread(target=self._talk, args=(call, to_send), daemon=True)
                    talking.start()
                with self._changed:
                    self._note(said.words)
                    self._changed.notify()
        raise RuntimeError("it ended without a word")

    def _connect_again(self) -> bool:
        with self._changed:
            self._to_send.put(None)
            self._to_send = queue.Queue()
            self.state, self.is_ready = replace(self.state, source=None, listens=None, failed=frozenset()), False
        try:
            self._machine.reconnect()
        except LINK_ERRORS:
            return False
        return True

    def _end(self, error: Exception) -> None:
        """The call has ended."""
        with self._changed:
            if not self.state.gone:
                self.fail(error)
            self._changed.notify()

    def _note(self, words: Mapping[str, Any]) -> None:
        if "needed" in words:
            if self._may_begin:  # it was called again
                self._to_send.put({"begin": True})
            self.needed, self.has_bz2 = words["needed"], words["bz2"]
            self._lacked, self._begun = words["lacks"], time.monotonic()
            self._moved = self._begun
            self.state = replace(self.state, lacks=self._lacked)
        elif "lacks" in words:
            self.received = words["received"]
            if words["lacks"] != self.state.lacks:
                self._moved = time.monotonic()
                self.state = replace(self.state, lacks=words["lacks"])
        elif "listening" in words:
            self.port, self.why, self.is_ready = words["listening"], words["why"] or "", True
            self.state = replace(self.state, listens=self.port is not None)
        elif "trouble" in words and words["trouble"] == self.state.source:
            self.why = words["why"]
            failed = self.state.failed | {words["trouble"]}
            self.state = replace(self.state, source=None, failed=failed)
        elif "get" in words:
            self._to_send.put(dict(words))
        elif "waiting" in words:
            self.why = words["waiting"]
        elif "holds" in words:
            self.holds, self.seconds = words["holds"], words["seconds"]

    def _talk(self, call: Call, to_send: queue.Queue[dict[str, Any] | None]) -> None:
        """Send what is to be sent, and a sign of life when there is nothing."""
        try:
            while True:
                try:
                    words = to_send.get(timeout=SIGN_OF_LIFE_SECONDS)
                except queue.Empty:
                    words = {"ping": True}
                if words is None:
                    return
                if "get" in words:
                    self._serve(call, words["get"], words["from"])
                else:
                    call.send(words)
        except Exception as error:
            broke = isinstance(error, LINK_ERRORS) and not isinstance(error, TimeoutError)
            if call is self._call and not broke:  # that is what `_hear` finds
                self._end(error)

    def _serve(self, call: Call, digest: str, offset: int) -> None:
        """Send a blob from an offset on."""
        if offset % CHUNK_BYTES:
            raise RuntimeError("it asked for what is no piece of a blob")
        for at in range(offset, self._frames.sizes[digest], CHUNK_BYTES):
            piece = self._frames.get(digest, at)
            if self.state.gone or not call.is_open:
                return
            call.send({"frame": len(piece)}, piece)
            self.control_bytes += len(piece)


@dataclass
class _Distribution:
    """The way of blobs from host to host, until each has all or has failed.

    order: the hosts that lack some, after the origin where that is a host; what: what the blobs are, for people.
    """

    order: Sequence[str]
    hosts: Mapping[str, Host]
    addresses: Mapping[str, str]
    say: Callable[[str], None]
    changed: threading.Condition
    what: str
    origin: str = relay.CONTROL

    def run(self) -> None:
        said, before = time.monotonic(), dict[str, tuple[float, int]]()
        with self.changed:
            while not all(host.holds or host.state.gone for host in self.hosts.values()):
                self._step()
                if time.monotonic() - said >= PROGRESS_SECONDS:
                    said = time.monotonic()
                    now = {name: (said, self.hosts[name].state.lacks) for name in self.order}
                    if any(lacks for _, lacks in now.values()):
                        self.say("; ".join(_words(name, now[name], before.get(name)) for name in now))
                    before = now
                self.changed.wait(STEP_SECONDS)

    def _step(self) -> None:
        """Name sources to the hosts that shall have others, and give up those to which nothing comes."""
        for name in self.order:
            host = self.hosts[name]
            host.look()
            if relay.CONTROL in host.state.failed:
                host.fail(RuntimeError(f"it could not take {self.what} from the control machine: {host.why}"))
            if host.state.source == relay.CONTROL and host.state.lacks and host.state.quiet_seconds > HOST_SECONDS:
                host.fail(RuntimeError(f"nothing came to it from the control machine for {HOST_SECONDS:.0f} s"))
        states = {name: self.hosts[name].state for name in self.order}
        for name, source in relay.failed_with(self.order, states).items():
            self.hosts[name].why = f"nothing came for {relay.STANDSTILL_SECONDS:.0f} s"
            states[name] = self.hosts[name].state = replace(states[name], failed=states[name].failed | {source})
        for name in relay.stranded(self.order, states, self.origin):
            self.hosts[name].fail(RuntimeError(self._why_stranded(name)))
        for name, source in relay.next_sources(self.order, states, self.origin).items():
            if not self.hosts[name].is_ready:
                continue
            self._say_why(name, source, states)
            port = self.hosts[source].port if source in self.hosts else None
            self.hosts[name].name_source(source, port, self.addresses.get(source))

    def _why_stranded(self, name: str) -> str:
        origin, own = self.hosts[self.origin], self.hosts[name].why
        if origin.state.gone:
            why = "has failed itself"
        elif origin.state.listens is False:
            why = f"does not listen: {origin.why or 'no answer in time'}"
        else:
            why = f"could not be used: {own}"
        first, last = clustermap.REACH_PORTS
        return (
            f"it has nobody to take layers from: {self.origin}, on which they were built, {why} (ports {first}-{last})"
        )

    def _say_why(self, name: str, source: str, states: Mapping[str, relay.State]) -> None:
        """Where a host does not take from the one before it in the chain."""
        place, host = self.order.index(name), self.hosts[name]
        usual = self.order[place - 1] if place else self.origin
        former = host.last_source or usual
        if source == usual or former == relay.CONTROL:
            return
        if states[former].gone:
            why = "has failed"
        elif states[former].listens is False:
            why = f"does not listen: {self.hosts[former].why or f'no answer within {LISTENING_SECONDS:.0f} s'}"
        else:
            why = f"cannot be used: {host.why}" if former in states[name].failed else "is slow"
        self.say(
            f"{name} takes {self.what} from {'the ' if source == relay.CONTROL else ''}{source}, as {former} {why}"
        )


def _words(host: str, now: tuple[float, int], before: tuple[float, int] | None) -> str:
    """`h2: 210.0 MiB to send, about 40 s`. The pairs are (time.monotonic(), bytes that the host lacks)."""
    if not now[1]:
        return f"{host} has all"
    pace = (before[1] - now[1]) / (now[0] - before[0]) if before else 0.0  # bytes/s
    return f"{host}: {size(now[1])} to send" + (f", about {age(now[1] / pace)}" if pace > 0 else "")
