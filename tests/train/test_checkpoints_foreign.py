"""Promises of train.checkpoints.foreign: weights of many makers, plain names, no code run, what does not fit named."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from train.checkpoints import CheckpointError, files, fit, load_weights


def network(classes: int = 10) -> nn.Module:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda weights: {prefix + name: tensor for name, tensor in weights.items()}


MAKERS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda weights: weights,
    "DistributedDataParallel": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "both": prefixed("module._orig_mod."),
    "both, the other way": prefixed("_orig_mod.module."),
    "AveragedModel": lambda weights: {"n_averaged": torch.tensor(3), **prefixed("module.")(weights)},
    "state_dict": lambda weights: {"epoch": 3, "state_dict": prefixed("module.")(weights), "best_acc1": 0.5},
    "model_state_dict": lambda weights: {"model_state_dict": weights, "optimizer": {}},
    "torchvision": lambda weights: {"model": weights, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=1)},
    "ema": lambda weights: {"ema": {"state_dict": weights}},
}


@pytest.mark.parametrize("maker", MAKERS)
def test_weights_come_out_under_plain_names(tmp_path: Path, maker: str) -> None:
    weights = network().state_dict()
    torch.save(MAKERS[maker](weights), tmp_path / "weights.pth")
    torch.testing.assert_close(load_weights(tmp_path / "weights.pth"), dict(weights), rtol=0, atol=0)


def test_files_of_before_the_zip_format_are_read(tmp_path: Path) -> None:
    weights = network().state_dict()
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(load_weights(tmp_path / "old.pth"), dict(weights), rtol=0, atol=0)


def test_safetensors_are_read(tmp_path: Path) -> None:
    weights = network().state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    torch.testing.assert_close(load_weights(tmp_path / "weights.safetensors"), dict(weights), rtol=0, atol=0)


def test_one_of_ours_is_verified(tmp_path: Path) -> None:
    weights = network().state_dict()
    path = files.write(tmp_path, 7, {"model": weights, "ema": {"decay": 0.9}, "position": {"step": 7}})
    assert load_weights(path)["3.bias"].equal(weights["3.bias"])
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="altered"):
        load_weights(path)


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"model": network().state_dict(), "args": Payload()}
    torch.save(content, tmp_path / "weights.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="refused"):
        load_weights(tmp_path / "weights.pth")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"<html>not found</html>"])
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_weights(tmp_path / name)


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [torch.zeros(1)], {"state_dict": {}}])
def test_a_file_without_weights_is_reported(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_weights(tmp_path / "w.pth")


def test_fitting_weights_are_loaded_whole() -> None:
    weights = dict(network().state_dict())
    state, notes = fit(network(), weights)
    assert (set(state), notes) == (set(weights), [])


def test_a_head_of_other_classes_is_left_at_random_and_said() -> None:
    ours = network(7)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    state, notes = fit(ours, dict(network(10).state_dict()))
    assert notes == ["3: left at random, the file's is for 10 classes and this network has 7"]
    assert all(ours.state_dict()[name].equal(before[name]) for name in before)  # nothing is changed yet
    ours.load_state_dict(state)
    assert ours.get_parameter("3.weight").equal(before["3.weight"])
    assert ours.get_parameter("0.weight").equal(network(10).get_parameter("0.weight"))


def test_all_that_does_not_fit_is_named() -> None:
    weights = dict(network().state_dict())
    weights["extra"] = weights.pop("1.bias")
    weights["0.weight"] = torch.zeros(4, 3, 5, 5)
    with pytest.raises(CheckpointError, match=r"missing: 1\.bias; unexpected: extra; .*0\.weight 4x3x5x5 for 4x3x3x3"):
        fit(network(), weights)


def test_old_files_without_batch_counters_and_unused_heads_fit() -> None:
    weights = {name: tensor for name, tensor in network().state_dict().items() if "num_batches" not in name}
    state, notes = fit(network(), weights | {"aux1.fc.weight": torch.zeros(2)})
    network().load_state_dict(state)
    assert notes == ["auxiliary classifiers in the file are not used"]
