"""The VPN's addresses and settings, from the hosts' facts; and the packages and RDMA that follow from it."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from launch.cli.refusal import Refusal
from launch.deploy import vpn
from launch.hosts.clustermap import Network
from launch.network import choose
from launch.network.links import Link


def facts(*routes: str, settings: str = "", up: bool = False) -> dict[str, Any]:
    return {"vpn": {"settings": settings, "public_key": "", "up": up, "routes": list(routes)}}


def below(address: str = "192.0.2.{}", mtu: int = 1500, path_mtu: int | None = None) -> choose.Choice:
    ends = {
        f"h{number}": choose.Endpoint("eno1", address.format(number), "the network", None, mtu) for number in (1, 2, 3)
    }
    links = [Link("h1", "h2", 900.0, 0.1, path_mtu, None)]
    return choose.Choice(Network("the network", "it is fast", []), ends, links)


def test_addresses_are_of_the_first_range_that_no_host_has_a_way_to() -> None:
    free = vpn.addresses({"h1": facts("10.0.0.0/24"), "h2": facts("169.254.0.0/16")})
    assert {name: str(one) for name, one in free.items()} == {"h1": "10.213.0.1/24", "h2": "10.213.0.2/24"}
    taken = vpn.addresses({"h1": facts("10.213.0.77"), "h2": facts("10.213.1.0/24", "192.0.2.0/24")})
    assert str(taken["h2"]) == "10.213.2.2/24"
    with pytest.raises(Refusal, match="none is free"):
        vpn.addresses({"h1": facts("10.0.0.0/8")})


def test_a_range_has_room_for_all_hosts() -> None:
    for count in (2, 253, 254, 255, 300, 1000):
        own = vpn.addresses({f"h{number}": facts() for number in range(count)})
        (network,) = {one.network for one in own.values()}
        assert len(set(own.values())) == count and network.broadcast_address not in {one.ip for one in own.values()}


@pytest.mark.parametrize(
    ("over", "bytes_"),
    [(below(), 1440), (below(mtu=9000), 8940), (below(mtu=9000, path_mtu=1500), 1440), (below("fd00::{}"), 1420)],
)
def test_what_is_sent_fits_into_the_network_below(over: choose.Choice, bytes_: int) -> None:
    assert vpn.mtu(over) == bytes_


def test_each_host_knows_the_others_by_their_keys_and_tested_addresses_and_no_private_key() -> None:
    own = {name: ipaddress.IPv4Interface(f"10.213.0.{number}/24") for number, name in enumerate(("h1", "h2", "h3"), 1)}
    text = vpn.settings("h2", own, {"h1": "key-1", "h2": "key-2", "h3": "key-3"}, below("fd00::{}"))
    assert "Address = 10.213.0.2/24" in text and "Endpoint = [fd00::3]:51820" in text
    assert "PublicKey = key-1\n" in text and "key-2" not in text and "PrivateKey" not in text


def test_hosts_that_have_it_still_are_found() -> None:
    known = {"h1": facts(), "h2": facts(settings="[Interface]"), "h3": facts(up=True)}
    assert vpn.left_over(known) == ["h2", "h3"]
