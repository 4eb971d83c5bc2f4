"""Reads the machine's network interfaces and says which of them can never carry training traffic, and why.

Pure functions over the output of `ip -j -d addr show` and what /sys/class/net says; readers stand last.
Which of the remaining addresses is used the control machine decides, when all hosts have tried and measured them.
RDMA devices (InfiniBand, RoCE) and the state of their ports come from /sys/class/infiniband, as the kernel's
Documentation/ABI/stable/sysfs-class-infiniband describes it.
Runs on bare hosts: standard library alone, Python 3.8 and later. Not verified on hardware: bonds, InfiniBand and RoCE
(tested with trees built by hand).
"""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

from ansible.module_utils.muster_host import read, run

CONTAINER_BRIDGE = re.compile(r"^(docker|br-|virbr|lxdbr|lxcbr|cni|podman|kube-bridge)")
CONTAINER_VETH = re.compile(r"^(veth|cali|lxc|vnet|tap)")
#: A VPN is known by its name too: one that runs in user space may hide behind any kind of link.
VPN_NAME = re.compile(
    r"^(tailscale\d*|wg\d+|wg-.+|wt\d+|tun\d+|utun\d+|zt[a-z0-9]{8}|nebula\d*|nordlynx|cscotun\d+|gpd\d+|ppp\d+|ipsec\d+)$"
)
TUNNELS = (
    *("tun", "wireguard", "ovpn", "ovpn-dco", "ppp", "xfrm", "vti", "vti6", "l2tp_eth", "bareudp", "vxlan", "geneve"),
    *("gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan", "ipip", "sit", "ip6tnl"),
)
TUNNEL_LINK_TYPES = ("none", "ppp", "ipip", "sit", "gre", "gre6", "tunnel6", "rawip")
#: Speeds that sysfs gives for "not known": -1 (signed or unsigned, 16 or 32 bits) and 0.
UNKNOWN_SPEEDS = (-1, 0, 65535, 4294967295)
PHYSICAL = ("physical", "bond", "vlan", "infiniband")
#: Kinds whose /sys/class/net/<name>/speed means something. A veth's 10000 is a constant of its driver.
KINDS_WITH_SPEED = ("physical", "bond", "vlan", "infiniband", "other")
#: The GIDs of the link-local and first addresses stand first; a port has up to 256, most of them empty.
GIDS_READ = 16


@dataclass(frozen=True)
class Others:
    """What a link's verdict needs to know of the other links, gathered once: hosts may have hundreds of veths."""

    kinds: dict[str, str]  # by name
    leading_out: set[str]  # names of those with a physical member
    indexes: set[int]


def kind_of(link: dict[str, Any]) -> str:
    """physical, bond, vlan, bridge, veth, vpn, infiniband, loopback, dummy or other, for one link of `ip -j -d`."""
    info, link_type = link.get("linkinfo", {}).get("info_kind", ""), link.get("link_type")
    if link_type == "loopback":
        return "loopback"
    if info in TUNNELS or VPN_NAME.match(link["ifname"]):
        return "vpn"
    if info in ("bond", "team"):
        return "bond"
    if link_type == "infiniband":
        return "infiniband"
    if info in ("vlan", "bridge", "veth", "dummy"):
        return str(info)
    if info:
        return "other"
    return "vpn" if link_type in TUNNEL_LINK_TYPES else "physical"


def parse_speed(text: str | None, kind: str) -> int | None:
    """Mbit/s from sysfs; None where the driver does not know, and for links that make a number up."""
    if text is None or kind not in KINDS_WITH_SPEED or not re.fullmatch(r"-?\d+", text):
        return None
    return None if int(text) in UNKNOWN_SPEEDS else int(text)


def why_refused(nic: dict[str, Any], link: dict[str, Any], others: Others) -> str | None:
    """Why a NIC can never be a candidate for training traffic; None if it can."""
    name, kind, master = nic["name"], nic["kind"], nic["master"]
    bridge, veth = kind == "bridge", kind == "veth"
    tunnel = link.get("linkinfo", {}).get("info_kind") or "by its name"
    ends_here = "link_netnsid" not in link and ("link" in link or link.get("link_index") in others.indexes)
    # A VRF is of the kind other, and its members keep their own addresses.
    member = master and others.kinds.get(master, "other") != "other"
    reasons = (
        (kind == "loopback", "loopback: it reaches this host alone"),
        (kind == "vpn", f"a VPN or tunnel ({tunnel}): slow, and its other end is often elsewhere"),
        (kind == "dummy", "a dummy link: it reaches nobody"),
        (
            bridge and CONTAINER_BRIDGE.match(name),
            "a bridge for containers or virtual machines: the same address is on many hosts",
        ),
        (bridge and name not in others.leading_out, "a bridge without a physical member: it does not leave this host"),
        # A veth is a container's end on its host (of no use), or the NIC of a host that is itself a container.
        (veth and CONTAINER_VETH.match(name), "a veth: the host's end of a container"),
        (veth and master, f"a veth in the bridge {master}: the host's end of a container"),
        (veth and ends_here, "a veth whose other end is on this host too"),
        (not nic["up"], "the link is down"),
        (not nic["carrier"], "no carrier: the cable or the other end is missing"),
        (member, f"a member of {master}: its traffic goes by {master}"),
        (not nic["addresses"], "no address"),
        (all(address["scope"] != "global" for address in nic["addresses"]), "link-local addresses only"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def parse_links(ip_json: str) -> list[dict[str, Any]]:
    """The links of `ip -j -d addr show`, as it describes them. Older iproute2 prints empty objects between them.

    Raises ValueError for text that is no JSON.
    """
    return [link for link in json.loads(ip_json or "[]") if "ifname" in link]


def describe_nics(
    links: list[dict[str, Any]],
    speeds: dict[str, str | None],
    train_interface: str | None = None,
    train_network: str | None = None,
) -> list[dict[str, Any]]:
    """NICs with their addresses and the reason for which they are refused (None: a candidate).

    links: of parse_links. speeds: /sys/class/net/<name>/speed by name.
    train_interface, train_network: what the user set in the inventory. A NIC that it names is never refused for its
    kind, since the user knows better; one without link or address stays refused, since nothing could be tried.
    Raises ValueError for a network that is none.
    """
    kinds = {link["ifname"]: kind_of(link) for link in links}
    leading_out = {link["master"] for link in links if link.get("master") and kinds[link["ifname"]] in PHYSICAL}
    others = Others(kinds, leading_out, {link.get("ifindex", 0) for link in links})
    known = _speeds(links, kinds, speeds)
    nics = []
    for link in links:
        flags, kind = link.get("flags", []), kinds[link["ifname"]]
        nic: dict[str, Any] = {
            "name": link["ifname"],
            "kind": kind,
            "up": "UP" in flags,
            "carrier": "LOWER_UP" in flags,
            "mtu": link.get("mtu", 0),
            "mac": link.get("address", "") if kind != "loopback" else "",
            "speed_mbits": known[link["ifname"]],
            "master": link.get("master"),
            "parent": link.get("link") if kind == "vlan" else None,
            "addresses": [_address(entry) for entry in link.get("addr_info", []) if _lasting(entry)],
        }
        nic["refused"] = why_refused(nic, link, others)
        if nic["refused"] and nic["up"] and nic["carrier"] and _chosen(nic, train_interface, train_network):
            nic["refused"] = None
        nics.append(nic)
    return nics


def _speeds(links: list[dict[str, Any]], kinds: dict[str, str], texts: dict[str, str | None]) -> dict[str, int | None]:
    """Mbit/s by name. What sysfs does not know of a bond comes from its members, and of a VLAN from what it is on."""
    known = {name: parse_speed(texts.get(name), kind) for name, kind in kinds.items()}
    unknown = {link["ifname"]: link for link in links if known[link["ifname"]] is None}
    for name, link in unknown.items():
        if kinds[name] == "bond":
            known[name] = bond_speed(link, [member for member in links if member.get("master") == name], known)
    for name, link in unknown.items():
        if kinds[name] == "vlan":
            known[name] = known.get(link.get("link", ""))
    return known


def bond_speed(bond: dict[str, Any], members: list[dict[str, Any]], known: dict[str, int | None]) -> int | None:
    """Mbit/s of a bond by its mode: one member's where only one sends, all members' together where they share.

    None where a member that counts does not know its own. One TCP connection never gets more than one member's.
    """
    data = bond.get("linkinfo", {}).get("info_data", {})
    mode, active = data.get("mode", ""), data.get("active_slave")
    up = [member["ifname"] for member in members if "LOWER_UP" in member.get("flags", [])]
    speeds = [known.get(name) for name in ([active] if mode == "active-backup" and active else up)]
    if not speeds or None in speeds:
        return None
    return min(speeds) if mode in ("active-backup", "broadcast") else sum(speeds)


def _address(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "address": entry["local"],
        "prefix": entry["prefixlen"],
        "family": 6 if entry["family"] == "inet6" else 4,
        "scope": entry.get("scope", "global"),
    }


def _lasting(entry: dict[str, Any]) -> bool:
    """Leaves out addresses that are not settled yet, or that IPv6 privacy changes from day to day."""
    passing = ("tentative", "dadfailed", "deprecated", "temporary")
    settled = not any(entry.get(word) for word in passing)
    return settled and entry.get("family") in ("inet", "inet6") and "local" in entry


def _chosen(nic: dict[str, Any], train_interface: str | None, train_network: str | None) -> bool:
    if nic["addresses"] and nic["name"] == train_interface:
        return True
    network = ipaddress.ip_network(train_network, strict=False) if train_network else ()
    return any(ipaddress.ip_address(entry["address"]) in network for entry in nic["addresses"])


def read_nics(train_interface: str | None, train_network: str | None) -> list[dict[str, Any]]:
    """The NICs of this machine. Raises RuntimeError if `ip` does not answer."""
    result = run(["ip", "-j", "-d", "addr", "show"])
    if result.rc != 0:
        raise RuntimeError(f"`ip -j -d addr show` failed: {result.complaint}. Fix: install iproute2 on that host")
    links = parse_links(result.out)
    speeds = read_speeds(link["ifname"] for link in links if kind_of(link) in KINDS_WITH_SPEED)
    return describe_nics(links, speeds, train_interface, train_network)


def read_speeds(names: Iterable[str], folder: Path = Path("/sys/class/net")) -> dict[str, str | None]:
    """/sys/class/net/<name>/speed by name; None where the driver refuses to say."""
    return {name: read(folder / name / "speed") for name in names}


def parse_state(text: str | None) -> str:
    """DOWN, INIT, ARMED, ACTIVE, ... from "4: ACTIVE"; "unknown" where the file says nothing."""
    return (text or "").partition(":")[2].strip() or "unknown"


def parse_rate(text: str | None) -> float | None:
    """Gbit/s from "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)"; None for anything else."""
    found = re.match(r"([0-9.]+) Gb/sec", text or "")
    return float(found.group(1)) if found else None


def read_rdma(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, Any]]:
    """Ports as [{"device", "port", "state", "rate_gbits", "link_layer", "nics", "soft", "verbs"}], by device and port.

    rate_gbits is None where the port does not say. nics: names of the network interfaces of that port. soft: RDMA made
    in software over an ordinary NIC (rxe, siw), which is slower than TCP. verbs: the name below /dev/infiniband through
    which programs use the device; None where ib_uverbs is not loaded. An empty list where there is no RDMA.
    """
    found = []
    verbs = {read(path / "ibdev"): path.name for path in root.with_name("infiniband_verbs").glob("uverbs*")}
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
                    "verbs": verbs.get(device.name),
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
