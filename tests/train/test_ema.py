"""Promises of train.model.ema: the averages, and evaluating with them without leaving a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train import model_ranks
from tests.train.test_model import Results
from train.model.ema import Ema


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def change(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_averages_follow_the_formula_with_its_warm_up() -> None:
    model = network()
    ema, wanted = Ema(model, 0.25), {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(1, 8):
        change(model, step)
        ema.update(step)
        decay = min(0.25, (1 + step) / (10 + step))  # 2/11 first, 0.25 from step 2 on
        wanted = {n: decay * wanted[n] + (1 - decay) * p.detach() for n, p in model.named_parameters()}
    for name in wanted:
        torch.testing.assert_close(ema.state()[name], wanted[name])


def test_statistics_are_averaged_as_weights_are_and_counts_are_not() -> None:
    model = network()
    ema, wanted = Ema(model, 0.5), model.get_buffer("1.running_mean").clone()
    for step in range(1, 5):
        model(torch.randn(6, 3) + step)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * model.get_buffer("1.running_mean")
    torch.testing.assert_close(ema.state()["1.running_mean"], wanted)
    assert "1.num_batches_tracked" not in ema.state()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ema.swapped_in():
        assert model.get_buffer("1.running_mean").equal(ema.state()["1.running_mean"])
        assert model.get_buffer("1.num_batches_tracked") == 4
    assert all(tensor.equal(own[name]) for name, tensor in model.state_dict().items())


def test_a_state_without_statistics_begins_with_the_networks() -> None:
    """As checkpoints of before had them."""
    model = network()
    model(torch.randn(6, 3))
    ema = Ema(network(), 0.9)
    parameters = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    ema.network.load_state_dict(model.state_dict())
    ema.load(parameters)
    assert ema.state()["1.running_var"].equal(model.get_buffer("1.running_var"))
    assert all(ema.state()[name].equal(tensor) for name, tensor in parameters.items())


def test_inside_the_network_computes_with_the_averages_and_outside_with_its_own_bits() -> None:
    model = network().eval()
    ema = Ema(model, 0.9)
    change(model, 1)
    ema.update(1)
    inputs = torch.randn(5, 3)
    own, kept, places = model(inputs), model.state_dict(), [p.data_ptr() for p in model.parameters()]
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    with ema.swapped_in():
        averaged = model(inputs)
        assert all(p.equal(ema.state()[n]) for n, p in model.named_parameters())
        assert [p.data_ptr() for p in model.parameters()] == places
    other = network().eval()
    other.load_state_dict({**other.state_dict(), **ema.state()})
    assert averaged.equal(other(inputs))
    assert not averaged.equal(own)
    assert all(tensor.equal(kept[name]) for name, tensor in model.state_dict().items())


def test_an_error_inside_leaves_the_networks_own_weights() -> None:
    model = network()
    ema = Ema(model, 0.9)
    change(model, 1)
    kept = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError), ema.swapped_in():
        raise RuntimeError
    assert all(p.equal(k) for p, k in zip(model.parameters(), kept, strict=True))


def test_half_precision_weights_have_float32_averages() -> None:
    model = network().bfloat16()
    ema = Ema(model, 0.999)
    change(model, 1)
    ema.update(1)
    assert {a.dtype for a in ema.state().values()} == {torch.float32}
    kept = [p.detach().clone() for p in model.parameters()]
    with ema.swapped_in():
        pass
    assert all(p.equal(k) for p, k in zip(model.parameters(), kept, strict=True))


def test_a_loaded_state_goes_on_bit_by_bit() -> None:
    models, emas = [network(), network()], []
    for model in models:
        emas.append(Ema(model, 0.9))
    for step in range(1, 4):
        change(models[0], step)
        emas[0].update(step)
    models[1].load_state_dict(models[0].state_dict())
    emas[1].load({name: tensor.clone() for name, tensor in emas[0].state().items()})
    for model, ema in zip(models, emas, strict=True):
        change(model, 4)
        ema.update(4)
    assert all(tensor.equal(emas[1].state()[name]) for name, tensor in emas[0].state().items())


def test_averages_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"another model: 9\.weight differ"):
        ema = Ema(network(), 0.9)
        ema.load({**ema.state(), "9.weight": torch.zeros(1)})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return model_ranks.run(Path(tmp_path_factory.mktemp("ranks")), "averaged", 2)


@pytest.mark.slow
def test_sharded_parameters_have_the_averages_of_whole_ones(ranks: Results) -> None:
    for rank in ranks:
        plain, sharded = rank["plain"], rank["sharded"]
        assert plain["state"].keys() == sharded["state"].keys()
        for name, average in sharded["state"].items():
            torch.testing.assert_close(average, plain["state"][name])
            assert average.equal(ranks[0]["sharded"]["state"][name])
            assert average.equal(sharded["loaded"][name])


@pytest.mark.slow
def test_a_sharded_network_computes_with_its_averages_and_then_with_its_own_weights(ranks: Results) -> None:
    for rank in ranks:
        values: dict[str, Any] = rank["sharded"]
        torch.testing.assert_close(values["within"], rank["plain"]["within"])
        assert values["before"].equal(values["after"])
        assert not values["before"].equal(values["within"])
