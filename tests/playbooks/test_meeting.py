"""Promise: each host learns on which addresses it reaches the others, quickly, and who answers where they do not.

Real sockets: each host has addresses of its own in 127.0.0.0/8. The control machine's part is `meet`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ansible.module_utils import muster_meeting
from ansible.module_utils.muster_meeting import Meeting, Unreached, reach, within

PORTS = [29600, 29607]
DEAD = "198.51.100.1"  # a documentation address
THIRD_BYTE = itertools.count(1)
PATIENCE = 300.0  # s, for an attempt: who waits in vain outlasts the next one
END_SECONDS = 100.0  # for all hosts of a test to be through


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine fails no attempt, and who waits for what does not come fails the test."""
    for name in ("ATTEMPT_SECONDS", "REPLY_SECONDS"):
        monkeypatch.setattr(muster_meeting, name, PATIENCE)


@pytest.fixture
def net() -> str:
    """A prefix of loopback addresses that no other test uses."""
    return f"127.42.{next(THIRD_BYTE)}"


def options(name: str, addresses: Sequence[str], token: str = "token") -> dict[str, Any]:
    return {"name": name, "token": token, "addresses": list(addresses), "ports": PORTS}


def meet(
    hosts: Mapping[str, Sequence[str]],
    *,
    absent: Sequence[str] = (),
    directory: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, dict[tuple[str, str], dict[str, Any]]]:
    """host -> (peer, address) -> what came of it, with all hosts but the absent ones.

    directory: what stands in it otherwise than the hosts said.
    """

    async def together() -> list[list[dict[str, Any]]]:
        meetings = {name: Meeting(options(name, own)) for name, own in hosts.items() if name not in absent}
        for meeting in meetings.values():
            await meeting.listen()
        listening = {name: dict(meeting.listening) for name, meeting in meetings.items()} | dict(directory or {})
        for meeting in meetings.values():
            meeting.directory = listening
        tries = [
            reach(meeting, {peer: [*own] for peer, own in hosts.items() if peer != name})
            for name, meeting in meetings.items()
        ]
        found = await asyncio.gather(*tries)
        for meeting in meetings.values():
            meeting.close()
        return found

    found = asyncio.run(asyncio.wait_for(together(), END_SECONDS))
    names = [name for name in hosts if name not in absent]
    return {name: {(r["peer"], r["address"]): r for r in results} for name, results in zip(names, found, strict=True)}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which hosts connect, in order. Nobody answers at DEAD."""
    connect: Any = asyncio.open_connection
    tried: list[str] = []

    async def open_connection(address: str, port: int, **more: Any) -> Any:
        tried.append(address)
        if address == DEAD:
            await asyncio.sleep(PATIENCE)
        return await connect(address, port, **more)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    return tried


def test_hosts_reach_each_other_on_all_addresses_at_once(net: str) -> None:
    hosts = {f"h{n}": [f"{net}.{n}", f"{net}.{100 + n}"] for n in range(1, 5)}
    begun = time.monotonic()
    found = meet(hosts)
    lasted_ms = 1000 * (time.monotonic() - begun)
    for host, peer in itertools.permutations(hosts, 2):
        for address in hosts[peer]:
            result = found[host][peer, address]
            assert result["ok"] and result["error"] is None and 0 < result["milliseconds"] < lasted_ms
    assert all(len(results) == 6 for results in found.values())


def test_a_host_that_did_not_come_is_named_and_costs_nothing(net: str, attempts: list[str]) -> None:
    found = meet({"h1": [f"{net}.1"], "h2": [f"{net}.2"], "h3": [f"{net}.3"]}, absent=["h3"])
    assert found["h1"]["h2", f"{net}.2"]["ok"] and found["h2"]["h1", f"{net}.1"]["ok"]
    assert found["h1"]["h3", f"{net}.3"]["error"] == "h3 did not take part"
    assert sorted(attempts) == [f"{net}.1", f"{net}.2"]


@pytest.mark.slow
def test_an_address_that_does_not_work_is_given_up_soon_and_the_others_are_reached(
    net: str, attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At DEAD h2 cannot listen, h3 says that it does, and nobody answers."""
    hosts = {"h1": [f"{net}.1"], "h2": [DEAD, f"{net}.2"], "h3": [DEAD, f"{net}.3"]}
    monkeypatch.setattr(muster_meeting, "ATTEMPT_SECONDS", 1.5)
    found = meet(hosts, directory={"h3": {f"{net}.3": PORTS[0], DEAD: PORTS[0]}})["h1"]
    assert found["h2", f"{net}.2"]["ok"] and found["h3", f"{net}.3"]["ok"]
    assert found["h2", DEAD]["error"] == f"h2 cannot listen on {DEAD}: Cannot assign requested address"
    assert not found["h3", DEAD]["ok"] and f"port {PORTS[0]}" in found["h3", DEAD]["error"]
    assert Counter(attempts[:8]) == {f"{net}.1": 2, f"{net}.2": 2, f"{net}.3": 2, DEAD: 2}  # by all hosts, all at once
    assert attempts.count(DEAD) == 4


def test_time_in_which_the_host_itself_is_held_up_does_not_end_an_attempt() -> None:
    async def held_up() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
            time.sleep(0.1)
        return "connected"

    assert asyncio.run(within(0.2, held_up())) == "connected"


def test_an_attempt_ends_and_what_it_did_is_cancelled() -> None:
    async def attempt() -> bool:
        silent = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.05, silent)
        return silent.cancelled()

    assert asyncio.run(attempt())


def test_an_address_that_both_hosts_have_counts_as_not_reached(net: str) -> None:
    """On one machine the second listener gets another port; on two, both would answer themselves on the first."""
    shared = f"{net}.200"
    hosts = {"h1": [f"{net}.1", shared], "h2": [f"{net}.2", shared]}
    found = meet(hosts, directory={"h2": {f"{net}.2": PORTS[0], shared: PORTS[0]}})["h1"]
    assert found["h2", f"{net}.2"]["ok"]
    wanted = f"port {PORTS[0]}: h1 itself answers there: h2 and h1 have the same address"
    assert found["h2", shared]["error"] == wanted


def test_an_address_that_another_host_answers_on_is_named_as_such(net: str) -> None:
    hosts = {"h1": [f"{net}.1"], "h2": [f"{net}.2", f"{net}.3"], "h3": [f"{net}.3"]}
    listening = {f"{net}.2": PORTS[0], f"{net}.3": PORTS[0] + 1}
    found = meet({"h3": hosts["h3"], **hosts}, directory={"h2": listening | {f"{net}.3": PORTS[0]}})["h1"]
    assert found["h3", f"{net}.3"]["ok"] and found["h2", f"{net}.2"]["ok"]
    assert "h3 answers there, not h2: two hosts have the same address" in found["h2", f"{net}.3"]["error"]


def test_a_port_where_nothing_listens_is_refused(net: str) -> None:
    found = meet({"h1": [f"{net}.1"], "h2": [f"{net}.2"]}, directory={"h2": {f"{net}.2": PORTS[1]}})["h1"]
    wanted = f"port {PORTS[1]} refused: a firewall rejects it, or nothing listens there"
    assert found["h2", f"{net}.2"]["error"] == wanted


def test_ports_that_other_programs_hold_are_passed_over(net: str) -> None:
    async def listen() -> dict[str, int | str]:
        meeting = Meeting(options("h1", [f"{net}.1"]))
        await meeting.listen()
        meeting.close()
        return meeting.listening

    with socket.create_server((f"{net}.1", PORTS[0])):
        assert asyncio.run(listen()) == {f"{net}.1": PORTS[0] + 1}
    held = [socket.create_server((f"{net}.1", port)) for port in range(PORTS[0], PORTS[1] + 1)]
    assert asyncio.run(listen()) == {f"{net}.1": "no port from 29600 to 29607 is free"}
    for server in held:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "another program answers there"),
        (b'{"status": "ok"}\n', "another program answers there"),
        (b"", "the other end closed the connection"),
        (None, "no answer in time"),
    ],
)
def test_another_program_on_the_port_is_recognised(
    net: str, says: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        for _ in range(2):
            connection, _ = server.accept()
            if says is None:
                kept.append(connection)
            else:
                connection.recv(1000)
                connection.sendall(says)
                connection.close()

    if says is None:
        monkeypatch.setattr(muster_meeting, "REPLY_SECONDS", 1.5)
    kept: list[socket.socket] = []
    with socket.create_server((f"{net}.9", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        found = meet({"h1": [f"{net}.1"], "h2": [f"{net}.9"]}, absent=["h2"], directory={"h2": {f"{net}.9": port}})
        thread.join(END_SECONDS)
    for connection in kept:
        connection.close()
    assert words in found["h1"]["h2", f"{net}.9"]["error"]


def test_hosts_of_another_call_are_recognised_and_do_not_learn_the_secret(net: str) -> None:
    async def ask() -> str:
        here, there = Meeting(options("h1", [f"{net}.1"])), Meeting(options("h2", [f"{net}.2"], token="another"))
        await there.listen()
        here.directory = {"h2": there.listening}
        try:
            await here.greet("h2", f"{net}.2", network=0)
        except Unreached as failure:
            return str(failure)
        finally:
            there.close()
        raise AssertionError

    assert "h2 answers for another deploy or check" in asyncio.run(ask())


def test_strangers_on_the_port_do_no_harm_and_learn_no_secret(net: str) -> None:
    async def stranger(address: str, text: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(address, PORTS[0])
        writer.write(text)
        answer = await reader.read()
        writer.close()
        return answer

    async def together() -> tuple[list[bytes], bool]:
        here, there = Meeting(options("h1", [f"{net}.1"])), Meeting(options("h2", [f"{net}.2"]))
        await there.listen()
        here.directory = {"h2": there.listening}
        texts = [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\n", b'{"muster": 1, "network": 0, "host": "h1"}\n']
        answers = await asyncio.gather(*(stranger(f"{net}.2", text) for text in texts))
        (result,) = await reach(here, {"h2": [f"{net}.2"]})
        there.close()
        return answers, result["ok"]

    (nothing, nor_here, greeted), ok = asyncio.run(together())
    assert (nothing, nor_here, ok) == (b"", b"", True)
    assert json.loads(greeted) == {"muster": 1, "host": "h2", "ours": False, "gone": False}


def test_nothing_listens_afterwards(net: str) -> None:
    meet({"h1": [f"{net}.1"], "h2": [f"{net}.2"]})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((f"{net}.1", PORTS[0]), END_SECONDS)
