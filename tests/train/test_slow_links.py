"""Promises of --compress and --sync-every: what is averaged, that nothing is lost, and that a run can be broken off."""

import dataclasses
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.parallel_ranks import run
from tests.train.resume_ranks import CRASH, SETTINGS, STEPS, Change, crash_in_step, end_of, in_order, own_host, train
from tests.train.test_resume import assert_equal, losses, settings_in
from train.checkpoints import CheckpointError, files, load_weights
from train.checkpoints.agree import meant
from train.checkpoints.files import load, members_of
from train.inference.weights import read
from train.parallel import exchange
from train.parallel.codecs import BLOCK, FLOATS, SLICE, codec_of, decode, encode
from train.parallel.coded_all_reduce import MESSAGE_BYTES, chunks, in_turns, keep_to_one_thread, message_spans
from train.parallel.exchange import (
    Piece,
    divided,
    exchanges_before,
    exchanges_in_warmup,
    period_in_warmup,
    periods_in_warmup,
)
from train.parallel.momentum import Leg, MeanMomentum, mean_momentum
from train.settings import EXIT_REFUSED, Settings, compression, problems

PLAIN_SGD = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05, "schedule": "constant", "warmup": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "sync": {"sync_every": 5},
    "pieces": {"sync_every": 4, "stream": 2, "optimizer": "sgd"},
    "stream": {"sync_every": 4, "stream": 2, "compress": "int8", "outer_momentum": 0.5, "outer_lr": 0.7},
    "int4": {"sync_every": 3, "compress": "int4", "optimizer": "sgd", "nesterov": True, "shares": "3,1"},
    "powersgd": {"compress": "powersgd:3", "lr": 0.002},
}


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, SLICE, SLICE + 300])
@pytest.mark.parametrize("kind", ["none", "bf16", "fp16", "int8", "int4"])
def test_a_code_loses_at_most_half_a_step(kind: str, count: int) -> None:
    codec = codec_of(kind)
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 100
    code = encode(codec, values)
    assert len(code) == codec.size(count) and code.dtype == torch.uint8
    lost = (decode(codec, code, torch.empty(count)) - values).abs()
    if kind in FLOATS:
        bits = {"none": 60, "fp16": 11, "bf16": 8}[kind]
        assert (lost <= values.abs() * 2.0**-bits).all()
        return
    block, bits = BLOCK[int(kind[3:])], int(kind[3:])
    for first in range(0, count, block):
        half = values[first : first + block].abs().max() / (2 ** (bits - 1) - 1) / 2
        assert lost[first : first + block].max() <= half * 1.0001


@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "int4"])
def test_what_a_code_lost_is_what_its_reader_lacks(kind: str) -> None:
    codec, values, lost = codec_of(kind), torch.randn(1000), torch.empty(1000)
    code = torch.empty(codec.size(1000), dtype=torch.uint8)
    codec.encode_slice(values, code, lost)
    torch.testing.assert_close(lost, values - decode(codec, code, torch.empty(1000)), rtol=0, atol=1e-6)
    assert lost.any() != codec.is_exact


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_blocks_keep_signs_zeros_and_what_is_not_finite(kind: str) -> None:
    codec, block = codec_of(kind), BLOCK[int(kind[3:])]
    ends = torch.tensor([1.0, -1.0]).repeat(block // 2)
    assert decode(codec, encode(codec, ends), torch.empty(block)).equal(ends)
    assert decode(codec, encode(codec, torch.zeros(block)), torch.empty(block)).equal(torch.zeros(block))
    assert decode(codec, encode(codec, ends * 1e-38), torch.empty(block)).abs().max() <= 1e-38
    wrong = torch.cat([ends, ends])
    wrong[3] = torch.nan
    decoded = decode(codec, encode(codec, wrong), torch.empty(2 * block))
    assert decoded[:block].isnan().any() and decoded[block:].equal(ends)


def test_chunks_are_whole_blocks_and_pieces_are_about_equal() -> None:
    assert chunks(1000, 3, 256) == [0, 256, 512, 1000]
    assert chunks(100, 3, 256) == [0, 0, 0, 100]
    assert divided([5, 1, 1, 1, 5], 2, int) == [[5, 1, 1], [1, 5]]
    assert divided([9, 1], 3, int) == [[9], [1]]


def test_others_get_their_messages_in_turns() -> None:
    assert list(in_turns([(2, "abc"), (0, ""), (1, "d")])) == [(2, "a"), (1, "d"), (2, "b"), (2, "c")]
    assert list(in_turns([])) == []


def test_messages_hold_each_value_once() -> None:
    for kind in ("none", "int8"):
        codec, start, end = codec_of(kind), 3 * SLICE, 400 * SLICE + 5
        found = list(message_spans(codec, start, end))
        assert (found[0][0].start, found[-1][0].stop) == (start, end)
        assert all(before[0].stop == after[0].start for before, after in pairwise(found))
        assert len(found) > 1
        for values, place in found:
            assert (place.start, place.stop) == (codec.size(values.start), codec.size(values.stop))
            assert place.stop - place.start <= MESSAGE_BYTES and values.start % SLICE == 0


def piece_of(*parameters: torch.Tensor, anchor: torch.Tensor, started: torch.Tensor | None = None) -> Piece:
    made = [torch.nn.Parameter(parameter) for parameter in parameters]
    starts = list(accumulate((p.numel() for p in made[:-1]), initial=0))
    return Piece([], made, starts, anchor, None, torch.optim.SGD([anchor], 1.0), [1], started=started)


def test_weights_are_read_where_they_are_as_they_would_be_copied() -> None:
    sizes = [(5,), (0,), (), (3, 4), (2,)]
    live = [torch.randn(size) for size in sizes]
    flat = torch.cat([values.reshape(-1) for values in live])
    anchor = torch.randn(len(flat))
    piece, copied = piece_of(*live, anchor=anchor), piece_of(*live, anchor=anchor, started=flat)
    assert piece.is_flat
    for start in range(len(flat)):
        for end in range(start + 1, len(flat) + 1):
            part = slice(start, end)
            assert piece.gradient(part, torch.empty(SLICE)).equal((anchor - flat)[part])
            assert copied.gradient(part, torch.empty(SLICE)).equal((anchor - flat)[part])
    strided = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert not piece_of(strided, anchor=torch.zeros(96)).is_flat


def test_an_exchange_over_a_slow_link_says_that_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int] = []
    monkeypatch.setattr(exchange, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(exchange, "still_alive", lambda: said.append(1))
    made = SimpleNamespace(all_reduce=SimpleNamespace(moved=0), waited=0.0)
    piece = piece_of(torch.zeros(1), anchor=torch.zeros(1))

    def background(moves: bool) -> None:
        for _ in range(20):
            time.sleep(0.02)
            made.all_reduce.moved += moves
        piece.mean.set_result("the mean")  # type: ignore[union-attr, arg-type]

    for moves in (False, True):
        said.clear()
        piece.mean = Future()
        thread = threading.Thread(target=background, args=[moves])
        thread.start()
        assert exchange.Exchange.result(made, piece) == "the mean"  # type: ignore[arg-type, comparison-overlap]
        thread.join()
        assert bool(said) == moves
    assert made.waited > 0


@pytest.mark.slow
def test_a_mean_of_gradients_in_bf16_is_rounded_once_when_it_leaves_and_once_as_a_sum(tmp_path: Path) -> None:
    """And the same bits on all ranks."""
    ranks = list(run("slow_links_ranks", "rounded", tmp_path, 3).values())
    for number, (mean, every) in enumerate(ranks[0]):
        assert all(found[number][0].equal(mean) for found in ranks)
        exact = torch.stack(every).double().mean(0)
        half_a_step = 2.0**-8 * (mean.abs().double() + torch.stack(every).double().abs().mean(0))
        assert ((mean - exact).abs() <= 1.01 * half_a_step).all()
        assert mean.bfloat16().to(mean.dtype).equal(mean) and (mean.abs().sum() > 0 or not len(mean))


# -- momentum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_who_is_alone_keeps_its_momentum(layout: torch.memory_format) -> None:
    """The way of one step, read back."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2, 4, 4).contiguous(memory_format=layout))
    groups = [{"params": [weight], "lr_factor": 0.5, "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)
    momentum = MeanMomentum(optimizer)
    momentum.follow(weight, torch.ones(3, 2, 4, 4), Leg(1.0, 1))  # there is none yet: nothing happens
    for _ in range(4):
        before = weight.detach().clone()
        weight.grad = torch.randn(3, 2, 4, 4)
        optimizer.step()
    own = optimizer.state[weight]["momentum_buffer"]
    known, leg = own.clone(), Leg().after_step(momentum.rate()).ended(Leg())
    assert leg.rates == pytest.approx(0.1) and leg.weight == 1
    momentum.follow(weight, torch.ones(3, 2, 4, 4), leg.after_step(None))  # of a part of the way nothing is known
    assert own.equal(known)
    own.zero_()
    way = (before - weight).detach()
    momentum.follow(weight, way, Leg())  # no step of any size: there is no mean
    assert not own.any()
    if weight.is_contiguous():
        for part in (slice(0, 40), slice(40, 96)):
            momentum.follow(weight, way.view(-1)[part], leg, part)
    else:
        momentum.follow(weight, way, leg)
    torch.testing.assert_close(own, known, rtol=1e-4, atol=1e-4)


def test_a_short_leg_counts_by_its_part_of_the_one_before() -> None:
    long = Leg(1.6, 16).ended(Leg())
    short = Leg(0.4, 4).ended(long)
    assert (long.weight, short.weight, Leg(1.2, 12).ended(short).weight) == (1, 0.25, 1)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.ones(1)
    MeanMomentum(optimizer).follow(weight, torch.full((1,), 0.8), short)
    assert optimizer.state[weight]["momentum_buffer"].item() == pytest.approx(0.75 * 1 + 0.25 * 2)


def test_momentum_is_the_mean_s_in_the_parameter_s_own_type() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.ones_like(weight)
    MeanMomentum(optimizer).follow(weight, torch.full((2,), 0.5), Leg(0.25, 1))
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "adamw"}, {"nesterov": True}, {"outer_momentum": 0.9}, {"amp": "fp16"}, {}],
    ids=str,
)
def test_whose_momentum_members_go_on_with(changes: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    found = mean_momentum(optimizer, Settings(**{"optimizer": "sgd", "sync_every": 4, **changes}))
    assert (found is None) == bool(changes)


@pytest.mark.slow
def test_after_an_exchange_momentum_is_the_mean_of_all_steps_since_the_one_before(tmp_path: Path) -> None:
    for kinds in run("slow_links_ranks", "steered", tmp_path, 1, 3).values():
        for momentum, promised in (pair for parameters in kinds for pair in parameters):
            torch.testing.assert_close(momentum, promised, rtol=1e-4, atol=1e-4)


# -- what goes together ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compress": "zip"}, "--compress 'zip': it has to be none, bf16"),
        ({"compress": "powersgd:2"}, "a rank from 3 to 32"),
        ({"compress": "int8"}, "give --sync-every 16"),
        ({"compress": "powersgd", "sync_every": 4}, "--compress int8"),
        ({"compress": "bf16", "parallel": "fsdp"}, "goes with --parallel ddp, not with fsdp"),
        ({"compress": "int8", "parallel": "fsdp"}, "goes with --parallel ddp, not with fsdp"),
        ({"sync_every": 4, "parallel": "horovod"}, "goes with --parallel ddp, not with horovod"),
        ({"bucket_mb": 8, "parallel": "fsdp"}, "--bucket-mb 8: goes with --parallel ddp, not with fsdp"),
        ({"stream": 2}, "--stream 2: goes with --sync-every"),
        ({"outer_lr": 0.7}, "--outer-lr 0.7: goes with --sync-every"),
        ({"sync_warmup": 0.3}, "--sync-warmup 0.3: goes with --sync-every"),
        ({"sync_every": 2, "stream": 3}, "at most one piece in each of --sync-every's 2 steps"),
        ({"sync_every": 4, "ema": 0.9}, "--ema"),
        ({"sync_every": 4, "sync_bn": True}, "--sync-bn"),
        ({"sync_every": 4, "bad_samples": "skip"}, "--bad-samples skip"),
        ({"sync_every": -1}, "0 or more"),
        ({"sync_every": 4, "outer_momentum": 1.0}, "below 1"),
        ({"communication": "auto", "compress": "bf16"}, "it chooses --compress itself"),
        ({"communication": "auto", "sync_every": 4}, "it chooses --sync-every itself"),
        ({"communication": "auto", "sync_warmup": 0.3}, "chooses that itself: leave this one out"),
        ({"communication": "auto", "parallel": "fsdp"}, "goes with --parallel ddp, not with fsdp"),
        ({"allow_approximate": True}, "goes with --communication auto"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(given: dict[str, Any], said: str) -> None:
    (problem,) = problems(Settings(**given), 2)
    assert said in problem


def test_what_goes_together_is_not_refused() -> None:
    for kind in KINDS.values():
        assert problems(Settings(**{**kind, "shares": ""}), 2) == []
    assert compression("powersgd").rank == 4 and compression("powersgd:3").rank == 3


# -- whole trainings ---------------------------------------------------------------------------------------------------


def two_hosts_of(*sizes: int) -> dict[int, Change]:
    """Changes by rank: hosts with so many ranks each, which share a folder."""

    def placed(local: int, size: int) -> Change:
        return lambda: os.environ.update(LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(size))

    places = [(local, size) for size in sizes for local in range(size)]
    return {rank: placed(*place) for rank, place in enumerate(places)}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def data_parallel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """The folder of a run of plain data parallelism with this momentum, which is made once."""

    @cache
    def made(momentum: float) -> Path:
        folder = tmp_path_factory.mktemp("ddp")
        settings = settings_in(folder, **{**PLAIN_SGD, "keep": 9, "momentum": momentum})
        assert train(3, settings, normalised=False) == [0] * 3
        return folder

    return made


MEMBERS, HOSTS = (3,), (2, 1)  # sizes of the hosts of three ranks


def in_every_step() -> list[Any]:
    """Each way of averaging with one of the two divisions into hosts, and with both in the long matrix."""
    averaged, coded = "average their weights", "send each other gradients"
    cases: list[tuple[dict[str, Any], float, str, tuple[int, ...] | None]] = [
        ({"sync_every": 2, "sync_warmup": 0.99, "outer_momentum": 0.9}, 1e-5, f"{averaged} every 2 steps", MEMBERS),
        ({"sync_every": 1, "shares": "1,3,2", "momentum": 0.9}, 1e-5, f"{averaged} every step", HOSTS),
        ({"sync_every": 1, "compress": "int8"}, 3e-3, "weights (changes are sent as int8) every step", HOSTS),
        ({"compress": "fp16"}, 3e-4, f"{coded} rounded to fp16", None),
        ({"compress": "bf16", "shares": "1,3,2"}, 3e-3, f"{coded} rounded to bf16", MEMBERS),
        ({"compress": "powersgd:32", "epochs": 3}, 3e-2, f"{coded} as matrices of rank 32", HOSTS),
    ]
    return [
        pytest.param(
            *case, hosts, marks=() if hosts == usual else pytest.mark.long, id=f"{name}-{case[0]}"
        )
        for *case, usual in cases
        for name, hosts in (("members", MEMBERS), ("hosts", HOSTS))
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "tolerance", "said", "hosts"), in_every_step())
def test_in_every_step_it_is_data_parallelism_but_for_rounding(
    changes: dict[str, Any],
    tolerance: float,
    said: str,
    hosts: tuple[int, ...],
    data_parallel: Callable[[float], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """For SGD, and any shares; also where a host has two ranks, which are one member."""
    ddp = data_parallel(changes.get("momentum", 0.0))
    capfd.readouterr()
    ours = settings_in(tmp_path, **{**PLAIN_SGD, "keep": 9, **changes})
    assert train(3, ours, normalised=False, changes=two_hosts_of(*hosts)) == [0] * 3
    assert said in capfd.readouterr().out
    assert_close(end_of(tmp_path), end_of(ddp), tolerance)
    assert losses(tmp_path) == pytest.approx(losses(ddp), rel=10 * tolerance)


def test_exchanges_become_rarer_in_the_first_part_of_a_run() -> None:
    periods = [period_in_warmup(step, 16, 40) for step in range(1, 41)]
    assert periods == [1] * 10 + [2] * 10 + [4] * 10 + [8] * 10
    assert [period_in_warmup(step, 5, 7) for step in range(1, 8)] == [1, 1, 1, 2, 2, 4, 4]
    assert {period_in_warmup(step, every, 9) for every in (1, 2) for step in range(1, 10)} == {1}
    assert period_in_warmup(1, 16, 1) == 1


def test_an_evaluation_has_an_exchange_of_its_own_where_none_was_due() -> None:
    assert exchanges_before([10, 20, 32, 40], every=16, warmup=10, stream=0) == 2  # the warm-up ends with one
    assert exchanges_before([16, 32], every=16, warmup=0, stream=0) == 0
    assert exchanges_before([16, 32], every=16, warmup=0, stream=4) == 2  # each piece has another step
    assert exchanges_before([19, 20], every=16, warmup=40, stream=4) == 1  # of the periods of the warm-up


def test_so_many_exchanges_for_a_step_are_in_the_first_part_as_are_said() -> None:
    """Whole periods of each length, so that none is cut off."""
    for every in range(1, 41):
        periods = periods_in_warmup(every)
        for times in (1, 3):
            warmup = len(periods) * max(periods) * times
            counted = sum(step % period_in_warmup(step, every, warmup) == 0 for step in range(1, warmup + 1))
            assert counted == pytest.approx(warmup * exchanges_in_warmup(every)), (every, times)


@pytest.mark.slow
def test_hosts_have_the_same_weights_and_statistics_after_an_exchange_and_others_between(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_in(tmp_path, sync_every=7, keep=9, sync_warmup=7 / STEPS)
    assert train(2, settings) == [0, 0]
    assert "average their weights every 7 steps, more often in the first 7 steps, and before" in capfd.readouterr().out
    # Together in steps 1, 2, 3, 4 and 7; epochs, with evaluations, end at 4, 8 and 12.
    for step, alike in ((2, True), (4, True), (6, False), (8, True), (10, False), (12, True)):
        one, other = (load(tmp_path / "checkpoints", step, member=member) for member in (0, 1))
        common, rows = (load(tmp_path / "checkpoints", step)[part] for part in ("model", "rank_buffers"))
        name = "0.weight"
        assert one["model"][name].equal(other["model"][name]) == alike, step
        assert one["model"][name].equal(common[name]) == alike, step
        assert rows[0].equal(rows[1]) == alike, step


def break_and_resume(folder: Path, step: int, **changes: Any) -> list[Path]:
    """Two hosts with a folder each, killed in this step and started again."""
    folders = [folder / name for name in ("a", "b")]
    settings = settings_in(folder, **changes)
    assert train(2, settings, changes=hosts(folders, crash_in_step(step))) == [CRASH] * 2
    assert train(2, settings, changes=hosts(folders)) == [0, 0]
    return folders


def hosts(folders: list[Path], change: Change = lambda: None) -> dict[int, Change]:
    """By rank: each on a host of its own, with its folder there."""
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return {rank: in_order(own_host(each), change) for rank, each in enumerate(folders)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("stream", (7,)),
        ("int4", (5,)),
        ("powersgd", (12,)),
        *(pytest.param(kind, (5, 7, 12), marks=pytest.mark.long) for kind in KINDS),
    ],
    ids=str,
)
def test_a_run_killed_in_any_step_ends_with_the_same_bits(kind: str, steps: tuple[int, ...], tmp_path: Path) -> None:
    """Also what each host alone knows: its error feedback, its optimizer. A second checkpoint has begun in each case:
    then a first one is whole on both hosts."""
    whole = [tmp_path / "whole" / name for name in ("a", "b")]
    assert train(2, settings_in(tmp_path / "whole", **KINDS[kind]), changes=hosts(whole)) == [0, 0]
    assert (whole[0] / "checkpoints/step-12.pt").read_bytes() == (whole[1] / "checkpoints/step-12.pt").read_bytes()
    if kind == "powersgd":  # what it left out is part of what is compared: there is some, another one on each host
        ends = [load(folder / "checkpoints", STEPS, member=member) for member, folder in enumerate(whole)]
        errors = [end["strategy"]["error_dict"][0] for end in ends]
        assert errors[0].abs().max() > 0 and not errors[0].equal(errors[1])
    for step in steps:
        broken = break_and_resume(tmp_path / f"broken-{step}", step, **KINDS[kind])
        for member, (ours, theirs) in enumerate(zip(broken, whole, strict=True)):
            for part in ("model", "rank_buffers", "optimizer", "exchange"):
                assert_equal(end_of(ours)[part], end_of(theirs)[part], f"killed in step {step}: {part}")
            mine, unbroken = (load(folder / "checkpoints", STEPS, member=member) for folder in (ours, theirs))
            assert_equal(mine, unbroken, f"killed in step {step}: of member {member}")


EVERY_5 = {"sync_every": 5, "blocking_checkpoints": True}


@pytest.fixture(scope="module")
def broken_in_step_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks in one folder, which tests copy: the checkpoint of step 6 is behind."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    train(2, settings_in(folder, **EVERY_5), changes=dict.fromkeys(range(2), crash_in_step(8)))
    return folder


@pytest.fixture(scope="module")
def hosts_broken_in_step_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a folder for each host, a and b."""
    folder = tmp_path_factory.mktemp("hosts") / "run"
    folders = [folder / name for name in ("a", "b")]
    train(2, settings_in(folder, **EVERY_5), changes=hosts(folders, crash_in_step(8)))
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    assert train(2, settings_in(folder, **EVERY_5)) == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "changes", "said"),
    [
        (1, {}, "weights and optimizer are the mean of what 2 of 2 hosts had learned alone"),
        pytest.param(
            3, {}, "weights and optimizer are the mean of what 2 of 2 hosts had learned alone", marks=pytest.mark.long
        ),
        (2, {"sync_every": 0}, "sync_every 5 -> 0"),
        pytest.param(2, {"stream": 2}, "stream 0 -> 2", marks=pytest.mark.long),
    ],
    ids=["one", "three", "off", "stream"],
)
def test_another_number_of_hosts_goes_on_from_the_mean(
    other: int,
    changes: dict[str, Any],
    said: str,
    broken_in_step_8: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(broken_in_step_8, tmp_path / "run"))
    capfd.readouterr()
    own = [load(folder / "checkpoints", 6, member=member) for member in (0, 1)]
    later = settings_in(folder, **{"sync_every": 5, "checkpoint_every": "7", "keep": 9, **changes})
    assert train(other, later) == [0] * other
    text = capfd.readouterr().out
    assert said in text and "mean of what 2 of 2 hosts" in text and len(losses(folder)) == STEPS
    assert not own[0]["model"]["0.weight"].equal(own[1]["model"]["0.weight"])


@pytest.mark.slow
def test_the_mean_is_weighted_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    for found in run("slow_links_ranks", "mean_of_members", tmp_path, 1, 3).values():
        weights, optimizer, scaler, number = found
        assert number == 2 and scaler == {"scale": 4.0}
        assert weights["w"].tolist() == [10 + (3 * 1 + 1 * 5) / 4] * 2
        assert optimizer["state"]["w"]["exp_avg"].tolist() == [(3 * 2 + 1 * 6) / 4] * 2
        assert optimizer["state"]["w"]["step"].item() == 7 and optimizer["groups"] == [{"lr": 0.1, "names": ["w"]}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "said"), [("b", "are what one of 2 hosts had"), ("ab", "2 hosts' own files of --sync-every none")]
)
def test_a_host_that_lost_all_its_own_files_is_said(
    lost: str, said: str, hosts_broken_in_step_8: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(hosts_broken_in_step_8, tmp_path / "run"))
    folders = [folder / name for name in ("a", "b")]
    for name in lost:
        for path in list((folder / name / "checkpoints").glob("member-*")):
            path.unlink()
    capfd.readouterr()
    assert train(2, settings_in(folder, **EVERY_5), changes=hosts(folders)) == [0, 0]
    text = capfd.readouterr().out
    assert said in text and "going on from step-6.pt" in text
    assert_equal(end_of(folders[0])["model"], end_of(folders[1])["model"])


def without_step_6(folder: Path) -> None:
    for path in list(folder.glob("*step-6.*")):
        path.unlink()


def with_torn_step_6(folder: Path) -> None:
    path = folder / "member-1-step-6.pt"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(without_step_6, "(rank 1): no own file of step 6, which is passed over"), (with_torn_step_6, "is torn")],
)
def test_a_step_that_a_host_could_not_finish_gives_way_to_the_one_before(
    spoil: Callable[[Path], None],
    said: str,
    hosts_broken_in_step_8: Path,
    unbroken: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its own file comes first: without it the others' checkpoint of that step would lose what it had learned."""
    folder = Path(shutil.copytree(hosts_broken_in_step_8, tmp_path / "run"))
    folders = [folder / name for name in ("a", "b")]
    spoil(folders[1] / "checkpoints")
    capfd.readouterr()
    assert train(2, settings_in(folder, **EVERY_5), changes=hosts(folders)) == [0, 0]
    text = capfd.readouterr().out
    assert said in text and "going on from step-4.pt" in text
    assert_equal(end_of(folders[1])["model"], end_of(unbroken)["model"])
    assert (folders[0] / "checkpoints/left-step-6.pt").is_file()


@pytest.mark.slow
def test_members_files_are_removed_with_their_checkpoints(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, run_dir=tmp_path, sync_every=3, keep=1, eval_every=9)
    assert train(2, settings) == [0, 0]
    folder = tmp_path / "checkpoints"
    assert {int(n) for path in folder.glob("member-*") for n in re.findall(r"step-(\d+)", path.name)} == {STEPS}
    assert members_of(folder, STEPS, 2) == [0, 1]


@pytest.mark.slow
def test_a_host_that_dies_ends_the_others_within_the_timeout(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, sync_every=3)
    statuses = train(2, settings, changes={1: crash_in_step(6)})
    assert statuses[1] == CRASH and statuses[0] not in (0, EXIT_REFUSED)


def test_a_member_s_own_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = files.write(tmp_path, 4, {"model": {}}, member=1, members=2)
    for use in (files.load_path, meant, load_weights, read):
        with pytest.raises(CheckpointError, match=r"one host alone knew.*give .*/step-4\.pt"):
            use(path)


@pytest.mark.slow
def test_powersgd_takes_gradients_of_a_lower_rank_than_its_own(tmp_path: Path) -> None:
    """Such as those of a small layer, or of one sample."""
    for found, exact in run("slow_links_ranks", "low_rank", tmp_path, 2).values():
        assert found.isfinite().all()
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


# -- the exchange itself -----------------------------------------------------------------------------------------------


def test_the_background_works_with_one_thread_and_training_with_all() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as background, ThreadPoolExecutor(1) as later:
        torch.set_num_threads(3)
        try:
            keep_to_one_thread(background)
            found = [pool.submit(torch.get_num_threads).result() for pool in (background, later)]
            assert (torch.get_num_threads(), found) == (3, [1, 3])
        finally:
            torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        ("feedback", 3),
        ("streamed_feedback", 2),
        pytest.param("feedback", 2, marks=pytest.mark.long),
        pytest.param("streamed_feedback", 3, marks=pytest.mark.long),
    ],
)
def test_what_few_bits_lose_comes_with_the_next_exchange(scenario: str, ranks: int, tmp_path: Path) -> None:
    """Changes of which some are far below a step of the code arrive in the end, on all ranks alike."""
    found = run("slow_links_ranks", scenario, tmp_path, ranks)
    for (size, rank), (weights, exact, step_of_code) in found.items():
        assert weights.equal(found[size, 0][0])
        assert (weights - exact).abs().max() <= 3 * step_of_code, (size, rank)
        small = exact.abs() < 3 * step_of_code
        assert not small.all() and exact.abs().max() > 20 * step_of_code


@pytest.mark.slow
def test_what_a_host_learns_while_a_piece_is_under_way_is_counted_once(tmp_path: Path) -> None:
    for weights, exact, _ in run("slow_links_ranks", "streamed", tmp_path, 3).values():
        torch.testing.assert_close(weights, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_equal_weights_are_not_sent_at_the_start_and_others_are(tmp_path: Path) -> None:
    for equal, after, sent in run("slow_links_ranks", "starts", tmp_path, 2).values():
        assert equal == [True, False] and after == [True, True]
        assert sent[0] < 20_000 < sent[1]
