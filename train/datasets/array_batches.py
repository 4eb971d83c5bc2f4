"""Batches of datasets that are arrays: made in the training process, all samples of a batch together."""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from train.datasets import augment
from train.datasets.base import ArraySource, DataError, Dataset
from train.datasets.memory import Kept, keeps
from train.datasets.policy import Erasing
from train.datasets.sidestream import on_side_stream
from train.datasets.transform import Form, Normaliser, Store, affine_batch, cropped_batch, to_device
from train.order import Ints
from train.settings import Settings
from train.start.group import Place

GPU_PART = 0.25  # of the GPU's free memory that a dataset may take with --memory auto


class ArrayBatches:
    def __init__(
        self,
        dataset: Dataset,
        train: ArraySource,
        test: ArraySource,
        settings: Settings,
        form: Form,
        place: Place,
    ) -> None:
        self.augmentation = dataset.augmentation
        self.augment, self.seed, self.form = settings.augment != "none", settings.seed, form
        self.bad: dict[str, str] = {}  # an array has none
        self.normalise = Normaliser(dataset.mean, dataset.std, form)
        self.erasing = Erasing(settings.random_erasing, settings.seed) if settings.random_erasing else None
        self.train, self.test = train, test
        home = home_of(train.images.nbytes + test.images.nbytes, settings.memory, form.device)
        self.stores = [Store(stored(each, settings.memory, home), each.transposed, form) for each in (train, test)]
        self.keep = self.resizes() and keeps(settings.memory, len(train) + len(test), self.kept_shape())
        if self.keep and place.local_world_size == 1:
            self.keep_in([mmap.mmap(-1, size) for size in self.kept_sizes()])
        self.stream = torch.cuda.Stream(form.device) if form.on_gpu else None

    def keep_in(self, memory: Sequence[mmap.mmap]) -> None:
        """Keep prepared images of the training part, of the held-out part in this memory."""
        self.stores = [
            replace(store, kept=Kept(len(store.images), self.kept_shape(), each))
            for store, each in zip(self.stores, memory, strict=True)
        ]

    def kept_sizes(self) -> list[int]:
        """Bytes that `keep_in` needs."""
        return [Kept.bytes_of(len(store.images), self.kept_shape()) for store in self.stores]

    def resizes(self) -> bool:
        """Whether there is work that can be done once and kept: the resize on the CPU."""
        return not (self.form.on_gpu or self.augmentation.affine or self.zoom() == 1)

    def zoom(self) -> float:
        return self.form.size / self.train.images.shape[-1]

    def kept_shape(self) -> tuple[int, int, int]:
        channels, size = self.train.images.shape[1], self.form.size
        nhwc = self.form.layout(channels) == torch.channels_last
        return (size, size, channels) if nhwc else (channels, size, size)

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[tuple[Tensor, ...]]:
        """epoch None: the held-out part."""
        if self.stream is not None:
            return on_side_stream(requests, lambda indices: self.batch(indices, epoch), self.stream)
        # No thread of its own: the cores are the model's, and a batch costs a small part of a step.
        return (self.batch(indices, epoch) for indices in requests)

    def batch(self, indices: Ints, epoch: int | None) -> tuple[Tensor, ...]:
        images = self.images(indices, epoch)
        if self.erasing and epoch is not None:
            self.erasing.change(images, epoch, indices)
        labels = (self.test if epoch is None else self.train).labels[indices]
        return images, to_device(torch.from_numpy(labels), self.form.device)

    def images(self, indices: Ints, epoch: int | None) -> Tensor:
        store = self.stores[epoch is None]
        coordinates = (self.seed, epoch, indices) if self.augment and epoch is not None else None
        if self.augmentation.affine:
            maps = augment.identity_maps(len(indices))
            if coordinates:
                maps = augment.affine_maps(self.augmentation, *coordinates)
            return affine_batch(self.normalise, store, indices, maps)
        change = augment.shifts(self.augmentation, self.zoom(), *coordinates) if coordinates else None
        return cropped_batch(self.normalise, store, indices, change)

    def close(self) -> None:
        self.stores = []


def home_of(size: int, memory: str, device: torch.device) -> torch.device:
    """The device whose memory holds a dataset of `size` bytes. Raises DataError where --memory gpu finds no room."""
    if device.type != "cuda" or memory in ("ram", "disk"):
        return torch.device("cpu")
    free = torch.cuda.mem_get_info(device)[0]
    if memory == "gpu" and size > free:
        raise DataError(
            f"--memory gpu: the dataset has {size >> 20} MiB, {device} only {free >> 20} MiB free. Use --memory ram"
        )
    return device if memory == "gpu" or size <= GPU_PART * free else torch.device("cpu")


def stored(source: ArraySource, memory: str, home: torch.device) -> Tensor:
    """A mapped file stays one, whose pages the ranks of a host share, unless --memory ram asks for a copy."""
    images = np.array(source.images) if memory == "ram" else source.images
    return torch.from_numpy(images).to(home)
