"""Promises: a run has no rights on its host, and answers nobody but its own hosts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from keeper import USER_ID
from tests.lab.conftest import Lab, summary_of
from tests.lab.test_endings import read_until

pytestmark = pytest.mark.lab

#: Prints which of these ports of an address answer, as JSON: connections to all of them, a thousand at a time.
SCAN = """
import asyncio, json, resource, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))

async def answers(port, at_once):
    async with at_once:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(sys.argv[1], port), 2)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

async def main(ports):
    at_once = asyncio.Semaphore(1000)
    found = await asyncio.gather(*(answers(port, at_once) for port in ports))
    print(json.dumps([port for port, answered in zip(ports, found) if answered]))

asyncio.run(main(PORTS))
"""


OTHERS = [22, 40404]  # sshd, and a program that is no run's
PORTS = [*range(29400, 29416), *range(1, 65536, 97)]  # those of runs, and some of all


def answering(lab: Lab, host: str, address: str, ports: Sequence[int]) -> list[int]:
    """The TCP ports of an address, of these, that answer a host."""
    scan = SCAN.replace("PORTS", repr(ports))
    found: list[int] = json.loads(lab.on(host, f"python3 - {address} <<'END'\n{scan}\nEND"))
    return found


def listening(lab: Lab, host: str) -> dict[int, str]:
    """Port -> address, of all on which a host's programs listen, but sshd."""
    ends = [line.split()[3].rpartition(":") for line in lab.on(host, "ss -Hltn4").splitlines()]
    return {int(port): address for address, _, port in ends if port != "22"}


def addresses(lab: Lab, host: int) -> list[str]:
    """A host's own, on its training network first."""
    known = lab.cluster["hosts"][host]
    usable = (nic for nic in known["facts"]["nics"] if not nic["refused"])
    others = (one["address"] for nic in usable for one in nic["addresses"] if one["family"] == 4)
    return [known["address"], *(address for address in others if address != known["address"])]


@dataclass(frozen=True)
class Seen:
    """Of a run on h1 and h2, while it went on."""

    ranks: list[dict[str, Any]]  # what each rank says: test_jobs/rights.py
    listening: dict[int, str]  # on h1
    answering: dict[str, list[int]]  # h1's ports, by who calls
    open_folders: str  # which everybody on h1 may write to


@contextlib.contextmanager
def running(lab: Lab, printed: list[str]) -> Iterator[None]:
    """A run of rights.py on h1 and h2, beside another program on h1 that listens. What it prints is added."""
    process = lab.start("train", WORKLOAD="tests/lab/test_jobs", SCRIPT="rights.py", ARGS=addresses(lab, 2)[1], NODES=2)
    printed.append(read_until(process, "all have said it"))
    lab.on("h1", "(python3 -m http.server 40404 >/dev/null 2>&1 & echo $! >/run/http.pid)")
    try:
        yield
    finally:
        lab.on("h1", "kill $(cat /run/http.pid); rm /run/http.pid")
    stopped = lab.fab("stop", RUN=printed[0].split("muster | run ")[1].split(":")[0], GRACE=1)
    assert stopped.returncode == 0, stopped.stdout
    printed.append(process.communicate(timeout=120)[0])


@pytest.fixture(scope="module")
def seen(lab: Lab) -> Seen:
    training, other = addresses(lab, 0)
    printed: list[str] = []
    with running(lab, printed):
        ports = listening(lab, "h1")
        ports.pop(40404, None)
        known = sorted([*OTHERS, *ports])
        answers = {
            "h3": answering(lab, "h3", training, sorted({*known, *PORTS})),
            "h3 by the other network": answering(lab, "h3", other, known),
            "h2": answering(lab, "h2", training, known),
        }
        folders = lab.on("h1", "find /var/lib/muster /run/muster -perm /o+w -not -type l")
    folder, _ = summary_of("".join(printed))
    ranks = [json.loads(path.read_text()) for path in sorted(folder.rglob("rights-*.json"))]
    assert len(ranks) == sum(host["nproc_per_node"] for host in lab.cluster["hosts"][:2])
    return Seen(ranks, ports, answers, folders)


def test_ranks_are_no_user_of_their_host_and_have_no_capability(seen: Seen) -> None:
    for said in seen.ranks:
        assert set(said["ids"]) == {USER_ID} and said["name"] == "muster"
        assert {int(mask, 16) for mask in said["capabilities"]} == {0} and said["no_new_privileges"] == "1"
        assert said["writes"] == ["/workload", "/tmp", "/muster/run"] and said["key"]
    assert seen.open_folders == ""


def test_a_run_leaves_memory_and_threads_to_its_host(lab: Lab, seen: Seen) -> None:
    facts = lab.cluster["hosts"][0]["facts"]
    for said in seen.ranks:
        assert 0.9 * facts["memory_bytes"] < said["memory"] < 0.96 * facts["memory_bytes"]
        assert said["threads"] == facts["threads_max"] // 2
        assert 0.49 < said["shm"] / facts["memory_bytes"] < 0.51


def test_no_port_of_a_live_run_answers_a_host_that_is_not_in_it(lab: Lab, seen: Seen) -> None:
    assert set(seen.listening.values()) == {addresses(lab, 0)[0]} and len(seen.listening) >= 3  # keeper, store, gloo
    assert seen.answering["h3"] == seen.answering["h3 by the other network"] == OTHERS
    assert seen.answering["h2"] == sorted([*OTHERS, *seen.listening])


def test_ranks_may_call_others(seen: Seen) -> None:
    assert all(said["reaches"] == {"tcp": True, "udp": True} for said in seen.ranks)


@pytest.mark.long
def test_no_port_at_all_of_a_live_run_answers_a_host_that_is_not_in_it(lab: Lab) -> None:
    with running(lab, []):
        assert answering(lab, "h3", addresses(lab, 0)[0], range(1, 65536)) == OTHERS
