"""Measures the links between hosts: round trip, path MTU, whether data flows, bandwidth. All hosts run it at once.

The schedule comes with the call: rounds of pairs, so that no host is in two measurements at the same time. Nobody
directs the hosts: each goes through its own pairs in order, and in each pair the first host calls the second, which
answers as soon as it has come to this pair. What a pair does, over the port range of muster_reach:

1. The caller connects, and the callee connects back, so that a firewall that lets one direction through is seen.
2. Bytes go to and fro over the open connection: the round trip is the least of several.
3. UDP packets that must not be cut into pieces look for the largest that gets through in both directions (path MTU).
4. BULK_BYTES go each way. A link that passes small packets only (an MTU black hole) stops here.
5. iperf3 measures the bandwidth, both directions at the same time, as an all-reduce uses them. Left out where `seconds`
   is 0. A pair of which one host lacks iperf3, or cannot use it, works all the same: its result names that host.

Needs iperf3 for step 5. Standard library alone, Python 3.8 and later. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import time
from typing import Any

from ansible.module_utils.muster_host import find_command

ATTEMPT_SECONDS = 1.5  # for a connection: one retransmitted SYN (after 1 s) still fits
PINGS = 11
BULK_BYTES = 256 * 1024
BULK_SECONDS = 4.0
UDP_TRIES, UDP_SECONDS = 3, 0.12
#: Sizes of IP packets at which networks are known to end: jumbo frames, tunnels, PPPoE, VPNs, the least of IPv6.
MTU_LADDER = (9000, 8900, 4470, 4082, 2044, 1500, 1492, 1480, 1450, 1420, 1400, 1350, 1300, 1280, 1000, 576)
LINE_BYTES = 1 << 16
IPERF_MISSING = "iperf3 is missing"
#: In what iperf3 says of an error: the link's fault, not the program's.
LINK_FAILURES = ("timed out", "timeout", "unreachable", "no route")
#: The same: the fault of the program at the server's end.
SERVER_FAILURES = ("refused", "busy", "closed", "reset", "terminated")
# From linux/in.h and in6.h; Python's socket module does not name them all.
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3
IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE = 23, 3


class Broken(Exception):
    """A pair that cannot be used, in words for the user."""


class NoIperf(Exception):
    """This host, or its peer if `of_peer`, cannot measure bandwidth: why, in words that "on h3" can follow."""

    def __init__(self, why: str, of_peer: bool = False) -> None:
        super().__init__(why)
        self.of_peer = of_peer


def matches(
    name: str, networks: list[dict[str, Any]], rounds: list[list[list[str]]]
) -> list[tuple[int, int, str, bool]]:
    """This host's pairs in order, as (network, round, peer, whether this host calls)."""
    found = []
    for network in range(len(networks)):
        for number, pairs in enumerate(rounds):
            for caller, callee in pairs:
                if name in (caller, callee):
                    found.append((network, number, callee if name == caller else caller, name == caller))
    return found


class Links:
    """One host's part. `run()` once; `results` then holds the pairs that this host called, both directions."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.name: str = options["name"]
        self.token: str = options["token"]
        self.networks: list[dict[str, Any]] = options["networks"]
        self.matches = matches(self.name, self.networks, options["rounds"])
        self.seconds: int = options["seconds"]
        self.patience: float = options["patience"]
        self.ports = range(options["ports"][0], options["ports"][1] + 1)
        self.results: list[dict[str, Any]] = []
        self.listening: dict[int, int] = {}  # network: port
        self.told: dict[tuple[int, int], asyncio.Future[Any]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.told = {(network, number): loop.create_future() for network, number, _, calls in self.matches if not calls}
        servers, deaf = [], {}
        for network, known in enumerate(self.networks):
            try:
                servers.append(await self._listen(network, known["addresses"][self.name]))
            except OSError as error:
                deaf[network] = f"{self.name} cannot listen on {known['addresses'][self.name]}: {error.strerror}"
        try:
            for network, number, peer, calls in self.matches:
                if not calls:
                    await self._answer(network, number)
                    continue
                pair = Pair(self, network, number, peer)
                if network in deaf:
                    pair.error = deaf[network]
                else:
                    await pair.call()
                self.results += pair.results()
        finally:
            for server in servers:
                server.close()
            for waiting in self.told.values():
                if waiting.done() and not waiting.cancelled():
                    waiting.result()[1].close()

    # Answering

    async def _listen(self, network: int, address: str) -> asyncio.AbstractServer:
        """On the first free port of the range, on this address alone."""
        failure = OSError(errno.EADDRINUSE, "no port of the range is free")
        for port in self.ports:
            try:
                server = await asyncio.start_server(self._accept, address, port, limit=LINE_BYTES, backlog=512)
            except OSError as error:
                failure = error
                if error.errno == errno.EADDRINUSE:
                    continue
                break
            self.listening[network] = port
            return server
        raise failure

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hands a caller to the pair that it names; the pair answers when this host has come to it."""
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), ATTEMPT_SECONDS))
            if hello["token"] != self.token:
                raise ValueError
            if hello.get("back"):  # step 1, from the callee's side
                say(writer, host=self.name)
                await asyncio.wait_for(writer.drain(), ATTEMPT_SECONDS)
                writer.close()
                return
            waiting = self.told[hello["network"], hello["round"]]
            if waiting.done():
                raise ValueError
            say(writer, host=self.name)  # at once: whoever says nothing here is not of Muster
            waiting.set_result((reader, writer, hello))
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            writer.close()  # a stranger, or a caller that has left

    async def _answer(self, network: int, number: int) -> None:
        """The callee's part of a pair."""
        try:
            reader, writer, hello = await asyncio.wait_for(self.told[network, number], self.patience)
        except asyncio.TimeoutError:
            return  # the caller says what it saw
        own = self.networks[network]["addresses"][self.name]
        echo, udp_port = await open_echo(own, self.ports)
        server = None
        try:
            theirs = self.networks[network]["addresses"][hello["host"]]
            back = await self._connect_back(own, theirs, hello)
            say(writer, host=self.name, back=back, udp=udp_port)
            while True:
                line = await asyncio.wait_for(reader.readline(), self.patience + 2 * self.seconds)
                request = json.loads(line) if line else {"done": True}
                if "ping" in request:
                    say(writer)
                elif "bulk" in request:
                    await asyncio.wait_for(reader.readexactly(request["bulk"]), BULK_SECONDS)
                    writer.write(bytes(request["bulk"]))
                elif "iperf" in request:
                    try:
                        if request["iperf"]:
                            port, server = await start_iperf(own, self.ports, self.seconds)
                            say(writer, port=port)
                        else:  # the caller cannot measure, and asks whether this host could
                            iperf_path()
                            say(writer)
                    except NoIperf as failure:
                        say(writer, problem=str(failure))
                else:
                    return
        except (OSError, ValueError, KeyError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the caller sees the same broken connection and says so
        finally:
            writer.close()
            if echo:
                echo.close()
            if server:
                await end(server)

    async def _connect_back(self, own: str, theirs: str, hello: dict[str, Any]) -> str | None:
        """Why the caller cannot be reached from here; None if it can."""
        try:
            reader, writer = await connect(theirs, hello["port"], own)
            try:
                say(writer, token=self.token, back=True)
                await asyncio.wait_for(reader.readline(), ATTEMPT_SECONDS)
            finally:
                writer.close()
        except Broken as error:
            return str(error)
        except (OSError, ValueError, asyncio.TimeoutError):
            return f"{theirs} port {hello['port']} accepts, but says nothing"
        return None


class Pair:
    """The caller's part of one pair of hosts on one network."""

    def __init__(self, links: Links, network: int, number: int, peer: str) -> None:
        self.links, self.network, self.number, self.peer = links, network, number, peer
        known = links.networks[network]
        self.own, self.theirs = known["addresses"][links.name], known["addresses"][peer]
        self.mtu = min(known["mtus"][links.name], known["mtus"][peer])
        self.mtus = {(links.name, peer): None, (peer, links.name): None}  # type: dict[tuple[str, str], int | None]
        self.mbits = {(links.name, peer): None, (peer, links.name): None}  # type: dict[tuple[str, str], float | None]
        self.rtt_ms: float | None = None
        self.error: str | None = None
        self.back: str | None = None  # what is wrong with the way from the peer to here alone
        self.problems: dict[str, str] = {}  # host: why it cannot measure bandwidth

    def results(self) -> list[dict[str, Any]]:
        """Both directions, as launch.links.Link has them, the network's place in the call, and `problems`.

        problems: by host why it cannot measure bandwidth ("iperf3 is missing"); the pair works then, without `mbits`.
        """
        name, peer = self.links.name, self.peer
        return [
            {
                "network": self.network,
                "source": source,
                "target": target,
                "mbits": self.mbits[source, target],
                "rtt_ms": self.rtt_ms,
                "path_mtu": self.mtus[source, target],
                "error": self.error or (self.back if source == peer else None),
                "problems": self.problems,
            }
            for source, target in ((name, peer), (peer, name))
        ]

    async def call(self) -> None:
        writer = None
        try:
            reader, writer, answer = await self._reach()
            if answer["back"]:
                self.back = f"{self.peer} does not reach {self.links.name}: {answer['back']}"
            await self._ping(reader, writer)
            if answer["udp"]:
                await self._find_mtu(answer["udp"])
            await self._bulk(reader, writer)
            if self.links.seconds and not self.back:
                await self._bandwidth(reader, writer)
            say(writer, done=True)
        except Broken as error:
            self.error = str(error)
        except (OSError, ValueError, KeyError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            connection = f"the connection from {self.links.name} to {self.peer} ({self.theirs})"
            self.error = f"{connection} broke off: {broke_off(error)}"
        finally:
            if writer:
                writer.close()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
        """Connects to where the peer listens, and waits until it has come to this pair. Raises Broken."""
        deadline = time.monotonic() + self.links.patience
        pause, said = 0.02, ""
        while time.monotonic() < deadline:
            for port in self.links.ports:
                try:
                    reader, writer = await connect(self.theirs, port, self.own)
                except Broken as error:
                    said = str(error)
                    if "refused" in said:
                        continue
                    raise Broken(f"{self.links.name} does not reach {self.peer}: {said}") from None
                mine = {"token": self.links.token, "host": self.links.name, "network": self.network}
                say(writer, round=self.number, port=self.links.listening[self.network], **mine)
                if await self._is_peer(reader):
                    with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
                        line = await asyncio.wait_for(reader.readline(), max(0.1, deadline - time.monotonic()))
                        return reader, writer, json.loads(line)
                    said = "it answered, but did not come to this pair"
                else:
                    said = f"another program, or another host, answers on {self.theirs} port {port}"
                writer.close()
            await asyncio.sleep(pause)
            pause = min(0.3, pause * 2)
        raise Broken(f"{self.peer} did not take part within {self.links.patience:.0f} s ({said})")

    async def _is_peer(self, reader: asyncio.StreamReader) -> bool:
        try:
            return bool(json.loads(await asyncio.wait_for(reader.readline(), ATTEMPT_SECONDS))["host"] == self.peer)
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError):
            return False

    async def _ping(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        times = []
        for number in range(PINGS):
            begun = time.perf_counter()
            say(writer, ping=number)
            await hear(reader, ATTEMPT_SECONDS)
            times.append(time.perf_counter() - begun)
        self.rtt_ms = round(1000 * min(times), 3)

    async def _find_mtu(self, port: int) -> None:
        """The largest packet that gets through each way; None where not even a small one does (UDP is blocked)."""
        probe = await MtuProbe.open(self.own, self.theirs, port)
        if probe is None:
            return
        name, peer, wait = self.links.name, self.peer, max(UDP_SECONDS, 4 * (self.rtt_ms or 0) / 1000)
        try:
            for size in [self.mtu, *(size for size in MTU_LADDER if size < self.mtu)]:
                there, back = await probe.passes(size, wait)
                if there and self.mtus[name, peer] is None:
                    self.mtus[name, peer] = size
                if back and self.mtus[peer, name] is None:
                    self.mtus[peer, name] = size
                if None not in self.mtus.values():
                    return
        finally:
            probe.close()

    async def _bulk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            say(writer, bulk=BULK_BYTES)
            writer.write(bytes(BULK_BYTES))
            await asyncio.wait_for(reader.readexactly(BULK_BYTES), BULK_SECONDS)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            raise Broken(self._stuck()) from None

    def _stuck(self) -> str:
        both = f"{self.links.name} and {self.peer}"
        small = [size for size in self.mtus.values() if size is not None and size < self.mtu]
        if small:
            return (
                f"an MTU black hole between {both}: the NICs have MTU {self.mtu}, but packets above {min(small)} bytes "
                f"vanish. Set the MTU of these NICs to {min(small)}, or mend the switch, tunnel or firewall between"
            )
        return (
            f"{both} connect, but {BULK_BYTES // 1024} KiB each way did not get through within {BULK_SECONDS:.0f} s: "
            "a link that loses packets, or an MTU black hole"
        )

    async def _bandwidth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, peer = self.links.name, self.peer
        try:
            iperf_path()
        except NoIperf as failure:
            self.problems[name] = str(failure)
        say(writer, iperf=not self.problems)
        answer = await hear(reader, 5)
        if "problem" in answer:
            self.problems[peer] = answer["problem"]
        if self.problems:
            return
        try:
            there, back = await run_iperf(self.own, self.theirs, answer["port"], self.links.seconds)
        except NoIperf as failure:
            self.problems[peer if failure.of_peer else name] = str(failure)
            return
        for source, target, measured in ((name, peer, there), (peer, name, back)):
            if measured <= 0:
                raise Broken(f"no data of iperf3 arrived from {source} at {target}")
            self.mbits[source, target] = round(measured / 1e6, 1)


def say(writer: asyncio.StreamWriter, **words: Any) -> None:
    writer.write(json.dumps(words).encode() + b"\n")


async def hear(reader: asyncio.StreamReader, seconds: float) -> dict[str, Any]:
    """The other end's next words. Raises IncompleteReadError (it closed), OSError, ValueError, asyncio.TimeoutError."""
    line = await asyncio.wait_for(reader.readline(), seconds)
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    words = json.loads(line)
    if not isinstance(words, dict):
        raise ValueError
    return words


def broke_off(error: Exception) -> str:
    """What ended a connection, for the user: never the words of a Python exception."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "the other end closed it"
    if isinstance(error, (asyncio.TimeoutError, socket.timeout)):
        return "no answer in time"
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else "it was cut"
    return "an answer that cannot be read"


async def connect(address: str, port: int, own: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises Broken."""
    try:
        opening = asyncio.open_connection(address, port, limit=LINE_BYTES, local_addr=(own, 0))
        reader, writer = await asyncio.wait_for(opening, ATTEMPT_SECONDS)
    except asyncio.TimeoutError:
        words = (
            f"no answer from {address} port {port} within {ATTEMPT_SECONDS} s: dropped by a firewall, or no such host"
        )
        raise Broken(words) from None
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            raise Broken(f"{address} port {port} refused") from None
        raise Broken(f"{address} port {port}: {error.strerror or error}") from None
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return reader, writer


# Step 3: UDP. A packet begins with the number of the try and its own length; the answer is a short packet that says
# that it arrived, and one of the same length that tries the way back.


def udp_socket(address: str, port: int) -> socket.socket:
    """Bound, and its packets are never cut into pieces. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE)
        else:
            made.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        made.bind((address, port))
    except OSError:
        made.close()
        raise
    return made


class Echo(asyncio.DatagramProtocol):
    """The callee's end: answers each packet as said above."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        if len(data) < 8:
            return
        sendto = self.transport.sendto  # type: ignore[attr-defined]
        sendto(b"short" + data[:8], address)
        sendto(b"equal" + data[:8] + bytes(max(0, len(data) - 13)), address)

    def error_received(self, failure: Exception) -> None:
        pass  # this end's MTU is smaller: the packet is missed by the other end


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


class MtuProbe(asyncio.DatagramProtocol):
    """The caller's end."""

    def __init__(self) -> None:
        self.seen: set[tuple[bytes, bytes]] = set()
        self.news = asyncio.Event()
        self.tries = 0

    @classmethod
    async def open(cls, own: str, theirs: str, port: int) -> MtuProbe | None:
        try:
            made = udp_socket(own, 0)
        except OSError:
            return None
        _, probe = await asyncio.get_running_loop().create_datagram_endpoint(cls, sock=made)
        probe.peer, probe.header = (theirs, port), 48 if ":" in theirs else 28
        return probe

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        self.seen.add((data[:5], data[5:13]))
        self.news.set()

    def error_received(self, failure: Exception) -> None:
        pass  # too long for this host's own link, or refused: no answer comes

    async def passes(self, size: int, wait: float) -> tuple[bool, bool]:
        """Whether an IP packet of `size` bytes gets (there, back)."""
        there = back = False
        for _ in range(UDP_TRIES):
            self.tries += 1
            mark = self.tries.to_bytes(4, "big") + size.to_bytes(4, "big")
            self.transport.sendto(mark + bytes(max(0, size - self.header - 8)), self.peer)
            deadline = time.monotonic() + wait
            while not (there and back) and time.monotonic() < deadline:
                self.news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.news.wait(), max(0.001, deadline - time.monotonic()))
                there = there or (b"short", mark) in self.seen or (b"equal", mark) in self.seen
                back = back or (b"equal", mark) in self.seen
            if there and back:
                break
        return there, back

    def close(self) -> None:
        self.transport.close()


# Step 5: iperf3


def iperf_path() -> str:
    """Raises NoIperf."""
    path = find_command("iperf3")
    if path is None:
        raise NoIperf(IPERF_MISSING)
    return path


async def start_iperf(address: str, ports: range, seconds: int) -> tuple[int, asyncio.subprocess.Process]:
    """A server on the highest free port of the range, for as long as a measurement takes. Raises NoIperf."""
    path = iperf_path()
    for port in reversed(ports):
        with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        words = ["timeout", str(20 + 2 * seconds), path, "-s", "-B", address, "-p", str(port)]
        quiet = asyncio.subprocess.DEVNULL
        try:
            return port, await asyncio.create_subprocess_exec(*words, stdin=quiet, stdout=quiet, stderr=quiet)
        except OSError as error:
            raise NoIperf(f"iperf3 does not start ({os.strerror(error.errno or 0)})") from None
    raise NoIperf(f"no port from {ports[0]} to {ports[-1]} is free for iperf3")


async def run_iperf(own: str, theirs: str, port: int, seconds: int) -> tuple[float, float]:
    """Bit/s that arrived (there, here). --bidir: iperf3 3.7 and later.

    Raises Broken where the link fails under load, NoIperf where a program does.
    """
    path = iperf_path()
    words = [path, "-c", theirs, "-B", own, "-p", str(port), "-t", str(seconds), "-i", "0", "-J"]
    words += ["--connect-timeout", "1500", "--bidir"]
    said: dict[str, Any] = {}
    for _ in range(40):  # the server takes some milliseconds until it listens
        pipe, quiet = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(*words, stdin=quiet, stdout=pipe, stderr=quiet)
        except OSError as error:
            raise NoIperf(f"iperf3 does not start ({os.strerror(error.errno or 0)})") from None
        try:
            out, _ = await asyncio.wait_for(process.communicate(), seconds + 8)
            said = json.loads(out)
            if "error" not in said:
                there, back = (said["end"][key] for key in ("sum_received", "sum_received_bidir_reverse"))
                return float(there["bits_per_second"]), float(back["bits_per_second"])
        except asyncio.TimeoutError:
            await end(process)
            raise Broken(f"iperf3 from {own} to {theirs} did not end: the link stalls under load") from None
        except (ValueError, KeyError, TypeError):
            raise NoIperf("iperf3 fails without a reason that can be read (it has to be 3.7 or later)") from None
        if not any(reason in said["error"] for reason in ("refused", "busy")):
            break
        await asyncio.sleep(0.05)
    why = str(said["error"])
    if any(reason in why.lower() for reason in LINK_FAILURES):
        raise Broken(f"iperf3 from {own} to {theirs}: {why}")
    raise NoIperf(f"iperf3 fails ({why})", of_peer=any(reason in why.lower() for reason in SERVER_FAILURES))


async def end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(process.wait(), 2)
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs this host's part; its results, as `Pair.results` describes them.

    options: name; token, the same on all hosts and new for each call; networks [{addresses {host: address}, mtus
    {host: bytes}}]; rounds [[[caller, callee], ...], ...]; seconds of each bandwidth measurement (0: none); patience,
    seconds to wait for a peer; ports [first, last].
    """
    os.environ["LC_ALL"] = "C"
    links = Links(options)
    asyncio.run(links.run())
    return links.results
