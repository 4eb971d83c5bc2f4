"""Promises of how a run goes on after failures, over random faults: never two halves, always an end, nothing lost."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from keeper import course as c
from keeper import decide as d
from keeper import known as k
from keeper.next_attempt import why_not_again
from tests.keeper.simulation import (
    FAULTS,
    GRACE_SECONDS,
    HOSTS,
    LONGEST_WITH_RESTARTS,
    RETURNS,
    WITNESS_FAULTS,
    Host,
    World,
    search,
)

STEPS = 400  # 100 seconds of training
MANY = k.Rules(nodes=5, max_restarts=1000, max_host_failures=1000)
EVENTS = (*FAULTS, *WITNESS_FAULTS, *[RETURNS] * 3)
fault_lists = st.lists(
    st.tuples(st.floats(0, 200), st.sampled_from(EVENTS), st.integers(0, 4), st.integers(0, 4)), max_size=12
)


def run(world: World, faults: list[tuple[float, str, int, int]]) -> None:
    names = list(world.hosts)
    picked = [(at, fault, names[one % len(names)], names[other % len(names)]) for at, fault, one, other in faults]
    world.run(picked, LONGEST_WITH_RESTARTS)


def check_that_one_attempt_trained_at_a_time(world: World) -> None:
    """Once an attempt has taken a step, none that was accepted before it takes one; and steps go on where they were."""
    begun = [step.attempt.identity for step in world.steps]
    assert begun == sorted(begun)
    numbers = {step.attempt.number: step.attempt for step in world.steps}
    assert all(step.attempt.identity == numbers[step.attempt.number].identity for step in world.steps)
    for before, after in zip(world.steps, world.steps[1:], strict=False):
        assert after.step == before.step + 1 or after.attempt.identity > before.attempt.identity


@search(12, 300, st.integers(1, 5), st.integers(0, 2), st.booleans(), st.integers(), fault_lists)
def test_never_two_halves_and_always_an_end(
    nodes: int, spares: int, witnessed: bool, seed: int, faults: list[tuple[float, str, int, int]]
) -> None:
    count = min(5, nodes + spares)
    world = World(count, seed, 10.0, replace(MANY, nodes=nodes), STEPS)
    if witnessed:
        world.begin_witness()
    run(world, faults)
    check_that_one_attempt_trained_at_a_time(world)
    for host in world.survivors():
        assert host.course.left, (host.course.me, host.course)
        assert host.ranks == "gone"
    succeeded = "succeeded" in world.verdicts()
    assert not succeeded or max(step.step for step in world.steps) == STEPS


class Council:
    """Keepers that hear each other in any order, or never, and propose whatever comes to their minds."""

    def __init__(self, count: int, seed: int) -> None:
        self.chance = random.Random(seed)
        names = HOSTS[:count]
        first = k.Attempt(names, (1, 2))
        self.hosts = names
        self.at_first = {
            name: c.begin(name, names, replace(MANY, nodes=count), first, 0.0, GRACE_SECONDS)
            for name in (*names, f"{k.WITNESS}1", f"{k.WITNESS}2")
        }
        self.courses = dict(self.at_first)
        self.stepped = first  # the newest attempt that could take a step
        self.changes: set[str] = set()  # deciders that there were
        for name in names:
            self.fail(name)

    def run(self, turns: int) -> None:
        for _ in range(turns):
            one, other = self.chance.choices(list(self.courses), k=2)
            what = self.chance.random()
            if what < 0.6 and one != other:
                self.happen(one, d.Heard(1.0, other, c.beat(self.courses[other], 1.0)))
            elif what < 0.8:
                self.propose(one)
            elif what < 0.83:
                self.propose_decider(one)
            elif what < 0.86:
                self.fail(one)
            else:
                self.come_back(one)
            self.check()

    def happen(self, name: str, event: Any) -> None:
        self.courses[name], _ = c.decide(self.courses[name], event)

    def fail(self, name: str) -> None:
        """Its ranks fail, and have ended."""
        course = self.courses[name]
        if course.own is None or course.own.status == "ended":
            return
        self.happen(name, d.Failed(1.0, d.Cause("rank", name, 0, "killed", 1.0)))
        self.happen(name, d.Ended(1.0, 1))

    def come_back(self, name: str) -> None:
        """Its keeper has ended, and with it its ranks, and is started again."""
        if name in self.hosts:
            kept = json.loads(json.dumps(c.promises(self.courses[name])))
            self.courses[name] = c.come_back(self.at_first[name], kept, 1.0)

    def propose(self, name: str) -> None:
        """Any hosts, as an attempt after the newest one that it knows."""
        course = self.courses[name]
        if not course.has_ended or name not in self.hosts:
            return
        hosts = tuple(host for host in self.hosts if self.chance.random() < 0.5) or (name,)
        decider = self.chance.choice(list(self.courses))
        self.vote_for(name, k.Attempt(hosts, (1, 2), course.attempt.number + 1, decided_by=decider))

    def propose_decider(self, name: str) -> None:
        """Anybody, by a host whose ranks train."""
        course = self.courses[name]
        if course.has_ended or not course.takes_part:
            return
        decider = self.chance.choice(list(self.courses))
        self.vote_for(name, replace(course.attempt, decided_by=decider, first_ballot=course.attempt.identity))

    def vote_for(self, name: str, proposal: k.Attempt) -> None:
        course = self.courses[name]
        votes = [*course.votes, *(vote for known in course.known.values() for vote in known.votes)]
        ballot = 1 + max([course.attempt.ballot, *(vote.ballot for vote in votes)])
        self.courses[name] = replace(course, votes=(*course.votes, replace(proposal, ballot=ballot)))

    def check(self) -> None:
        """All hosts of an attempt at work: then it takes a step, and none before it ever does again."""
        at_work = {name: course.own_attempt for name, course in self.courses.items() if not course.has_ended}
        for course in self.courses.values():
            attempt = course.attempt
            if all(at_work.get(host) == attempt.identity for host in attempt.hosts):
                assert attempt.identity >= self.stepped.identity, (attempt, self.stepped)
                assert attempt.identity > self.stepped.identity or attempt.hosts == self.stepped.hosts
                self.stepped = attempt
                self.changes.add(attempt.decided_by)


@search(12, 500, st.integers(2, 5), st.integers())
def test_whoever_proposes_what_and_hears_whom_there_is_one_attempt_that_can_take_a_step(count: int, seed: int) -> None:
    Council(count, seed).run(300)


def proposed(council: Council, ballot: int, hosts: str, voters: str) -> k.Attempt:
    """An attempt 2 for which these have voted."""
    proposal = k.Attempt(tuple(hosts.split()), (1, 2), 2, ballot)
    for name in voters.split():
        course = council.courses[name]
        council.courses[name] = replace(course, votes=(*course.votes, proposal))
    return proposal


def test_an_attempt_begins_when_all_its_hosts_have_voted_for_it() -> None:
    council = Council(3, 1)
    proposal = proposed(council, 2, "h1 h2 h3", "h1 h2")
    council.happen("h1", d.Heard(1.0, "h2", c.beat(council.courses["h2"], 1.0)))
    assert council.courses["h1"].attempt.number == 1
    council.happen("h3", d.Heard(1.0, "h1", c.beat(council.courses["h1"], 1.0)))  # and votes
    council.happen("h1", d.Heard(1.0, "h3", c.beat(council.courses["h3"], 1.0)))
    assert council.courses["h1"].attempt == proposal and council.courses["h1"].own_attempt == 2


def test_who_has_voted_for_an_attempt_begins_no_older_one() -> None:
    council = Council(4, 1)
    older = proposed(council, 2, "h1 h2", "h1 h2 h3")
    proposed(council, 3, "h3 h4", "h2 h3 h4")
    council.courses["h1"] = replace(council.courses["h1"], attempt=older)
    council.happen("h2", d.Heard(1.0, "h1", c.beat(council.courses["h1"], 1.0)))
    assert council.courses["h2"].attempt.number == 1 and council.courses["h2"].has_ended


def test_a_keeper_that_is_started_again_has_forgotten_no_vote() -> None:
    council = Council(4, 1)
    older = proposed(council, 2, "h1 h2", "h1 h2 h3")
    newer = proposed(council, 3, "h3 h4", "h2 h3 h4")
    council.come_back("h2")
    council.courses["h1"] = replace(council.courses["h1"], attempt=older)
    council.happen("h2", d.Heard(1.0, "h1", c.beat(council.courses["h1"], 1.0)))
    assert council.courses["h2"].votes == (older, newer) and council.courses["h2"].attempt.number == 1


def test_a_witness_that_has_begun_an_attempt_votes_for_another_one_of_its_number() -> None:
    """Its hosts had voted once more, as its word came late, and then may not begin the older one."""
    council, witness = Council(2, 1), f"{k.WITNESS}1"
    council.courses[witness] = replace(council.courses[witness], attempt=k.Attempt(("h1",), (1, 2), 2, 2))
    newer = proposed(council, 3, "h1", "h1")
    council.happen(witness, d.Heard(1.0, "h1", c.beat(council.courses["h1"], 1.0)))
    assert council.courses[witness].attempt == newer  # and accepts it, as its vote is enough


NETWORK = ("alone", "cut", "heal")


@search(
    5,
    120,
    st.integers(2, 5),
    st.integers(),
    st.lists(st.tuples(st.floats(0, 60), st.sampled_from(NETWORK), st.integers(0, 4), st.integers(0, 4)), max_size=10),
)
def test_a_network_that_comes_and_goes_never_makes_two_runs_of_one(
    count: int, seed: int, faults: list[tuple[float, str, int, int]]
) -> None:
    world = World(count, seed, 10.0, replace(MANY, nodes=count), STEPS)
    run(world, faults)
    check_that_one_attempt_trained_at_a_time(world)


RECOVERABLE = ("rank dies", "launcher dies", "hang", "disk", "store")


@search(
    5,
    120,
    st.integers(1, 5),
    st.integers(),
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(RECOVERABLE), st.integers(0, 4), st.just(0)), max_size=5),
)
def test_faults_of_ranks_alone_are_survived_by_all_hosts(
    count: int, seed: int, faults: list[tuple[float, str, int, int]]
) -> None:
    world = World(count, seed, 10.0, replace(MANY, nodes=count), STEPS)
    run(world, faults)
    assert world.verdicts() == ["succeeded"] * count
    assert world.steps[-1].step == STEPS
    if not any(fault == "disk" for _, fault, *_ in faults):  # such a keeper may be too late for an attempt
        assert len(world.steps[-1].attempt.hosts) == count


@search(3, 60, st.integers(3, 5), st.integers(), st.floats(5, 80), st.integers(0, 4))
def test_the_loss_of_any_one_host_of_three_or_more_is_survived(count: int, seed: int, at: float, where: int) -> None:
    world, lost = World(count, seed, 10.0, replace(MANY, nodes=count), STEPS), HOSTS[where % count]
    run(world, [(at, "power", where, 0)])
    assert world.verdicts() == ["succeeded"] * (count - 1)
    assert world.steps[-1].step == STEPS
    assert world.steps[-1].attempt.hosts == tuple(host for host in HOSTS[:count] if host != lost)


@search(3, 60, st.integers(1, 2), st.integers(), st.floats(10, 80), st.integers(0, 3))
def test_with_a_witness_half_of_the_hosts_may_be_lost_whichever_they_are(
    pairs: int, seed: int, at: float, where: int
) -> None:
    world, count = World(2 * pairs, seed, 10.0, replace(MANY, nodes=2 * pairs), STEPS), 2 * pairs
    world.begin_witness()
    lost = [HOSTS[(where + index) % count] for index in range(pairs)]
    world.run([(at, "power", host, "") for host in lost], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["succeeded"] * pairs
    assert world.steps[-1].step == STEPS and not set(world.steps[-1].attempt.hosts) & set(lost)


@search(3, 60, st.integers(2, 5), st.integers(), st.floats(5, 80), st.integers(0, 4))
def test_a_host_that_is_shut_down_leaves_the_others_whichever_it_is(
    count: int, seed: int, at: float, where: int
) -> None:
    """Also one of two without a witness: it votes for its end."""
    world, name = World(count, seed, 10.0, replace(MANY, nodes=count), STEPS), HOSTS[where % count]
    run(world, [(at, "container asked to end", where, 0)])
    rest = [host for host in HOSTS[:count] if host != name]
    assert [c.verdict(world.hosts[host].course) for host in rest] == ["succeeded"] * (count - 1)
    assert world.steps[-1].step == STEPS and list(world.steps[-1].attempt.hosts) == rest
    assert dict(world.steps[-1].attempt.left_out) == {name: d.LEAVES}
    assert world.hosts[name].course.left and not world.hosts[name].course.stop


@pytest.mark.slow
def test_hosts_that_are_shut_down_stop_the_run_where_the_others_are_too_few() -> None:
    """Also one after the other; and where it may not be started again."""
    both = [(20.0, "container asked to end", "h2", ""), (20.5, "container asked to end", "h1", "")]
    for rules, faults in (
        (replace(MANY, nodes=2), both),
        (replace(MANY, nodes=2, min_nodes=2), both[:1]),
        (replace(MANY, nodes=2, max_restarts=0), both[:1]),
    ):
        world = World(2, 1, 10.0, rules, STEPS)
        world.run(faults, LONGEST_WITH_RESTARTS)
        assert [name for host in world.hosts.values() for name, _ in host.notes if name == "stop"], rules
        assert "stopped" in world.verdicts() and world.ended()


@pytest.mark.slow
def test_a_spare_that_is_shut_down_ends_alone() -> None:
    for restarts in (5, 0, -5):
        world = World(3, 1, 10.0, replace(MANY, nodes=2, max_restarts=restarts), STEPS)
        world.run([(20.0, "container asked to end", "h3", "")], LONGEST_WITH_RESTARTS)
        assert [c.verdict(world.hosts[host].course) for host in ("h1", "h2")] == ["succeeded"] * 2, restarts
        assert {step.attempt.number for step in world.steps} == {1} and world.ended()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "verdict"),
    [
        ([(20.0, "witness goes", "h1", "")], "succeeded"),  # the two agree on the master again
        ([(20.0, "witness goes", "h1", ""), (30.0, "witness comes", "h1", "")], "succeeded"),
        ([(20.0, "witness cut", "h2", "")], "succeeded"),
        ([(44.0, "witness goes", "h1", "")], "failed"),  # too late to agree on anything
    ],
)
def test_a_witness_that_goes_leaves_the_master_to_decide(
    faults: list[tuple[float, str, str, str]], verdict: str
) -> None:
    world = World(2, 1, 10.0, replace(MANY, nodes=2), STEPS)
    world.begin_witness()
    world.run([*faults, (45.0, "power", "h2", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == [verdict]


def test_of_two_hosts_the_one_goes_on_that_the_witness_hears() -> None:
    world = World(2, 1, 10.0, replace(MANY, nodes=2), STEPS)
    world.begin_witness()
    cut = [(20.0, "cut", "h1", "h2"), (20.0, "witness cut", "h1", "")]
    world.run(cut, LONGEST_WITH_RESTARTS)
    check_that_one_attempt_trained_at_a_time(world)
    assert world.steps[-1].attempt.hosts == ("h2",) and world.verdicts() == ["failed", "succeeded"]
    over = world.hosts["h1"].course.over
    assert over is not None and over.reason.endswith("or half without the control machine that had the run in view")


def test_of_two_hosts_and_a_spare_either_may_be_lost() -> None:
    for lost, rest in (("h1", ("h2", "h3")), ("h2", ("h1", "h3"))):
        world = World(3, 1, 10.0, replace(MANY, nodes=2), STEPS)
        world.run([(20.0, "power", lost, "")], LONGEST_WITH_RESTARTS)
        assert world.steps[-1].attempt.hosts == rest and world.verdicts() == ["succeeded"] * 2


def test_who_decides_is_changed_while_ranks_train_and_nothing_else() -> None:
    world = World(2, 1, 10.0, replace(MANY, nodes=2), STEPS)
    world.run([(15.0, "witness comes", "h1", ""), (30.0, "witness goes", "h1", "")], LONGEST_WITH_RESTARTS)
    assert {step.attempt.number for step in world.steps} == {1} and world.verdicts() == ["succeeded"] * 2
    assert [step.step for step in world.steps] == list(range(1, STEPS + 1))
    for host in world.hosts.values():
        assert [words["host"] for name, words in host.notes if name == "decider"] == [f"{k.WITNESS}0", "h1"]


def test_of_two_hosts_the_master_goes_on_alone_and_the_other_one_ends() -> None:
    for lost, verdict in (("h2", "succeeded"), ("h1", "failed")):
        world = World(2, 1, 10.0, replace(MANY, nodes=2), STEPS)
        world.run([(20.0, "power", lost, "")], LONGEST_WITH_RESTARTS)
        assert world.verdicts() == [verdict]
    over = world.hosts["h2"].course.over
    assert over is not None and over.reason == (
        "h2 cannot know whether h1 goes on: less than half of its hosts are left, or half without the master"
    )


@pytest.mark.slow
def test_a_cut_in_two_halves_lets_the_master_s_half_go_on_and_the_other_joins_when_it_is_healed() -> None:
    world = World(4, 1, 10.0, replace(MANY, nodes=4), 4 * STEPS)
    halves = [(20.0, "cut", one, other) for one in ("h1", "h2") for other in ("h3", "h4")]
    world.run([*halves, (50.0, "heal", "h1", "h1"), (70.0, "rank dies", "h2", "")], LONGEST_WITH_RESTARTS)
    check_that_one_attempt_trained_at_a_time(world)
    hosts = {step.attempt.number: step.attempt.hosts for step in world.steps}
    assert hosts == {1: HOSTS[:4], 2: ("h1", "h2"), 3: HOSTS[:4]}
    assert world.verdicts() == ["succeeded"] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "returns", "attempts"),
    [
        ({"h3": "power"}, 50.0, {2: ("h1", "h2"), 3: ("h1", "h2", "h3")}),  # it waits until something else fails
        ({"h1": "power"}, 50.0, {2: ("h2", "h3"), 3: ("h1", "h2", "h3")}),
        ({"h3": "container"}, 21.0, {2: ("h1", "h2", "h3"), 3: ("h1", "h2", "h3")}),  # it is there before it is missed
        (
            {"h3": "container"},
            25.5,
            {2: ("h1", "h2", "h3"), 3: ("h1", "h2", "h3")},
        ),  # the run is in view: it is waited for
        ({"h1": "power", "h2": "power", "h3": "power"}, 25.0, {2: ("h1", "h2", "h3"), 3: ("h1", "h2", "h3")}),
    ],
)
def test_a_host_that_comes_back_joins_at_the_next_attempt(
    lost: dict[str, str], returns: float, attempts: dict[int, tuple[str, ...]]
) -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3), 2 * STEPS)
    world.begin_witness()
    faults = [(20.0, fault, host, "") for host, fault in lost.items()]
    faults += [(returns, RETURNS, host, "") for host in lost]
    world.run([*faults, (80.0, "rank dies", "h2", "")], LONGEST_WITH_RESTARTS)
    check_that_one_attempt_trained_at_a_time(world)
    found = {step.attempt.number: step.attempt.hosts for step in world.steps}
    assert found == {1: ("h1", "h2", "h3"), **attempts} and world.steps[-1].step == 2 * STEPS
    assert world.verdicts() == ["succeeded"] * 3


def test_what_a_host_that_comes_back_waits_for_is_a_word_of_the_others() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3), 2 * STEPS)
    while world.now < 20.0:
        world.step()
    world.inject("power", "h3", "")
    world.inject(RETURNS, "h3", "")
    assert c.waited_for(world.hosts["h3"].course, world.now) == "a word of h1, h2"


@pytest.mark.slow
def test_a_loss_is_noted_of_the_attempt_that_it_ended_though_another_one_begins_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted, do = [], World.do

    def watching(world: World, host: Host, action: Any) -> None:
        if isinstance(action, d.Note) and action.words.get("kind") == "host_lost":
            noted.append((host.course.me, action.attempt))
        do(world, host, action)

    monkeypatch.setattr(World, "do", watching)
    world = World(3, 1, 10.0, replace(MANY, nodes=3), STEPS)
    world.run([(20.0, "power", "h3", "")], LONGEST_WITH_RESTARTS)
    assert sorted(noted) == [("h1", 1), ("h2", 1)] and world.steps[-1].attempt.number == 2


@pytest.mark.slow
def test_a_host_that_comes_back_after_the_end_ends_too() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3), STEPS)
    world.run([(20.0, "power", "h3", ""), (200.0, RETURNS, "h3", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["succeeded", "succeeded", "failed"] and all(
        host.course.left for host in world.survivors()
    )


def test_a_spare_takes_the_place_of_a_lost_host_and_goes_with_the_run() -> None:
    world = World(4, 1, 10.0, replace(MANY, nodes=3), STEPS)
    world.run([(20.0, "power", "h1", "")], LONGEST_WITH_RESTARTS)
    assert world.steps[-1].attempt.hosts == ("h2", "h3", "h4") and world.verdicts() == ["succeeded"] * 3
    assert dict(world.steps[-1].attempt.left_out)["h1"].startswith("no word from it for")


@pytest.mark.slow
def test_a_spare_of_a_run_that_ends_well_has_done_nothing() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=2), STEPS)
    world.run([], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["succeeded"] * 3 and world.hosts["h3"].course.own is None


@pytest.mark.slow
def test_a_host_that_failed_twice_is_left_out_and_named() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3, max_host_failures=2), STEPS)
    world.run([(20.0, "rank dies", "h1", ""), (50.0, "rank dies", "h1", "")], LONGEST_WITH_RESTARTS)
    last = world.steps[-1].attempt
    assert (last.number, last.hosts) == (3, ("h2", "h3")) and world.steps[-1].step == STEPS
    assert last.left_out == (("h1", "2 attempts ended because of it"),)
    assert world.verdicts() == ["succeeded"] * 3


def test_the_only_host_is_not_left_out() -> None:
    world = World(1, 1, 10.0, replace(MANY, nodes=1, max_host_failures=1), STEPS)
    world.run([(20.0, "rank dies", "h1", ""), (50.0, "rank dies", "h1", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["succeeded"] and world.steps[-1].attempt.number == 3


@pytest.mark.slow
def test_a_host_whose_disk_is_full_is_left_out_at_once_and_ends_the_run_where_it_is_needed() -> None:
    for min_nodes, verdict, number in ((1, "succeeded", 2), (2, "failed", 1)):
        world = World(2, 1, 10.0, replace(MANY, nodes=2, min_nodes=min_nodes), STEPS)
        while world.now < 20.0:
            world.step()
        world.hosts["h2"].ranks = "failed"
        full = d.Cause("rank", "h2", 1, "OSError: No space left on device", world.now, unfit=True)
        world.happen(world.hosts["h2"], d.Failed(world.now, full))
        world.hosts["h2"].due.append((world.now, ("terminated", 1)))
        world.run([], LONGEST_WITH_RESTARTS)
        last = world.steps[-1].attempt
        assert world.verdicts() == [verdict] * 2 and last.number == number
    assert [host.course.over.reason for host in world.hosts.values() if host.course.over] == [
        "it would end the same way again"
    ] * 2


@pytest.mark.slow
def test_nobody_is_blamed_for_ranks_that_wait_for_each_other() -> None:
    world = World(2, 1, 10.0, replace(MANY, nodes=2, max_host_failures=1), STEPS)
    while world.now < 20.0:
        world.step()
    world.hosts["h1"].ranks = "waiting"
    world.happen(world.hosts["h1"], d.Failed(world.now, d.Cause("hang", "h1", None, "no progress", world.now)))
    world.run([], LONGEST_WITH_RESTARTS)
    assert world.steps[-1].attempt.hosts == ("h1", "h2") and world.steps[-1].attempt.number == 2


@pytest.mark.slow
def test_restarts_are_counted() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3, max_restarts=1), STEPS)
    world.run([(20.0, "rank dies", "h1", ""), (50.0, "rank dies", "h2", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["failed"] * 3
    assert {host.course.over.reason for host in world.hosts.values() if host.course.over} == {
        "it was restarted 1 time, as often as MAX_RESTARTS allows"
    }


def test_too_few_hosts_end_the_run() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3, min_nodes=3), STEPS)
    world.run([(20.0, "power", "h3", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["failed"] * 2
    over = world.hosts["h2"].course.over
    assert over is not None and over.reason == "2 of its hosts can go on, fewer than MIN_NODES=3" and world.now < 90


@pytest.mark.slow
def test_only_hosts_that_may_be_heard_again_are_waited_for() -> None:
    """A keeper whose container has ended comes back only where a control machine has the run in view; a host without
    power may only have been cut off."""
    few = "2 of its hosts can go on, fewer than MIN_NODES=3"
    half = "h2 cannot know whether h1 goes on: less than half of its hosts are left, or half without the master"
    for count, min_nodes, lost, reason in ((3, 3, "h3", few), (2, 1, "h1", half)):
        lasted = {}
        for fault, witnessed in (("power", False), ("container", False), ("container", count > 2)):
            world = World(count, 1, 10.0, replace(MANY, nodes=count, min_nodes=min_nodes), STEPS)
            if witnessed:
                world.begin_witness()
            world.run([(20.0, fault, lost, "")], LONGEST_WITH_RESTARTS)
            over = world.hosts["h2"].course.over
            assert over is not None and over.reason == reason
            assert world.verdicts() == ["failed"] * (count - 1)
            lasted[fault, witnessed] = world.now - 20.0
        at_once, later = lasted.pop(("container", False)), list(lasted.values())
        assert at_once < d.REFUSED_SECONDS + d.LOST_SECONDS < c.MINORITY_SECONDS < min(later)


@pytest.mark.slow
def test_a_host_that_is_left_out_anyway_is_not_waited_for() -> None:
    for max_failures, waits in ((1, False), (2, True)):
        rules = replace(MANY, nodes=3, min_nodes=3, max_host_failures=max_failures)
        world = World(3, 1, 10.0, rules, STEPS)
        world.run([(20.0, "power", "h3", "")], LONGEST_WITH_RESTARTS)
        assert world.verdicts() == ["failed"] * 2 and (world.now > 20.0 + c.MINORITY_SECONDS) is waits


@pytest.mark.slow
def test_a_host_that_was_cut_off_is_waited_for_where_it_is_needed() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3, min_nodes=3), STEPS)
    world.run([(20.0, "alone", "h3", ""), (45.0, "heal", "h1", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["succeeded"] * 3 and world.steps[-1].attempt.hosts == HOSTS[:3]


@pytest.mark.slow
def test_what_the_next_attempt_waits_for_is_said_with_its_limit() -> None:
    few = "2 of its hosts can go on, fewer than MIN_NODES=3"
    half = "h2 cannot know whether h1 goes on: less than half of its hosts are left, or half without the master"
    slow = "the ranks of h1 have not ended"
    cases = ((3, 3, "power", "h3", few), (2, 1, "power", "h1", half), (2, 1, "rank dies", "h2", slow))
    for count, min_nodes, fault, where, reason in cases:
        world = World(count, 1, 10.0, replace(MANY, nodes=count, min_nodes=min_nodes), STEPS)
        while world.now < 20.0:
            world.step()
        world.hosts["h1"].deaf_to_term = True  # its ranks are killed, after their grace
        world.inject(fault, where, "")
        said = set()
        while world.now < 50.0:
            world.step()
            said.add(c.waited_for(world.hosts["h2"].course, world.now))
        assert f"attempt 2 to begin: {reason}; that may take 30 s at most" in said


def test_a_stop_between_two_attempts_stops_the_run() -> None:
    world = World(3, 1, 10.0, replace(MANY, nodes=3, min_nodes=3), STEPS)
    world.run([(20.0, "power", "h3", ""), (40.0, "stop", "h2", "")], LONGEST_WITH_RESTARTS)
    assert world.verdicts() == ["stopped"] * 2 and world.now < 50


def ended(number: int, reached: int | None, reason: str = "killed by SIGKILL", **more: Any) -> d.Words:
    cause = d.Cause("rank", "h1", 0, reason, 0.0, **more).words(0.0)
    return {"number": number, "hosts": ["h1"], "cause": cause, "reached": reached}


def failed_course(rules: k.Rules, *ends: d.Words) -> k.Course:
    """The course of a run on one host whose attempts have ended so."""
    attempt = k.Attempt(("h1",), (1, 2), len(ends), len(ends), ends[:-1])
    cause = d.cause_of(ends[-1]["cause"], 0.0)
    own = d.State("h1", {}, 0.0, GRACE_SECONDS, "ended", causes=(cause,))
    course = c.begin("h1", ("h1",), rules, attempt, 0.0, GRACE_SECONDS)
    return replace(course, own=own, reached=ends[-1]["reached"])


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([ended(1, 9)], ""),
        ([ended(1, 9, "exit status 2: train: --lr 0", final=True)], "it would end the same way again"),
        ([ended(1, 90, "out of memory: killed by the kernel")], ""),
        ([ended(1, 90, "out of memory"), ended(2, 92, "out of memory")], "it was out of memory twice at step 92"),
        ([ended(1, 90, "out of memory"), ended(2, 300, "out of memory")], ""),
        ([ended(1, 9), ended(2, 9), ended(3, 4)], ""),
        (
            [ended(1, 9), ended(2, 9, "first"), ended(3, 4), ended(4, 8)],
            "3 attempts in a row made no new step; the first of them ended so: rank 0 on h1: first",
        ),
        (
            [ended(1, None, "bad"), ended(2, None), ended(3, 0)],
            "3 attempts in a row made no new step; the first of them ended so: rank 0 on h1: bad",
        ),
    ],
)
def test_what_would_end_the_same_way_is_not_started_again(ends: list[d.Words], reason: str) -> None:
    assert why_not_again(failed_course(k.Rules(1, 9), *ends)) == reason


def test_a_script_that_says_no_steps_is_not_judged_by_them() -> None:
    course = failed_course(k.Rules(1, 9, steps_are_known=False), ended(1, None), ended(2, None), ended(3, None))
    assert why_not_again(course) == ""


@pytest.mark.slow
def test_a_script_is_started_again_once_it_has_said_that_it_can_go_on() -> None:
    for says, attempts in ((False, 1), (True, 2)):
        world = World(2, 1, 10.0, replace(MANY, nodes=2, max_restarts=-3), STEPS)
        for _ in range(40):
            world.step()
        if says:
            world.happen(world.hosts["h2"], c.Resumable(world.now))
        world.run([(world.now + 5, "rank dies", "h1", "")], LONGEST_WITH_RESTARTS)
        assert world.steps[-1].attempt.number == attempts
        assert world.verdicts() == ["succeeded" if says else "failed"] * 2


def test_an_attempt_travels_whole() -> None:
    attempt = k.Attempt(("h1", "h3"), (29500, 29501), 2, 4, (ended(1, 7),), (("h2", "lost"),))
    assert k.attempt_of(attempt.words()) == attempt
    changed = replace(attempt, ballot=5, decided_by="h2", first_ballot=4)
    assert k.attempt_of(changed.words()) == changed and changed.identity == attempt.identity


@pytest.mark.parametrize(
    ("hosts", "decider", "voters", "enough"),
    [("abc", "", "ab", True), ("abc", "", "a", False), ("ab", "", "a", True), ("ab", "", "b", False),
     ("abcd", "", "ab", True), ("abcd", "", "cd", False), ("abcd", "", "bcd", True), ("a", "", "a", True),
     ("a", "", "b", False), ("ab", "w", "bw", True), ("ab", "w", "aw", True), ("ab", "w", "a", False),
     ("ab", "w", "ab", True), ("abcd", "w", "adw", True), ("abcd", "w", "aw", False), ("abc", "w", "cw", False)],
)  # fmt: skip
def test_a_majority_is_more_than_half_or_half_with_the_decider(
    hosts: str, decider: str, voters: str, enough: bool
) -> None:
    assert k.is_majority(set(voters), k.Attempt(tuple(hosts), (1, 2), decided_by=decider)) is enough
