"""Promise: hosts that run muster_links at once measure every pair both ways, and say what is wrong with one that fails.

Hosts are loopback addresses of this machine; iperf3 stands in with fixed figures (the lab runs the real one).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_iperf, muster_links, muster_meeting, muster_mtu
from ansible.module_utils.muster_meeting import Meeting

from launch.network.measure import rounds

ADDRESSES = {"h1": "127.0.0.1", "h2": "127.0.0.2", "h3": "127.0.0.3"}
TOKEN = "secret"
PATIENCE = 300.0  # s, for whatever has a limit of time: who waits that long outlasts the next one
END_SECONDS = 100.0  # for all hosts of a test to be through


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no attempt, and who waits for what does not come fails the test."""
    for name in ("ATTEMPT_SECONDS", "REPLY_SECONDS"):
        monkeypatch.setattr(muster_meeting, name, PATIENCE)
    for name in ("REPLY_SECONDS", "BULK_SECONDS"):
        monkeypatch.setattr(muster_links, name, PATIENCE)
    monkeypatch.setattr(muster_mtu, "PACKET_SECONDS", PATIENCE)


def free_ports(count: int = 16) -> list[int]:
    """A range of ports in which the first is free on all addresses; ephemeral ports are above."""
    for first in range(23000, 32000, count):
        try:
            for address in ADDRESSES.values():
                socket.create_server((address, first)).close()
            return [first, first + count - 1]
        except OSError:
            continue
    raise AssertionError("no free ports")


def options(name: str, hosts: list[str], ports: list[int], **more: Any) -> dict[str, Any]:
    """What one host is asked, as launch.network.measure makes it. more: options of "links"."""
    pairs = []
    for caller, callee in itertools.chain.from_iterable(rounds(hosts)):
        if name in (caller, callee):
            peer = callee if name == caller else caller
            ends = {"own": ADDRESSES[name], "theirs": ADDRESSES[peer], "mtus": dict.fromkeys((caller, callee), 1500)}
            pairs.append({"network": 0, "peer": peer, "calls": name == caller, **ends})
    meeting = {"name": name, "token": TOKEN, "addresses": [ADDRESSES[name]], "ports": ports}
    return {"meeting": meeting, "links": {"pairs": pairs, "seconds": 0, "patience": PATIENCE, **more}}


def run_all(every: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(source, target) -> result, with all hosts running at once."""

    async def together() -> list[dict[str, Any]]:
        meetings = [Meeting(asked["meeting"]) for asked in every]
        for meeting in meetings:
            await meeting.listen()
        for meeting in meetings:
            meeting.directory = {one.name: one.listening for one in meetings}
        work = [muster_links.measure(one, asked["links"]) for one, asked in zip(meetings, every, strict=True)]
        found = await asyncio.wait_for(asyncio.gather(*work), END_SECONDS)
        for meeting in meetings:
            meeting.close()
        return [result for results in found for result in results]

    return {(result["source"], result["target"]): result for result in asyncio.run(together())}


@pytest.fixture
def iperf(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Pairs that were measured, in order; 100 Mbit/s there, 50 back."""
    measured: list[tuple[str, str]] = []

    async def start(address: str, ports: range, seconds: int) -> tuple[int, Any]:
        return 1, await asyncio.create_subprocess_exec("sleep", "30")

    async def run(own: str, theirs: str, port: int, seconds: int) -> tuple[float, float]:
        measured.append((own, theirs))
        return 100e6, 50e6

    monkeypatch.setattr(muster_iperf, "find_command", lambda name: name)
    monkeypatch.setattr(muster_links, "start_iperf", start)
    monkeypatch.setattr(muster_links, "run_iperf", run)
    return measured


@pytest.mark.slow
def test_every_ordered_pair_is_measured(iperf: list[tuple[str, str]]) -> None:
    hosts, ports, begun = ["h1", "h2", "h3"], free_ports(), time.monotonic()
    found = run_all([options(name, hosts, ports, seconds=1) for name in hosts])
    lasted_ms = 1000 * (time.monotonic() - begun)
    assert set(found) == {(a, b) for a in hosts for b in hosts if a != b}
    for result in found.values():
        assert result["error"] is None and 0 < result["rtt_ms"] < lasted_ms and result["path_mtu"] == 1500
    assert len(iperf) == len(hosts) * (len(hosts) - 1) / 2
    caller, callee = rounds(hosts)[0][0]
    assert (found[caller, callee]["mbits"], found[callee, caller]["mbits"]) == (100.0, 50.0)


def test_the_quick_form_measures_no_bandwidth(iperf: list[tuple[str, str]]) -> None:
    ports = free_ports()
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    assert [result["mbits"] for result in found.values()] == [None, None] and not iperf
    assert all(result["error"] is None for result in found.values())


def test_a_pair_without_iperf3_at_one_end_works_and_names_that_host(
    iperf: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either end lacks it, or both.

    Hosts share this process: who asks for iperf3 is known by the address it serves on, or the pair it calls.
    """
    ports, hosts, lacking = free_ports(), ["h1", "h2", "h3"], ["h1", "h3"]
    names = {address: name for name, address in ADDRESSES.items()}
    start, bandwidth, answer = muster_links.start_iperf, muster_links.Pair._bandwidth, muster_links.answer
    there: ContextVar[bool] = ContextVar("there")

    async def start_there(address: str, ports: range, seconds: int) -> Any:
        muster_iperf.iperf_path()
        assert names[address] not in lacking
        return await start(address, ports, seconds)

    async def bandwidth_there(self: Any, reader: Any, writer: Any) -> None:
        there.set(self.name not in lacking)
        await bandwidth(self, reader, writer)

    async def answer_there(meeting: Any, known: Any, options: Any) -> None:
        there.set(meeting.name not in lacking)
        await answer(meeting, known, options)

    monkeypatch.setattr(muster_iperf, "find_command", lambda name: name if there.get() else None)
    monkeypatch.setattr(muster_links, "start_iperf", start_there)
    monkeypatch.setattr(muster_links.Pair, "_bandwidth", bandwidth_there)
    monkeypatch.setattr(muster_links, "answer", answer_there)
    found = run_all([options(name, hosts, ports, seconds=1) for name in hosts])
    assert len(found) == 6
    for pair, result in found.items():
        without = {host: "iperf3 is missing" for host in pair if host in lacking}
        assert result["problems"] == without
        assert (result["mbits"] is None) == bool(without)
        assert result["error"] is None and result["rtt_ms"] > 0 and result["path_mtu"] == 1500


def fake_iperf(folder: Path, monkeypatch: pytest.MonkeyPatch, client: str, server: str = "exec sleep 30") -> None:
    """An iperf3 that runs shell words of its own."""
    script = folder / "iperf3"
    script.write_text(f'#!/bin/sh\nif [ "$1" = -s ]; then {server}; fi\n{client}\n')
    script.chmod(0o755)
    monkeypatch.setattr(muster_iperf, "find_command", lambda name: str(script))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "blamed", "words"),
    [
        ("echo 'unknown option --bidir' >&2; exit 1", "caller", "it has to be 3.7 or later"),
        ("echo '{\"end\": {}}'", "callee", "refused, or without a reason"),
        ('echo \'{"end": {"streams": [{}]}}\'', "caller", "it has to be 3.7 or later"),
        ('echo \'{"error": "error - unable to create a new stream: No memory"}\'', "caller", "No memory"),
        ('echo \'{"error": "error - control socket has closed unexpectedly"}\'', "callee", "closed unexpectedly"),
        ('echo \'{"error": "unable to connect: Connection timed out"}\'', "link", "timed out"),
    ],
)
def test_an_iperf3_that_fails_is_its_hosts_fault_and_a_link_that_fails_is_broken(
    client: str, blamed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports()
    fake_iperf(tmp_path, monkeypatch, client)
    found = run_all([options(name, ["h1", "h2"], ports, seconds=1) for name in ("h1", "h2")])
    caller, callee = rounds(["h1", "h2"])[0][0]
    for result in found.values():
        assert result["mbits"] is None
        if blamed == "link":
            assert words in result["error"] and result["problems"] == {}
        else:
            ((host, why),) = result["problems"].items()
            assert result["error"] is None and host == (caller if blamed == "caller" else callee) and words in why


#: What iperf3 3.9 (Ubuntu 22.04) says at the end, cut short: `sum_received` is there twice.
IPERF_3_9 = """{"end": {
    "streams": [
        {"sender": {"bits_per_second": 9.6e9, "sender": true}, "receiver": {"bits_per_second": 9.5e9, "sender": true}},
        {"sender": {"bits_per_second": 1.2e9, "sender": false}, "receiver": {"bits_per_second": 1.1e9, "sender": false}}
    ],
    "sum_received": {"bits_per_second": 9.5e9, "sender": true},
    "sum_received": {"bits_per_second": 1.1e9, "sender": false}
}}"""


def test_an_older_iperf3_is_understood_which_names_both_directions_alike_and_is_refused_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = tmp_path / "connected"
    refused_once = f"[ -e {connected} ] || {{ touch {connected}; echo '{{\"end\": {{}}}}'; exit 1; }}\n"
    fake_iperf(tmp_path, monkeypatch, f"{refused_once}cat <<'END'\n{IPERF_3_9}\nEND")
    assert asyncio.run(muster_iperf.run_iperf("127.0.0.1", "127.0.0.2", 5201, 1)) == (9.5e9, 1.1e9)


def test_a_server_is_ended_with_its_children() -> None:
    async def outlives() -> bool:
        process = await muster_iperf._start(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        child = Path("/proc", (await process.stdout.readline()).decode().strip())
        await muster_iperf.end(process)
        for _ in range(1000):  # its new parent may be slow to take note
            if not child.exists() or (child / "stat").read_text().split()[2] == "Z":
                return False
            await asyncio.sleep(0.01)
        os.kill(int(child.name), signal.SIGKILL)
        await process.communicate()
        return True

    assert not asyncio.run(outlives())


class Says:
    """A reader of a connection on which the other end says this."""

    def __new__(cls, said: bytes) -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        return reader


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (b"", "the other end closed the connection"),
        (b"no json\n", "an answer that cannot be read"),
        (b"[1]\n", "an answer that cannot be read"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (OSError("Expecting value"), "the connection was cut"),
        (KeyError("port"), "an answer that cannot be read"),
        (TimeoutError(), "no answer in time"),
    ],
)
def test_a_connection_that_breaks_off_is_reported_without_the_words_of_python(
    failure: bytes | Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = free_ports()

    async def breaks(self: Any, reader: Any, writer: Any) -> None:
        if isinstance(failure, Exception):
            raise failure
        await muster_links.hear(Says(failure), 1)

    monkeypatch.setattr(muster_links.Pair, "_ping", breaks)
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    caller, callee = rounds(["h1", "h2"])[0][0]
    wanted = f"the connection from {caller} to {callee} ({ADDRESSES[callee]}) broke off: {words}"
    assert {result["error"] for result in found.values()} == {wanted}


def test_a_host_that_does_not_come_is_named_and_the_others_are_measured() -> None:
    ports, hosts = free_ports(), ["h1", "h2", "h3"]
    found = run_all([options(name, hosts, ports) for name in ("h1", "h2")])
    assert (found.get(("h1", "h2")) or found["h2", "h1"])["error"] is None
    errors = [str(result["error"]) for pair, result in found.items() if "h3" in pair]
    assert errors and all("h3 did not take part" in error for error in errors)


@pytest.mark.parametrize("down", [True, False], ids=["both ways", "one way"])
def test_a_pair_that_does_not_connect_keeps_nobody_waiting(down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host would wait 300 s for a caller that does not reach it, and the hosts of later pairs for that host."""
    ports, hosts = free_ports(), ["h1", "h2", "h3"]
    caller, callee = rounds(hosts)[0][0]
    greet = Meeting.greet

    async def blocked(self: Meeting, peer: str, *ends: Any, **more: Any) -> Any:
        if (self.name, peer) == (caller, callee) or (down and (self.name, peer) == (callee, caller)):
            raise muster_meeting.Unreached("port 1: no route to host")
        return await greet(self, peer, *ends, **more)

    monkeypatch.setattr(Meeting, "greet", blocked)
    monkeypatch.setattr(muster_links, "STILL_COMING_SECONDS", 0.1)
    found = run_all([options(name, hosts, ports) for name in hosts])
    assert {pair for pair, result in found.items() if result["error"]} == {(caller, callee), (callee, caller)}


@pytest.mark.slow
def test_a_host_that_is_kept_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(meeting: Any, known: Any, options: Any) -> None:
        await asyncio.sleep(2)

    ports = free_ports()
    monkeypatch.setattr(muster_links, "answer", kept)
    found = run_all([options(name, ["h1", "h2"], ports, patience=1) for name in ("h1", "h2")])
    assert "h2 answers, but did not come to its pair with h1 within 1 s" in found["h1", "h2"]["error"]


@pytest.mark.slow
def test_a_host_that_fails_costs_its_partner_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any) -> None:
        pass

    ports, begun = free_ports(), time.monotonic()
    monkeypatch.setattr(muster_links.Pair, "call", nothing)
    run_all([options(name, ["h1", "h2"], ports, patience=0.2) for name in ("h1", "h2")])
    assert time.monotonic() - begun >= 0.2


def test_an_address_that_is_not_this_hosts_is_named_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDRESSES, "h1", "192.0.2.1")
    found = run_all([options(name, ["h1", "h2"], [23000, 23001]) for name in ("h1", "h2")])
    assert "h1 cannot listen on 192.0.2.1" in found["h1", "h2"]["error"]


def test_a_connection_back_that_fails_is_the_error_of_that_direction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = free_ports()

    async def blocked(meeting: Any, known: dict[str, Any]) -> str:
        return "no answer on port 1"

    monkeypatch.setattr(muster_links, "why_not_back", blocked)
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    assert found["h1", "h2"]["error"] is None
    assert found["h2", "h1"]["error"] == "h2 does not reach h1 at 127.0.0.1: no answer on port 1"


@pytest.mark.slow
def test_a_path_smaller_than_the_nics_is_found_and_a_black_hole_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callee misses packets above 1400 bytes, and bulk data stalls, as behind a tunnel that tells nobody."""
    ports = free_ports()
    received, passes = muster_mtu.Echo.datagram_received, muster_mtu.Probe.passes

    def lossy(self: Any, data: bytes, address: Any) -> None:
        if len(data) + 28 <= 1400:
            received(self, data, address)

    async def patient_where_it_helps(self: Any, size: int) -> tuple[bool, bool]:
        self.answer_seconds = PATIENCE if size <= 1400 else 0.05
        return await passes(self, size)

    async def stuck(self: Any, reader: Any, writer: Any) -> None:
        raise muster_links.Broken(self._why_stuck())

    monkeypatch.setattr(muster_mtu.Probe, "passes", patient_where_it_helps)
    monkeypatch.setattr(muster_mtu.Echo, "datagram_received", lossy)
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    assert {result["path_mtu"] for result in found.values()} == {1400}
    assert {result["error"] for result in found.values()} == {None}  # data flows: MTU discovery works here
    monkeypatch.setattr(muster_links.Pair, "_bulk", stuck)
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    for result in found.values():
        assert "MTU black hole h1 -> h2: h1's NIC has MTU 1500 and h2's NIC has MTU 1500" in result["error"]
        assert "packets above 1400 bytes vanish" in result["error"]


def test_where_udp_is_blocked_the_first_packets_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ports, arrived = free_ports(), []
    monkeypatch.setattr(muster_mtu, "PACKET_SECONDS", 0.1)
    monkeypatch.setattr(muster_mtu.Echo, "datagram_received", lambda self, data, address: arrived.append(len(data)))
    found = run_all([options(name, ["h1", "h2"], ports) for name in ("h1", "h2")])
    assert all(result["path_mtu"] is None and result["error"] is None for result in found.values())
    assert arrived == [576 - 28] * muster_mtu.PACKET_TRIES


@pytest.mark.parametrize(
    ("there", "back", "nic", "most"),
    [(9000, 9000, 9000, 2), (1400, 1400, 9000, 6), (1500, 1300, 1500, 6), (400, 9000, 1500, 1), (576, 576, 576, 1)],
)
def test_the_largest_packet_is_found_with_few_sizes(there: int, back: int, nic: int, most: int) -> None:
    """`there` and `back`: what gets through, in bytes; most: how many sizes may be tried."""

    class Link(muster_mtu.Probe):
        async def passes(self, size: int) -> tuple[bool, bool]:
            tried.add(size)
            self.passed[size] = size <= there, size <= min(there, back)
            return self.passed[size]

    async def search() -> tuple[int | None, int | None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(muster_mtu, "Probe", Link)
            return await muster_mtu.path_mtus("127.0.0.1", "127.0.0.2", 9, nic, 0.1)

    tried: set[int] = set()
    wanted = (None, None) if there < 576 else (there, min(there, back))
    assert asyncio.run(search()) == wanted and len(tried) <= most
