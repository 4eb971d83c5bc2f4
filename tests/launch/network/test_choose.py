"""Promise: the training network is the fastest on which every ordered pair of hosts works; else a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.cli.refusal import Refusal
from launch.network import choose as networks
from launch.network.choose import Measurements
from launch.network.links import Link
from tests.launch.samples import facts, full_reach, nic

DECOY = nic("docker0", "172.17.0.1/16", refused="bridge of a container engine")


def lab(*more: dict[str, Any]) -> dict[str, Any]:
    """Two hosts whose NICs have different names, with the decoy that every host has."""
    return {
        "h1": facts(nic("enp1s0", "10.77.0.11/24"), nic("eno2", "10.78.0.11/24"), DECOY, *more),
        "h2": facts(nic("ens3", "10.77.0.12/24"), nic("bond0", "10.78.0.12/24"), DECOY, *more),
    }


SSH = {"h1": "10.77.0.11", "h2": "10.77.0.12"}
DATA, MANAGEMENT = "10.78.0.0/24", "10.77.0.0/24"
STALLS = "h1 -> h2: data stalls"

#: (network, source, target) -> Mbit/s, or why the pair is broken
Speed = Callable[[networks.Working, str, str], float | str]


def links(works: networks.WorkingNetworks, speed: Speed) -> dict[str, list[Link]]:
    measured: dict[str, list[Link]] = {}
    for working in works.working:
        for a in working.endpoints:
            for b in working.endpoints:
                if a != b:
                    got = speed(working, a, b)
                    mbits, error = (None, got) if isinstance(got, str) else (got, None)
                    link = Link(a, b, mbits, 0.1, 1500, error)
                    measured.setdefault(working.label, []).append(link)
    return measured


def speeds(by_network: Mapping[str, float | str]) -> Speed:
    return lambda working, source, target: by_network.get(working.name, 940.0)


def choose(
    known: dict[str, Any],
    settings: Any = None,
    broken: Any = frozenset(),
    ssh: Any = None,
    speed: Speed = speeds({}),  # noqa: B008
) -> networks.Choice:
    chosen = settings or {host: {} for host in known}
    works = networks.working(known, chosen, full_reach(known, broken))
    return networks.choose(known, SSH if ssh is None else ssh, works, Measurements().with_round(links(works, speed)))


def why_not(choice: networks.Choice, name: str) -> str:
    return next(entry["reason"] for entry in choice.network.refused if entry["network"].startswith(name))


def test_a_tie_goes_to_the_network_that_does_not_carry_ssh() -> None:
    choice = choose(lab(), speed=speeds({MANAGEMENT: 945.0, DATA: 938.0}))
    assert choice.network.name == DATA
    assert {h: (e.interface, e.address) for h, e in choice.endpoints.items()} == {
        "h1": ("eno2", "10.78.0.11"),
        "h2": ("bond0", "10.78.0.12"),
    }
    assert why_not(choice, "docker0 (h1, h2)").startswith("bridge")
    assert (
        why_not(choice, MANAGEMENT)
        == "0.945 Gbit/s measured on the slowest pair (h1 -> h2); it is as fast, but it carries SSH"
    )
    assert "0.938 Gbit/s measured" in choice.network.reason and "does not carry SSH" in choice.network.reason
    assert len(choice.links) == 2


def rounds(*measured: Mapping[str, float | str], busy: Sequence[str] = ()) -> Measurements:
    """Measurements of networks between h1 and h2 in turns, each as Mbit/s by network or why the link failed."""

    def link(got: float | str) -> Link:
        mbits, error = (None, got) if isinstance(got, str) else (got, None)
        return Link("h1", "h2", mbits, 0.1, 1500, error)

    together = Measurements()
    for one in measured:
        together = together.with_round({name: [link(got)] for name, got in one.items()}, busy)
    return together


@pytest.mark.parametrize(
    ("measured", "again"),
    [
        ([{DATA: 368.0, MANAGEMENT: 504.0}], True),  # a busy machine, no shaped link
        ([{DATA: 94.0, MANAGEMENT: 940.0}], False),  # no disturbance explains a factor of ten
        ([{DATA: 930.0, MANAGEMENT: 940.0}], False),
        ([{DATA: 940.0}], False),
        ([{DATA: 368.0, MANAGEMENT: 504.0}, {DATA: 610.0, MANAGEMENT: 480.0}], False),  # near: 610 and 504
        (
            [{DATA: 368.0, MANAGEMENT: 504.0}, {DATA: 380.0, MANAGEMENT: 900.0}],
            False,
        ),  # both of the one above both of the other
        ([{DATA: 368.0, MANAGEMENT: 904.0}, {DATA: 380.0, MANAGEMENT: 900.0}], False),  # the one always slower
        ([{DATA: 300.0, MANAGEMENT: 200.0}, {DATA: 310.0, MANAGEMENT: 940.0}], True),
        ([{DATA: 300.0, MANAGEMENT: 200.0}, {DATA: 310.0, MANAGEMENT: 940.0}, {DATA: 99.0, MANAGEMENT: 935.0}], False),
        ([{DATA: 400.0, MANAGEMENT: 200.0}] * 2 + [{DATA: 410.0, MANAGEMENT: 940.0}] * 2, False),  # the most
        ([{DATA: STALLS, MANAGEMENT: 940.0}], False),
        ([{DATA: STALLS, MANAGEMENT: STALLS}], True),  # no deploy is refused for one measurement
        ([{DATA: STALLS, MANAGEMENT: STALLS}] * 2, False),
        ([{DATA: STALLS}, {DATA: 940.0}], False),
        ([{DATA: 368.0, MANAGEMENT: 504.0}, {DATA: STALLS, MANAGEMENT: 510.0}], False),
        ([{DATA: 368.0, MANAGEMENT: 504.0}, {DATA: STALLS, MANAGEMENT: STALLS}], True),
    ],
)
def test_networks_are_measured_again_while_it_is_not_clear_which_is_faster_or_whether_one_works(
    measured: list[dict[str, float | str]], again: bool
) -> None:
    assert networks.contested(rounds(*measured)) == (list(measured[0]) if again else [])


def test_a_busy_processor_leaves_no_first_measurement_to_itself() -> None:
    once = {DATA: 94.0, MANAGEMENT: 940.0}
    assert networks.contested(rounds(once, busy=["h1"])) == [DATA, MANAGEMENT]
    assert networks.contested(rounds(once, once, busy=["h1"])) == []


def decided(measurements: Measurements, kept: str = "") -> networks.Choice:
    """The choice between the lab's networks, given their measurements by CIDR."""
    known = lab()
    works = networks.working(known, {host: {} for host in known}, full_reach(known))
    names = {working.name: working.label for working in works.working if working.name in measurements.links}
    labelled = Measurements(
        {names[name]: links for name, links in measurements.links.items()},
        {names[name]: speeds for name, speeds in measurements.speeds.items()},
        {names[name]: failures for name, failures in measurements.failures.items()},
    )
    works = replace(works, working=[working for working in works.working if working.name in names])
    return networks.choose(known, SSH, works, labelled, names.get(kept, ""))


def test_a_difference_within_the_spread_of_measurements_is_no_difference() -> None:
    unclear = rounds({DATA: 368.0, MANAGEMENT: 504.0}, {DATA: 400.0, MANAGEMENT: 380.0}, {DATA: 390.0})
    assert decided(unclear).network.name == DATA
    clear = rounds({DATA: 368.0, MANAGEMENT: 504.0}, {DATA: 360.0, MANAGEMENT: 510.0})
    assert decided(clear).network.name == MANAGEMENT
    four = rounds(*[{DATA: 500.0, MANAGEMENT: 400.0}] * 3, {DATA: 510.0, MANAGEMENT: 940.0})
    assert decided(four).network.name == DATA
    unsaid = "4 measurements did not show which of the two is faster"
    assert unsaid in why_not(decided(four), MANAGEMENT) and unsaid not in why_not(decided(clear), DATA)


def test_a_choice_once_made_is_kept_unless_another_is_clearly_better() -> None:
    alike, better = rounds({DATA: 945.0, MANAGEMENT: 940.0}), rounds({DATA: 940.0, MANAGEMENT: 94.0})
    choice = decided(alike, kept=MANAGEMENT)
    assert choice.network.name == MANAGEMENT
    assert "was chosen before and is as fast (`make deploy MEASURE=1` chooses again)" in why_not(choice, DATA)
    assert decided(better, kept=MANAGEMENT).network.name == DATA


def test_a_network_that_fails_under_repetition_is_not_preferred_and_it_is_said() -> None:
    failing = rounds({DATA: 900.0, MANAGEMENT: 500.0}, {DATA: STALLS, MANAGEMENT: 400.0}, {DATA: 910.0})
    choice = decided(failing)
    assert choice.network.name == MANAGEMENT and "failed" not in choice.network.reason
    assert why_not(choice, DATA) == f"failed in 1 of 3 measurements: {STALLS}"
    assert decided(failing, kept=DATA).network.name == MANAGEMENT


def test_a_network_that_fails_under_repetition_is_taken_where_no_other_is_better_and_it_is_said() -> None:
    alone = decided(rounds({DATA: STALLS}, {DATA: 940.0}))
    assert alone.network.name == DATA
    assert alone.network.reason.endswith(
        f"; check its cables and switch ports, as it failed in 1 of 2 measurements: {STALLS}"
    )
    both = decided(rounds({DATA: 900.0, MANAGEMENT: 94.0}, {DATA: STALLS, MANAGEMENT: STALLS}, {DATA: 890.0}))
    assert both.network.name == DATA and "failed in 1 of 3 measurements" in both.network.reason
    assert "failed in 1 of 2 measurements" in why_not(both, MANAGEMENT)
    with pytest.raises(Refusal, match=r"failed in 2 of 2 measurements: h1 -> h2: data stalls"):
        decided(rounds({DATA: STALLS}, {DATA: STALLS}))


def test_a_measurement_without_its_slow_pair_does_not_make_a_network_fast() -> None:
    slow, fast = Link("h1", "h2", 94.0, 0.1, 1500, None), Link("h2", "h1", 940.0, 0.1, 1500, None)
    broken = replace(slow, mbits=None, error=STALLS)
    once = Measurements().with_round({DATA: [slow, fast]}).with_round({DATA: [broken, fast]})
    assert once.speeds == {DATA: [94.0, 0.0]} and once.failures == {DATA: [STALLS]}


def test_the_nic_of_ssh_carries_it_at_its_other_address_too() -> None:
    """h3 has a second address, of the data network, on the NIC that SSH comes in by."""
    known = {
        "h1": facts(nic("m", "10.77.0.11/24"), nic("d", "10.78.0.11/24")),
        "h2": facts(nic("m", "10.77.0.12/24", "10.78.0.112/24"), nic("d", "10.78.0.12/24")),
    }
    choice = choose(known, ssh={"h1": "10.77.0.11", "h2": "10.77.0.12"}, speed=speeds({MANAGEMENT: 94.0}))
    assert choice.endpoints["h2"].interface == "d"
    assert why_not(choice, f"{DATA} (d, m)").endswith("but it carries SSH")


def test_the_faster_network_is_taken_even_if_it_carries_ssh() -> None:
    choice = choose(lab(), speed=speeds({MANAGEMENT: 940.0, DATA: 94.0}))
    assert choice.network.name == MANAGEMENT
    assert why_not(choice, DATA) == "0.094 Gbit/s measured on the slowest pair (h1 -> h2)"


def test_a_network_is_as_fast_as_its_slowest_pair() -> None:
    def speed(working: networks.Working, source: str, target: str) -> float:
        return 10.0 if (working.name, source) == (DATA, "h2") else 9000.0 if working.name == DATA else 940.0

    choice = choose(lab(), speed=speed)
    assert choice.network.name == MANAGEMENT
    assert "0.010 Gbit/s measured on the slowest pair (h2 -> h1)" in why_not(choice, DATA)


def test_labels_do_not_count_below_what_one_stream_can_show() -> None:
    known = {
        "h1": facts(nic("a", "10.1.0.1/24", speed=1000), nic("b", "10.2.0.1/24", speed=25000)),
        "h2": facts(nic("a", "10.1.0.2/24", speed=1000), nic("b", "10.2.0.2/24", speed=10000)),
    }
    truth = {"10.1.0.0/24": 940.0, "10.2.0.0/24": 94.0}
    assert choose(known, speed=speeds(truth), ssh={}).network.name == "10.1.0.0/24"


def test_labels_tell_networks_apart_that_are_faster_than_one_stream() -> None:
    known = {
        host: facts(nic("a", f"10.1.0.{i}/24", speed=25000), nic("b", f"10.2.0.{i}/24", speed=100_000))
        for i, host in enumerate(("h1", "h2"), 1)
    }
    truth = {"10.1.0.0/24": 23_000.0, "10.2.0.0/24": 19_000.0}
    choice = choose(known, speed=speeds(truth), ssh={"h1": "10.2.0.1"})
    assert choice.network.name == "10.2.0.0/24"
    assert "slower by its label" in why_not(choice, "10.1.0.0/24")


def test_a_network_that_connects_but_does_not_carry_data_is_refused() -> None:
    choice = choose(lab(), speed=speeds({DATA: "an MTU black hole between h1 and h2"}))
    assert choice.network.name == MANAGEMENT
    assert why_not(choice, DATA) == "an MTU black hole between h1 and h2"
    with pytest.raises(Refusal, match="black hole"):
        choose(lab(), speed=lambda working, source, target: "an MTU black hole")


def test_of_two_nics_in_one_subnet_the_faster_counts() -> None:
    known = {
        "h1": facts(nic("slow", "10.1.0.1/24"), nic("fast", "10.1.0.101/24")),
        "h2": facts(nic("only", "10.1.0.2/24")),
    }

    def speed(working: networks.Working, source: str, target: str) -> float:
        return 9000.0 if working.endpoints["h1"].interface == "fast" else 940.0

    choice = choose(known, speed=speed, ssh={})
    assert {host: end.interface for host, end in choice.endpoints.items()} == {"h1": "fast", "h2": "only"}
    assert "0.94 Gbit/s" in why_not(choice, "10.1.0.0/24 (slow, only)")


def two_nics() -> dict[str, Any]:
    """h3 has both NICs in the subnet; the list of NICs is the same whichever of them it uses."""
    return {
        "h1": facts(nic("eno2", "10.0.0.1/24")),
        "h2": facts(nic("ens3", "10.0.0.2/24")),
        "h3": facts(nic("eno2", "10.0.0.3/24"), nic("ens3", "10.0.0.13/24")),
    }


@pytest.mark.parametrize("fast", ["eno2", "ens3"])
def test_two_nics_of_a_host_in_one_subnet_are_measured_apart_under_labels_of_their_own(fast: str) -> None:
    def speed(working: networks.Working, source: str, target: str) -> float:
        return 9000.0 if working.endpoints["h3"].interface == fast else 94.0

    choice = choose(two_nics(), speed=speed, ssh={})
    other = {"eno2": "ens3", "ens3": "eno2"}[fast]
    assert choice.endpoints["h3"].interface == fast
    assert why_not(choice, f"10.0.0.0/24 (eno2, ens3; h3: {other})").startswith("0.094 Gbit/s")


def test_no_two_networks_have_the_same_label() -> None:
    known = two_nics()
    known["h4"] = facts(nic("ens3", "10.0.0.4/24"), nic("eno2", "10.0.0.14/24"), nic("ens5", "10.0.0.24/24"))
    known["h5"] = facts(nic("eno2", "10.0.0.5/24"))

    def labels(known: dict[str, Any]) -> list[str]:
        works = networks.working(known, {host: {} for host in known}, full_reach(known))
        return [working.label for working in works.working]

    assert labels(two_nics()) == ["10.0.0.0/24 (eno2, ens3; h3: eno2)", "10.0.0.0/24 (eno2, ens3; h3: ens3)"]
    assert len(labels(known)) == len(set(labels(known))) == 3
    assert labels(lab()) == [f"{MANAGEMENT} (enp1s0, ens3)", f"{DATA} (eno2, bond0)"]


def test_pairs_without_bandwidth_work_and_the_others_decide() -> None:
    """iperf3 is missing on h3: the pairs of h1 and h2 tell the networks apart."""
    ends = {
        host: networks.Endpoint("eth0", f"10.0.0.{n}", DATA, None, 1500) for n, host in enumerate(("h1", "h2", "h3"))
    }
    works = networks.WorkingNetworks([networks.Working(DATA, ends), networks.Working(MANAGEMENT, ends)], {})

    def measured(usual: dict[str, float | None]) -> dict[str, list[Link]]:
        every = links(works, lambda working, source, target: 0.0)
        return {
            label: [
                replace(link, mbits=None if "h3" in (link.source, link.target) else usual[label.split()[0]])
                for link in own
            ]
            for label, own in every.items()
        }

    known: dict[str, Any] = {host: {"nics": []} for host in ends}
    choice = networks.choose(known, {}, works, Measurements().with_round(measured({DATA: 94.0, MANAGEMENT: 940.0})))
    assert choice.network.name == MANAGEMENT
    words = "measured on the slowest pair (h1 -> h2), 4 pairs not measured"
    assert f"0.94 Gbit/s {words}" in choice.network.reason and why_not(choice, DATA) == f"0.094 Gbit/s {words}"
    choice = networks.choose(
        known, {"h1": "10.0.0.0"}, works, Measurements().with_round(measured({DATA: None, MANAGEMENT: None}))
    )
    assert "bandwidth not measured" in choice.network.reason and "0 Gbit/s" not in choice.network.reason


def test_one_direction_blocked_refuses_a_network() -> None:
    choice = choose(lab(), broken={("h2", "10.78.0.11")})
    assert choice.network.name == MANAGEMENT
    assert "h2 does not reach h1 at 10.78.0.11 (timed out)" in why_not(choice, DATA)


def test_no_network_on_which_all_reach_each_other_is_refused_pair_by_pair() -> None:
    with pytest.raises(Refusal) as caught:
        choose(lab(), broken={("h1", "10.78.0.12"), ("h2", "10.77.0.11")})
    said = str(caught.value)
    assert "h1 does not reach h2 at 10.78.0.12" in said and "h2 does not reach h1 at 10.77.0.11" in said


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


@pytest.mark.slow
@settings(max_examples=60)
@given(hosts=st.integers(2, 4), count=st.integers(1, 4), data=st.data())
def test_the_choice_agrees_with_brute_force(hosts: int, count: int, data: st.DataObject) -> None:
    """Random hosts, NICs, reachability, broken measurements and speeds, against a search through all networks."""
    names = [f"h{i}" for i in range(hosts)]
    present = {(h, n) for h in range(hosts) for n in range(count) if data.draw(st.booleans(), label=f"{h} on {n}")}
    known = {
        name: facts(*(nic(f"e{n}", f"10.{n}.0.{h + 1}/24") for n in range(count) if (h, n) in present))
        for h, name in enumerate(names)
    }
    every = [(names[a], f"10.{n}.0.{b + 1}") for (b, n) in sorted(present) for a in range(hosts) if a != b]
    broken = set(data.draw(st.lists(st.sampled_from(every), max_size=4))) if every else set()
    ssh_network = data.draw(st.integers(0, count - 1))
    ssh = {name: f"10.{ssh_network}.0.{h + 1}" for h, name in enumerate(names)}
    truth: dict[tuple[int, str, str], float | str] = {
        (n, a, b): data.draw(st.one_of(st.sampled_from([94.0, 500.0, 900.0, 1000.0, 9000.0]), st.just("stalls")))
        for n in range(count)
        for a in names
        for b in names
        if a != b
    }

    def speed(working: networks.Working, source: str, target: str) -> float | str:
        return truth[int(working.endpoints[target].address.split(".")[1]), source, target]

    common = [n for n in range(count) if all((h, n) in present for h in range(hosts))]
    value = {}  # network -> Mbit/s of its slowest pair, for those on which all pairs work
    for n in common:
        pairs = [truth[n, a, b] for a in names for b in names if a != b]
        if not any(address.split(".")[1] == str(n) for _, address in broken) and "stalls" not in pairs:
            value[n] = min(mbits for mbits in pairs if not isinstance(mbits, str))
    try:
        choice = choose(known, broken=broken, ssh=ssh, speed=speed)
    except Refusal:
        assert not value
        return
    chosen = {int(end.address.split(".")[1]) for end in choice.endpoints.values()}
    if choice.network.name == "routed":
        assert not common
    else:
        (n,) = chosen
        assert n in value
        assert value[n] >= 0.8 * max(value.values())
        if n == ssh_network:
            assert not [other for other in value if other != n and value[other] >= 0.8 * max(value.values())]
    for host, end in choice.endpoints.items():
        assert not any((other, end.address) in broken for other in names if other != host)
