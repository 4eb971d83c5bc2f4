"""Batches for the model: for each request, a list of sample numbers, normalised images and labels on the device.

It holds no position: what comes is a function of the requests, the epoch and the seed alone, so that a resumed run
asks for what it still needs and gets the same bits.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from train.datasets.array_batches import ArrayBatches
from train.datasets.base import ArraySource, DataError, Dataset
from train.datasets.file_batches import FileBatches
from train.datasets.folder import FolderSource
from train.datasets.memory import Offer, this_host
from train.datasets.own import OwnSource
from train.datasets.own_batches import OwnBatches
from train.datasets.transform import Form
from train.order import Ints
from train.settings import POLICIES, Settings
from train.start.group import Place, from_all_ranks

# Inputs and targets, of a user's own dataset whatever it makes of them; with --bad-samples skip also which are good,
# where files can be bad.
Batch = tuple[Any, ...]
Rows = Tensor | slice


def counted_rows(batch: Batch, count: int) -> Rows:
    """Those rows of a batch that count: of the first `count`, without padding, the good ones."""
    inputs, _, *good = batch
    if good and not good[0][:count].all():
        rows: Tensor = good[0][:count].nonzero()[:, 0].to(inputs.device)
        return rows
    return slice(count)


class Batches(Protocol):
    bad: dict[str, str]  # see Loader.bad

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[Batch]: ...

    def close(self) -> None: ...


class Loader:
    """waited: seconds that the model waited in next() so far; on the CPU all time that batches took.

    Raises DataError where --memory gpu has no room, shared memory is too small for workers, or --augment's policy does
    not suit the dataset.
    """

    def __init__(self, dataset: Dataset, settings: Settings, device: torch.device, place: Place) -> None:
        self.waited = 0.0
        form = Form(settings.image_size or dataset.image_size, settings.channels_last, device)
        self.maker: Batches
        policy = settings.augment in POLICIES
        if policy and dataset.augmentation.affine:
            raise DataError(
                f"--augment {settings.augment}: dataset {dataset.name} has turns, shifts and zooms of its own, "
                "made in one with its resize: --augment standard"
            )
        if isinstance(dataset.train, OwnSource) and isinstance(dataset.test, OwnSource):
            self.maker = OwnBatches(dataset, dataset.train, dataset.test, settings, form, place)
        elif isinstance(dataset.train, ArraySource) and isinstance(dataset.test, ArraySource) and not policy:
            self.maker = ArrayBatches(dataset, dataset.train, dataset.test, settings, form, place)
        else:
            assert isinstance(dataset.train, FolderSource | ArraySource)
            assert isinstance(dataset.test, FolderSource | ArraySource)
            self.maker = FileBatches(dataset, dataset.train, dataset.test, settings, form, place)

    def share(self, place: Place) -> None:
        """Lets the ranks of a host keep in one memory what they have prepared: each image is prepared once and kept
        once. Collective, before the first batch; without it only a rank that is alone on its host keeps any.
        """
        mine = self.maker if isinstance(self.maker, ArrayBatches) and place.local_world_size > 1 else None
        offer = Offer.of(mine.kept_sizes()) if mine and mine.keep and place.local_rank == 0 else None
        offers = from_all_ranks(offer, place)
        found = next((each for each in offers if each and each.host == this_host()), None)
        if mine and found and (memory := found.map()):
            mine.keep_in(memory)
        from_all_ranks(None, place)  # all of the host have mapped it
        if offer:
            offer.close()

    def training(self, requests: Iterable[Ints], epoch: int) -> Iterator[Batch]:
        """For each request (int64 [n], sample numbers of the training part, any, also repeated): float32
        [n, 3, size, size] on the device, augmented and normalised, in NHWC memory where channels_last, and int64
        labels [n].

        Requests are taken a few ahead of the batches. A sample has the same bits in every request, rank and worker
        of the same epoch. next() raises BadSample for a file that cannot be decoded; with --bad-samples skip a batch of
        files has instead a third tensor, bool [n] on the CPU: which samples are good. A bad one's place has another
        image of the request, and must count with weight 0.
        """
        return self._timed(self.maker.batches(requests, epoch))

    def held_out(self, requests: Iterable[Ints]) -> Iterator[Batch]:
        """The same of the held-out part, without augmentation."""
        return self._timed(self.maker.batches(requests, None))

    @property
    def bad(self) -> dict[str, str]:
        """Name -> why, of the samples that were left out so far, by this rank."""
        return self.maker.bad

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            begun = time.perf_counter()
            batch = next(batches, None)
            self.waited += time.perf_counter() - begun
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """Ends the worker processes."""
        self.maker.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
