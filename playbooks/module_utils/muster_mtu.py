"""Path MTU: the largest IP packet that gets from one host to another, found with UDP packets that must not be cut.

A packet begins with the number of the try and its own length; the answer is a short packet that says that it arrived,
and one of the same length that tries the way back. A packet that is too long for an end's own link counts as lost.
Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

PACKET_TRIES, PACKET_SECONDS = 3, 0.12
#: Sizes of IP packets, in bytes, at which networks are known to end: least of IPv4, IPv6, VPN, PPPoE, tunnel, jumbo.
PACKET_BYTES = (576, 1000, 1280, 1300, 1350, 1400, 1420, 1450, 1480, 1492, 1500, 2044, 4082, 4470, 8900, 9000)
# (level, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE) from linux/in.h and in6.h; the socket module does not name them all.
PROBE_IPV4, PROBE_IPV6 = (socket.IPPROTO_IP, 10, 3), (socket.IPPROTO_IPV6, 23, 3)


def udp_socket(address: str, port: int) -> socket.socket:
    """Bound, and its packets are never cut into pieces. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.setsockopt(*PROBE_IPV6 if family == socket.AF_INET6 else PROBE_IPV4)
        made.bind((address, port))
    except OSError:
        made.close()
        raise
    return made


class Echo(asyncio.DatagramProtocol):
    """The end that answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if len(data) < 8:
            return
        self.transport.sendto(b"short" + data[:8], address)
        self.transport.sendto(b"equal" + data[:8] + bytes(max(0, len(data) - 13)), address)


async def open_echo(address: str, ports: range) -> tuple[asyncio.BaseTransport | None, int]:
    """(transport, port); (None, 0) where no port of the range is free."""
    for port in ports:
        try:
            made = udp_socket(address, port)
        except OSError:
            continue
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Echo, sock=made)
        return transport, port
    return None, 0


class Probe(asyncio.DatagramProtocol):
    """The end that asks. `answer_seconds`: how long to wait for the answer to a packet."""

    def __init__(self, theirs: str, port: int, answer_seconds: float) -> None:
        self.peer, self.header, self.answer_seconds = (theirs, port), 48 if ":" in theirs else 28, answer_seconds
        self.seen: set[tuple[bytes, bytes]] = set()
        self.news = asyncio.Event()
        self.tries = 0
        self.passed: dict[int, tuple[bool, bool]] = {}  # by size

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        self.seen.add((data[:5], data[5:13]))
        self.news.set()

    async def passes(self, size: int) -> tuple[bool, bool]:
        """Whether an IP packet of `size` bytes gets (there, back)."""
        there, back = self.passed.get(size, (False, False))
        for _ in range(0 if size in self.passed else PACKET_TRIES):
            self.tries += 1
            mark = self.tries.to_bytes(4, "big") + size.to_bytes(4, "big")
            self.transport.sendto(mark + bytes(max(0, size - self.header - 8)), self.peer)
            deadline = time.monotonic() + self.answer_seconds
            while not (there and back) and time.monotonic() < deadline:
                self.news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.news.wait(), max(0.001, deadline - time.monotonic()))
                there = there or (b"short", mark) in self.seen or (b"equal", mark) in self.seen
                back = back or (b"equal", mark) in self.seen
            if there and back:
                break
        self.passed[size] = there, back
        return there, back

    async def largest(self, way: int, sizes: list[int]) -> int:
        """The largest of the ascending sizes that gets through one way (0: there, 1: back), if the first one does."""
        if (await self.passes(sizes[-1]))[way]:  # as on most networks
            return sizes[-1]
        low, high = 0, len(sizes) - 2
        while low < high:
            middle = (low + high + 1) // 2
            if (await self.passes(sizes[middle]))[way]:
                low = middle
            else:
                high = middle - 1
        return sizes[low]


async def path_mtus(own: str, theirs: str, port: int, nic_mtu: int, rtt_ms: float) -> tuple[int | None, int | None]:
    """Bytes of the largest IP packet that gets through (there, back), at most `nic_mtu`.

    (None, None) where not even the smallest one does: UDP is blocked, which the first packets show.
    """
    try:
        made = udp_socket(own, 0)
    except OSError:
        return None, None
    wait = max(PACKET_SECONDS, 4 * rtt_ms / 1000)
    transport, probe = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Probe(theirs, port, wait), sock=made
    )
    sizes = [size for size in PACKET_BYTES if size < nic_mtu] + [nic_mtu]
    try:
        if not all(await probe.passes(sizes[0])):
            return None, None
        return await probe.largest(0, sizes), await probe.largest(1, sizes)
    finally:
        transport.close()
