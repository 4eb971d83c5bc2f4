"""Promises of `make bench-links`: what is compared with what, which figure is the worst, and what is not run twice."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import links
from benchmarks.links import OPTIONS, WORKS, Case, Record, RunFailed, figures, losses, missing, parse
from benchmarks.links_project import noise_images
from launch.health import ways
from train.settings import parse as settings_of
from train.settings import problems


def speed(link: str, model: str, option: str, nodes: int, rate: float, alone: float) -> Record:
    return {"link": link, "model": model, "option": option, "nodes": nodes, "rate": rate, "alone": alone}


def accuracy(dataset: str, option: str, seed: int, percent: float) -> Record:
    return {"dataset": dataset, "option": option, "seed": seed, "accuracy": percent}


RECORDS = [
    speed("1gbit", "resnet18", "plain", 2, 12.0, 10.0),
    speed("1gbit", "resnet18", "bf16", 2, 36.0, 20.0),  # on a machine that was twice as fast then
    speed("1gbit", "resnet18", "sync16", 2, 19.5, 10.0),
    speed("1gbit", "vgg11", "plain", 2, 1.6, 2.0),
    speed("1gbit", "vgg11", "bf16", 2, 2.0, 2.0),
    speed("1gbit", "vgg11", "powersgd", 2, 3.8, 2.0),
    speed("1gbit", "vgg11", "sync16", 2, 3.0, 2.0),
    speed("1gbit", "resnet18", "sync16", 3, 28.8, 10.0),
    *(accuracy("digits", "plain", seed, percent) for seed, percent in enumerate((99.0, 98.0, 97.0))),
    *(accuracy("digits", "bf16", seed, percent) for seed, percent in enumerate((98.0, 98.0, 98.0))),
    *(accuracy("made", "plain", seed, percent) for seed, percent in enumerate((90.0, 91.0))),
    *(accuracy("made", "sync16", seed, percent) for seed, percent in enumerate((89.0, 91.2))),
    accuracy("made", "stream16", 0, 87.0),
]


def test_a_figure_is_the_best_option_of_the_worst_model() -> None:
    assert figures(RECORDS) == {
        "two_hosts_1gbit_exact": 1.0,  # VGG-11's bf16; ResNet-18's is 1.8
        "two_hosts_1gbit_approximate": 1.9,  # VGG-11's PowerSGD; ResNet-18's sync16 is 1.95
        "two_hosts_200mbit_approximate": None,  # not measured
        "three_hosts_1gbit_approximate": 2.88,  # of the one model that was measured
        "exact_over_plain": 1.25,  # VGG-11's; ResNet-18's is 1.5
        "accuracy_loss_points": 0.4,
        "accuracy_loss_points_asked_for": 3.0,
        "worst_forecast_error": None,
    }
    assert set(figures([]).values()) == {None}


def test_a_loss_is_a_mean_over_the_seeds_that_both_have() -> None:
    lost = {("digits", "bf16"): 0.0, ("made", "sync16"): 0.4, ("made", "stream16"): 3.0}
    assert losses(one for one in RECORDS if "accuracy" in one) == lost
    assert losses([accuracy("digits", "bf16", 0, 90.0)]) == {}


def test_tables_have_a_row_for_each_result_and_a_column_for_a_forecast() -> None:
    expected = {"link": "200mbit", "model": "vgg11", "nodes": 2, "rates": {"bf16": 6.5, "sync16": 18.0}, "alone": 4.0}
    records = [*RECORDS, expected, speed("200mbit", "vgg11", "bf16", 2, 3.0, 2.0)]
    assert figures(records)["worst_forecast_error"] == 0.083
    rows = list(links.speed_rows(records))
    assert rows[1].split() == ["1gbit", "resnet18", "plain", "2", "12.0", "10.0", "1.20"]
    assert rows[-1].split() == ["200mbit", "vgg11", "bf16", "2", "3.0", "2.0", "1.50", "1.62"]
    (row,) = [row for row in links.accuracy_rows(RECORDS) if row.startswith("made     sync16")]
    assert row.split() == ["made", "sync16", "2", "90.10", "0.40"]


# -- rates -------------------------------------------------------------------------------------------------------------


def steps_of(seconds: list[float]) -> list[dict[str, Any]]:
    """Steps of eight images each, which took so long, one after the other."""
    ends = [sum(seconds[:number]) for number in range(1, len(seconds) + 1)]
    return [{"event": "step", "images": 8, "seconds": end} for end in ends]


def test_a_rate_is_of_the_steps_after_the_first_one() -> None:
    period = [1.0, 1.0, 1.0, 5.0]  # with its exchange
    assert links.rate(steps_of([9.0, *period, *period])) == pytest.approx(64 / 16)


FAKE_FAB = """#!/bin/sh
cd {folder}
n=$(cat asked 2>/dev/null | wc -l)
echo "$NODES $INVENTORY $ARGS" >> asked
echo "muster | run r$n: here"
"""


@pytest.mark.parametrize(
    "old",
    [(("resnet18", 2), math.inf, 99.0), (("vgg11", 2), -math.inf, 99.0)],
    ids=["other", "old"],
)
def test_one_host_is_what_the_same_hosts_make_apart_before_and_after(
    old: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fab"
    program.write_text(FAKE_FAB.format(folder=tmp_path))
    program.chmod(0o755)
    work, case = WORKS[2], links.speed_case("1gbit", WORKS[2], "bf16", 2)
    apart, bf16 = work.period_of(links.APART), work.period_of(OPTIONS["bf16"])
    periods = (apart, bf16, apart, bf16, apart, apart, bf16, apart, apart)
    for number, seconds in enumerate((1.0, 2.0, 3.0, 2.0, 4.0, 4.0, 2.0, 4.0, 8.0)):
        folder = tmp_path / "runs" / f"r{number}"
        folder.mkdir(parents=True)
        steps = steps_of([9.0] * periods[number] + [seconds] * 12)
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(step) for step in steps))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(links, "FAB", program)
    hosts = links.Hosts("bench-links")
    first = hosts.measure(case)
    assert (first["rate"], first["apart"], first["alone"]) == (4.0, [8.0, 2.67], 2.67)  # the mean, for each of two
    assert hosts.measure(case)["apart"] == [2.67, 2.0]  # the last one is taken again
    hosts.apart = old
    assert hosts.measure(case)["apart"] == [2.0, 2.0]
    monkeypatch.setattr(links, "forecast_of", lambda name, case: {"rates": {"bf16": 6.0}})
    expected = hosts.measure(Case("forecast", case.about, case.arguments))
    assert (expected["rates"], expected["apart"]) == ({"bf16": 6.0}, [2.0, 1.0])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert all(line.startswith("2 inventory/bench-links ") for line in asked)
    assert ["--sync-every" in line for line in asked] == [True, False, True, False, True, True, False, True, True]
    assert not list((tmp_path / "runs").iterdir())


def test_hosts_that_train_apart_have_no_exchange() -> None:
    for work in WORKS:
        settings = settings_of(work.arguments(links.APART, 2))
        assert problems(settings, 2) == [] and settings.sync_warmup == 0
        assert settings.sync_every > work.steps(links.APART) > work.steps(OPTIONS["plain"])


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.model)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_an_epoch_of_whole_periods_that_the_trainer_does_not_refuse(work: links.Work, name: str) -> None:
    option = OPTIONS[name]
    for nodes in (2, 3):
        settings = settings_of(work.arguments(option, nodes))
        assert problems(settings, nodes) == []
        dataset = getattr(noise_images, settings.dataset.partition(":")[2])("train", Path())
        steps, period = len(dataset) / settings.batch_size, work.period_of(option)
        assert settings.batch_size == nodes * work.batch_size
        assert steps == work.steps(option) == (1 + links.PERIODS) * period
        assert period > max(2, steps / 10) or settings.sync_every  # before that PowerSGD sends whole gradients
        assert (settings.sync_every, settings.stream) == (option.sync_every, option.number("--stream"))


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.number("--stream")])
def test_each_piece_leaves_and_takes_effect_once_in_the_period_that_counts(name: str) -> None:
    """As train.parallel.exchange has it."""
    option, settings = OPTIONS[name], settings_of(OPTIONS[name].arguments.split())
    for work in WORKS:
        first, every = work.period_of(option), option.sync_every // settings.stream
        sent = range(every, work.steps(option) + 1, every)
        effects = [step + every for step in sent if step + every <= work.steps(option)]
        assert len([step for step in sent if step > first]) == links.PERIODS * settings.stream
        assert len([step for step in effects if step > first]) == links.PERIODS * settings.stream


def test_a_forecast_is_read_from_what_make_check_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ["--parallel ddp", "--bucket-mb 4", "--compress bf16", "--compress bf16 --bucket-mb 4"]
    ways += ["--sync-every 16 --stream 4 --compress int8", "--parallel fsdp *"]
    speeds = [(nodes, {"images_per_second": 9.0, "steady_images_per_second": 10.0 * nodes}) for nodes in (1, 2)]
    rows = [{"nodes": nodes, "option": way, **each} for nodes, each in speeds for way in ways]
    document = json.dumps({"schema": "muster.check/2", "forecast": {"rows": rows}})
    monkeypatch.setattr(links, "output_of", lambda command, variables: f"==> Surveying\n{document}\n")
    case = Case("forecast", {"link": "1gbit", "model": "resnet18", "nodes": 2}, [])
    found = links.forecast_of("lab", case)
    rates = {"plain": 20.0, "--bucket-mb 4": 20.0, "bf16": 20.0, "stream16": 20.0}
    assert found == {"rates": rates}
    assert links.option_of("--bucket-mb 4") == links.Option(links.EXACT, "--bucket-mb 4")
    assert links.option_of("bf16") == OPTIONS["bf16"]


def test_every_option_is_one_that_a_forecast_compares() -> None:
    long = ways.Training("sgd", 100_000)
    compared = {way.links: way for way in (ways.PLAIN, *ways.FOR_SLOW_LINKS, ways.STREAMED)}
    assert {option.arguments for option in OPTIONS.values()} == set(compared)
    for option in OPTIONS.values():
        way = compared[option.arguments]
        assert way.is_approximate == (option.kind in (links.APPROXIMATE, links.ASKED)) and way.is_verified
        assert ways.is_advised(way, long) == (option.kind != links.ASKED)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_training_for_accuracy_is_not_refused(name: str) -> None:
    for learning in links.LEARNINGS:
        assert problems(settings_of(learning.arguments(OPTIONS[name], 0)), 3) == []


def test_pictures_of_noise_come_in_any_number() -> None:
    dataset = noise_images.__getattr__("of_130_16")("train", Path())
    assert len(dataset) == 130 and dataset[129][0].shape == (3, 16, 16)
    with pytest.raises(AttributeError, match="of_960_32 is 960 pictures"):
        noise_images.__getattr__("some")


# -- which cases, and which not again ----------------------------------------------------------------------------------


def test_plain_ddp_is_measured_always() -> None:
    given = parse(["--parts", "speed", "--models", "resnet18", "--options", "bf16", "--nodes", "2"])
    assert [tuple(case.about.values()) for case in links.cases_of(given)] == [
        about
        for link in ("1gbit", "200mbit")
        for about in (
            (link, "resnet18", 2, 0.4),
            *((link, "resnet18", option, 2, 0.4) for option in ("plain", "bf16")),
        )
    ]
    assert not links.cases_of(parse(["--parts", "accuracy"]))[0].about.keys() & {"link", "nodes"}


def test_all_cases_have_keys_of_their_own_which_change_with_their_arguments() -> None:
    cases = links.cases_of(parse([]))
    assert len({case.key for case in cases}) == len(cases)
    case = Case("speed", {"link": "1gbit", "nodes": 2}, ["--model", "vgg11"])
    assert case.key != Case("speed", case.about, ["--model", "resnet18"]).key
    assert case.key != Case("speed", case.about | {"cpus": 0.25}, case.arguments).key


def test_the_lab_gets_the_limits_of_a_case_where_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse(["--parts", "speed", "--models", "resnet18", "--options", "plain"])
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(links, "fab", lambda name, task, HOSTS, CPUS, LINK: seen.append((task, HOSTS, CPUS, LINK)))
    monkeypatch.setattr(links, "awake", lambda hosts: nullcontext())
    monkeypatch.setattr(links, "measured", lambda case, *_: seen.append((case.part, case.about["nodes"])))
    assert list(links.run_speed(links.cases_of(given), True, Path())) == [None] * 8
    assert seen == [
        event
        for link in ("1gbit", "200mbit")
        for nodes, cpus in ((2, 0.4), (3, 0.25))
        for event in (("lab", 3, cpus, link), ("forecast", nodes), ("speed", nodes))
    ]


def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "build" / "results.jsonl"
    one, two = (
        Case("accuracy", {"dataset": "digits", "option": "plain", "seed": seed}, [str(seed)]) for seed in (0, 1)
    )
    assert links.read_results(path) == {}
    assert links.measured(one, lambda case: {"accuracy": 98.0}, path)
    assert links.measured(one, lambda case: {"accuracy": 99.0}, path)
    with path.open("a") as file:
        file.write('{"case": "accuracy 1", "accu')  # cut off
    results = links.read_results(path)
    assert missing([one, two], results) == [two]
    assert missing([one, one, one, two], results) == [one, two]  # a third turn
    assert links.middle(results[one.key])["accuracy"] == 99.0 and results[one.key][0]["seed"] == 0


def test_of_several_turns_the_middle_ratio_counts() -> None:
    rates = [(19.0, 10.0), (24.0, 20.0), (18.0, 10.0)]  # 1.9, 1.2, 1.8
    found = [speed("1gbit", "vgg11", "sync32", 2, rate, alone) for rate, alone in rates]
    assert links.middle(found) == found[2] | {"ratios": [1.9, 1.2, 1.8]}
    assert links.middle(found[:2])["rate"] == 24.0  # the worse one of two
    assert links.middle(found[:1]) == found[0]
    given = parse(["--parts", "speed", "--links", "1gbit", "--models", "vgg11", "--nodes", "2", "--turns", "2"])
    options = [case.about.get("option") for case in links.cases_of(given)]
    assert options == [None, *OPTIONS, *OPTIONS]  # one forecast, then turn by turn
    with pytest.raises(SystemExit):
        parse(["--turns", "0"])


def test_a_run_that_failed_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(case: Case) -> Record:
        raise RunFailed("rank 1: out of memory")

    path = tmp_path / "results.jsonl"
    assert links.measured(Case("speed", {"link": "", "nodes": 1}, ["--model", "vgg11"]), fail, path) is None
    assert not path.exists() and "out of memory" in capsys.readouterr().out


def test_a_command_that_fails_or_takes_too_long_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="no memory"):
        links.output_of(["sh", "-c", "echo no memory; exit 1"], {})
    monkeypatch.setattr(links, "LIMIT_SECONDS", 0.01)
    with pytest.raises(RunFailed, match=r"more than 0.01 s"):
        links.output_of(["sleep", "5"], {"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize("what", ["links", "models", "options", "parts"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(what: str) -> None:
    with pytest.raises(SystemExit, match=rf"--{what} 10gbit: it is none of \w+, "):
        parse([f"--{what}", "10gbit"])
    with pytest.raises(SystemExit, match="give some of"):
        parse([f"--{what}", ","])


def test_the_figures_are_json() -> None:
    assert json.loads(json.dumps(figures(RECORDS)))["exact_over_plain"] == 1.25
