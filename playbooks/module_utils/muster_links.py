"""Measures the links between hosts: round trip, path MTU, whether data flows, bandwidth. All hosts run it at once.

Every host gets its own pairs in an order in which no host is in two measurements at the same time. Nobody directs the
hosts: each goes through its pairs, and in each pair the first host calls the second, which answers as soon as it has
come to this pair. What a pair does, over the port range of the meeting:

1. The caller connects, and the callee connects back, so that a firewall that lets one direction through is seen.
2. Bytes go to and fro over the open connection: the round trip is the least of several.
3. UDP packets that must not be cut into pieces find the largest that gets through in each direction (path MTU).
4. BULK_BYTES go each way. A link that passes small packets only (an MTU black hole) stops here.
5. iperf3 measures the bandwidth, both directions at the same time, as an all-reduce uses them. Left out where `seconds`
   is 0. A pair of which one host lacks iperf3, or cannot use it, works all the same: its result names that host.

Needs iperf3 for step 5. Standard library alone, Python 3.8 and later. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Callable

from ansible.module_utils.muster_iperf import LinkFails, NoIperf, end, iperf_path, run_iperf, start_iperf
from ansible.module_utils.muster_meeting import ENDINGS, REPLY_SECONDS, Meeting, Unreached, hear, say, why_ended
from ansible.module_utils.muster_mtu import open_echo, path_mtus

PINGS = 11
STILL_COMING_SECONDS = 1.0  # between two questions whether a caller may still come to its pair
BULK_BYTES = 256 * 1024
BULK_SECONDS = 4.0


class Broken(Exception):
    """A pair that cannot be used, in words for the user."""


async def measure(
    meeting: Meeting, options: dict[str, Any], on_pair: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Go through this host's pairs; returns the results of those in which it is the caller, both directions.

    options: pairs [{network (a number), peer, calls (whether this host is the caller), own, theirs (addresses),
    mtus {host: bytes}}]; seconds of each bandwidth measurement (0: none); patience, seconds to wait for a peer.
    on_pair: called after each pair in which this host is the caller.
    """
    results = []
    for known in options["pairs"]:
        if not known["calls"]:
            await answer(meeting, known, options)
            continue
        pair = Pair(meeting, known, options)
        await pair.call()
        results += pair.results()
        on_pair()
    return results


async def answer(meeting: Meeting, known: dict[str, Any], options: dict[str, Any]) -> None:
    """The callee's part of a pair. Whatever goes wrong, the caller sees it and says so."""
    own, theirs, peer = known["own"], known["theirs"], known["peer"]
    try:
        meeting.port(meeting.name, own), meeting.port(peer, theirs)
        reader, writer = await caller_of(meeting, known, options["patience"])
    except Unreached:
        return
    echo, udp_port = await open_echo(own, meeting.ports)
    server = None
    try:
        say(writer, back=await why_not_back(meeting, known), udp=udp_port)
        while True:
            request = await hear(reader, options["patience"] + 2 * options["seconds"])
            if "ping" in request:
                say(writer)
            elif "bulk" in request:
                await asyncio.wait_for(reader.readexactly(request["bulk"]), BULK_SECONDS)
                writer.write(bytes(request["bulk"]))
            elif "iperf" in request:
                try:
                    if request["iperf"]:
                        port, server = await start_iperf(own, meeting.ports, options["seconds"])
                        say(writer, port=port)
                    else:  # the caller cannot measure, and asks whether this host could
                        iperf_path()
                        say(writer)
                except NoIperf as failure:
                    say(writer, problem=str(failure))
            else:
                return
    except ENDINGS:
        pass
    finally:
        writer.close()
        if echo:
            echo.close()
        if server:
            await end(server)


async def caller_of(meeting: Meeting, known: dict[str, Any], patience: float) -> Any:
    """The caller's connection (reader, writer), once it has come to this pair. Raises Unreached if it does not come.

    Whether it still may is asked of the caller itself: nobody waits long for a host whose network is down or that does
    not reach this one, as the hosts of later pairs would wait in turn.
    """
    visitor, failures = meeting.visitor(known["network"], known["peer"]), 0
    deadline = time.monotonic() + patience
    while not (await asyncio.wait([visitor], timeout=STILL_COMING_SECONDS))[0]:
        failures = failures + 1 if await why_not_back(meeting, known, waits=known["network"]) else 0
        if failures == 2 or time.monotonic() > deadline:
            raise Unreached(f"{known['peer']} does not come")
    return visitor.result()


async def why_not_back(meeting: Meeting, known: dict[str, Any], **more: Any) -> str | None:
    """Why the callee does not reach the caller; None if it does. more: as for Meeting.greet."""
    try:
        _, writer, _ = await meeting.greet(known["peer"], known["theirs"], known["own"], **more)
        writer.close()
    except Unreached as failure:
        return str(failure)
    return None


class Pair:
    """The caller's part of one pair of hosts on one network."""

    def __init__(self, meeting: Meeting, known: dict[str, Any], options: dict[str, Any]) -> None:
        self.meeting, self.name, self.peer = meeting, meeting.name, known["peer"]
        self.network, self.own, self.theirs = known["network"], known["own"], known["theirs"]
        self.seconds, self.patience = options["seconds"], options["patience"]
        self.nic_mtus: dict[str, int] = known["mtus"]
        there, back = (self.name, self.peer), (self.peer, self.name)
        self.mtus: dict[tuple[str, str], int | None] = {there: None, back: None}
        self.mbits: dict[tuple[str, str], float | None] = {there: None, back: None}
        self.rtt_ms: float | None = None
        self.error: str | None = None
        self.back: str | None = None  # what is wrong with the way from the peer to here alone
        self.problems: dict[str, str] = {}  # host: why it cannot measure bandwidth

    def results(self) -> list[dict[str, Any]]:
        """Both directions, as the control side's Link has them, with the number of the network and `problems`.

        problems: by host why it cannot measure bandwidth ("iperf3 is missing"); the pair works then, without `mbits`.
        """
        return [
            {
                "network": self.network,
                "source": source,
                "target": target,
                "mbits": self.mbits[source, target],
                "rtt_ms": self.rtt_ms,
                "path_mtu": self.mtus[source, target],
                "error": self.error or (self.back if source == self.peer else None),
                "problems": self.problems,
            }
            for source, target in self.mbits
        ]

    async def call(self) -> None:
        """Measure; whatever goes wrong becomes `error`."""
        writer = None
        try:
            self.meeting.port(self.name, self.own)  # the callee has to connect back to it
            reader, writer, _ = await self.meeting.greet(self.peer, self.theirs, self.own, network=self.network)
            answered = await self._turn(reader)
            if answered["back"]:
                self.back = f"{self.peer} does not reach {self.name} at {self.own}: {answered['back']}"
            await self._ping(reader, writer)
            if answered["udp"]:
                mtu = min(self.nic_mtus.values())
                found = await path_mtus(self.own, self.theirs, answered["udp"], mtu, self.rtt_ms or 0.0)
                self.mtus = dict(zip(self.mtus, found))
            await self._bulk(reader, writer)
            if self.seconds and not self.back:
                await self._bandwidth(reader, writer)
            say(writer, done=True)
        except Unreached as failure:
            self.error = f"{self.name} does not reach {self.peer} at {self.theirs}: {failure}"
        except (Broken, LinkFails) as failure:
            self.error = str(failure)
        except ENDINGS as error:
            connection = f"the connection from {self.name} to {self.peer} ({self.theirs})"
            self.error = f"{connection} broke off: {why_ended(error)}"
        finally:
            self.meeting.gone.add((self.network, self.peer))
            if writer:
                writer.close()

    async def _turn(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        """What the peer says once it has come to this pair."""
        try:
            return await hear(reader, self.patience)
        except asyncio.TimeoutError:
            words = f"{self.peer} answers, but did not come to its pair with {self.name} within {self.patience:.0f} s"
            raise Broken(f"{words}: another pair keeps it busy") from None

    async def _ping(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times = []
        for number in range(PINGS):
            begun = time.perf_counter()
            say(writer, ping=number)
            await hear(reader, REPLY_SECONDS)
            times.append(time.perf_counter() - begun)
        self.rtt_ms = round(1000 * min(times), 3)

    async def _bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            say(writer, bulk=BULK_BYTES)
            writer.write(bytes(BULK_BYTES))
            await asyncio.wait_for(reader.readexactly(BULK_BYTES), BULK_SECONDS)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            raise Broken(self._why_stuck()) from None

    def _why_stuck(self) -> str:
        least = min(self.nic_mtus.values())
        for (source, target), size in self.mtus.items():
            if size is not None and size < least:
                nics = " and ".join(f"{host}'s NIC has MTU {mtu}" for host, mtu in self.nic_mtus.items())
                return (
                    f"an MTU black hole {source} -> {target}: {nics}, but packets above {size} bytes vanish. "
                    f"Set the MTU of these NICs to {size}, or fix the switch, tunnel or firewall between them"
                )
        return (
            f"{self.name} and {self.peer} connect, but {BULK_BYTES // 1024} KiB each way did not get through within "
            f"{BULK_SECONDS:.0f} s: a link that loses packets, or an MTU black hole"
        )

    async def _bandwidth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            iperf_path()
        except NoIperf as failure:
            self.problems[self.name] = str(failure)
        say(writer, iperf=not self.problems)
        answered = await hear(reader, REPLY_SECONDS)
        if "problem" in answered:
            self.problems[self.peer] = answered["problem"]
        if self.problems:
            return
        try:
            found = await run_iperf(self.own, self.theirs, answered["port"], self.seconds)
        except NoIperf as failure:
            self.problems[self.peer if failure.of_peer else self.name] = str(failure)
            return
        for (source, target), measured in zip(self.mbits, found):
            if measured <= 0:
                raise Broken(f"no data of iperf3 arrived from {source} at {target}")
            self.mbits[source, target] = round(measured / 1e6, 1)
