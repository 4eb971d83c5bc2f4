"""Promises: a seed is one draw of faults that a run survives, and what is wrong with a run is found, whatever it is."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import drill_judge as judge
from benchmarks.common import whole_number
from benchmarks.drill import CLOSE, Outcome, figures, is_good
from benchmarks.drill_draw import (
    BLOCK_FAULTS,
    GAP_SECONDS,
    KINDS,
    LOSSES,
    SHORT,
    START_SECONDS,
    Drawn,
    bearable,
    draw,
)
from keeper.decide import LOST_SECONDS
from keeper.known import Attempt, is_majority
from train.checkpoints import files
from train.order import equally, steps

HOSTS = ("h1", "h2", "h3")
seeds = st.integers(0, 10_000)


# -- what is drawn -----------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 200))
def test_a_seed_is_one_draw_of_as_many_faults_as_asked(seed: int, number: int) -> None:
    blocks = draw(seed, number)
    assert blocks == draw(seed, number)
    assert sum(map(len, blocks)) == number and all(1 <= len(block) <= BLOCK_FAULTS for block in blocks)


def test_seeds_differ() -> None:
    assert len({tuple(draw(seed, 20)) for seed in range(50)}) == 50


@given(seeds)
def test_a_hundred_faults_have_every_kind(seed: int) -> None:
    faults = [fault for block in draw(seed, 100) for fault in block]
    assert {fault.kind for fault in faults} == set(KINDS)


def test_faults_come_at_every_moment() -> None:
    faults = [fault for seed in range(10) for block in draw(seed, 100) for fault in block]
    assert {fault.moment for fault in faults} == {"training", "start", "saving"}


@given(seeds, st.integers(1, 100))
def test_every_other_run_keeps_its_hosts_and_no_run_loses_too_many(seed: int, number: int) -> None:
    for place, block in enumerate(draw(seed, number)):
        lost = sum(KINDS[fault.kind].loses for fault in block)
        assert lost <= (LOSSES if place % 2 else 0)


@given(seeds)
def test_a_fault_comes_at_a_moment_and_for_a_time_that_its_kind_has(seed: int) -> None:
    for fault in (fault for block in draw(seed, 100) for fault in block):
        kind = KINDS[fault.kind]
        least, most = START_SECONDS if fault.moment == "start" else GAP_SECONDS
        assert least <= fault.after <= most
        assert fault.moment != "start" or kind.in_start
        assert fault.moment != "saving" or kind.in_saving
        assert kind.seconds[0] <= fault.seconds <= kind.seconds[1] and 0 <= fault.place < 1


@given(seeds)
def test_a_fault_in_a_start_up_follows_one_that_starts_ranks_anew_and_never_another_such(seed: int) -> None:
    for block in draw(seed, 100):
        for before, fault in itertools.pairwise(block):
            if fault.moment == "start":
                assert KINDS[before.kind].restarts and before.moment != "start"


def test_what_is_short_is_shorter_than_a_host_may_be_silent() -> None:
    assert max(SHORT) < LOST_SECONDS
    for kind in KINDS.values():  # and who loses the network for long is lost
        if kind.loses and kind.seconds > SHORT:
            assert min(kind.seconds) > LOST_SECONDS


@given(st.permutations(HOSTS), st.integers(1, 3), st.sampled_from(sorted(KINDS)))
def test_no_fault_takes_the_majority_away(order: list[str], number: int, name: str) -> None:
    kind, hosts = KINDS[name], tuple(order[:number])
    attempt = Attempt(hosts, (0, 0))
    for target in bearable(kind, hosts):
        assert set(target) <= set(hosts) and len(target) == (2 if kind.pair else 1)
        if kind.loses:  # of a pair one side is left
            left = [set(hosts) - {host} for host in target]
            assert (any if kind.pair else all)(is_majority(one, attempt) for one in left)


def test_all_that_a_run_can_bear_is_offered() -> None:
    lost, cut, kept = KINDS["power_loss"], KINDS["cut_long"], KINDS["rank_killed"]
    assert bearable(lost, HOSTS) == [("h1",), ("h2",), ("h3",)]
    assert bearable(lost, ("h2", "h3")) == [("h3",)]  # the master decides
    assert bearable(lost, ("h2",)) == []
    assert bearable(cut, HOSTS) == [("h1", "h2"), ("h1", "h3"), ("h2", "h3")]
    assert bearable(cut, ("h2",)) == []
    assert bearable(kept, ("h2",)) == [("h2",)]


# -- what is judged ----------------------------------------------------------------------------------------------------


def events_of(planned: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    found = [{"event": "step", "step": step, "epoch": epoch, "images": size} for step, epoch, size in planned]
    return [{"event": "start"}, *found, {"event": "end"}]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4))
def test_planned_are_the_steps_that_the_trainer_makes(samples: int, batch_size: int, epochs: int) -> None:
    made = [step.global_count for epoch in range(epochs)
            for step in steps(samples, batch_size, 0, epoch, equally(1), 0)]  # fmt: skip
    planned = judge.planned_steps(samples, batch_size, epochs)
    assert [size for *_, size in planned] == made
    assert [step for step, *_ in planned] == list(range(1, len(made) + 1))
    assert sum(size for *_, size in planned) == samples * epochs
    assert [epoch for _, epoch, _ in planned] == [epoch for epoch in range(1, epochs + 1)
                                                  for _ in range(len(made) // epochs)]  # fmt: skip
    assert judge.wrong_samples(events_of(planned), planned) == []


@given(st.data(), st.sampled_from(["left out", "twice", "swapped", "another size", "another epoch", "one more"]))
def test_whatever_is_wrong_with_the_steps_is_found(data: st.DataObject, what: str) -> None:
    planned = judge.planned_steps(25, 10, 3)
    seen = list(planned)
    place = data.draw(st.integers(0, len(seen) - 2))
    step, epoch, size = seen[place]
    if what == "left out":
        del seen[place]
    elif what == "twice":
        seen.insert(place, seen[place])
    elif what == "swapped":
        seen[place], seen[place + 1] = seen[place + 1], seen[place]
    elif what == "another size":
        seen[place] = (step, epoch, size + 1)
    elif what == "another epoch":
        seen[place] = (step, epoch + 1, size)
    else:
        seen.append((len(seen) + 1, 4, 10))
    assert judge.wrong_samples(events_of(seen), planned)


def test_a_run_without_metrics_has_no_samples() -> None:
    assert judge.wrong_samples([], judge.planned_steps(25, 10, 3))


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)},
        "optimizer": {"state": [{"exp_avg": torch.full((2,), float("nan"))}], "lr": 0.1},
        "metric": 0.5,
        "ema": None,
    }


def test_equal_states_do_not_differ() -> None:
    assert list(judge.differing(state(), copy.deepcopy(state()))) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda one: one["model"]["weight"].view(-1)[4:5].nextafter_(torch.tensor([9.0])), "model.weight"),
        (lambda one: one["model"].update(weight=-0.0 * one["model"]["weight"]), "model.weight"),
        (lambda one: one["model"].update(count=torch.tensor(3.0)), "model.count"),
        (lambda one: one["model"].update(weight=one["model"]["weight"].reshape(3, 2)), "model.weight"),
        (lambda one: one["model"].pop("count"), "model.count"),
        (lambda one: one["optimizer"]["state"][0]["exp_avg"].fill_(1.0), "optimizer.state.0.exp_avg"),
        (lambda one: one["optimizer"]["state"].append({}), "optimizer.state"),
        (lambda one: one["optimizer"].update(lr=0.2), "optimizer.lr"),
        (lambda one: one.update(metric=None), "metric"),
        (lambda one: one.update(ema={}), "ema"),
    ],
)
def test_the_smallest_difference_is_named(change: Any, named: str) -> None:
    other = copy.deepcopy(state())
    change(other)
    assert list(judge.differing(state(), other)) == [named]
    assert list(judge.differing(other, state())) == [named]


def test_a_run_kept_its_hosts_where_each_attempt_with_steps_had_them() -> None:
    whole = {"hosts": list(HOSTS), "reached": 10}
    without = {"hosts": ["h1", "h3"], "reached": 12}
    assert judge.kept_all_hosts([whole, whole], HOSTS)
    assert judge.kept_all_hosts([whole, {**without, "reached": None}, whole], HOSTS)
    assert not judge.kept_all_hosts([whole, without, whole], HOSTS)
    assert not judge.kept_all_hosts([{**whole, "hosts": ["h2", "h1", "h3"]}], HOSTS)  # other ranks


def test_a_checkpoint_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        files.write(tmp_path, step, state())
    assert judge.unreadable(tmp_path) == (3, [])
    path = files.path_of(tmp_path, 10)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    files.path_of(tmp_path, 15).write_bytes(files.path_of(tmp_path, 15).read_bytes()[:-1])
    count, wrong = judge.unreadable(tmp_path)
    assert count == 3 and len(wrong) == 2 and "step-10.pt" in wrong[0] and "step-15.pt" in wrong[1]
    assert judge.unreadable(tmp_path / "none") == (0, [])


FAULT = Drawn("rank_killed", "training", 15.0, 0.0, 0.0)


def test_runs_in_which_all_went_well_are_good() -> None:
    found = figures([Outcome(), Outcome(injected=[FAULT], differing=[]), Outcome(injected=[FAULT], distance=CLOSE)])
    assert is_good(found, 2)
    assert (found["faults"], found["final_equal"], found["final_close"]) == (2, True, True)
    assert (found["runs"], found["equal_runs"], found["shrunk_runs"]) == (2, 1, 1)
    assert not is_good(found, 3), "one was not injected"


def test_what_was_not_compared_is_neither_equal_nor_close() -> None:
    found = figures([Outcome(), Outcome(injected=[FAULT])])
    assert found["final_equal"] is None and found["final_close"] is None


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ({"hand_fixes": ["make gather"]}, "hand_fixes", 1),
        ({"orphans": ["process 1 on h1"]}, "orphans", 1),
        ({"unreadable": ["h1: torn", "h2: torn"]}, "unreadable", 2),
        ({"wrong_samples": ["missing: 1"]}, "samples_ok", False),
        ({"differing": ["model.weight"]}, "final_equal", False),
        ({"differing": None, "distance": CLOSE + 0.001}, "final_close", False),
        ({"not_needed": ["cut_short: h1"]}, "not_needed", 1),
    ],
)
def test_whatever_is_wrong_with_one_run_is_counted_and_said(change: dict[str, Any], key: str, value: Any) -> None:
    bad = Outcome(**{"injected": [FAULT], "differing": [], **change})
    for place in range(3):
        outcomes = [Outcome(), Outcome(injected=[FAULT], differing=[]), Outcome(injected=[FAULT], differing=[])]
        outcomes[place] = bad
        found = figures(outcomes)
        assert found[key] == value and not is_good(found, found["faults"])
    assert bad.problems


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "10001", "٣"])
def test_a_bad_number_of_faults_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SystemExit) as refused:
        whole_number("FAULTS", text, 1)
    assert f"FAULTS={text} is not a whole number" in str(refused.value) and "\n" not in str(refused.value)
    assert whole_number("FAULTS", "20", 1) == 20
