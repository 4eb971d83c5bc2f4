"""A torchvision classification model or one of the user's own, with random weights that are a function of the seed."""

from typing import Any

import torch
import torchvision
from torch import nn

from train import generators, own_parts
from train.names import is_own
from train.settings import Settings, SettingsError, strangers

WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def build(name: str, classes: int, image_size: int, seed: int) -> nn.Module:
    """The model of this name with random weights that are a function of the seed. image_size: pixels of its input, 0
    where that is no square image (then only a trial shows whether the model takes it).

    Raises SettingsError for a name that torchvision does not know (with near ones), an image size that it refuses, and
    for what is wrong with a function of the user's own.
    """
    if is_own(name):
        with generators.kept():
            generators.seed(seed)
            made: nn.Module = own_parts.call("--model", name, nn.Module, num_classes=classes)
        return made
    if unknown := list(strangers(Settings(model=name))):
        raise SettingsError(unknown[0])
    options: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name in WITH_AUXILIARY_HEADS else {}
    torch.manual_seed(seed)
    if name.startswith("vit_") and image_size:
        options["image_size"] = image_size
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
        model.eval()
        if image_size:
            with torch.no_grad():
                model(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--image-size {image_size}: {name} does not take it ({reason}); try 224") from error
    return model
