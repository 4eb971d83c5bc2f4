"""The VPN's addresses and settings, from the hosts' facts; and the packages and RDMA that follow from it."""

from __future__ import annotations

import ipaddress
import re
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from launch.cli.refusal import Refusal
from launch.deploy import vpn
from launch.hosts import hostcall
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


def test_of_two_hosts_one_greets() -> None:
    own = {name: ipaddress.IPv4Interface(f"10.213.0.{number}/24") for number, name in enumerate(("h1", "h2", "h3"), 1)}
    keys = {name: f"key-{name}" for name in own}
    greeted = {host: re.findall(r"peer key-(\S+) persistent", vpn.settings(host, own, keys, below())) for host in own}
    assert greeted == {"h1": ["h2", "h3"], "h2": ["h3"], "h3": []}


def deployed(hosts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Facts of hosts between which it is up."""
    known = {name: {"runs": [], **facts(up=True)} for name in hosts}
    for name, one in known.items():
        one["vpn"]["public_key"] = f"key-{name}"
    own, keys = vpn.addresses(known), {name: f"key-{name}" for name in hosts}
    for name, one in known.items():
        one["vpn"]["settings"] = vpn.settings(name, own, keys, between(hosts))
    return known


def between(hosts: Sequence[str]) -> choose.Choice:
    whole = below()
    return replace(whole, endpoints={name: whole.endpoints[name] for name in hosts})


def test_nothing_is_changed_where_it_is_up_and_all_hosts_where_one_comes_or_goes() -> None:
    three, two = ("h1", "h2", "h3"), ("h1", "h2")
    assert vpn.to_change(deployed(three), between(three)) == []
    assert vpn.to_change(deployed(two) | {"h3": facts()}, between(three)) == ["h1", "h2", "h3"]
    fewer = deployed(three)
    del fewer["h3"]
    assert vpn.to_change(fewer, between(two)) == ["h1", "h2"]
    down = deployed(three)
    down["h2"]["vpn"]["up"] = False  # as after a restart without systemd
    assert vpn.to_change(down, between(three)) == ["h2"]


def test_a_run_in_progress_keeps_it() -> None:
    known = deployed(("h1", "h2"))
    vpn.refuse_runs(known)
    known["h2"]["runs"] = [{"run": "20260101-1", "owner": "ann", "state": "running"}]
    with pytest.raises(Refusal, match="run 20260101-1 is in progress"):
        vpn.refuse_runs(known)


def test_hosts_that_do_not_hear_each_other_are_named_once_all_others_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where UDP is blocked between h1 and h3."""
    unmet, asked = {"h1": ["key-h3"], "h2": [], "h3": ["key-h1"]}, list[tuple[str, str]]()

    def say_to(machine: Any, module: str, options: dict[str, Any], timeout: float) -> dict[str, Any]:
        what = "up" if options["settings"] else "down"
        asked.append((what, machine.name))
        return {"public_key": f"key-{machine.name}", "unmet": unmet[machine.name] if what == "up" else []}

    monkeypatch.setattr(hostcall, "say_to", say_to)
    machines: Any = [types.SimpleNamespace(name=name) for name in unmet]
    with pytest.raises(Refusal) as refused:
        vpn.bring_up(machines, {name: facts() for name in unmet}, below())
    said = str(refused.value)
    assert "h1 and h3 do not hear each other" in said and "h2" not in said and "UDP to port 51820" in said
    assert [what for what, _ in asked] == ["down"] * 3 + ["up"] * 3  # a former one must not answer


def test_hosts_that_have_it_still_are_found() -> None:
    known = {"h1": facts(), "h2": facts(settings="[Interface]"), "h3": facts(up=True)}
    assert vpn.left_over(known) == ["h2", "h3"]
