"""Promises of states and buffers: kept under plain names, they fit any --parallel and any number of ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.train.parallel_models import adamw, data, network, strategy_of
from tests.train.parallel_ranks import run
from tests.train.parallel_states import BATCHES
from tests.train.resume_ranks import SETTINGS, train
from tests.train.test_profile import traced
from train.optim import make_groups, make_optimizer
from train.parallel import Strategy
from train.reporting.profile import FOLDER, trace_name
from train.settings import Settings, SettingsError
from train.start.group import Place

pytestmark = pytest.mark.slow
WAYS = {"ddp": (2,), "channels_last": (2,), "none": (1,), "fsdp": (1, 3)}


def assert_same(ours: Any, theirs: Any, exact: bool = True) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key], exact)
    elif isinstance(theirs, Tensor):
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(ours, theirs, **tolerance)
    else:
        assert ours == theirs


SAVED = {"save_ddp": 2, "save_compiled": 2, "save_fsdp": 3}


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    run("parallel_states", request.param, out, SAVED[request.param])
    return out


#: Each way to save and each way to go on once; the rest of the matrix is long.
USUAL = {("save_ddp", "fsdp"), ("save_ddp", "channels_last"), ("save_compiled", "none"), ("save_fsdp", "ddp")}


@pytest.mark.parametrize(
    ("saved", "way"),
    [
        pytest.param(function, way, marks=() if (function, way) in USUAL else pytest.mark.long)
        for function in SAVED
        for way in WAYS
    ],
    indirect=["saved"],
)
def test_a_state_goes_on_under_any_way(saved: Path, way: str) -> None:
    """Loaded to the bit; and the next step gives the weights that the run it comes from got."""
    state, following = torch.load(saved / "saved.pt"), torch.load(saved / "next.pt")
    assert list(state["model"]) == list(network().state_dict())
    for (_, rank), found in run("parallel_states", f"resume_{way}", saved, *WAYS[way]).items():
        if rank == 0 or way != "fsdp":
            assert_same(found["loaded"]["model"], state["model"])
            assert_same(found["loaded"]["optimizer"]["state"], state["optimizer"]["state"])
            assert_same(found["loaded"]["optimizer"]["groups"], state["optimizer"]["groups"])
        else:  # once per host is enough
            assert found["loaded"] == {"model": {}, "optimizer": {}}
        assert_same(found["next"], following["model"], exact=False)


def test_fsdp_gathers_in_the_precision_of_amp_and_reduces_in_float32(tmp_path: Path) -> None:
    """The gradients are ddp's but for rounding. Batch normalisation, which is left to the root, wants float32."""
    for found in run("parallel_states", "halved", tmp_path, 2).values():
        for batch_norm in (False, True):
            ours, ddps = found[f"fsdp {batch_norm}"], found[f"ddp {batch_norm}"]
            whole = {name for name, dtype in ours["gathered"].items() if dtype == torch.float32}
            assert whole == ({"0.1.weight", "0.1.bias"} if batch_norm else set())
            assert set(ours["gathered"].values()) <= {torch.float32, torch.bfloat16}
            assert ours["reduced"] == {torch.float32} and ours["kept"] == {torch.float32}
            for mine, theirs in zip(ours["gradients"], ddps["gradients"], strict=True):
                assert mine.dtype == torch.float32
                assert (mine - theirs).norm() < 0.02 * theirs.norm()
            for name, mine in ours["statistics"].items():
                torch.testing.assert_close(mine, ddps["statistics"][name], rtol=0.01, atol=0.001)


def test_fsdp_moves_no_more_of_a_model_to_the_device_than_a_block(tmp_path: Path) -> None:
    """What has been moved before is in pieces already."""
    for found in run("parallel_states", "cut_block_by_block", tmp_path, 2).values():
        assert sum(found["moved"]) == found["total"] and len(found["moved"]) > 3
        assert max(found["moved"]) == 33 * 96 + 33


def test_fsdp_uses_no_collective_whose_name_breaks_the_heap(tmp_path: Path) -> None:
    """As train.model.pieces says of names with more than 15 letters. gloo has all-reduces for _reduce_scatter_base_."""
    more: dict[str, Any] = {"epochs": 2, "ema": 0.9, "clip": 1.0, "profile": 3}
    settings = dataclasses.replace(SETTINGS, parallel="fsdp", run_dir=tmp_path, **more)
    assert train(2, settings) == [0, 0]
    for rank in (0, 1):
        used = {name.removeprefix("c10d::") for name in traced(tmp_path / FOLDER / trace_name(rank), "c10d::")}
        assert used <= {"_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_"}
        assert "_allgather_base_" in used


def test_another_model_is_refused_with_names() -> None:
    strategy = strategy_of(Place(), network(), parallel="none")
    model = strategy.model_state()
    wrong = {key: value for key, value in model.items() if key != "3.bias"} | {"5.weight": torch.zeros(2, 33)}
    before = {key: value.clone() for key, value in model.items()}
    with pytest.raises(SettingsError, match=r"lacks 3\.bias; 5\.weight is \[2, 33\] there and \[10, 33\] here"):
        strategy.load(wrong, None, None)
    assert_same(strategy.model_state(), before)


def test_another_optimizers_groups_are_refused() -> None:
    strategy = strategy_of(Place(), network(), parallel="none")
    state = strategy.optimizer_state(adamw(strategy))
    other = torch.optim.SGD(strategy.network.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="other parameter groups"):
        strategy.load(strategy.model_state(), other, state)


def test_loading_leaves_the_loaded_state_alone() -> None:
    strategy = strategy_of(Place(), network(), parallel="none")
    images, labels = data()

    def one_step(optimizer: torch.optim.Optimizer) -> None:
        functional.cross_entropy(strategy.module(images), labels).backward()
        optimizer.step()

    first = adamw(strategy)
    one_step(first)
    state = strategy.optimizer_state(first)
    before = {name: values["exp_avg"].clone() for name, values in state["state"].items()}
    second = adamw(strategy)
    strategy.load(strategy.model_state(), second, state)
    one_step(second)
    assert_same({name: values["exp_avg"] for name, values in state["state"].items()}, before)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("before", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_state_goes_on_in_another_memory_layout(name: str, before: torch.memory_format) -> None:
    """With fused kernels, which pair weights and momentum by their place in memory."""
    after = torch.channels_last if before is torch.contiguous_format else torch.contiguous_format
    settings = Settings(optimizer=name, lr=0.1)

    def laid_out(layout: torch.memory_format) -> tuple[Strategy, torch.optim.Optimizer]:
        strategy = strategy_of(Place(), network().to(memory_format=layout), parallel="none")  # type: ignore[call-overload]
        return strategy, make_optimizer(settings, make_groups(strategy.network, 0.05), torch.device("cpu"))

    def step(strategy: Strategy, optimizer: torch.optim.Optimizer, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        for parameter in strategy.network.parameters():
            parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=draw))
        optimizer.step()

    ours, optimizer = laid_out(before)
    for number in range(2):
        step(ours, optimizer, number)
    theirs, other = laid_out(after)
    theirs.load(ours.model_state(), other, ours.optimizer_state(optimizer))
    step(ours, optimizer, 2)
    step(theirs, other, 2)
    assert_same(theirs.model_state(), ours.model_state(), exact=False)
    assert_same(theirs.optimizer_state(other)["state"], ours.optimizer_state(optimizer)["state"], exact=False)


def test_settings_of_an_optimizer_are_this_runs() -> None:
    strategy = strategy_of(Place(), network(), parallel="none")

    def made(**settings: Any) -> torch.optim.Optimizer:
        chosen = Settings(optimizer="sgd", **settings)
        return make_optimizer(chosen, make_groups(strategy.network, chosen.weight_decay), torch.device("cpu"))

    first = made(momentum=0.9, weight_decay=0.1)
    for parameter in strategy.network.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    state = strategy.optimizer_state(first)
    second = made(momentum=0.5, weight_decay=0.2, nesterov=True)
    strategy.load(strategy.model_state(), second, state)
    decayed = second.param_groups[0]
    assert (decayed["momentum"], decayed["weight_decay"], decayed["nesterov"]) == (0.5, 0.2, True)
    assert_same(strategy.optimizer_state(second)["state"], state["state"])
    plain = made(momentum=0.0)
    strategy.load(strategy.model_state(), plain, state)
    assert strategy.optimizer_state(plain)["state"] == {}
    again = made(momentum=0.9)
    strategy.load(strategy.model_state(), again, strategy.optimizer_state(plain))
    for values in strategy.optimizer_state(again)["state"].values():
        assert not values["momentum_buffer"].any()  # as at the start of a run


def test_clipping_sees_the_whole_gradient(tmp_path: Path) -> None:
    images, labels = data()
    model, batch = network(), torch.from_numpy(BATCHES[0])
    functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for each in run("parallel_states", "clipped", tmp_path, 3).values():
        for found in each.values():
            torch.testing.assert_close(found["norm"], norm)
            for mine, parameter in zip(found["gradients"], model.parameters(), strict=True):
                torch.testing.assert_close(mine, parameter.grad)


def test_under_fsdp_all_ranks_skip_a_step_that_overflowed_on_one(tmp_path: Path) -> None:
    for found in run("parallel_states", "scaled", tmp_path, 2).values():
        assert_same(found["after"], found["before"])
        assert found["scale"] == 4.0


def test_batch_statistics_are_each_ranks_own_and_their_mean_is_for_evaluation(tmp_path: Path) -> None:
    found = run("parallel_states", "statistics", tmp_path, 2)
    one, other = found[2, 0], found[2, 1]
    assert not one["own"]["0.1.running_mean"].equal(other["own"]["0.1.running_mean"])
    for key in ("0.1.running_mean", "0.1.running_var"):
        torch.testing.assert_close(one["mean"][key], (one["own"][key] + other["own"][key]) / 2)
    assert_same(other["mean"], one["mean"])
    for rank in (one, other):
        assert_same(rank["inside"], rank["mean"])
        assert_same(rank["after"], rank["own"])
        assert_same(rank["rank 0's"], one["own"])
    assert one["own"]["0.1.num_batches_tracked"].dtype == torch.int64
    assert_same(other["rows"], one["rows"])
    assert_same(dict(enumerate(other["weights"])), dict(enumerate(one["weights"])))


def test_averaged_statistics_are_each_ranks_own_and_their_mean_is_for_evaluation(tmp_path: Path) -> None:
    found = run("parallel_states", "averaged_statistics", tmp_path, 2)
    for parallel in ("ddp", "fsdp"):
        one, other = found[2, 0][parallel], found[2, 1][parallel]
        assert not one["own"]["0.1.running_mean"].equal(other["own"]["0.1.running_mean"])
        for key, own in one["own"].items():
            torch.testing.assert_close(one["inside"][key], (own + other["own"][key]) / 2)
            assert one["state"][key].equal(one["inside"][key])
        assert_same(other["inside"], one["inside"])
        for rank in (one, other):
            assert_same(rank["after"], rank["before"])
            assert_same(rank["again"], rank["own"])
    assert_same(found[2, 0]["fsdp"]["state"], found[2, 0]["ddp"]["state"], exact=False)


def test_a_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    for found in run("parallel_states", "unused", tmp_path, 2).values():
        for when in ("at once", "later"):
            assert "no gradient reached unused.weight, unused.bias" in found[when]
            assert "--find-unused-parameters" in found[when]
        assert found["asked"] == found["static"] == ""


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    return run("parallel_states", "joined", tmp_path_factory.mktemp("joined"), 2)


def test_ddp_says_how_much_of_a_step_waits_for_others(joined: dict[tuple[int, int], Any]) -> None:
    for found in joined.values():
        assert 0 <= found["comm"] < 1
    assert strategy_of(Place(), network(), parallel="none").comm_share() is None


def test_ddp_says_which_rank_the_others_wait_for(joined: dict[tuple[int, int], Any]) -> None:
    fast, slow = joined[2, 0]["computing"], joined[2, 1]["computing"]
    assert slow > 0.2 and 0 < fast < slow
    assert strategy_of(Place(), network(), parallel="none").computing_seconds() is None


def test_uneven_inputs_are_joined(joined: dict[tuple[int, int], Any]) -> None:
    """Rank 0 makes three steps, rank 1 two: every sample weighs the same, and the replicas stay equal."""
    assert_same(joined[2, 1]["model"], joined[2, 0]["model"])
    images, labels = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for chosen in (slice(0, 8), slice(8, 16), slice(16, 20)):
        (functional.cross_entropy(model(images[chosen]), labels[chosen], reduction="sum") / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(joined[2, 0]["model"], dict(model.state_dict()), exact=False)
