"""Batches of datasets that are image files: decoded by worker processes, normalised on the device."""

from collections.abc import Iterable, Iterator
from itertools import tee

import torch
from torch import Tensor

from train.datasets.base import Dataset
from train.datasets.decode import Job, Task
from train.datasets.folder import FolderSource
from train.datasets.sidestream import on_side_stream
from train.datasets.transform import Form, Normaliser, to_device
from train.datasets.workers import Pool, auto_workers, chunk_of, slots_for
from train.order import Ints
from train.process import Place
from train.settings import Settings


class FileBatches:
    def __init__(
        self,
        dataset: Dataset,
        train: FolderSource,
        test: FolderSource,
        settings: Settings,
        form: Form,
        place: Place,
    ) -> None:
        self.form, self.train, self.test = form, train, test
        self.normalise = Normaliser(dataset, form)
        change = dataset.augmentation if settings.augment != "none" else None
        job = Job(train, test, change, settings.seed, form.size, form.channels_last)
        on_gpu = form.on_gpu
        workers = settings.workers if settings.workers >= 0 else auto_workers(place.local_world_size, on_gpu)
        batch = -(-settings.batch_size // place.world_size)
        chunk = chunk_of(batch, workers)
        slots = slots_for(3 * form.size**2, chunk, batch, workers, place.local_world_size) if workers else 0
        self.pool = Pool(job, workers, slots, chunk)
        self.stream = torch.cuda.Stream(form.device) if on_gpu else None

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """epoch None: the held-out part."""
        ahead, now = tee(requests)
        chunks = self.pool.chunks(self.tasks(ahead, epoch))

        def make(indices: Ints) -> tuple[Tensor, Tensor]:
            return self.batch(indices, chunks, epoch)

        try:
            yield from on_side_stream(now, make, self.stream) if self.stream else map(make, now)
        finally:
            chunks.close()

    def tasks(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[Task]:
        for request in requests:
            for start in range(0, len(request), self.pool.chunk):
                yield Task(request[start : start + self.pool.chunk], epoch)

    def batch(self, indices: Ints, chunks: Iterator[Tensor], epoch: int | None) -> tuple[Tensor, Tensor]:
        """Uses up the chunks of this request."""
        on_gpu, count, ready = self.form.on_gpu, len(indices), 0
        # To a GPU go the bytes, from pinned memory; on the CPU each chunk is normalised into its place.
        out = torch.empty((count, *self.pool.job.shape), dtype=torch.uint8, pin_memory=True) if on_gpu else None
        images = self.form.empty(count if out is None else 0)
        while ready < count:
            chunk = next(chunks)
            piece = slice(ready, ready + len(chunk))
            if out is None:
                self.normalise.into(images[piece], self.planes_first(chunk))
            else:
                out[piece].copy_(chunk)
            ready += len(chunk)
        if out is not None:
            images = self.normalise(self.planes_first(out.to(self.form.device, non_blocking=True)))
        source = self.test if epoch is None else self.train
        return images, to_device(torch.from_numpy(source.labels[indices]), self.form.device)

    def planes_first(self, chunk: Tensor) -> Tensor:
        return chunk.permute(0, 3, 1, 2) if self.form.channels_last else chunk

    def close(self) -> None:
        self.pool.close()
