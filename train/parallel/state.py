"""Whole states under plain names, whatever the model was wrapped in: what a checkpoint holds of model and optimizer.

Tensors are keyed by the parameter's name in the bare model, never by position or shard, so that a state saved
under any --parallel and number of ranks fits any other. Parameters in pieces (DTensor, of fsdp) are gathered one
after the other: at no time is the whole model on one GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.model.pieces import like, whole
from train.model.plain_names import plain
from train.settings import SettingsError

Keep = Callable[[Tensor], Tensor | None]  # what becomes of a gathered tensor; None: this rank drops it


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def entries(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each under its plain name, in the model's order."""
    return ((plain(name), value.detach()) for name, value in network.state_dict().items())


def model_state(network: nn.Module, keep: Keep = as_it_is) -> dict[str, Tensor]:
    """Collective if parameters are in pieces. Tensors that are whole already are not copied."""
    kept = ((name, keep(whole(value))) for name, value in entries(network))
    return {name: value for name, value in kept if value is not None}


@torch.no_grad()
def load_model(network: nn.Module, model: dict[str, Tensor]) -> None:
    """Copies `model` into the network in place. Raises SettingsError, with nothing loaded, unless names and shapes fit.

    `model`: as from `model_state`, whole on every rank.
    """
    targets = dict(entries(network))
    if unfit := misfits(targets, model):
        raise SettingsError(
            f"the checkpoint's model is not this --model: {unfit}; give the --model and number of classes it was "
            "trained with, or --resume none"
        )
    for name, target in targets.items():
        target.copy_(like(target, model[name]))


def misfits(targets: dict[str, Tensor], model: dict[str, Tensor]) -> str:
    missing = sorted(targets.keys() - model.keys())
    unknown = sorted(model.keys() - targets.keys())
    shapes = [
        f"{name} is {list(model[name].shape)} there and {list(target.shape)} here"
        for name, target in targets.items()
        if name in model and model[name].shape != target.shape
    ]
    parts = [f"it lacks {few(missing)}"] * bool(missing) + [f"it has {few(unknown)}"] * bool(unknown)
    return "; ".join(parts + [few(shapes)] * bool(shapes))


def few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def names_of(network: nn.Module) -> dict[Tensor, str]:
    return {parameter: plain(name) for name, parameter in network.named_parameters()}


def optimizer_state(network: nn.Module, optimizer: Optimizer, keep: Keep = as_it_is) -> dict[str, Any]:
    """{"state": {parameter's name: {"exp_avg": tensor, ...}}, "groups": [{"names": [...], "lr": ..., ...}]}

    Collective if parameters are in pieces. Tensors that are whole already are not copied.
    """
    names = names_of(network)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                values = optimizer.state[parameter]
                # Sorted: gathering goes in the same order on every rank.
                state[names[parameter]] = {key: kept(values[key], keep) for key in sorted(values)}
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "names": [names[parameter] for parameter in group["params"]]})
    return {"state": state, "groups": groups}


def kept(value: Any, keep: Keep) -> Any:
    return keep(whole(value)) if isinstance(value, Tensor) else value


def load_optimizer(network: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """The reverse of `optimizer_state`; `state` is whole on every rank and stays as it is.

    What has been learned is the state's; the settings of the groups (weight decay, momentum, fused) stay this
    optimizer's. Raises SettingsError, with nothing loaded, if the parameters of the groups differ.
    """
    names, position = names_of(network), 0
    groups, numbered = [], {}
    mine = [sorted(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups]
    if mine != [sorted(group["names"]) for group in state["groups"]]:
        raise SettingsError(
            "the checkpoint's optimizer has other parameter groups than this run's: give the --model, --optimizer, "
            "--freeze and --head-lr it was trained with, or --resume none"
        )
    for group in optimizer.param_groups:
        places = []
        for parameter in group["params"]:
            saved = {key: placed(parameter, value) for key, value in state["state"].get(names[parameter], {}).items()}
            if group.get("momentum") == 0:  # it would stay as it is until there is a momentum again
                saved.pop("momentum_buffer", None)
            numbered[position] = {**optimizer.state.get(parameter, {}), **saved}
            places.append(position)
            position += 1
        groups.append({**group, "params": places})
    optimizer.load_state_dict({"state": {k: v for k, v in numbered.items() if v}, "param_groups": groups})


def placed(parameter: Tensor, value: Any) -> Any:
    """A copy of one value of an optimizer's state; if it has its parameter's shape, on its device, cut and laid out as
    it is: fused kernels go through both in the order of memory, whatever the strides say.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return target.copy_(like(parameter, value))
