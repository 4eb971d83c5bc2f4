"""How the hosts of one call find each other: one way to listen, one greeting, one way to connect and to say why not.

Every host listens on its own addresses, on each at the first free port of a documented range, and reports where to the
control machine (`listening`). That waits until every host has done so, then gives all hosts the same list
(`directory`). So no host has to search for ports, or to guess whether another has started yet.

The greeting: the caller sends one line of JSON
    {"muster": 1, "token": a word that only the hosts of this call know, "host": the caller, ...}
and the host that listens answers at once, also to a caller from another call,
    {"muster": 1, "host": its name, "ours": whether the caller knows the token}
so that an address that another machine answers on (172.17.0.1, which every host has) is recognised. A caller that adds
"network" stays connected: see `visitor`. Every wait is bounded. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import time
from typing import Any, Awaitable, TypeVar

T = TypeVar("T")

ATTEMPT_SECONDS = 1.5  # to connect: a SYN that is sent again (after 1 s) still fits
SLICES = 15  # of these seconds: see `within`
REPLY_SECONDS = 5.0  # for a line over a connection that is there: a busy host can be held up for seconds
LINE_BYTES = 1 << 16
ATTEMPTS_AT_ONCE = 256  # attempts to connect; a process may have 1,024 files open, and as many hosts call this one

#: What can end a connection; `why_ended` says it in words.
ENDINGS = (OSError, ValueError, KeyError, asyncio.TimeoutError, asyncio.IncompleteReadError)


class Unreached(Exception):
    """An address on which the host that was meant does not answer, in words for the user."""


class Meeting:
    """One host's place among the hosts of a call.

    options: name of this host; token; addresses, its own on which to listen; ports [first, last].
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.name: str = options["name"]
        self.token: str = options["token"]
        self.addresses: list[str] = options["addresses"]
        self.ports = range(options["ports"][0], options["ports"][1] + 1)
        self.listening: dict[str, int | str] = {}  # by own address the port, or why it cannot be listened on
        self.directory: dict[str, dict[str, int | str]] = {}  # the same by host, of all hosts that take part
        self.gone: set[tuple[int, str]] = set()  # (network, host): the pairs in which this host was the caller, ended
        self._servers: list[asyncio.AbstractServer] = []
        self._visitors: dict[tuple[int, str], asyncio.Future[Any]] = {}

    async def listen(self) -> None:
        """Listen on all own addresses; `listening` then says where."""
        for address in dict.fromkeys(self.addresses):
            self.listening[address] = await self._listen(address)

    async def _listen(self, address: str) -> int | str:
        for port in self.ports:
            try:
                server = await asyncio.start_server(self._receive, address, port, limit=LINE_BYTES, backlog=512)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return os.strerror(error.errno or errno.EADDRNOTAVAIL)
            else:
                self._servers.append(server)
                return port
        return f"no port from {self.ports[0]} to {self.ports[-1]} is free"

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await hear(reader, REPLY_SECONDS)
            ours = hello.get("token") == self.token
            gone = (hello.get("waits"), hello.get("host")) in self.gone
            say(writer, muster=1, host=self.name, ours=ours, gone=ours and gone)
            if ours and "network" in hello and not self.visitor(hello["network"], hello["host"]).done():
                self.visitor(hello["network"], hello["host"]).set_result((reader, writer))
                return
            await asyncio.wait_for(writer.drain(), REPLY_SECONDS)
        except ENDINGS:
            pass  # a port scanner, or a caller that has left
        writer.close()

    def visitor(self, network: int, caller: str) -> asyncio.Future[Any]:
        """The connection (reader, writer) on which a host has asked for its pair with this one, once it has come."""
        if (network, caller) not in self._visitors:
            self._visitors[network, caller] = asyncio.get_running_loop().create_future()
        return self._visitors[network, caller]

    def port(self, host: str, address: str) -> int:
        """Where a host listens on one of its addresses. Raises Unreached."""
        if host not in self.directory:
            raise Unreached(f"{host} did not take part")
        found = self.directory[host][address]
        if isinstance(found, str):
            raise Unreached(f"{host} cannot listen on {address}: {found}")
        return found

    async def greet(
        self, peer: str, address: str, own: str | None = None, **more: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, float]:
        """Connect to a host at one of its addresses, from the own address given, and make sure that it is this host.

        Returns the connection and the milliseconds of the TCP handshake. Raises Unreached.
        """
        port, begun = self.port(peer, address), time.monotonic()
        try:
            local = (own, 0) if own else None
            opening = asyncio.open_connection(address, port, limit=LINE_BYTES, local_addr=local)
            reader, writer = await within(ATTEMPT_SECONDS, opening)
        except asyncio.TimeoutError:
            why = f"no answer on port {port} within {ATTEMPT_SECONDS} s"
            raise Unreached(f"{why}: a firewall drops it, or there is no such host") from None
        except ConnectionRefusedError:
            raise Unreached(f"port {port} refused: a firewall rejects it, or nothing listens there") from None
        except OSError as error:
            raise Unreached(f"port {port}: {why_ended(error)}") from None
        milliseconds = round(1000 * (time.monotonic() - begun), 3)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            say(writer, muster=1, token=self.token, host=self.name, **more)
            wrong = self._why_wrong(peer, await hear(reader, REPLY_SECONDS))
        except ValueError:
            wrong = "another program answers there"
        except ENDINGS as error:
            wrong = why_ended(error)
        if wrong:
            writer.close()
            raise Unreached(f"port {port}: {wrong}")
        return reader, writer, milliseconds

    def _why_wrong(self, peer: str, answer: dict[str, Any]) -> str | None:
        host = answer.get("host")
        if answer.get("muster") != 1:
            return "another program answers there"
        if not answer.get("ours"):
            return f"{host} answers for another deploy or check: try again when that has ended"
        if host == self.name:
            return f"{self.name} itself answers there: {peer} and {self.name} have the same address"
        if host != peer:
            return f"{host} answers there, not {peer}: two hosts have the same address"
        if answer.get("gone"):
            return f"{host} has left this pair"
        return None

    def close(self) -> None:
        """Close everything that is still open."""
        for server in self._servers:
            server.close()
        for waiting in self._visitors.values():
            if waiting.done() and not waiting.cancelled():
                waiting.result()[1].close()


async def reach(meeting: Meeting, peers: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Try all candidate addresses of the other hosts (by name) at once.

    Returns for each address {"peer", "address", "ok", "milliseconds" (of the TCP handshake), "error"}. An address that
    does not work costs about three seconds, ten where another program listens and says nothing.
    """
    few = asyncio.Semaphore(ATTEMPTS_AT_ONCE)
    tries = [_try(meeting, peer, address, few) for peer, addresses in peers.items() for address in addresses]
    return list(await asyncio.gather(*tries))


async def _try(meeting: Meeting, peer: str, address: str, few: asyncio.Semaphore) -> dict[str, Any]:
    milliseconds, error = None, None
    for _ in range(2):
        try:
            async with few:
                _, writer, milliseconds = await meeting.greet(peer, address)
            writer.close()
            error = None
            break
        except Unreached as failure:
            error = str(failure)
    return {"peer": peer, "address": address, "ok": error is None, "milliseconds": milliseconds, "error": error}


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`. Raises asyncio.TimeoutError after so many seconds, in which time counts a slice at a time.

    So a host that is held up itself, as its processors are busy, does not take that for an address without an answer.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(SLICES):
            if (await asyncio.wait([task], timeout=seconds / SLICES))[0]:
                return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()


def say(writer: asyncio.StreamWriter, **words: Any) -> None:
    """Send one line of JSON."""
    writer.write(json.dumps(words).encode() + b"\n")


async def hear(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """The other end's next line. Raises one of ENDINGS."""
    line = await asyncio.wait_for(reader.readline(), seconds)
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    words = json.loads(line)
    if not isinstance(words, dict):
        raise ValueError
    return words


def why_ended(error: BaseException) -> str:
    """What ended a connection, for the user: never the words of a Python exception."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "the other end closed the connection"
    if isinstance(error, (asyncio.TimeoutError, socket.timeout)):
        return "no answer in time"
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else "the connection was cut"
    return "an answer that cannot be read"
