"""Promises of --communication auto: what is chosen, what is said of it, and what the trainer is given."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from launch.health import communication, forecast, run_probe
from launch.health.ways import FOR_SLOW_LINKS, LOST_IN, Training, Way, cost, is_advised, lost
from launch.job.trainer_arguments import without_choice
from tests.launch.health.test_forecast import document, with_options
from tests.launch.samples import cluster
from train.settings import parse, problems

SYNC = Way(sync_every=16, compress="int8")
SGD, ADAMW = Training("sgd", 100_000), Training("adamw", 100_000)


def choice(
    reduce: float, compressed: float, exchanged: float, approximate: bool, training: Training = SGD
) -> tuple[Way, str]:
    """(what is chosen on two hosts, what is said)"""
    known = with_options(document(reduce, (1.0, 1.0)), compressed, exchanged)
    made = [one for one in forecast.outlooks(known) if one.nodes == 2]
    best = communication.chosen(made, approximate, training)
    return best.way, communication.sentence(made, best, training)


def test_an_exact_way_is_taken_where_it_gains_anything() -> None:
    way, said = choice(0.5, 0.3, 0.1, False)
    assert way == Way(compress="bf16")
    assert said.startswith("--compress bf16: ") and "against" in said and "rounding" in said


def test_what_changes_the_training_needs_the_flag_and_its_cost_is_said() -> None:
    way, said = choice(0.5, 0.3, 0.1, True)
    assert way == SYNC and f"it lost {lost(SYNC, 'sgd')} points of accuracy with sgd in the 1800 steps" in said


def test_of_ways_that_are_about_as_fast_the_one_that_lost_least_is_taken() -> None:
    rarer = Way(sync_every=32, compress="int8")
    assert choice(0.5, 0.5, 0.1, True)[0] == SYNC and lost(SYNC, "sgd") < lost(rarer, "sgd")  # type: ignore[operator]
    assert choice(0.5, 0.5, 1.0, True)[0] == rarer  # long exchanges: half as many are much faster


def test_a_way_that_is_worth_it_gives_way_to_no_other_that_is_not() -> None:
    made = [one for one in forecast.outlooks(with_options(document(0.5, (1.0, 1.0)), 0.5, 0.1)) if one.nodes == 2]
    speeds = {"": 100.0, "--compress bf16": 101.5, "--sync-every 16 --compress int8": 106.0}
    known = [replace(one, images_per_second=speeds[one.way.links]) for one in made if one.way.links in speeds]
    assert communication.chosen(known, True, SGD).way == SYNC
    assert communication.chosen(known, False, SGD).way == Way()


def test_what_changes_the_training_is_not_taken_for_a_shorter_one_than_was_measured() -> None:
    enough = LOST_IN["sgd"]
    assert [is_advised(SYNC, Training("sgd", steps)) for steps in (enough, enough - 1)] == [True, False]
    assert is_advised(Way(compress="bf16"), Training("sgd", 1))
    short = Training("sgd", 12)
    way, said = choice(0.5, 0.3, 0.1, True, short)
    assert way == Way(compress="bf16") and choice(0.5, 0.3, 0.1, True, Training("sgd", enough))[0] == SYNC
    made = [one for one in forecast.outlooks(with_options(document(0.5, (1.0, 1.0)), 0.3, 0.1)) if one.nodes == 2]
    said = communication.left_out(made, made[0], short)
    assert said.startswith("; not taken: --sync-every 16 --compress int8, 1.9 x, which ")
    assert cost(SYNC, short) in said and "the 12 steps of this run" in said
    way, said = choice(0.5, 0.5, 0.1, True, short)
    assert way == Way() and "no exact way" in said and "allow" not in said


def test_what_cost_much_with_this_optimizer_or_is_not_known_is_not_taken() -> None:
    another = Training("another", 100_000)
    assert [is_advised(SYNC, training) for training in (SGD, ADAMW, another)] == [True, False, False]
    assert choice(0.5, 0.3, 0.1, True, ADAMW)[0] == Way(compress="bf16")
    made = [one for one in forecast.outlooks(with_options(document(0.5, (1.0, 1.0)), 0.3, 0.1)) if one.nodes == 2]
    said = communication.left_out(made, made[0], ADAMW)
    assert said.startswith("; not taken: --sync-every 16 --compress int8, 1.9 x, which lost ") and "with adamw" in said
    assert communication.left_out(made, made[0], SGD) == communication.left_out(made, made[0], another) == ""
    fastest = max(made, key=lambda one: one.images_per_second)
    assert communication.left_out(made, fastest, ADAMW) == ""
    way, said = choice(0.5, 0.5, 0.1, False, ADAMW)
    assert way == Way() and "allow" not in said
    assert is_advised(replace(SYNC, bucket_mb=8, shares="auto"), SGD)  # these change no training
    assert not is_advised(replace(SYNC, sync_every=17), SGD)
    for way in FOR_SLOW_LINKS:
        assert is_advised(way, SGD) and (lost(way, "sgd") == 0.0) != way.is_approximate


def test_nothing_is_changed_where_it_gains_nothing_and_why_is_said() -> None:
    way, said = choice(0.001, 0.001, 0.001, True)
    assert way == Way() and said.startswith("nothing is changed: 0% of a step is waiting") and "allow" not in said
    way, said = choice(0.5, 0.5, 0.1, False)
    assert way == Way() and "--allow-approximate would find a faster way" in said


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("--epochs 2 --communication auto --lr 1", "--epochs 2 --lr 1"),
        ("--communication=auto --allow-approximate", ""),
        ("--config {} --communication auto", "--config {} --communication as-given --no-allow-approximate"),
    ],
)
def test_the_trainer_is_given_the_choice_alone(typed: str, left: str) -> None:
    assert without_choice(shlex.split(typed)) == tuple(shlex.split(left))


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("way", FOR_SLOW_LINKS, ids=str)
def test_what_is_chosen_is_what_the_trainer_takes(config: bool, way: Way) -> None:
    asks = '--config \'{"communication": "auto", "allow_approximate": true}\'' if config else "--communication auto"
    args = [*without_choice(shlex.split(asks)), *shlex.split(way.links)]
    settings = parse(args)
    assert problems(settings, 2) == [] and settings.communication == "as-given"
    assert (settings.compress, settings.sync_every, settings.stream) == (way.compress, way.sync_every, way.stream)


def test_hosts_are_measured_before_the_choice_and_one_host_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    known, said, asked = cluster(1, 1), list[str](), list[Any]()

    def probe(*given: Any, wait: bool) -> dict[str, Any]:
        asked.append((given[3], wait))
        return {"forecast": with_options(document(0.5, (1.0, 1.0)), 0.3, 0.1)}

    monkeypatch.setattr(run_probe, "run", probe)
    settings = {"allow_approximate": False, "optimizer": "adamw"}
    args = communication.settled(settings, ["--communication", "auto"], known, known.hosts, [], said.append, True)
    assert args == ("--compress", "bf16") and asked == [(["--of-all", "--forecast", "--"], True)]
    assert said[-1].startswith("communication: --compress bf16: ")
    alone = communication.settled(settings, ["--communication", "auto"], known, known.hosts[:1], [], said.append)
    assert alone == () and len(asked) == 1 and "one host" in said[-1]
