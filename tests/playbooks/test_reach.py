"""muster_reach with real sockets: each host is a thread with an event loop and addresses of its own in 127.0.0.0/8."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from muster_reach import Reach, _cancel

PORTS = itertools.count(29600, 8)
THIRD_BYTE = itertools.count(1)


@dataclass
class Cluster:
    """Hosts that test each other; `seconds` is how long each took."""

    hosts: dict[str, list[str]]
    ports: tuple[int, int]
    reaches: dict[str, Reach]
    seconds: dict[str, float]

    def ok(self, host: str, peer: str) -> list[bool]:
        return [result["ok"] for result in self.reaches[host].results if result["peer"] == peer]

    def errors(self, host: str) -> list[str]:
        return [result["error"] for result in self.reaches[host].results if not result["ok"]]


@pytest.fixture
def net() -> str:
    """A prefix of loopback addresses that no other test uses."""
    return f"127.42.{next(THIRD_BYTE)}"


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    first = next(PORTS)
    yield first, first + 7


def run(
    hosts: dict[str, list[str]],
    ports: tuple[int, int],
    *,
    silent: tuple[str, ...] = (),
    skew: dict[str, float] | None = None,
    views: dict[str, dict[str, list[str]]] | None = None,
    seconds: float = 4.0,
) -> Cluster:
    """Runs the test on all hosts but the silent ones. views: what a host was told, where it differs from `hosts`."""
    cluster = Cluster(hosts, ports, {}, {})

    def work(name: str) -> None:
        time.sleep((skew or {}).get(name, 0.0))
        begun = time.monotonic()
        reach = Reach(name, (views or {}).get(name, hosts), "token", ports, seconds)
        cluster.reaches[name] = reach
        asyncio.run(reach.run())
        cluster.seconds[name] = time.monotonic() - begun

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in hosts if name not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 10)
        assert not thread.is_alive()
    return cluster


def test_hosts_that_all_reach_each_other_are_done_long_before_the_deadline(net: str, ports: tuple[int, int]) -> None:
    hosts = {f"h{n}": [f"{net}.{n}", f"{net}.{100 + n}"] for n in range(1, 5)}
    cluster = run(hosts, ports)
    for host, peer in itertools.permutations(hosts, 2):
        assert cluster.ok(host, peer) == [True, True], cluster.errors(host)
    assert max(cluster.seconds.values()) < 2
    assert all(0 < result["milliseconds"] < 1000 for result in cluster.reaches["h1"].results)


@pytest.mark.slow
def test_hosts_that_start_late_are_waited_for(net: str, ports: tuple[int, int]) -> None:
    cluster = run({"h1": [f"{net}.1"], "h2": [f"{net}.2"]}, ports, skew={"h2": 1.5})
    assert cluster.ok("h1", "h2") == cluster.ok("h2", "h1") == [True]
    assert cluster.seconds["h2"] < 1


@pytest.mark.slow
def test_a_host_that_never_starts_costs_the_deadline_and_is_named(net: str, ports: tuple[int, int]) -> None:
    hosts = {"h1": [f"{net}.1"], "h2": [f"{net}.2"], "h3": [f"{net}.3"]}
    cluster = run(hosts, ports, silent=("h3",), seconds=2.0)
    assert cluster.ok("h1", "h2") == cluster.ok("h2", "h1") == [True]
    assert cluster.ok("h1", "h3") == [False]
    assert "h3 did not show up within 2 s" in cluster.errors("h1")[0]
    assert 1.9 < cluster.seconds["h1"] < 3.5


def test_an_address_that_does_not_work_is_given_up_before_the_deadline(net: str, ports: tuple[int, int]) -> None:
    # h2 claims 198.51.100.1 (a documentation address): it cannot listen there, and nobody gets an answer.
    hosts = {"h1": [f"{net}.1"], "h2": [f"{net}.2", "198.51.100.1"]}
    cluster = run(hosts, ports, seconds=20.0)
    assert cluster.ok("h1", "h2") == [True, False]
    assert max(cluster.seconds.values()) < 5
    assert "198.51.100.1" in cluster.reaches["h2"].problems[0]


def test_an_address_that_both_hosts_have_counts_as_not_reached(net: str, ports: tuple[int, int]) -> None:
    shared = f"{net}.200"
    hosts = {"h1": [f"{net}.1", shared], "h2": [f"{net}.2", shared]}
    # On one machine the second listener gets another port; on two machines both would answer themselves on the first.
    # So h1 is told that h2 is there, while nothing but h1 itself answers.
    cluster = run({"h1": [shared], "h2": [shared]}, ports, silent=("h2",), seconds=1.0)
    assert cluster.ok("h1", "h2") == [False]
    assert "h1 itself answers" in cluster.errors("h1")[0]
    both = run(hosts, ports, seconds=5.0)
    assert both.ok("h1", "h2")[0]


@pytest.mark.slow
def test_an_address_that_another_host_answers_on_is_named_as_such(net: str, ports: tuple[int, int]) -> None:
    # h4 never shows up and h1 comes last, so that h3 is there, and stays, while h1 looks.
    hosts = {"h1": [f"{net}.1"], "h2": [f"{net}.2"], "h3": [f"{net}.3"], "h4": [f"{net}.4"]}
    wrong = {**hosts, "h2": [f"{net}.3"]}
    cluster = run(hosts, ports, views={"h1": wrong}, silent=("h4",), skew={"h1": 0.5}, seconds=4.0)
    assert cluster.ok("h1", "h3") == [True]
    assert "h3 answers" in cluster.errors("h1")[0]


def test_reaching_in_one_direction_alone_ends_and_is_seen(net: str, ports: tuple[int, int]) -> None:
    hosts = {"h1": [f"{net}.1"], "h2": [f"{net}.2"]}
    blind = {**hosts, "h2": ["198.51.100.1"]}  # h1 knows no address of h2 that works
    cluster = run(hosts, ports, views={"h1": blind}, seconds=15.0)
    assert cluster.ok("h2", "h1") == [True]
    assert cluster.ok("h1", "h2") == [False]
    assert max(cluster.seconds.values()) < 6


@pytest.mark.slow
def test_ports_that_other_programs_hold_are_passed_over(net: str, ports: tuple[int, int]) -> None:
    with socket.create_server((f"{net}.2", ports[0])) as taken:
        cluster = run({"h1": [f"{net}.1"], "h2": [f"{net}.2"]}, ports)
        assert taken.getsockname()[1] == ports[0]
    assert cluster.ok("h1", "h2") == [True]
    assert cluster.reaches["h2"].listening == {f"{net}.2": ports[0] + 1}


def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    swallowed = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                swallowed.append(True)
                if len(swallowed) > 2:
                    raise

    async def end_it() -> None:
        task = asyncio.ensure_future(stubborn())
        await asyncio.sleep(0)
        await asyncio.wait_for(_cancel({task}), 10)
        assert task.cancelled()

    asyncio.run(end_it())
    assert len(swallowed) == 3


def test_strangers_on_the_port_do_no_harm(net: str, ports: tuple[int, int]) -> None:
    stop = threading.Event()

    def stranger() -> None:
        while not stop.wait(0.01):
            try:
                with socket.create_connection((f"{net}.1", ports[0]), 0.2) as connection:
                    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            except OSError:
                continue

    thread = threading.Thread(target=stranger)
    thread.start()
    cluster = run({"h1": [f"{net}.1"], "h2": [f"{net}.2"]}, ports, skew={"h2": 0.5})
    stop.set()
    thread.join()
    assert cluster.ok("h1", "h2") == cluster.ok("h2", "h1") == [True]


def test_nothing_listens_afterwards(net: str, ports: tuple[int, int]) -> None:
    run({"h1": [f"{net}.1"], "h2": [f"{net}.2"]}, ports)
    for address, port in ((f"{net}.1", ports[0]), (f"{net}.2", ports[0])):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), 1)


def test_one_host_alone_has_nothing_to_do(net: str, ports: tuple[int, int]) -> None:
    cluster = run({"h1": [f"{net}.1"]}, ports)
    results: list[dict[str, Any]] = cluster.reaches["h1"].results
    assert results == []
    assert cluster.seconds["h1"] < 0.5
