"""Which NICs may carry training traffic: muster_nics fed with what `ip -j -d addr show` prints on various machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import muster_nics

ADDRESS = {"family": "inet", "local": "10.1.0.5", "prefixlen": 24, "scope": "global"}
LINK_LOCAL = {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"}


def link(name: str, kind: str | None = None, *, index: int = 2, addresses: list[Any] | None = None, **more: Any) -> Any:
    """One link as iproute2 prints it: up, with carrier and with 10.1.0.5/24, where nothing else is given."""
    described = {
        "ifindex": index,
        "ifname": name,
        "flags": ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"],
        "mtu": 1500,
        "operstate": "UP",
        "link_type": "ether",
        "address": "52:54:00:12:34:56",
        "addr_info": [ADDRESS] if addresses is None else addresses,
    }
    if kind:
        described["linkinfo"] = {"info_kind": kind}
    return described | more


def parse(*links: Any, speeds: dict[str, str | None] | None = None, **chosen: Any) -> dict[str, dict[str, Any]]:
    return {
        nic["name"]: nic
        for nic in muster_nics.describe_nics(muster_nics.parse_links(json.dumps(links)), speeds or {}, **chosen)
    }


def elsewhere(name: str, **more: Any) -> Any:
    """A veth whose other end is in another network namespace."""
    return link(name, "veth", link_index=6, link_netnsid=0, **more)


@pytest.mark.parametrize(
    ("described", "kind"),
    [
        (link("eno1"), "physical"),
        (link("bond0", "bond"), "bond"),
        (link("eno1.100", "vlan", link="eno1"), "vlan"),
        (link("ib0", link_type="infiniband", address="80:00:02:08:fe:80:00:00"), "infiniband"),
        (link("ib0.8001", "ipoib", link_type="infiniband"), "infiniband"),
        (link("bond1", "bond", link_type="infiniband", address="80:00:02:08:fe:80:00:00"), "bond"),
        (link("team0", "team"), "bond"),
        (link("wgigabit0"), "physical"),
        (link("tundra0"), "physical"),
        (elsewhere("enp1s0"), "veth"),
        (elsewhere("bond0"), "veth"),
        (link("macvlan0", "macvlan", link_index=2, link_netnsid=0), "other"),
    ],
)
def test_nics_that_lead_out_of_the_host_are_candidates(described: Any, kind: str) -> None:
    nic = parse(described)[described["ifname"]]
    assert (nic["kind"], nic["refused"]) == (kind, None)
    assert nic["addresses"] == [{"address": "10.1.0.5", "prefix": 24, "family": 4, "scope": "global"}]


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (link("lo", link_type="loopback", flags=["LOOPBACK", "UP", "LOWER_UP"]), "loopback"),
        (link("eno2", flags=["BROADCAST", "MULTICAST"]), "down"),
        (link("eno2", flags=["NO-CARRIER", "BROADCAST", "UP"]), "no carrier"),
        (link("eno2", addresses=[]), "no address"),
        (link("eno2", addresses=[LINK_LOCAL]), "link-local"),
        (link("eno2", addresses=[ADDRESS | {"local": "169.254.3.4", "scope": "link"}]), "link-local"),
        (link("docker0", "bridge"), "containers"),
        (link("docker0", "bridge", flags=["NO-CARRIER", "UP"]), "containers"),
        (link("br-1f2e3d4c5b6a", "bridge"), "containers"),
        (link("virbr0", "bridge"), "containers"),
        (link("cni-podman0", "bridge"), "containers"),
        (link("podman1", "bridge"), "containers"),
        (link("br0", "bridge"), "without a physical member"),
        (elsewhere("veth1a2b3c4"), "veth"),
        (elsewhere("cali12345"), "veth"),
        (elsewhere("lxc9"), "veth"),
        (elsewhere("vnet3"), "veth"),
        (elsewhere("enp9s0", master="docker0"), "bridge docker0"),
        (link("wg0", "wireguard", link_type="none"), "VPN"),
        (link("tailscale0", "tun", link_type="none"), "VPN"),
        (link("tailscale0", link_type="none"), "VPN"),  # an iproute2 that tells no kind
        (elsewhere("tailscale0"), "VPN"),
        (link("zt3jnkuqx7", "tun", link_type="ether"), "VPN"),  # ZeroTier is a tap
        (link("wt0", "wireguard", link_type="none"), "VPN"),
        (link("ppp0", link_type="ppp"), "VPN"),
        (link("corp", link_type="none"), "VPN"),
        (link("tun0", "ovpn"), "VPN"),
        (link("flannel.1", "vxlan"), "tunnel"),
        (link("dummy0", "dummy"), "dummy"),
    ],
)
def test_nics_that_cannot_carry_training_are_refused_with_the_reason(described: Any, words: str) -> None:
    refused = parse(described)[described["ifname"]]["refused"]
    assert refused is not None and words in refused


def test_a_bridge_over_a_physical_nic_is_used_and_its_members_are_not() -> None:
    nics = parse(
        link("eno1", index=2, master="br0", addresses=[]),
        elsewhere("veth77", index=3, master="br0", addresses=[]),
        link("br0", "bridge", index=4),
    )
    assert nics["br0"]["refused"] is None
    assert "member of br0" in nics["eno1"]["refused"]
    assert nics["veth77"]["refused"]


def test_a_bond_is_used_and_its_members_are_not() -> None:
    nics = parse(
        link("eno1", index=2, master="bond0", addresses=[]),
        link("eno2", index=3, master="bond0"),
        link("bond0", "bond", index=4),
        link("bond0.20", "vlan", index=5, link="bond0"),
        speeds={"bond0": "50000", "bond0.20": "50000", "eno1": "25000"},
    )
    assert nics["bond0"]["refused"] is nics["bond0.20"]["refused"] is None
    assert "member of bond0" in nics["eno1"]["refused"] and "member of bond0" in nics["eno2"]["refused"]
    assert nics["bond0"]["speed_mbits"] == nics["bond0.20"]["speed_mbits"] == 50000


def test_a_member_of_a_vrf_keeps_its_own_traffic() -> None:
    nics = parse(link("eno1", index=2, master="mgmt"), link("mgmt", "vrf", index=3, addresses=[]))
    assert nics["eno1"]["refused"] is None


def test_both_ends_of_a_veth_on_this_host_are_refused_whatever_their_names() -> None:
    nics = parse(link("eth8", "veth", index=7, link="eth9"), link("eth9", "veth", index=8, link="eth8"))
    assert all("on this host too" in nic["refused"] for nic in nics.values())


def host_of_containers(count: int) -> str:
    """A host with that many containers: `ip -j -d addr show` with their veths, half in a bridge, half of Calico."""
    half = [
        elsewhere(f"veth{n:04x}", index=10 + n, master="docker0", addresses=[LINK_LOCAL]) for n in range(0, count, 2)
    ]
    rest = [elsewhere(f"eth{n}x", index=10 + n, addresses=[LINK_LOCAL]) for n in range(1, count, 2)]
    return json.dumps([link("eno1"), link("docker0", "bridge", index=3), *half, *rest])


def test_hundreds_of_container_veths_leave_the_one_real_nic() -> None:
    nics = muster_nics.describe_nics(muster_nics.parse_links(host_of_containers(600)), {})
    assert [nic["name"] for nic in nics if nic["refused"] is None] == ["eno1"]
    assert len(nics) == 602


def test_each_link_is_looked_at_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(link: Any, kind_of: Any = muster_nics.kind_of) -> Any:
        looked.append(link["ifname"])
        return kind_of(link)

    monkeypatch.setattr(muster_nics, "kind_of", look)
    muster_nics.describe_nics(muster_nics.parse_links(host_of_containers(600)), {})
    assert len(looked) == 602


@pytest.mark.parametrize("chosen", [{"train_interface": "wg0"}, {"train_network": "10.1.0.0/16"}])
def test_what_the_user_chose_is_not_refused_for_its_kind(chosen: dict[str, str]) -> None:
    assert parse(link("wg0", "wireguard"), speeds=None, **chosen)["wg0"]["refused"] is None


@pytest.mark.parametrize("described", [link("eno2", flags=[]), link("eno2", addresses=[])])
def test_what_the_user_chose_stays_refused_without_link_or_address(described: Any) -> None:
    assert parse(described, train_interface="eno2")["eno2"]["refused"]


def test_another_network_of_the_user_changes_nothing() -> None:
    assert parse(link("wg0", "wireguard"), train_network="192.168.0.0/16")["wg0"]["refused"]


@pytest.mark.parametrize(
    ("text", "kind", "speed"),
    [
        ("25000", "physical", 25000),
        ("-1", "physical", None),
        ("0", "physical", None),
        ("65535", "bond", None),
        ("4294967295", "vlan", None),
        ("10000", "veth", None),
        ("", "physical", None),
        (None, "physical", None),
    ],
)
def test_a_speed_is_a_known_one_or_none(text: str | None, kind: str, speed: int | None) -> None:
    assert muster_nics.parse_speed(text, kind) == speed


def bond(mode: str, **more: Any) -> Any:
    described = link("bond0", "bond", index=4)
    described["linkinfo"]["info_data"] = {"mode": mode, **more}
    return described


@pytest.mark.parametrize(
    ("described", "speeds", "speed"),
    [
        (bond("802.3ad"), {"bond0": "50000"}, 50000),
        (bond("802.3ad"), {"bond0": "-1", "eno1": "25000", "eno2": "25000"}, 50000),
        (bond("balance-xor"), {"eno1": "1000", "eno2": "-1"}, None),
        (bond("active-backup", active_slave="eno2"), {"bond0": "65535", "eno1": "1000", "eno2": "10000"}, 10000),
        (bond("active-backup"), {"eno1": "1000", "eno2": "10000"}, 1000),
        (bond("broadcast"), {"eno1": "10000", "eno2": "10000"}, 10000),
    ],
)
def test_the_speed_of_a_bond_and_of_a_vlan_on_it(
    described: Any, speeds: dict[str, str | None], speed: int | None
) -> None:
    nics = parse(
        link("bond0.20", "vlan", index=5, link="bond0"),
        link("eno1", index=2, master="bond0", addresses=[]),
        link("eno2", index=3, master="bond0", addresses=[]),
        described,
        speeds=speeds,
    )
    assert nics["bond0"]["speed_mbits"] == nics["bond0.20"]["speed_mbits"] == speed
    assert nics["bond0.20"]["parent"] == "bond0" and nics["bond0.20"]["refused"] is None


def test_a_member_without_a_cable_adds_nothing_to_its_bond() -> None:
    dead = link("eno2", index=3, master="bond0", addresses=[], flags=["NO-CARRIER", "UP"])
    nics = parse(bond("802.3ad"), link("eno1", master="bond0"), dead, speeds={"eno1": "25000", "eno2": "25000"})
    assert nics["bond0"]["speed_mbits"] == 25000


def lasting(nics: list[dict[str, Any]]) -> list[str]:
    """The addresses that may be tried: link-local ones are left out by launch."""
    return [entry["address"] for nic in nics for entry in nic["addresses"] if entry["scope"] == "global"]


def test_a_host_with_ipv6_alone_has_a_candidate() -> None:
    v6 = {"family": "inet6", "local": "fd00:78::11", "prefixlen": 64, "scope": "global"}
    nics = list(parse(link("eno1", addresses=[v6, LINK_LOCAL])).values())
    assert nics[0]["refused"] is None and lasting(nics) == ["fd00:78::11"]


def test_addresses_that_will_not_last_are_left_out() -> None:
    v6 = {"family": "inet6", "local": "2001:db8::5", "prefixlen": 64, "scope": "global"}
    passing = [v6 | {"local": f"2001:db8::{n}", word: True} for n, word in enumerate(("temporary", "tentative"))]
    nics = list(parse(link("eno1", addresses=[ADDRESS, v6, *passing, LINK_LOCAL])).values())
    assert lasting(nics) == ["10.1.0.5", "2001:db8::5"]


def test_speeds_are_read_from_sysfs(tmp_path: Path) -> None:
    (tmp_path / "eno1").mkdir()
    (tmp_path / "eno1" / "speed").write_text("1000\n")
    (tmp_path / "wlan0").mkdir()
    assert muster_nics.read_speeds(["eno1", "wlan0"], tmp_path) == {"eno1": "1000", "wlan0": None}


def test_this_machine_has_a_loopback_that_is_refused() -> None:
    nics = {nic["name"]: nic for nic in muster_nics.read_nics(None, None)}
    assert nics["lo"]["kind"] == "loopback" and nics["lo"]["refused"]
