"""Any torchvision classification model by name, with random weights that are a function of the seed."""

from typing import Any

import torch
import torchvision
from torch import nn

from train.settings import SettingsError

WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def build(name: str, classes: int, image_size: int, seed: int) -> nn.Module:
    """A torchvision classification model with random weights that are a function of the seed.

    Raises SettingsError for a name that torchvision does not know (with near ones) and an image size that it
    refuses.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise SettingsError(f"--model {name}: torchvision has no such model{near(name, names)}")
    options: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name in WITH_AUXILIARY_HEADS else {}
    torch.manual_seed(seed)
    if name.startswith("vit_"):
        options["image_size"] = image_size
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--image-size {image_size}: {name} does not take it ({reason}); try 224") from error
    return model


def near(name: str, names: list[str]) -> str:
    from difflib import get_close_matches  # only for this message

    close = get_close_matches(name, names)
    return f"; did you mean {', '.join(close)}?" if close else f"; it has {', '.join(names)}"
