"""Promises of train.optim: who is decayed, and the learning rate of every step."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from train.optim import Schedule, make_groups, make_optimizer, peak_lr
from train.settings import Settings

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 4, 2), nn.LayerNorm(2))


def test_norms_and_biases_are_not_decayed_and_nothing_is_left_out() -> None:
    model = network()
    decayed, undecayed = make_groups(model, 0.05)
    assert (decayed["param_names"], decayed["weight_decay"]) == (["0.weight", "3.weight"], 0.05)
    assert undecayed["param_names"] == ["0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias"]
    assert undecayed["weight_decay"] == 0.0
    parameters = dict(model.named_parameters())
    for group in (decayed, undecayed):
        assert all(parameters[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_follows_the_settings_and_knows_the_names(name: str) -> None:
    settings = Settings(optimizer=name, lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.01)
    optimizer = make_optimizer(settings, make_groups(network(), settings.weight_decay), CPU)
    decayed, undecayed = optimizer.state_dict()["param_groups"]
    assert type(optimizer).__name__.lower() == name
    assert (decayed["lr"], decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.01, 0.0)
    assert decayed["param_names"] == ["0.weight", "3.weight"]
    if name == "sgd":
        assert (decayed["momentum"], decayed["nesterov"]) == (0.8, True)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fused_updates_are_those_of_the_plain_loop(name: str) -> None:
    settings = Settings(optimizer=name, lr=0.01)
    ours, theirs = network(), network()
    groups = make_groups(theirs, 0.05)
    optimizers: list[torch.optim.Optimizer] = [
        make_optimizer(settings, make_groups(ours, 0.05), CPU),
        torch.optim.SGD(groups, lr=0.01, momentum=0.9, foreach=False)
        if name == "sgd"
        else torch.optim.AdamW(groups, lr=0.01, foreach=False),
    ]
    for step in range(5):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_the_default_schedule_is_warm_up_over_a_fifth_and_half_a_cosine() -> None:
    """Bit by bit: a run's weights follow from it."""
    schedule = Schedule(Settings(), 12, 108)
    for step in range(108):
        warm_up = 0.002 * (step + 1) / 22
        cosine = 0.002 * (1 + math.cos(math.pi * ((step - 22) / 86))) / 2
        assert schedule.at(step) == (warm_up if step < 22 else cosine)


def test_warm_up_is_a_part_of_all_steps_and_ends_at_the_peak() -> None:
    for total in (1, 7, 100, 12345):
        schedule = Schedule(Settings(lr=1.0, warmup=0.1), 10, total)
        rates = [schedule.at(step) for step in range(schedule.warm_up_steps)]
        assert schedule.warm_up_steps == max(1, round(total / 10))
        assert rates == sorted(rates)
        assert rates[-1] == 1.0


@pytest.mark.parametrize("kind", ["cosine", "step", "constant"])
def test_without_warm_up_the_first_step_has_the_peak(kind: str) -> None:
    assert Schedule(Settings(lr=0.5, warmup=0.0, schedule=kind), 10, 50).at(0) == 0.5


def test_the_step_schedule_drops_every_so_many_epochs() -> None:
    settings = Settings(lr=1.0, warmup=0.0, schedule="step", step_every=30, step_gamma=0.1)
    schedule = Schedule(settings, 10, 900)
    assert [schedule.at(step) for step in (0, 299, 300, 599, 600, 899)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_constant_rate_stays() -> None:
    schedule = Schedule(Settings(lr=0.25, warmup=0.1, schedule="constant"), 10, 100)
    assert {schedule.at(step) for step in range(10, 100)} == {0.25}


def test_scale_lr_multiplies_by_the_batch_over_the_reference() -> None:
    settings = Settings(lr=0.1, batch_size=8192, scale_lr=256)
    assert peak_lr(settings) == pytest.approx(3.2)  # Goyal et al. 2017
    assert Schedule(replace(settings, schedule="constant"), 1, 10).at(9) == peak_lr(settings)
    assert peak_lr(replace(settings, scale_lr=0)) == 0.1


def test_setting_a_step_gives_all_groups_a_float() -> None:
    settings = Settings()
    optimizer = make_optimizer(settings, make_groups(network(), 0.05), CPU)
    lr = Schedule(settings, 12, 108).set(optimizer, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [lr, lr]
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_the_state_holds_all_that_decides_the_rate() -> None:
    assert Schedule(Settings(), 12, 108).state() == {
        "peak": 0.002,
        "schedule": "cosine",
        "warmup": 0.2,
        "step_every": 30,
        "step_gamma": 0.1,
        "steps_per_epoch": 12,
        "total_steps": 108,
    }


def test_a_first_step_that_is_skipped_leaves_no_trace_in_the_momentum() -> None:
    """fp16's first steps often overflow; torch's fused SGD kept uninitialised memory then."""
    settings = Settings(optimizer="sgd", lr=0.5, amp="fp16")
    weight = nn.Parameter(torch.ones(1000))
    optimizer = make_optimizer(settings, [{"params": [weight], "weight_decay": 0.0}], CPU)
    scaler = torch.amp.GradScaler("cpu")
    for gradient, wanted in ((float("inf"), 1.0), (1.0, 0.5)):
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.detach().unique().tolist() == [wanted]
