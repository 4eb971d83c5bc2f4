"""Promise: the training network is one on which every ordered pair of hosts was seen to connect; else a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import network
from launch.refusal import Refusal
from tests.launch.samples import facts, full_reach, nic

DECOY = nic("docker0", "172.17.0.1/16", refused="bridge of a container engine")


def lab(*more: dict[str, Any]) -> dict[str, Any]:
    """Two hosts whose NICs have different names, with the decoy that every host has."""
    return {
        "h1": facts(nic("enp1s0", "10.77.0.11/24"), nic("eno2", "10.78.0.11/24"), DECOY, *more),
        "h2": facts(nic("ens3", "10.77.0.12/24"), nic("bond0", "10.78.0.12/24"), DECOY, *more),
    }


SSH = {"h1": "10.77.0.11", "h2": "10.77.0.12"}


def choose(known: dict[str, Any], settings: Any = None, broken: Any = frozenset(), ssh: Any = None) -> network.Choice:
    chosen = settings or {host: {} for host in known}
    return network.choose(known, chosen, SSH if ssh is None else ssh, full_reach(known, broken))


def test_a_tie_goes_to_the_network_that_does_not_carry_ssh() -> None:
    choice = choose(lab())
    assert choice.network.name == "10.78.0.0/24"
    assert {h: (e.interface, e.address) for h, e in choice.endpoints.items()} == {
        "h1": ("eno2", "10.78.0.11"),
        "h2": ("bond0", "10.78.0.12"),
    }
    assert {r["network"]: r["reason"] for r in choice.network.refused}["docker0 (h1, h2)"].startswith("bridge")


def test_one_direction_blocked_refuses_a_network() -> None:
    choice = choose(lab(), broken={("h2", "10.78.0.11")})
    assert choice.network.name == "10.77.0.0/24"
    why = {r["network"]: r["reason"] for r in choice.network.refused}["10.78.0.0/24"]
    assert "h2 does not reach h1 at 10.78.0.11 (timed out)" in why


def test_no_network_on_which_all_reach_each_other_is_refused_pair_by_pair() -> None:
    with pytest.raises(Refusal) as caught:
        choose(lab(), broken={("h1", "10.78.0.12"), ("h2", "10.77.0.11")})
    said = str(caught.value)
    assert "h1 does not reach h2 at 10.78.0.12" in said and "h2 does not reach h1 at 10.77.0.11" in said


def test_a_faster_label_wins() -> None:
    known = {
        "h1": facts(nic("a", "10.1.0.1/24", speed=1000), nic("b", "10.2.0.1/24", speed=25000)),
        "h2": facts(nic("a", "10.1.0.2/24", speed=1000), nic("b", "10.2.0.2/24", speed=10000)),
    }
    assert choose(known, ssh={"h1": "10.2.0.1"}).network.name == "10.2.0.0/24"


def test_hosts_without_a_shared_subnet_may_be_routed() -> None:
    known = {"h1": facts(nic("a", "10.1.0.1/24")), "h2": facts(nic("a", "10.2.0.1/24"))}
    assert choose(known).network.name == "routed"


def test_the_users_network_is_taken_or_refused_with_reasons() -> None:
    wanted = {host: {"train_network": "10.77.0.0/24"} for host in ("h1", "h2")}
    assert choose(lab(), wanted).network.name == "10.77.0.0/24"
    with pytest.raises(Refusal, match=r"h1 does not reach h2 at 10\.77\.0\.12"):
        choose(lab(), wanted, broken={("h1", "10.77.0.12")})
    with pytest.raises(Refusal, match=r"train_network=10\.9\.0\.0/16"):
        choose(lab(), {host: {"train_network": "10.9.0.0/16"} for host in ("h1", "h2")})


def test_the_users_interface_counts_per_host() -> None:
    choice = choose(lab(), {"h1": {"train_interface": "enp1s0"}, "h2": {"train_interface": "ens3"}})
    assert choice.network.name == "10.77.0.0/24"


def test_one_host_needs_no_network() -> None:
    assert choose({"h1": facts(DECOY)}, ssh={}).endpoints["h1"].address == "127.0.0.1"


def test_ipv6_only_works() -> None:
    known = {"h1": facts(nic("a", "fd00::1/64")), "h2": facts(nic("b", "fd00::2/64"))}
    assert choose(known, ssh={}).endpoints["h2"].address == "fd00::2"


@given(
    hosts=st.integers(2, 4),
    networks=st.integers(1, 4),
    data=st.data(),
)
def test_the_choice_agrees_with_brute_force(hosts: int, networks: int, data: st.DataObject) -> None:
    names = [f"h{i}" for i in range(hosts)]
    present = {(h, n) for h in range(hosts) for n in range(networks) if data.draw(st.booleans(), label=f"{h} on {n}")}
    known = {
        name: facts(*(nic(f"e{n}", f"10.{n}.0.{h + 1}/24") for n in range(networks) if (h, n) in present))
        for h, name in enumerate(names)
    }
    every = [(names[a], f"10.{n}.0.{b + 1}") for (b, n) in sorted(present) for a in range(hosts) if a != b]
    broken = set(data.draw(st.lists(st.sampled_from(every), max_size=4))) if every else set()
    common = [n for n in range(networks) if all((h, n) in present for h in range(hosts))]
    good = [n for n in common if not any(address.split(".")[1] == str(n) for _, address in broken)]
    try:
        choice = choose(known, broken=broken, ssh={})
    except Refusal:
        assert not good
        return
    if good:
        assert choice.network.name in {f"10.{n}.0.0/24" for n in good}
    else:
        assert choice.network.name == "routed" and not common
    for host, end in choice.endpoints.items():
        assert not any((other, end.address) in broken for other in names if other != host)
