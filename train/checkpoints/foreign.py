"""Weights to start a training from: ours, other people's .pt and .pth files, .safetensors. Plain names come out."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoints import files
from train.checkpoints.files import CheckpointError

WRAPPERS = ("state_dict", "model_state_dict", "model", "weights", "ema")
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
EXTRA = ("n_averaged",)  # torch.optim.swa_utils.AveragedModel's counter
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # torchvision's heads that only its own training uses
COUNTER = "num_batches_tracked"  # of batch normalisation; files of before PyTorch 0.4.1 have none


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights in the file, on the CPU. One of ours is verified against its manifest.

    Raises CheckpointError where it is missing, altered, holds code or no weights.
    """
    files.refuse_member(path)
    if path.suffix == ".safetensors":
        return stripped(read_safetensors(path))
    if files.step_of(path) is not None and files.manifest_of(path).is_file():
        return stripped(unwrapped(files.load_path(path), path))
    return stripped(unwrapped(read_torch(path), path))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from error


def read_torch(path: Path) -> Any:
    try:
        with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):  # torchvision's "args"
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from error
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError and others here
        raise CheckpointError(
            f"{path} is no file of weights, or holds more than tensors and plain values, which could run code when "
            f"unpacked: refused. Fix: torch.save(model.state_dict(), ...) where it was made. torch says: "
            f"{files.reason_of(error)}"
        ) from error


def unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    """The innermost dict of tensors, through the wrappers that people put around a state_dict."""
    while isinstance(content, dict):
        inner = next((content[name] for name in WRAPPERS if isinstance(content.get(name), dict)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict) or not content or not all(isinstance(each, Tensor) for each in content.values()):
        found = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path} holds no weights (found: {found or 'nothing'}): a state_dict is needed, alone or under one of "
            f"{', '.join(WRAPPERS)}"
        )
    return content


def stripped(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the wrappers' prefixes, which all names have or none."""
    weights = {name: tensor for name, tensor in weights.items() if name not in EXTRA}
    while weights:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def fit(network: nn.Module, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """(state to hand to network.load_state_dict, notes for the user); changes nothing.

    A classifier head for another number of classes is left as the network has it, and said so. Raises CheckpointError
    that names every missing, unexpected and mis-shaped entry.
    """
    own, notes = network.state_dict(), []
    head, classes = head_of(network)
    given = {name: tensor for name, tensor in weights.items() if name in own or not name.startswith(AUXILIARY)}
    if len(given) < len(weights):
        notes.append("auxiliary classifiers in the file are not used")
    wrong = [name for name in own if name in given and own[name].shape != given[name].shape]
    if wrong and all(name.rpartition(".")[0] == head for name in wrong):
        theirs = len(given[wrong[0]]) if given[wrong[0]].ndim else 0
        notes.append(f"{head}: left at random, the file's is for {theirs} classes and this network has {classes}")
        given = {name: tensor for name, tensor in given.items() if name.rpartition(".")[0] != head} | {
            name: own[name] for name in own if name.rpartition(".")[0] == head
        }
        wrong = []
    given |= {name: own[name] for name in own if name.endswith(COUNTER) and name not in given}
    problems = [
        *named("missing", [name for name in own if name not in given]),
        *named("unexpected", [name for name in given if name not in own]),
        *named("of another shape", [f"{n} {shape(given[n])} for {shape(own[n])}" for n in wrong]),
    ]
    if problems:
        raise CheckpointError(f"the weights do not fit the {type(network).__name__}: {'; '.join(problems)}")
    return given, notes


def head_of(network: nn.Module) -> tuple[str, int]:
    """Name and outputs of the classifier: the last linear or convolutional layer, as in all of torchvision's."""
    layers = [(name, each) for name, each in network.named_modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    if not layers:
        return "", 0
    name, layer = layers[-1]
    return name, layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def named(what: str, names: list[str], most: int = 20) -> list[str]:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{what}: {', '.join(names[:most])}{more}"] if names else []


def shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
