"""Finds RDMA devices (InfiniBand, RoCE) and the state of their ports. Whether NCCL shall use them is decided elsewhere.

Reads /sys/class/infiniband as the kernel's Documentation/ABI/stable/sysfs-class-infiniband describes it. Runs on bare
hosts: standard library alone, Python 3.8 and later. Not verified on hardware: tested with trees built by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible.module_utils.muster_host import read

#: The GIDs of the link-local and first addresses stand first; a port has up to 256, most of them empty.
GIDS_READ = 16


def parse_state(text: str | None) -> str:
    """DOWN, INIT, ARMED, ACTIVE, ... from "4: ACTIVE"; "unknown" where the file says nothing."""
    return (text or "").partition(":")[2].strip() or "unknown"


def parse_rate(text: str | None) -> float | None:
    """Gbit/s from "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)"; None for anything else."""
    found = re.match(r"([0-9.]+) Gb/sec", text or "")
    return float(found.group(1)) if found else None


def read_rdma(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, Any]]:
    """Ports as [{"device", "port", "state", "rate_gbits", "link_layer", "nics", "soft"}], by device and port.

    rate_gbits is None where the port does not say. nics: names of the network interfaces of that port. soft: RDMA made
    in software over an ordinary NIC (rxe, siw), which is slower than TCP. An empty list where there is no RDMA.
    """
    found = []
    for device in sorted(root.glob("*")):
        ports = sorted((device / "ports").glob("[0-9]*"), key=lambda port: int(port.name))
        for port in ports:
            found.append(
                {
                    "device": device.name,
                    "port": int(port.name),
                    "state": parse_state(read(port / "state")),
                    "rate_gbits": parse_rate(read(port / "rate")),
                    "link_layer": read(port / "link_layer") or "unknown",
                    "nics": _nics(device, port, len(ports)),
                    "soft": (device / "parent").exists() or not (device / "device").exists(),
                }
            )
    return found


def _nics(device: Path, port: Path, ports: int) -> list[str]:
    """By the port's GIDs (RoCE, also over a bond), and by the PCI function that device and NIC share (IPoIB)."""
    names = {read(port / "gid_attrs" / "ndevs" / str(n)) for n in range(GIDS_READ)}
    for nic in (device / "device" / "net").glob("*"):
        if ports == 1 or _port_of(nic) == int(port.name):
            names.add(nic.name)
    names.add(read(device / "parent"))
    return sorted(name for name in names if name)


def _port_of(nic: Path) -> int:
    """The port of a NIC on a device with several; dev_port counts from 0, old drivers set dev_id instead."""
    texts = read(nic / "dev_port") or "0", read(nic / "dev_id") or "0x0"
    try:
        return max(int(texts[0]), int(texts[1], 16)) + 1
    except ValueError:
        return 1


def fill_speeds(nics: list[dict[str, Any]], rdma: list[dict[str, Any]]) -> None:
    """Gives NICs of the kind infiniband that do not know their speed that of their port. Changes `nics`."""
    rates = {name: port["rate_gbits"] for port in rdma for name in port["nics"] if port["rate_gbits"]}
    for nic in nics:
        if nic["kind"] == "infiniband" and nic["speed_mbits"] is None and nic["name"] in rates:
            nic["speed_mbits"] = int(1000 * rates[nic["name"]])
