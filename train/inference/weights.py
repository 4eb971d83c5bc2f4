"""Trained weights and their recipe, from a checkpoint, a run's folder, or files that `python -m train export` wrote.

Everything is read with weights_only=True or as safetensors: no pickled code runs. Tensors come on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.checkpoints import files, foreign
from train.checkpoints.files import CheckpointError, State
from train.inference import recipe as recipes
from train.inference.recipe import Recipe, RecipeError


@dataclass(frozen=True)
class Trained:
    """weights: as torchvision's own state_dict of recipe.model with that many classes."""

    path: Path
    recipe: Recipe
    weights: dict[str, Tensor]


def read(path: Path, ema: bool = False, say: Callable[[str], None] = lambda text: None) -> Trained:
    """Weights at `path`: step-<n>.pt, a folder of checkpoints or of a run (its newest intact one; `say` reports those
    that were passed over), or an exported .safetensors, or .pt with its .json beside it. ema: the averaged weights.

    Raises CheckpointError.
    """
    try:
        files.refuse_member(path)
        if path.is_dir():
            return newest(path, ema, say)
        if not path.exists():
            raise CheckpointError(f"there is no {path}: name a checkpoint (step-<n>.pt), or a run's folder")
        if path.suffix == ".safetensors":
            return exported(path, safetensors_metadata(path), foreign.read_safetensors(path), ema)
        if files.step_of(path) is not None and files.manifest_of(path).is_file():
            return of_state(path, files.load_path(path), ema)
        content = foreign.read_torch(path)
        if isinstance(content, dict) and isinstance(content.get("config"), dict):
            return of_state(path, content, ema)
        return exported(path, sidecar(path), foreign.stripped(foreign.unwrapped(content, path)), ema)
    except RecipeError as error:
        raise CheckpointError(f"{path}: {error}") from error


def newest(folder: Path, ema: bool, say: Callable[[str], None]) -> Trained:
    home = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    for step in reversed(files.saved_steps(home)):
        try:
            state = files.load(home, step)
        except CheckpointError as error:
            say(f"{error}; passed over")
            continue
        return of_state(files.path_of(home, step), state, ema)
    raise CheckpointError(f"{folder} holds no intact checkpoint (step-<n>.pt with its step-<n>.json)")


def of_state(path: Path, state: State, ema: bool) -> Trained:
    """From a checkpoint's state: "model" (in older ones "weights"), "ema", "config", "position"."""
    model = state.get("model", state.get("weights"))
    if not isinstance(model, dict) or not model:
        raise CheckpointError(f"{path} holds no weights")
    weights = foreign.stripped(model)
    if ema:
        weights = averaged(path, weights, state.get("ema"))
    config = state.get("config") or {}
    step = (state.get("position") or {}).get("step")
    return Trained(path, recipes.of_config(config, outputs(weights), step), weights)


def averaged(path: Path, weights: dict[str, Tensor], ema: Any) -> dict[str, Tensor]:
    """The averages in the network's own types; what was not averaged (counts, in older checkpoints all buffers) as the
    network has it."""
    if not ema:
        raise CheckpointError(f"{path} has no averaged weights: it was trained without --ema")
    averages = foreign.stripped(ema)
    if strange := sorted(set(averages) - set(weights)):
        raise CheckpointError(f"{path}: its averaged weights are of another model: {', '.join(strange[:5])}")
    return {name: averages[name].to(own.dtype) if name in averages else own for name, own in weights.items()}


def outputs(weights: Mapping[str, Tensor]) -> int:
    """Outputs of the classifier: those of the last weight that is no norm's, as in all of torchvision's models."""
    return next((len(tensor) for tensor in reversed(list(weights.values())) if tensor.ndim > 1), 0)


def exported(path: Path, metadata: Mapping[str, str], weights: dict[str, Tensor], ema: bool) -> Trained:
    if ema:
        raise CheckpointError(f"{path} was exported: --ema is for checkpoints")
    return Trained(path, recipes.of_text(metadata), weights)


def safetensors_metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from error


def sidecar(path: Path) -> dict[str, str]:
    """The metadata of an exported .pt, which is nothing but a state_dict: beside it."""
    beside = path.with_suffix(".json")
    try:
        values = json.loads(beside.read_text(encoding="utf-8"))
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    except FileNotFoundError as error:
        what = f"{path} is weights alone, and {beside} that says what they are is not there"
        raise CheckpointError(f"{what}: name a checkpoint, or export it anew") from error
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"cannot read {beside}: {error}") from error


def network_of(trained: Trained) -> nn.Module:
    """The model with these weights, in evaluation mode, on the CPU. Raises CheckpointError where they do not fit."""
    from train.model.build import build
    from train.settings import SettingsError

    recipe = trained.recipe
    try:
        network = build(recipe.model, len(recipe.class_names), recipe.image_size, seed=0)
        network.load_state_dict(trained.weights)
    except SettingsError as error:
        raise CheckpointError(f"{trained.path}: its model cannot be made: {error}") from error
    except RuntimeError as error:
        raise CheckpointError(f"{trained.path}: the weights do not fit {recipe.model}: {error}") from error
    if recipe.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.eval()
