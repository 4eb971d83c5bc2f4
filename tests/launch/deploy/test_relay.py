"""Promise: each byte leaves the control machine once, and no host waits for one that fails, stands still or is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from launch.deploy import relay
from launch.deploy.relay import CONTROL, State
from launch.network.links import Link

GIB = 2**30
HOSTS = [f"h{number}" for number in range(1, 9)]
STUCK = relay.STANDSTILL_SECONDS + 1


def link(source: str, target: str, mbits: float | None) -> Link:
    return Link(source, target, mbits, 0.1, 1500, None)


def start(**states: State) -> dict[str, State]:
    """Eight hosts that lack all, with these exceptions."""
    return {name: State(GIB, listens=True) for name in HOSTS} | states


def in_a_chain(**others: dict[str, Any]) -> dict[str, State]:
    """Eight hosts, each taking from the one before it, with these exceptions."""
    sources = dict(zip(HOSTS, [CONTROL, *HOSTS], strict=False))
    states = {name: State(GIB, listens=True, source=source, pace=1e8) for name, source in sources.items()}
    return states | {name: replace(states[name], **fields) for name, fields in others.items()}


def sources(states: dict[str, State]) -> dict[str, str]:
    return relay.next_sources(HOSTS, states)


def test_the_control_machine_sends_to_one_host_and_each_passes_on_to_the_next() -> None:
    assert sources(start()) == dict(zip(HOSTS, [CONTROL, *HOSTS], strict=False))
    assert sources(in_a_chain()) == {}


def test_hosts_with_slow_links_come_last_and_noise_changes_nothing() -> None:
    names = ["h1", "h2", "h3", "h4"]
    speeds = {"h1": 90.0, "h2": 940.0, "h3": 930.0, "h4": 10.0}
    links = [link(a, b, min(speeds[a], speeds[b])) for a, b in permutations(names, 2)]
    assert relay.chain(names, links) == ["h2", "h3", "h1", "h4"] or relay.chain(names, links)[-1] == "h4"
    even = [link(a, b, 940.0 - 10 * number) for number, (a, b) in enumerate(permutations(names, 2))]
    assert relay.chain(names, even) == names
    assert relay.chain(names, []) == relay.chain(names, [link("h1", "h2", None)]) == names


def test_a_host_waits_until_the_one_before_it_has_said_whether_it_listens() -> None:
    assert "h3" not in sources(start(h2=State(GIB)))
    assert sources(start(h2=State(GIB, listens=False)))["h3"] == "h1"
    assert sources(start(h1=State(GIB, listens=False)))["h2"] == CONTROL


@pytest.mark.parametrize("fields", [{"gone": True}, {"listens": False}, {"quiet_seconds": STUCK}])
def test_a_source_that_is_gone_or_stands_still_is_left_for_the_one_before_it(fields: dict[str, Any]) -> None:
    states = in_a_chain(h3=fields, h2={"lacks": GIB - 5})
    assert sources(states)["h4"] == "h2"
    assert set(sources(states)) <= {"h3", "h4"}


def test_where_the_first_host_stands_still_only_the_second_leaves_it_whoever_waits() -> None:
    states = {name: replace(state, quiet_seconds=STUCK) for name, state in in_a_chain().items()}
    assert sources(states) == {"h2": CONTROL}


def test_a_host_to_which_nothing_comes_from_one_that_has_all_has_failed_with_it() -> None:
    states = in_a_chain(h4={"lacks": 0}, h5={"quiet_seconds": STUCK})
    assert relay.failed_with(HOSTS, states) == {"h5": "h4"}
    states["h5"] = replace(states["h5"], failed=frozenset({"h4"}))
    assert sources(states)["h5"] == "h3"
    assert relay.failed_with(HOSTS, in_a_chain(h1={"quiet_seconds": STUCK})) == {}


def test_after_two_other_hosts_the_control_machine_is_taken_and_kept() -> None:
    failed = frozenset({"h6", "h7"})
    assert sources(in_a_chain(h8={"source": None, "failed": failed}))["h8"] == CONTROL
    assert "h8" not in sources(in_a_chain(h8={"source": CONTROL, "failed": failed}))


def test_a_slow_host_is_passed_by_but_not_one_that_began_with_less() -> None:
    behind = {"lacks": GIB, "pace": 4e7}
    states = in_a_chain(h2={"lacks": GIB // 2}, h3=behind)
    assert sources(states) == {"h4": "h2"}
    assert sources(in_a_chain(h2={"lacks": GIB // 2}, h3={**behind, "pace": 9e7})) == {}
    assert sources(in_a_chain(h2={"lacks": 0, "pace": None}, h3=behind)) == {}


def test_who_has_all_is_taken_from_wherever_it_stands() -> None:
    assert sources(start(h8=State(0, listens=True)))["h1"] == "h8"
    assert "h8" not in sources(start(h8=State(0, listens=True)))


def rounds(blocked: Sequence[str]) -> dict[str, str]:
    """The sources at the end, where nobody can connect to the hosts that are blocked."""
    states = start()
    for _ in range(100):
        named = sources(states)
        for name, source in named.items():
            ok = source not in blocked and (name not in blocked or source == CONTROL)
            failed = states[name].failed if ok else states[name].failed | {source}
            states[name] = replace(states[name], source=source if ok else None, failed=failed)
        if not named:
            return {name: state.source or "" for name, state in states.items()}
    raise AssertionError("it has no end")


@pytest.mark.parametrize("blocked", [["h1"], ["h4"], ["h8"], ["h3", "h4", "h5"], HOSTS])
def test_whatever_hosts_are_cut_off_every_host_ends_with_a_source_and_nobody_waits_in_a_circle(
    blocked: list[str],
) -> None:
    found = rounds(blocked)
    for name in HOSTS:
        seen = {name}
        while (name := found[name]) != CONTROL:
            assert name not in seen and name not in blocked
            seen.add(name)
    assert list(found.values()).count(CONTROL) <= len(blocked) + 1


def test_a_host_that_has_built_the_image_sends_it_and_the_control_machine_never() -> None:
    states = start(h1=State(0, listens=True))
    assert relay.next_sources(HOSTS, states, "h1") == dict(zip(HOSTS[1:], HOSTS, strict=False))
    assert relay.stranded(HOSTS, states, "h1") == []
    states["h1"] = State(0)  # it has not said yet whether it listens
    assert "h2" not in relay.next_sources(HOSTS, states, "h1") and relay.stranded(HOSTS, states, "h1") == []
    taking = in_a_chain(h1={"lacks": 0, "source": None}, h2={"gone": True})
    assert relay.next_sources(HOSTS, taking, "h1") == {"h3": "h1"}


@pytest.mark.parametrize("fields", [{"gone": True}, {"listens": False}])
def test_without_the_host_that_has_built_it_an_image_comes_from_those_that_have_all_of_it(fields: Any) -> None:
    states = start(h1=replace(State(0, listens=True), **fields))
    assert relay.stranded(HOSTS, states, "h1") == ["h2"] and "h2" not in relay.next_sources(HOSTS, states, "h1")
    states["h5"] = State(0, listens=True)
    assert relay.stranded(HOSTS, states, "h1") == [] and relay.next_sources(HOSTS, states, "h1")["h2"] == "h5"


def test_a_host_that_has_failed_with_the_one_that_has_built_it_does_not_ask_it_again() -> None:
    states = start(h1=State(0, listens=True), h2=State(GIB, listens=True, failed=frozenset({"h1"})))
    assert relay.stranded(HOSTS, states, "h1") == ["h2"]
    assert relay.stranded(HOSTS, states) == []  # the control machine has it
