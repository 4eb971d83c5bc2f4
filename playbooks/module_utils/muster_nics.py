"""Reads the machine's network interfaces and says which of them can never carry training traffic, and why.

Pure functions over the output of `ip -j -d addr show` and what /sys/class/net says; the two readers stand last.
Which of the remaining addresses is used is decided elsewhere, by measurement between all hosts (muster_reach).
Runs on bare hosts: standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.muster_host import read, run

CONTAINER_BRIDGE = re.compile(r"^(docker|br-|virbr|lxdbr|lxcbr|cni|podman|kube-bridge)")
CONTAINER_VETH = re.compile(r"^(veth|cali|lxc|vnet|tap)")
TUNNELS = ("tun", "wireguard", "vxlan", "geneve", "gre", "gretap", "ip6gre", "ipip", "sit", "ip6tnl", "vti", "xfrm")
# Speeds that sysfs gives for "not known": -1 (as signed or unsigned) and 0. A veth's 10000 is a constant of the driver.
UNKNOWN_SPEEDS = (-1, 0, 65535, 4294967295)
PHYSICAL = ("physical", "bond", "vlan", "infiniband")


def kind_of(link: dict[str, Any]) -> str:
    """physical, bond, vlan, bridge, veth, vpn, infiniband, loopback, dummy or other, for one link of `ip -j -d`."""
    info = link.get("linkinfo", {}).get("info_kind", "")
    if link.get("link_type") == "loopback":
        return "loopback"
    if link.get("link_type") == "infiniband":
        return "infiniband"
    if info in ("bond", "team"):
        return "bond"
    if info in ("vlan", "bridge", "veth", "dummy"):
        return str(info)
    if info in TUNNELS:
        return "vpn"
    return "other" if info else "physical"


def parse_speed(text: str | None, kind: str) -> int | None:
    """Mbit/s from sysfs; None where the driver does not know, and for links that make a number up."""
    if text is None or kind in ("veth", "vpn", "bridge", "dummy", "loopback"):
        return None
    try:
        speed = int(text)
    except ValueError:
        return None
    return None if speed in UNKNOWN_SPEEDS else speed


def why_refused(nic: dict[str, Any], link: dict[str, Any], links: list[dict[str, Any]]) -> str | None:
    """Why a NIC can never be a candidate for training traffic; None if it can."""
    name, kind, master = nic["name"], nic["kind"], nic["master"]
    if kind == "loopback":
        return "loopback: it reaches this host alone"
    if kind == "vpn":
        tunnel = link.get("linkinfo", {}).get("info_kind", "tunnel")
        return f"a VPN or tunnel ({tunnel}): slow, and its other end is often elsewhere"
    if kind == "dummy":
        return "a dummy link: it reaches nobody"
    if kind == "bridge":
        reason = _why_bridge_refused(name, links)
        if reason:
            return reason
    if kind == "veth":
        reason = _why_veth_refused(link, links)
        if reason:
            return reason
    if not nic["up"]:
        return "the link is down"
    if not nic["carrier"]:
        return "no carrier: the cable or the other end is missing"
    if master and _kind_of_name(master, links) != "other":
        return f"a member of {master}: its traffic goes by {master}"
    if not nic["addresses"]:
        return "no address"
    if all(address["scope"] != "global" for address in nic["addresses"]):
        return "link-local addresses only"
    return None


def _kind_of_name(name: str, links: list[dict[str, Any]]) -> str:
    """The kind of a link by its name. A VRF has the kind other: a member of it keeps its own addresses."""
    return next((kind_of(link) for link in links if link["ifname"] == name), "other")


def _why_bridge_refused(name: str, links: list[dict[str, Any]]) -> str | None:
    if CONTAINER_BRIDGE.match(name):
        return "a bridge for containers or virtual machines: the same address is on many hosts"
    members = [link for link in links if link.get("master") == name]
    if not any(kind_of(member) in PHYSICAL for member in members):
        return "a bridge without a physical member: it does not leave this host"
    return None


def _why_veth_refused(link: dict[str, Any], links: list[dict[str, Any]]) -> str | None:
    """A veth is a container's end on its host (of no use), or the NIC of a host that is itself a container."""
    if CONTAINER_VETH.match(link["ifname"]):
        return "a veth: the host's end of a container"
    if link.get("master"):
        return f"a veth in the bridge {link['master']}: the host's end of a container"
    own = {other["ifindex"] for other in links}
    if "link_netnsid" not in link and ("link" in link or link.get("link_index") in own):
        return "a veth whose other end is on this host too"
    return None


def parse_nics(
    ip_json: str,
    speeds: dict[str, str | None],
    train_interface: str | None = None,
    train_network: str | None = None,
) -> list[dict[str, Any]]:
    """NICs with their addresses and the reason for which they are refused (None: a candidate).

    ip_json: output of `ip -j -d addr show`. speeds: /sys/class/net/<name>/speed by name.
    train_interface, train_network: what the user set in the inventory. A NIC that it names is never refused for its
    kind, since the user knows better; one without link or address stays refused, since nothing could be tried.
    """
    links = [link for link in json.loads(ip_json) if "ifname" in link]
    nics = []
    for link in links:
        flags, kind = link.get("flags", []), kind_of(link)
        nic: dict[str, Any] = {
            "name": link["ifname"],
            "kind": kind,
            "up": "UP" in flags,
            "carrier": "LOWER_UP" in flags,
            "mtu": link.get("mtu", 0),
            "mac": link.get("address", "") if kind != "loopback" else "",
            "speed_mbits": parse_speed(speeds.get(link["ifname"]), kind),
            "master": link.get("master"),
            "addresses": [_address(entry) for entry in link.get("addr_info", []) if _lasting(entry)],
        }
        nic["refused"] = why_refused(nic, link, links)
        if nic["refused"] and nic["up"] and nic["carrier"] and _chosen(nic, train_interface, train_network):
            nic["refused"] = None
        nics.append(nic)
    return nics


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
    if not nic["addresses"]:
        return False
    if train_interface and nic["name"] == train_interface:
        return True
    return bool(train_network) and any(in_network(entry["address"], str(train_network)) for entry in nic["addresses"])


def in_network(address: str, network: str) -> bool:
    """Whether an address lies in a CIDR network. Raises ValueError for a network that is none."""
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def candidates(nics: list[dict[str, Any]]) -> list[str]:
    """Addresses to be tried between hosts: of the NICs that are not refused, those that are not link-local."""
    usable = [nic for nic in nics if nic["refused"] is None]
    return [entry["address"] for nic in usable for entry in nic["addresses"] if entry["scope"] == "global"]


def read_nics(train_interface: str | None, train_network: str | None) -> list[dict[str, Any]]:
    """The NICs of this machine. Raises RuntimeError if `ip` does not answer."""
    result = run(["ip", "-j", "-d", "addr", "show"])
    if result.rc != 0:
        raise RuntimeError(f"`ip -j -d addr show` failed: {result.complaint}. Mend: install iproute2 on that host")
    return parse_nics(result.out, read_speeds(), train_interface, train_network)


def read_speeds(folder: Path = Path("/sys/class/net")) -> dict[str, str | None]:
    """/sys/class/net/<name>/speed by name; None where the driver refuses to say."""
    return {link.name: read(link / "speed") for link in folder.iterdir()} if folder.is_dir() else {}
