"""Promises of the keepers' decisions, over random faults: a run always ends, on all hosts, and the cause is named.

Within one attempt; what comes after it: test_course.py. Keepers are simulated (simulation.py).
"""

from __future__ import annotations

import pytest
from hypothesis import example
from hypothesis import strategies as st

from keeper import decide as d
from keeper.causes import EXIT_STOPPED
from tests.keeper.simulation import FAULTS, GRACE_SECONDS, HOSTS, World, search

fault_lists = st.lists(
    st.tuples(st.floats(0, 120), st.sampled_from(FAULTS), st.integers(0, 3), st.integers(0, 3)), max_size=6
)


@search(10, 240, st.integers(2, 4), st.integers(), st.floats(5, 100), fault_lists)
@example(
    3, 268_517_381_353, 65.0, [(63.75, "rank dies", 0, 0)]
)  # a beat that was sent before its host's end comes last
def test_whatever_happens_every_keeper_ends_and_leaves_no_rank(
    count: int, seed: int, finish: float, faults: list[tuple[float, str, int, int]]
) -> None:
    world = World(count, seed, finish)
    names = HOSTS[:count]
    world.run([(at, fault, names[one % count], names[other % count]) for at, fault, one, other in faults])
    for host in world.survivors():
        assert host.course.left, (host.course.me, host.course)
        assert host.ranks == "gone"


@search(4, 80, st.integers(2, 4), st.integers(), st.floats(5, 100))
def test_without_a_fault_all_succeed(count: int, seed: int, finish: float) -> None:
    world = World(count, seed, finish)
    world.run([])
    assert [d.verdict(host.state) for host in world.hosts.values()] == ["succeeded"] * count


@search(4, 80, st.integers(2, 4), st.integers(), st.lists(st.tuples(st.floats(0, 60), st.integers(0, 3)), max_size=3))
def test_a_keeper_that_its_disk_holds_up_loses_nobody(count: int, seed: int, disks: list[tuple[float, int]]) -> None:
    world = World(count, seed, 100.0)
    world.run([(at, "disk", HOSTS[where % count], "") for at, where in disks])
    assert [d.verdict(host.state) for host in world.hosts.values()] == ["succeeded"] * count


@search(4, 80, st.integers(1, 4), st.integers(), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_a_torchrun_that_does_not_learn_of_the_end_is_ended(count: int, seed: int, where: list[int]) -> None:
    world = World(count, seed, 20.0)
    world.run([(5.0, "store", HOSTS[one % count], "") for one in where])
    assert [d.verdict(host.state) for host in world.hosts.values()] == ["succeeded"] * count
    assert world.now < 20.0 + d.DONE_SECONDS + 10.0


#: fault -> the kind of the cause that all survivors name.
NAMED = {"rank dies": "rank", "launcher dies": "launcher", "hang": "hang", "power": "host_lost", "alone": "host_lost"}


@search(4, 80, st.integers(3, 4), st.integers(), st.floats(5, 80), st.sampled_from(sorted(NAMED)), st.integers(0, 3))
def test_all_hosts_name_the_host_of_the_fault(count: int, seed: int, at: float, fault: str, where: int) -> None:
    world, host = World(count, seed, at + 30), HOSTS[where % count]
    world.run([(at, fault, host, host)])
    for survivor in world.survivors():
        cause = d.root(survivor.state)
        assert cause is not None and (cause.kind, cause.host) == (NAMED[fault], host), (survivor.state.me, cause)
        assert d.verdict(survivor.state) == "failed"


@search(4, 80, st.integers(3, 4), st.integers(), st.floats(5, 80) | st.just(0.0))
def test_two_hosts_that_do_not_hear_each_other_are_named_as_a_pair(count: int, seed: int, at: float) -> None:
    world = World(count, seed, at + 30)
    world.run([(at, "cut", "h1", "h2")])
    for host in world.hosts.values():
        cause = d.root(host.state)
        assert cause is not None and cause.kind == "cut" and {cause.host, cause.other} == {"h1", "h2"}, cause


@pytest.mark.parametrize(("fault", "seconds"), [("power", 11.0), ("cut", 11.0), ("alone", 11.0)])
def test_silence_ends_all_ranks_within_seconds(fault: str, seconds: float) -> None:
    world = World(3, 1, 1000.0)
    while world.now < 20.0:
        world.step()
    world.inject(fault, "h2", "h3")
    while any(host.ranks != "gone" for host in world.survivors()):
        world.step()
        assert world.now < 20.0 + seconds + 1.0


@search(4, 80, st.integers(2, 4), st.integers(), st.floats(5, 80), st.integers(0, 3))
def test_a_stop_on_one_host_stops_all(count: int, seed: int, at: float, where: int) -> None:
    world = World(count, seed, at + 100)
    world.run([(at, "stop", HOSTS[where % count], "")])
    assert [d.verdict(host.state) for host in world.hosts.values()] == ["stopped"] * count


def keeper(*peers: str) -> d.State:
    """h1's keeper, ranks running, its peers heard now."""
    state = d.State("h1", {peer: d.Peer() for peer in peers}, 0.0, GRACE_SECONDS)
    state, _ = d.decide(state, d.Started(1.0))
    for peer in peers:
        state, _ = d.decide(state, d.Heard(1.0, peer, {"status": "running", "hears": {}, "ended": [], "causes": []}))
    return state


def test_a_rank_that_lost_its_peer_is_not_the_cause_where_another_failed_later() -> None:
    state = keeper("h2")
    lost = d.Cause("rank", "h1", 0, "RuntimeError: connection closed by peer", 5.0, consequence=True)
    state, _ = d.decide(state, d.Failed(5.0, lost))
    words = d.Cause("rank", "h2", 1, "killed by SIGKILL", 2.0).words(2.1)
    beat = {"status": "ending", "hears": {}, "ended": [], "causes": [words]}
    state, _ = d.decide(state, d.Heard(5.1, "h2", beat))
    cause = d.root(state)
    assert cause is not None and (cause.host, cause.rank) == ("h2", 1)


def test_a_rank_that_is_slow_to_end_after_its_exception_is_not_ended_by_what_its_peers_say() -> None:
    state = keeper("h2")
    lost = d.Cause("rank", "h2", 1, "connection closed by peer", 1.5, consequence=True, patience=d.CAUSE_SECONDS)
    beat = {"status": "ending", "hears": {}, "ended": [], "causes": [lost.words(1.6)]}
    state, actions = d.decide(state, d.Heard(1.6, "h2", beat))
    assert not any(isinstance(action, (d.Terminate, d.Kill)) for action in actions)
    state, _ = d.decide(state, d.Failed(4.0, d.Cause("rank", "h1", 0, "ValueError: bad data", 4.0)))
    cause = d.root(state)
    assert cause is not None and (cause.host, cause.rank) == ("h1", 0) and not cause.consequence


def test_what_only_follows_from_another_failure_ends_the_run_all_the_same() -> None:
    lost = d.Cause("rank", "h1", 0, "connection closed by peer", 2.0, consequence=True, patience=d.CAUSE_SECONDS)
    state, _ = d.decide(keeper("h2"), d.Failed(2.0, lost))
    state, actions = d.decide(state, d.Tick(2.0 + d.CAUSE_SECONDS))
    assert d.Terminate() in actions


def test_ranks_killed_after_their_grace_did_not_all_stop_as_asked() -> None:
    state, _ = d.decide(keeper("h2"), d.StopAsked(2.0, "Ctrl-C", 1.0))
    state, actions = d.decide(state, d.Tick(2.0 + 1.0))
    assert any(isinstance(action, d.Kill) for action in actions) and state.killed


def test_that_is_said_too_where_other_ranks_only_followed() -> None:
    state, _ = d.decide(keeper("h2"), d.StopAsked(2.0, "Ctrl-C", 1.0))
    followed = d.Cause("rank", "h2", 1, "connection closed by peer", 2.5, consequence=True)
    state, _ = d.decide(state, d.Failed(2.5, followed))
    state, _ = d.decide(state, d.Tick(2.0 + 1.0))
    assert state.killed and d.verdict(state) == "stopped"


def test_a_host_whose_ranks_have_ended_says_for_whom_it_waits() -> None:
    state, actions = d.decide(keeper("h2", "h3"), d.Done(5.0))
    assert d.Note("ranks_ended", {}) in actions and d.beat(state, 5.0)["done"]
    assert d.waited_for(state, 5.0) == "the ranks of h2, h3"
    words = {"status": "running", "done": True, "hears": {}, "ended": [], "causes": []}
    state, _ = d.decide(state, d.Heard(6.0, "h3", words))
    assert d.waited_for(state, 6.0) == "the ranks of h2" and state.status == "running"


def test_ranks_that_are_being_killed_are_not_said_to_be_killed_in_0_s() -> None:
    state, _ = d.decide(keeper("h2"), d.StopAsked(2.0, "Ctrl-C", 6.0))
    state, _ = d.decide(state, d.Tick(2.1))
    assert d.waited_for(state, 2.0) == f"the ranks of {state.me} to end; they are killed in 6 s"
    assert {d.waited_for(state, now) for now in (7.6, 8.0, 9.0)} == {f"the ranks of {state.me} to end"}


def test_a_keeper_whose_host_answers_but_listens_no_more_is_gone_soon() -> None:
    state, _ = d.decide(keeper("h2"), d.Refused(2.0, "h2"))
    state, _ = d.decide(state, d.Tick(2.0 + d.REFUSED_SECONDS + 0.1))
    cause = d.root(state)
    assert cause is not None and (cause.kind, cause.host) == ("host_lost", "h2") and "container" in cause.reason


def test_a_host_that_is_never_heard_is_named_after_the_start() -> None:
    state = d.State("h1", {"h2": d.Peer()}, 0.0, GRACE_SECONDS)
    state, _ = d.decide(state, d.Started(1.0))
    assert d.waited_for(state, 1.0) == "the first word of h2"
    state, _ = d.decide(state, d.Tick(d.START_SECONDS + 1.0))
    cause = d.root(state)
    assert cause is not None and (cause.kind, cause.host) == ("start", "h2")


def test_a_rank_that_was_asked_to_stop_by_somebody_else_stops_the_run() -> None:
    state, _ = d.decide(keeper("h2"), d.Ended(9.0, EXIT_STOPPED))
    assert d.verdict(state) == "stopped" and state.stop is not None and "not from Muster" in state.stop.by


def test_ranks_save_when_a_host_leaves_and_that_is_no_stop() -> None:
    state, actions = d.decide(keeper("h2"), d.Failed(9.0, d.Cause("leaves", "h1", None, d.LEAVES, 9.0)))
    assert d.Terminate() in actions and state.kill_at == 9.0 + GRACE_SECONDS
    state, _ = d.decide(state, d.Ended(10.0, EXIT_STOPPED))
    assert state.stop is None and d.verdict(state) == "failed"
