"""What is needed to use trained weights: the model, its classes, and how its images were prepared.

Kept in every checkpoint (state["config"]["data"]) and with exported weights, so that no user has to guess. Standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from train.names import is_own

if TYPE_CHECKING:  # it imports NumPy
    from train.datasets.base import Dataset
    from train.settings import Settings

Triple = tuple[float, float, float]

#: How a held-out image gets its size (see train.datasets). sampled: one bilinear resampling, edges continued;
#: resized: bilinear, antialiased; centre: the centre, after resizing the shorter side to 256/224 of the wanted size;
#: own: by code of the user's, which is not known here.
PREPARATIONS = ("sampled", "resized", "centre", "own")
SAMPLED = ("digits", "mnist")


class RecipeError(Exception):
    """Too little is known of the weights; the message says what is missing."""


@dataclass(frozen=True)
class Recipe:
    model: str
    dataset: str
    class_names: tuple[str, ...]
    mean: Triple  # of red, green, blue scaled to 0 .. 1
    std: Triple
    image_size: int  # pixels, of the model's input; 0 where that is no square image of the user's own
    preparation: str
    channels_last: bool = False
    step: int | None = None  # optimizer step of the weights

    def as_text(self) -> dict[str, str]:
        """As safetensors' metadata: each value a JSON text, except plain strings."""
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in asdict(self).items()}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def data_config(dataset: Dataset, settings: Settings) -> dict[str, Any]:
    """What a checkpoint keeps of its dataset, as config["data"]."""
    if is_own(settings.dataset) or is_own(settings.transform):
        preparation = "own"
    elif getattr(dataset.augmentation, "resized_crop", None):
        preparation = "centre"
    else:
        preparation = "sampled" if dataset.augmentation.affine else "resized"
    return {
        "name": dataset.name,
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "image_size": settings.image_size or dataset.image_size,
        "preparation": preparation,
    }


def of_config(config: Mapping[str, Any], classes: int, step: int | None) -> Recipe:
    """From a checkpoint's config; `classes`: outputs of its classifier, for one that names no classes.

    Raises RecipeError where mean and std, or the image size, are not known.
    """
    data = config.get("data") or {}
    name = str(data.get("name") or config.get("dataset", ""))
    missing = [key for key in ("mean", "std") if key not in data]
    size = int(config.get("image_size") or data.get("image_size") or 0)
    if missing or not (size or data.get("preparation") == "own"):
        what = ", ".join([*missing, *([] if size else ["image_size"])])
        raise RecipeError(f"the checkpoint's config does not say: {what} of the images; train anew with this version")
    default = "centre" if name == "imagefolder" else "sampled" if name in SAMPLED else "resized"
    return checked(
        {
            "model": config.get("model", ""),
            "dataset": name,
            "class_names": data.get("class_names") or [str(number) for number in range(classes)],
            "mean": data["mean"],
            "std": data["std"],
            "image_size": size,
            "preparation": data.get("preparation", default),
            "channels_last": bool(config.get("channels_last", False)),
            "step": step,
        }
    )


def of_text(metadata: Mapping[str, str]) -> Recipe:
    """The reverse of Recipe.as_text. Raises RecipeError."""
    plain = {"model", "dataset", "preparation"}
    known = {field.name for field in fields(Recipe)}
    try:
        values = {key: text if key in plain else json.loads(text) for key, text in metadata.items() if key in known}
    except ValueError as error:
        raise RecipeError(f"its metadata is not what `python -m train export` writes ({error})") from error
    return checked(values)


def checked(values: Mapping[str, Any]) -> Recipe:
    """Raises RecipeError where a value is missing or not of its kind."""
    try:
        mean, std = (tuple(float(value) for value in values[key]) for key in ("mean", "std"))
        recipe = Recipe(
            model=str(values["model"]),
            dataset=str(values["dataset"]),
            class_names=tuple(str(name) for name in values["class_names"]),
            mean=mean * 3 if len(mean) == 1 else mean,  # type: ignore[arg-type]
            std=std * 3 if len(std) == 1 else std,  # type: ignore[arg-type]
            image_size=int(values["image_size"]),
            preparation=str(values["preparation"]),
            channels_last=bool(values.get("channels_last", False)),
            step=None if values.get("step") is None else int(values["step"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"does not say {error}" if isinstance(error, KeyError) else f"is not what export writes ({error})"
        raise RecipeError(f"what is known of these weights {what}") from error
    if recipe.preparation not in PREPARATIONS or len(recipe.mean) != 3 or len(recipe.std) != 3 or not recipe.model:
        raise RecipeError("what is known of these weights is not what export writes")
    return recipe
