"""A trial of the user's own parts before anything is trained: the first samples go through model and loss.

What is wrong becomes one SettingsError that says which part, what it was given and what was expected.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from train import generators, losses, own_parts
from train.datasets import Dataset
from train.datasets.base import Source
from train.datasets.own import OwnSource, Reader, Scale, shown
from train.model.running_statistics import unchanged_buffers
from train.names import is_own
from train.settings import Settings, SettingsError

SAMPLES = 2  # batch normalisation refuses one


def trial(settings: Settings, dataset: Dataset, network: nn.Module) -> None:
    """network: on the CPU, in its plain form; left as it is. Raises SettingsError, DataError; nothing to try without
    own parts."""
    if not any(is_own(getattr(settings, name)) for name in own_parts.PARTS):
        return
    loss = losses.make(settings)
    was_training = network.training
    with generators.kept(), unchanged_buffers(network), torch.no_grad():
        generators.seed(settings.seed)
        for training, source in ((True, dataset.train), (False, dataset.test)):
            inputs, targets = some(settings, dataset, source, 0 if training else None)
            check_form(settings, inputs, targets)
            network.train(training)
            outputs = attempt(f"--model {settings.model}", f"inputs {shown(inputs)}{of_bytes(inputs)}", network, inputs)
            given = f"outputs {shown(outputs)} and targets {shown(targets)}{hint(settings)}"
            attempt(f"--loss {settings.loss}", given, loss, outputs, targets)
            check_classes(settings, dataset, outputs, targets)
    network.train(was_training)


def attempt(part: str, given: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except losses.LossError as error:
        raise SettingsError(f"{part}: {error}; it was given {given}") from error
    except Exception as error:
        raise SettingsError(f"{part}: {own_parts.said(error)}; it was given {given}") from error


def some(settings: Settings, dataset: Dataset, source: Source, epoch: int | None) -> tuple[Any, Any]:
    """A batch of the part's first samples on the CPU, as training would get it."""
    if not isinstance(source, OwnSource):
        size = settings.image_size or dataset.image_size
        return torch.zeros(SAMPLES, 3, size, size), torch.zeros(SAMPLES, dtype=torch.int64)
    numbers = np.arange(SAMPLES, dtype=np.int64) % len(source)
    inputs, targets = Reader(source, settings.seed).batch(epoch, numbers)
    return (inputs if source.stored is None else Scale(dataset, torch.device("cpu"))(inputs)), targets


def check_form(settings: Settings, inputs: Any, targets: Any) -> None:
    """Of what needs a certain form of inputs or targets. Raises SettingsError."""
    if settings.parallel == "dp" and not isinstance(inputs, Tensor):
        raise SettingsError(f"--parallel dp: it cuts one tensor, and the inputs are {shown(inputs)}: --parallel ddp")
    mixing = " ".join(f"--{name} {getattr(settings, name)}" for name in ("mixup", "cutmix") if getattr(settings, name))
    is_class = isinstance(targets, Tensor) and targets.ndim == 1 and losses.is_class_number(targets)
    is_image = isinstance(inputs, Tensor) and inputs.dtype.is_floating_point
    if mixing and not (is_class and is_image and (inputs.ndim == 4 or not settings.cutmix)):
        raise SettingsError(
            f"{mixing}: it mixes images, float [n, C, H, W], with class numbers, int64 [n], and your samples make "
            f"inputs {shown(inputs)} and targets {shown(targets)}: leave it out"
        )


def check_classes(settings: Settings, dataset: Dataset, outputs: Any, targets: Any) -> None:
    """For cross entropy with class numbers. Raises SettingsError."""
    of_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if is_own(settings.loss) or not of_tensors or not losses.is_class_number(targets):
        return
    if outputs.ndim > 1 and outputs.shape[1] < dataset.classes:
        raise SettingsError(
            f"--model {settings.model}: its outputs are {shown(outputs)}, and there are {dataset.classes} classes: "
            f"[n, {dataset.classes}] is needed, or more dimensions behind these two"
        )


def of_bytes(inputs: Any) -> str:
    bytes_come = any(isinstance(leaf, Tensor) and leaf.dtype == torch.uint8 for leaf in tree_leaves(inputs))
    return "; v2.ToDtype(torch.float32, scale=True) makes numbers of 0 to 1 of uint8" if bytes_come else ""


def hint(settings: Settings) -> str:
    if is_own(settings.loss):
        return ""
    return (
        "; cross entropy takes outputs [n, C] with class numbers, int64 [n], or [n, C, ...] with [n, ...]: for "
        "anything else give a --loss of your own"
    )
