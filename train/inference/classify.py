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
from PIL import UnidentifiedImageError
from torch import Tensor, nn

from train.checkpoints.files import CheckpointError
from train.datasets.augment import identity_maps
from train.datasets.base import BadSample
from train.datasets.decode import centre, opened, tensor_of
from train.datasets.memory import Recycler
from train.datasets.transform import Form, Normaliser, Store, affine_batch, cropped_batch
from train.inference.recipe import Recipe
from train.inference.weights import Trained, network_of

Answer = list[tuple[int, float]]  # (class number, probability), the likeliest first
BATCHES_AHEAD = 4  # batches that a device may be ahead of the printing
FIRST = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Replica:
    network: nn.Module
    prepare: Preparation


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
            self.free.put(Replica(copy.deepcopy(network).to(device), Preparation(self.recipe, device)))

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
            prepared = list(decoders.map(lambda path: prepared_or_reason(path, replica.prepare), paths))
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


def prepared_or_reason(path: Path, prepare: Preparation) -> Tensor | str:
    try:
        return prepare(path)
    except BadSample as bad:
        cause = bad.__cause__
        if isinstance(cause, FileNotFoundError):
            return "there is no such file"
        if isinstance(cause, UnidentifiedImageError):
            return "not an image in a format that Pillow knows"
        if isinstance(cause, OSError):  # Pillow's for an image that is cut off, or the system's
            return f"cannot be read ({cause.strerror or cause})"
        return f"not an image that can be decoded ({bad.reason})"


class Preparation:
    """Makes of an image file what training's own loader makes of it as a held-out one. For any number of threads."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.size, self.preparation, self.device = recipe.image_size, recipe.preparation, device
        form = Form(self.size, recipe.channels_last, device, Recycler(most=0))
        self.normalise = Normaliser(recipe.mean, recipe.std, form)

    def __call__(self, path: Path) -> Tensor:
        """float32 [1, 3, size, size] on the device. Raises BadSample for a file that is no image."""
        if self.preparation == "centre":
            return self.normalise(centre(path, self.size)[None].to(self.device))
        store = Store(pixels_of(path), False, self.normalise.form)
        if self.preparation == "sampled":
            return affine_batch(self.normalise, store, FIRST, identity_maps(1))
        return cropped_batch(self.normalise, store, FIRST, None)


def pixels_of(path: Path) -> Tensor:
    """uint8 [1, 3, height, width]: the whole image."""
    with opened(path) as image:
        return tensor_of(path, image, (0, 0, *image.size)).contiguous()
