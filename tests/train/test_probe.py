"""Promises of `python -m train.forecast.probe`: checked sums, nccl-tests' bandwidth, what a forecast needs to know."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.health.ways import FOR_SLOW_LINKS
from tests.train.test_agent import direct
from tests.train.test_group import free_port
from train.forecast import communication, link_options, probe, step_times
from train.model.build import build
from train.settings import EXIT_REFUSED, Settings, SettingsError
from train.start.group import Place

CPU = torch.device("cpu")
FIGURES = ("seconds", "cpu_seconds", "busy_seconds")


def two_ranks(folder: Path, *arguments: str, hosts: int = 1) -> tuple[list[int], str, dict[str, Any]]:
    """Two ranks on one host or two: their exit statuses, what they said, and the document that they leave. They are
    forked from this process, which has torch loaded."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"LOCAL_WORLD_SIZE": str(2 // hosts), "GLOO_SOCKET_IFNAME": "lo", "MUSTER_RUN_DIR": str(folder)}
    context, ranks = multiprocessing.get_context("fork"), []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank // hosts), "MUSTER_HOST": f"h{rank * hosts // 2}"}
        ranks.append(context.Process(target=one_rank, args=(folder / f"said-{rank}", place | own, list(arguments))))
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(300)
        each.kill()  # no-op for one that has ended
        each.join()
    said = "".join((folder / f"said-{rank}").read_text() for rank in range(2))
    path = folder / probe.PROBE_FILE
    return [int(each.exitcode or 0) for each in ranks], said, json.loads(path.read_text()) if path.exists() else {}


def one_rank(said: Path, variables: dict[str, str], arguments: list[str]) -> None:
    os.environ |= variables
    torch.set_num_threads(1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    status = probe.main(arguments)
    sys.stderr.flush()
    os._exit(status)


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert probe.bus_bandwidth(1000, 1.0, 2) == 1000
    assert probe.bus_bandwidth(1000, 2.0, 4) == 750
    assert probe.bus_bandwidth(1000, 1.0, 1) == 0


@pytest.mark.parametrize("ranks", [2, 3, 364])
def test_the_patterns_sums_are_exact_in_any_order(ranks: int) -> None:
    values = probe.pattern(4096, CPU)
    total = torch.zeros_like(values)
    for rank in reversed(range(ranks)):
        total += values * (rank + 1)
    assert torch.equal(total, values * (ranks * (ranks + 1) // 2))
    assert float(total.max()) < 2**24


def test_a_wrong_sum_names_rank_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def corrupt(tensor: torch.Tensor) -> None:
        tensor[3] += 1

    monkeypatch.setenv("MUSTER_HOST", "h7")
    monkeypatch.setattr(dist, "all_reduce", corrupt)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    values = probe.pattern(4096, CPU)
    with pytest.raises(probe.WrongValue, match="rank 0 on h7: 1 of 1024 sums"):
        probe.sum_once(values, torch.empty_like(values), Place())


@pytest.mark.slow
def test_every_size_is_measured_once_however_few_seconds_there_are(tmp_path: Path) -> None:
    """By hosts with one rank each, which the agent starts without torchrun."""
    assert direct(tmp_path, "train.forecast.probe", "--seconds", "0.02") == [(0, {}), (0, {})]
    document = json.loads((tmp_path / "0" / probe.PROBE_FILE).read_text())
    assert document["schema"] == probe.PROBE_SCHEMA
    assert [(entry["rank"], entry["host"]) for entry in document["ranks"]] == [(0, "h0"), (1, "h1")]
    first = document["all_reduce"]["sizes"][0]
    assert first["bytes"] == probe.MIB
    assert first["bus_bytes_per_second"] == pytest.approx(first["bytes"] / first["seconds"])
    assert [entry["bytes"] for entry in document["all_reduce"]["sizes"]] == list(probe.SUM_BYTES)
    assert document["all_reduce"]["sizes"][-1]["repeats"] == 1  # no time is left for more
    assert document["all_reduce"]["notes"] == []


@pytest.mark.parametrize(
    ("rate", "limit", "sums", "notes"),
    [
        (117.0, 3.5, [6, 6, 2], []),  # MiB/s: 1 Gbit/s; at about a second each there is time for one repeat
        (117.0, 60.0, [6, 6, 6], []),
        (117.0, 0.0, [1, 1, 1], []),
        (12.9, 0.0, [1, 1, 1], []),  # just under ten seconds
        (4.5, 3.0, [6, 1], ["128 MiB left out: one sum would take about 28 s"]),
        (0.5, 60.0, [6], [f"{size} MiB left out: one sum would take about {2 * size} s" for size in (16, 128)]),
    ],
)  # fmt: skip
def test_a_size_is_left_out_only_where_one_sum_takes_too_long(
    rate: float, limit: float, sums: list[int], notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank on a clock of its own; `rate`: MiB that are summed in a second."""
    now, done = [0.0], list[int]()

    def sum_once(values: torch.Tensor, given: torch.Tensor, place: Place) -> float:
        done.append(values.numel() * 4)
        now[0] += done[-1] / probe.MIB / rate
        return done[-1] / probe.MIB / rate

    monkeypatch.setattr(probe, "sum_once", sum_once)
    monkeypatch.setattr(probe, "pattern", lambda size, device: torch.empty(size // 4, device="meta"))
    monkeypatch.setattr(probe, "together", lambda value, place, device: value)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = probe.all_reduce(Place(), CPU, limit)
    assert [done.count(size) for size in probe.SUM_BYTES if size in done] == sums
    assert [entry["repeats"] for entry in found["sizes"]] == [max(1, count - 1) for count in sums]
    assert found["notes"] == notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(("--epochs", "1"), "unrecognized arguments", marks=pytest.mark.long),
        (("--forecast", "--", "--model", "resnet"), "torchvision has no such model"),
    ],
)
def test_wrong_arguments_are_refused_once_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    statuses, said, document = two_ranks(tmp_path, *arguments)
    assert statuses == [EXIT_REFUSED, EXIT_REFUSED]
    assert said.count(complaint) == 1
    assert not document


@pytest.mark.slow
def test_a_forecast_gets_all_that_it_needs(tmp_path: Path) -> None:
    arguments = ("--forecast", "--", "--model", "shufflenet_v2_x0_5", "--batch-size", "16")
    statuses, said, document = two_ranks(tmp_path, *arguments)
    assert statuses == [0, 0], said
    found = document["forecast"]
    parameters = sum(p.numel() for p in build("shufflenet_v2_x0_5", 10, 32, 0).parameters())
    assert found["gradient_bytes"] == sum(found["buckets"]) == parameters * 4
    assert len(found["buckets"]) == 2  # the first is torch's 1 MiB, though the usual one holds all
    assert [cut["equal"] for cut in found["shares"]] == [[8, 8]]  # both ranks are on one host
    assert sum(found["gradients"]) == found["gradient_bytes"] and 0 not in found["gradients"]
    for steps in found["steps"]:
        assert [step["samples"] for step in steps] == [4, 8]
        for step in steps:
            assert len(step["gradients"]) == len(found["gradients"])
            assert 0 < min(step["gradients"]) < max(step["gradients"]) < step["seconds"]
            assert step["gradients"][-1] < step["gradients"][0]  # the last layer's come first
            # Each is a median of its own: on a busy machine their sum may be longer than the median step.
            assert all(0 < part < step["seconds"] for part in (step["backward"], step["ready"][-1], step["update"]))
            assert step["ready"] == sorted(step["ready"])
    (sums,) = found["communication"]
    assert sums["world_size"] == 2
    assert all(len(sums[name]) == len(found["buckets"]) for name in FIGURES)
    assert "compress" not in sums and "exchange" not in sums  # one host has no slow link


@pytest.mark.slow
def test_a_forecast_gets_what_each_option_for_slow_links_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_options, "LEAST_WAIT", 0.0)  # on a busy machine, steps may take 20 times as long
    monkeypatch.setattr(communication, "MOST_SECONDS", 0.1)
    monkeypatch.setattr(step_times, "STEPS_SECONDS", 0.1)
    asked = ("--sync-every", "8", "--stream", "2", "--compress", "int4")
    arguments = ("--forecast", "--", "--model", "shufflenet_v2_x0_5", "--batch-size", "4", *asked)
    statuses, said, document = two_ranks(tmp_path, *arguments, hosts=2)
    assert statuses == [0, 0], said
    (sums,) = document["forecast"]["communication"]
    assert set(sums["compress"]) == {"bf16", "powersgd:4"} and set(sums["exchange"]) == {"int8", "int4"}
    for name in FIGURES:
        assert all(len(one[name]) == len(document["forecast"]["buckets"]) for one in sums["compress"].values())
        assert all(len(one[name]) == 2 and min(one[name]) > 0 for one in sums["exchange"].values())
    run, epochs = document["forecast"]["run"], Settings.epochs
    first, evaluations = run["exchanges"]["8"]
    assert run["warmup"] == pytest.approx(0.4 * run["steps"], abs=0.5)
    assert first == pytest.approx(run["warmup"] * (1 + 1 / 2 + 1 / 4) / 3) and 0 < evaluations <= epochs
    assert set(run["exchanges"]) == {"8", *(str(way.sync_every) for way in FOR_SLOW_LINKS if way.sync_every)}
    assert run["powersgd"] == pytest.approx(0.1 * run["steps"], abs=0.5)
    assert len(document["forecast"]["cold"]) == 2 and min(document["forecast"]["cold"]) >= 0


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, (["bf16", "powersgd:4"], ["int8"])),
        ({"communication": "auto"}, (["bf16", "powersgd:4"], ["int8"])),
        ({"compress": "fp16"}, (["bf16", "powersgd:4", "fp16"], ["int8"])),
        ({"sync_every": 4}, (["bf16", "powersgd:4"], ["int8", "none"])),
        ({"ema": 0.9}, (["bf16", "powersgd:4"], [])),
        ({"parallel": "fsdp"}, ([], [])),
    ],
)
def test_options_are_measured_where_the_link_holds_up_training(settings: dict[str, Any], kinds: Any) -> None:
    given = Settings(**settings)
    assert link_options.kinds_of(given, 0.06, 1.0) == kinds
    asked = [kind for kind in (given.compress,) if kind != "none" or given.sync_every]
    assert [kind for kinds in link_options.kinds_of(given, 0.04, 1.0) for kind in kinds] == (
        asked if given.parallel == "ddp" else []
    )


def test_members_of_a_round_are_its_hosts() -> None:
    members = link_options.members_of([2, 3, 6], 2, 1)
    assert members.ranks == (range(2), range(2, 3)) and members.here == range(2)
    assert 4 not in link_options.members_of([2, 3, 6], 2, 4).here


def test_every_number_of_hosts_is_measured_up_to_four_then_doubled_ones() -> None:
    assert step_times.rounds(1) == [1]
    assert step_times.rounds(3) == [1, 2, 3]
    assert step_times.rounds(24) == [1, 2, 3, 4, 8, 16, 24]


def test_ranks_are_counted_host_by_host() -> None:
    assert step_times.ends_of_hosts(["a", "a", "b", "c", "c", "c"]) == [2, 3, 6]


def test_a_steps_figures_are_the_medians() -> None:
    steps = [{"seconds": seconds, "ready": [seconds / 2]} for seconds in (9.0, 1.0, 3.0)]
    assert step_times.medians(steps) == {"seconds": 3.0, "ready": [1.5]}


def test_figures_of_a_round_are_those_of_its_slowest_rank() -> None:
    def entry(world: int, seconds: float) -> dict[str, Any]:
        return {"nodes": world, "world_size": world, **{name: [seconds] for name in FIGURES}}

    every = [[entry(2, 1.0), entry(3, 5.0)], [entry(2, 2.0), entry(3, 4.0)], [entry(3, 9.0)]]
    assert [one["seconds"] for one in communication.merged(every)] == [[2.0], [9.0]]


@pytest.mark.parametrize("between", [[], ["--"]])
def test_options_and_the_trainers_arguments_are_kept_apart(between: list[str]) -> None:
    options, rest = probe.parse(["--seconds", "2", "--forecast", *between, "--epochs", "3"])
    assert options.seconds == 2 and rest == ["--epochs", "3"]
    assert probe.parse(["--forecast"])[1] == []
    assert probe.parse([])[1] is None
    with pytest.raises(SettingsError, match="unrecognized"):
        probe.parse(["--forcast"])
