"""Decisions about a lab: systems, subnets, NIC names, cores, link rates, and the `ip` and `tc` lines that set them up.

Pure functions; lab.py and lab_host.py carry them out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise

# (management, data): names as different hardware, firmware and bonds give them. The numbers differ from host to host.
NIC_NAMES = (("enp{n}s0", "eno{m}"), ("ens{k}", "bond{z}"), ("eth{z}", "enp65s0f{z}"))
SYSTEMS = ("debian", "ubuntu24.04", "ubuntu22.04")  # of hosts; the first one where none is named
FIRST_HOST = 11  # last number of the first host's addresses
MAX_HOSTS = 200
DOCKER_BRIDGE = "172.17.0.1/16"  # what Docker gives every host
VETH_ADDRESS = "10.200.0.1/24"  # what a container network gives every host
DOWN_NETWORK = "10.201.0"
RESERVED = tuple(map(IPv4Network, ("172.17.0.0/16", "10.200.0.0/24", "10.201.0.0/24")))
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
QUOTA_PERIOD = 10_000  # microseconds; with the usual 100 ms a host would be stopped for most of each tenth of a second
LEAST_CPUS = 0.1  # a millisecond of each period, the least that the kernel accepts


@dataclass(frozen=True)
class Nics:
    """Names of a host's NICs; `down` is a decoy."""

    management: str
    data: str
    down: str


def nics(index: int) -> Nics:
    """Names of the NICs of the host `index` (from 0); they differ from those of the next host."""
    cycle = index // len(NIC_NAMES)
    numbers = {"n": 1 + cycle, "m": 2 + cycle, "k": 3 + cycle, "z": cycle}
    management, data = (name.format(**numbers) for name in NIC_NAMES[index % len(NIC_NAMES)])
    return Nics(management, data, f"enp{9 + cycle}s0")


def systems(text: str) -> tuple[str, ...]:
    """Systems that hosts have in turn, from a text such as debian,ubuntu; `ubuntu` is the newest one.

    Raises ValueError if it names none, or one that is not known.
    """
    newest = {"ubuntu": next(system for system in SYSTEMS if system.startswith("ubuntu"))}
    found = tuple(newest.get(word.strip().lower(), word.strip().lower()) for word in text.split(","))
    if unknown := [word for word in found if word not in SYSTEMS]:
        raise ValueError(f"{unknown[0]!r} is no system of lab hosts ({', '.join((*SYSTEMS, *newest))})")
    return found


def system_of_each(wanted: Sequence[str], there: Sequence[str | None]) -> list[str]:
    """The system of each host of a lab.

    wanted: systems that the hosts have in turn; none: hosts that exist keep theirs, others get the first of SYSTEMS.
    there: the system of each host, None for one that does not exist yet.
    """
    if wanted:
        return [wanted[index % len(wanted)] for index in range(len(there))]
    return [system or SYSTEMS[0] for system in there]


def free_subnets(taken: Iterable[IPv4Network]) -> Iterable[tuple[IPv4Network, IPv4Network]]:
    """Pairs (management, data) of /24 networks that overlap no taken network and no decoy."""
    busy = [*taken, *RESERVED]
    for number in range(256):
        pair = (IPv4Network(f"10.77.{number}.0/24"), IPv4Network(f"10.78.{number}.0/24"))
        if not any(subnet.overlaps(other) for subnet in pair for other in busy):
            yield pair


def address(subnet: IPv4Network, index: int) -> IPv4Address:
    """Address of the host `index` (from 0) on a lab network."""
    return subnet.network_address + FIRST_HOST + index


def neighbours(hosts: int) -> int:
    """Entries that the kernel's table of neighbours must have room for: each host's of each other host and of this
    machine, and this machine's of each, in both networks; twice that, as what was forgotten stays for a while."""
    return 2 * 2 * hosts * (hosts + 1)


def mac(seed: str) -> str:
    """A locally administered unicast hardware address, the same for the same seed."""
    return ":".join(["02", *(f"{byte:02x}" for byte in hashlib.sha256(seed.encode()).digest()[:5])])


def cpusets(cores: Sequence[int], hosts: int) -> list[str]:
    """Cores of each host as Podman writes them: cores of its own if there are enough, as real hosts have; otherwise one
    core for each host, in turn."""
    if hosts > len(cores):
        return [str(cores[index % len(cores)]) for index in range(hosts)]
    bounds = [len(cores) * index // hosts for index in range(hosts + 1)]
    return [",".join(map(str, cores[low:high])) for low, high in pairwise(bounds)]


def cpu_quota(text: str) -> float:
    """Computing time of a host, in cores, from a text such as 0.4.

    Raises ValueError if it is not a number of at least LEAST_CPUS.
    """
    if re.fullmatch(r"\d+(?:\.\d+)?", text.strip()) is None or float(text) < LEAST_CPUS:
        raise ValueError(f"{text!r} is not a number of cores such as 0.4 (at least {LEAST_CPUS})")
    return float(text)


def quota_options(cpus: float | None, cores: int) -> list[str]:
    """Podman's options for a host's computing time `cpus`, in cores; None: all that `cores` cores give, so no limit."""
    share = cores if cpus is None else cpus
    return [f"--cpu-period={QUOTA_PERIOD}", f"--cpu-quota={round(share * QUOTA_PERIOD)}"]


def link_rate(text: str) -> int:
    """Bits per second, from a rate as tc writes it, such as 1gbit or 100mbit.

    Raises ValueError if it is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower())
    if match is None or float(match.group(1)) <= 0:
        raise ValueError(f"{text!r} is not a rate such as 1gbit or 100mbit")
    return round(float(match.group(1)) * BITS[match.group(2)])


def shape_lines(device: str, rate: int | None) -> list[str]:
    """`tc -batch` lines for one end of a link; None: no limit. Run them with -force: there may be nothing to delete."""
    if rate is None:
        return [f"qdisc del dev {device} root"]
    burst = max(256 * 1024, rate // 8 // 1000)  # bytes; for fast links what they carry in a millisecond
    return [f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst} latency 50ms"]


def decoy_lines(names: Nics, index: int, has_docker: bool = False) -> list[str]:
    """`ip -batch` lines for the decoys of a host: Docker's bridge, a container's veth, a NIC that is down.

    has_docker: Docker has started with the host and made the bridge already.

    The bridge and the veth have the same addresses on every host. The NIC that is down would be usable if it were up.
    """
    return [
        *([] if has_docker else ["link add docker0 type bridge"]),
        f"addr replace {DOCKER_BRIDGE} brd 172.17.255.255 dev docker0",
        "link set docker0 up",
        "link add veth7f3a1c0 type veth peer name vethd41e5b2",
        "link set veth7f3a1c0 master docker0 up",
        "link set vethd41e5b2 up",
        "link add veth0a9c2e4 type veth peer name veth5b8d6f1",
        f"addr add {VETH_ADDRESS} brd 10.200.0.255 dev veth0a9c2e4",
        "link set veth0a9c2e4 up",
        "link set veth5b8d6f1 up",
        f"link add {names.down} type veth peer name vethe2c7a90",
        f"addr add {DOWN_NETWORK}.{FIRST_HOST + index}/24 brd {DOWN_NETWORK}.255 dev {names.down}",
    ]
