"""Classifies image files with trained weights: prepare as in evaluation, the model on one or more devices."""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from train.checkpoints.files import CheckpointError
from train.datasets.base import ArraySource, Augmentation, DataError, Dataset, Source
from train.datasets.folder import FolderSource
from train.datasets.loader import Loader
from train.inference.recipe import Recipe
from train.inference.weights import Trained, network_of
from train.settings import Settings
from train.start.group import Place

Answer = list[tuple[int, float]]  # (class number, probability), the likeliest first
BATCHES_AHEAD = 4  # batches that a device may be ahead of the printing
FIRST = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Replica:
    network: nn.Module
    device: torch.device


class Classifier:
    """The model on each of `devices`. Raises CheckpointError where the weights do not fit the model, or images were
    prepared by code of the user's own."""

    def __init__(self, trained: Trained, devices: Sequence[torch.device], batch_size: int) -> None:
        if trained.recipe.preparation == "own":
            raise CheckpointError(
                f"{trained.path}: its images were prepared by code of your own (--dataset {trained.recipe.dataset}, or "
                "--transform), which predict does not call: `python -m train export` writes the weights for a script "
                "of yours"
            )
        self.recipe, self.batch_size, self.devices = trained.recipe, batch_size, len(devices)
        network = network_of(trained)
        self.free: queue.SimpleQueue[Replica] = queue.SimpleQueue()
        for device in devices:
            self.free.put(Replica(copy.deepcopy(network).to(device), device))

    def classify(self, paths: Sequence[Path]) -> Iterator[Answer | str]:
        """For each file in turn all classes, the likeliest first; or why it is no image."""
        batches = [paths[start : start + self.batch_size] for start in range(0, len(paths), self.batch_size)]
        ahead = BATCHES_AHEAD * self.devices
        with ThreadPoolExecutor(self.devices) as drivers, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as decoders:
            coming = [drivers.submit(self._batch, batch, decoders) for batch in batches[:ahead]]
            for place in range(len(batches)):
                yield from coming[place].result()
                coming += [drivers.submit(self._batch, batch, decoders) for batch in batches[place + ahead :][:1]]

    def _batch(self, paths: Sequence[Path], decoders: ThreadPoolExecutor) -> list[Answer | str]:
        """On whichever device is free."""
        replica = self.free.get()
        try:
            prepared = list(decoders.map(lambda path: prepared_or_reason(path, self.recipe, replica.device), paths))
            images = [each for each in prepared if isinstance(each, Tensor)]
            answers = iter(self._answers(replica, torch.cat(images)) if images else [])
            return [each if isinstance(each, str) else next(answers) for each in prepared]
        finally:
            self.free.put(replica)

    @torch.no_grad()
    def _answers(self, replica: Replica, images: Tensor) -> list[Answer]:
        if self.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        probabilities = replica.network(images).float().softmax(1)
        values, order = (each.tolist() for each in probabilities.sort(dim=1, descending=True))
        return [list(zip(*each, strict=True)) for each in zip(order, values, strict=True)]


def prepared_or_reason(path: Path, recipe: Recipe, device: torch.device) -> Tensor | str:
    try:
        return prepare(path, recipe, device)
    except FileNotFoundError:
        return "there is no such file"
    except UnidentifiedImageError:
        return "not an image in a format that Pillow knows"
    except (Image.DecompressionBombError, DataError, ValueError, SyntaxError) as error:
        return f"not an image that can be decoded ({error})"
    except OSError as error:  # Pillow's for an image that is cut off, or the system's
        return f"cannot be read ({error.strerror or error})"


def prepare(path: Path, recipe: Recipe, device: torch.device) -> Tensor:
    """float32 [1, 3, size, size] on the device: what training's own loader makes of the image as a held-out one.

    Raises OSError and what Pillow raises for a file that is no image.
    """
    with path.open("rb") as file, Image.open(file) as image:
        pixels = None if recipe.preparation == "centre" else np.array(image.convert("RGB"))
    source: Source
    if pixels is None:
        source = FolderSource(path.parent, np.array([os.fsencode(path.name)]), FIRST, FIRST)
    else:
        source = ArraySource(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]), FIRST)
    settings = Settings(
        image_size=recipe.image_size, channels_last=recipe.channels_last, workers=0, memory="disk", batch_size=1
    )
    with Loader(as_dataset(recipe, source), settings, device, Place()) as loader:
        images, _ = next(loader.held_out([FIRST]))
    return images


def as_dataset(recipe: Recipe, source: Source) -> Dataset:
    """One whose held-out part is `source`, prepared by the recipe."""
    change = {
        "sampled": Augmentation(degrees=1),
        "resized": Augmentation(),
        "centre": Augmentation(resized_crop=(1, 1)),
    }
    return Dataset(
        name=recipe.dataset,
        class_names=recipe.class_names,
        train=source,
        test=source,
        mean=recipe.mean,
        std=recipe.std,
        image_size=recipe.image_size,
        augmentation=change[recipe.preparation],
    )
