"""`make bench-check`: seconds of the full and the quick check on three lab hosts, and what they cost with 64 and 256.

Parts (ARGS="--parts many"): `lab` needs root and Podman; the full check is measured without the forecast, and both
without the time that make needs to start. `vpn`, which is measured only when asked for, needs both, too: what
`train_vpn` leaves of the bandwidth between two lab hosts, in turn with that of the network below it, in both directions
at once. `many` needs neither, for its hosts are simulated:

- bytes on the standard input of each host's one SSH call, and the longest argument of a command, are those of the real
  call, to machines that only remember it;
- 64 processes of this machine, with an address each on loopback, go through the quick check's links with the real code.
  Counted are the seconds from when all have met to the last answer: that 64 interpreters of one machine share its
  processors when they start has nothing to do with real hosts. (They share them afterwards, too.) No packet is on a
  wire, and nothing is said over SSH. The reference goes through all pairs in the same way, in turn with it;
- a matrix of 256 hosts of which one sends slowly, one is far away, one path is smaller and scattered pairs are slow or
  broken is judged, shown in the terminal, as a page and as a picture.

The seconds of the full check of many hosts are computed: rounds of disjoint pairs, against one pair after another.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from invoke.context import Context
from rich.console import Console

from benchmarks.common import FAB, close, environment, fab, lab, take_data_network
from launch.health import check, link_checks, records
from launch.health.report import charts, page, terminal
from launch.hosts import clustermap, hostcall, ssh
from launch.hosts.connection import machines
from launch.hosts.inventory import Target
from launch.network import measure
from launch.network.links import Link
from launch.network.measure import NetworkAddresses, rounds

PARTS, MORE_PARTS = ("lab", "many"), ("vpn",)
RUNS = 5
TURNS = 3
SOME, MANY = 64, 256  # hosts
MEET_SECONDS = 300
LIMIT_SECONDS = 600


def full_seconds(name: str) -> float:
    """Seconds of one `fab check` without the forecast.

    Raises:
        SystemExit: the command failed.
    """
    begun = time.monotonic()
    done = subprocess.run(
        [FAB, "check"], env=environment(name, FORECAST=0), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"benchmark: `fab check` ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.monotonic() - begun


def quick_seconds(name: str) -> float:
    """Seconds of the quick check, including the logins, which `make train` needs in any case."""
    begun = time.monotonic()
    cluster = clustermap.read(Path("inventory") / name)
    with machines(cluster, cluster.hosts) as opened:
        check.quick(cluster, cluster.hosts, opened)
    return time.monotonic() - begun


def on_the_lab() -> dict[str, Any]:
    """Medians of both checks on three lab hosts."""
    with lab("bench-check", 3) as name:
        fab(name, "deploy")
        full, quick = [], []
        for turn in range(RUNS + 1):
            whole, short = full_seconds(name), quick_seconds(name)
            print(f"turn {turn}{' (warm-up)' if not turn else ''}: full {whole:.2f} s, quick {short:.2f} s")
            if turn:
                full.append(whole)
                quick.append(short)
    return {"full_seconds": round(statistics.median(full), 2), "quick_seconds": round(statistics.median(quick), 2)}


def nics_of(host: clustermap.MapHost) -> list[dict[str, Any]]:
    """The one that training takes."""
    return [nic for nic in host.facts["nics"] if nic["name"] == host.interface]


def through_vpn() -> dict[str, Any]:
    """Bandwidths between two lab hosts, through the VPN and without it. Raises SystemExit: a pair failed."""
    with lab("bench-check", 2) as name:
        take_data_network(name)
        settings = Path("inventory") / name / "group_vars" / "all.yml"
        networks = []
        for label, more in (("plain", ""), ("vpn", "train_vpn: wireguard\n")):
            settings.write_text(settings.read_text() + more)
            fab(name, "deploy")
            cluster = clustermap.read(Path("inventory") / name)
            addresses = {host.name: host.address for host in cluster.hosts}
            mtus = {host.name: nic["mtu"] for host in cluster.hosts for nic in nics_of(host)}
            networks.append(NetworkAddresses(label, addresses, mtus))
        seen: dict[str, list[float]] = {"plain": [], "vpn": []}
        with machines(cluster, cluster.hosts) as opened:
            for turn in range(RUNS):
                links, _ = measure.measure(opened, networks, measure.BANDWIDTH_SECONDS, print)
                for label, each in links.items():
                    if failed := [link.error for link in each if link.error or not link.mbits]:
                        raise SystemExit(f"benchmark: a pair failed: {failed[0]}")
                    seen[label] += [link.mbits for link in each if link.mbits]
                print(f"turn {turn}: {', '.join(f'{label} {values[-2:]} Mbit/s' for label, values in seen.items())}")
    vpn, plain = statistics.median(seen["vpn"]), statistics.median(seen["plain"])
    kernel = Path("/sys/module/wireguard").exists()
    return {
        "vpn_mbits": round(vpn, 1),
        "vpn_reference_mbits": round(plain, 1),
        "vpn_over_plain": round(vpn / plain, 3),
        "wireguard": "kernel" if kernel else "wireguard-go",
        "load": round(os.getloadavg()[0], 1),
    }


# -- simulated hosts ----------------------------------------------------------------------------------------------


def network_of(count: int) -> NetworkAddresses:
    """So many hosts on loopback."""
    addresses = {f"h{number}": f"127.46.{number >> 8}.{number & 255}" for number in range(1, count + 1)}
    return NetworkAddresses("training", addresses, dict.fromkeys(addresses, 1500))


class Remembers:
    """A machine that keeps what it is asked, and says nothing."""

    def __init__(self, name: str) -> None:
        self.name, self.target = name, Target(name, "127.0.0.1", 22, "muster", None, sudo_password="secret")
        self.argument, self.sent = "", 0

    def root(self, command: str, timeout: float, out: Any, stdin: ssh.Input) -> Any:
        self.argument = f"{ssh.sudo_prefix(self.target)}sh -c {shlex.quote(command)}"
        while piece := stdin.read(0):
            self.sent += len(piece)
        raise OSError("it only remembers")


class Process:
    """A machine that is a process of this one; notes when it listened, and when it answered."""

    def __init__(self, name: str) -> None:
        self.name, self.target = name, Target(name, "127.0.0.1", 22, "muster", None, python=sys.executable)
        self.listened = self.answered = 0.0

    def root(self, command: str, timeout: float, out: ssh.LineSink, stdin: ssh.Input) -> Any:
        def note(line: str) -> None:
            if '"listening"' in line:
                self.listened = time.monotonic()
            elif '"ended"' in line:
                self.answered = time.monotonic()
            out.write(f"{line}\n")

        words = f"cd / && {command}"  # no file of ours is on its path
        sink = ssh.LineSink(note)
        return Context().run(words, in_stream=stdin, out_stream=sink, hide=True, warn=True, timeout=timeout)


def sent_to(count: int, sample: bool) -> tuple[int, int]:
    """(most bytes that a host is sent before the hosts have met, longest argument) of the links of so many hosts."""
    network = network_of(count)
    hosts: list[Any] = [Remembers(name) for name in network.addresses]
    hostcall.call_hosts(hosts, measure.options(list(network.addresses), [network], 0, sample), LIMIT_SECONDS)
    return max(host.sent for host in hosts), max(len(host.argument) for host in hosts)


def links_seconds(count: int, sample: bool) -> float:
    """Seconds in which so many processes check their links.

    Raises:
        SystemExit: a pair failed.
    """
    network = network_of(count)
    names, hosts = list(network.addresses), [Process(name) for name in network.addresses]
    asked, called = measure.options(names, [network], 0, sample), list[Any](hosts)
    answers = hostcall.call_hosts(called, asked, LIMIT_SECONDS)
    found = measure.links(names, [network], answers, measure.asked_pairs(asked))[network.name]
    if failed := [link.error for link in found if link.error]:
        raise SystemExit(f"benchmark: {len(failed)} of {len(found)} pairs failed: {failed[0]}")
    return max(host.answered for host in hosts) - max(host.listened for host in hosts)


def matrix(count: int) -> list[Link]:
    """All pairs of so many hosts, with faults."""
    hosts, draw = list(network_of(count).addresses), random.Random(1)

    def link(a: str, b: str) -> Link:
        if draw.random() < 0.01:
            return Link(a, b, None, None, None, f"{a} does not reach {b}")
        mbits = 94.0 if a == "h7" or draw.random() < 0.02 else draw.uniform(900, 940)
        return Link(a, b, mbits, 9.0 if "h9" in (a, b) else draw.uniform(0.1, 0.2), 1400 if b == "h11" else 1500, None)

    return [link(a, b) for a in hosts for b in hosts if a != b]


def seconds_of(work: Callable[[], object]) -> float:
    """Median of TURNS."""
    taken = []
    for _ in range(TURNS):
        begun = time.monotonic()
        work()
        taken.append(time.monotonic() - begun)
    return round(statistics.median(taken), 2)


def judging(count: int) -> dict[str, Any]:
    """Seconds of all that is made of a matrix."""
    hosts, links = list(network_of(count).addresses), matrix(count)
    speeds: dict[str, int | None] = dict.fromkeys(hosts, 1000)
    mtus: dict[str, int | None] = dict.fromkeys(hosts, 1500)
    made = records.document(
        inventory="many",
        network="training",
        hosts=hosts,
        links=links,
        verdicts=link_checks.verdicts(links, speeds, mtus),
    )
    return {
        f"judge_{count}_seconds": seconds_of(lambda: link_checks.verdicts(links, speeds, mtus)),
        f"terminal_{count}_seconds": seconds_of(lambda: terminal.show(made, Console(file=io.StringIO(), width=100))),
        f"page_{count}_seconds": seconds_of(lambda: page.page(made)),
        f"page_{count}_bytes": len(page.page(made)),
        f"picture_{count}_seconds": seconds_of(lambda: charts.heatmap_svg(made)),
    }


def with_many() -> dict[str, Any]:
    """The figures of SOME and MANY hosts, and their reference."""
    hostcall.MEET_SECONDS = MEET_SECONDS
    figures: dict[str, Any] = {}
    for count in (SOME, MANY):
        figures[f"full_{count}_bytes_per_host"], _ = sent_to(count, False)
        figures[f"quick_{count}_bytes_per_host"], figures[f"longest_argument_{count}_bytes"] = sent_to(count, True)
        hosts = list(network_of(count).addresses)
        pairs, each = sum(map(len, rounds(hosts))), measure.PAIR_SECONDS + measure.BANDWIDTH_SECONDS
        figures[f"full_{count}_computed_seconds"] = round(measure.expected_seconds(count, 1, measure.BANDWIDTH_SECONDS))
        figures[f"one_after_another_{count}_computed_seconds"] = round(pairs * each)
    figures |= judging(MANY)
    sample, every = [], []
    for turn in range(TURNS):
        sample.append(links_seconds(SOME, True))
        every.append(links_seconds(SOME, False))
        print(f"turn {turn}: sample {sample[-1]:.2f} s, all pairs {every[-1]:.2f} s")
    quick, reference = statistics.median(sample), statistics.median(every)
    return figures | {
        f"quick_{SOME}_seconds": round(quick, 2),
        "reference_seconds": round(reference, 2),
        "ratio": round(quick / reference, 3),
        "reference": f"all pairs of {SOME} hosts before a run, by the same processes",
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=PARTS + MORE_PARTS, default=list(PARTS))
    parts = parser.parse_args().parts
    figures = with_many() if "many" in parts else {}
    figures |= through_vpn() if "vpn" in parts else {}
    close((on_the_lab() if "lab" in parts else {}) | figures)


if __name__ == "__main__":
    main()
