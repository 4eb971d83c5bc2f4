"""Batches of datasets that are image files: decoded by worker processes, normalised on the device."""

from collections.abc import Iterable, Iterator
from itertools import tee

import torch
from torch import Tensor

from train.datasets.base import Dataset
from train.datasets.decode import Job, Task
from train.datasets.folder import FolderSource
from train.datasets.memory import keeps
from train.datasets.sidestream import on_side_stream
from train.datasets.transform import Form, Normaliser, to_device
from train.datasets.workers import Pool, auto_workers, chunk_of, slots_for
from train.order import Ints
from train.settings import Settings
from train.start.group import Place


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
        # Held-out images are the same in every epoch: their pixels may be kept, by request.
        self.kept: dict[bytes, Tensor] = {}
        mine = -(-len(test) // place.world_size)
        self.keep = keeps(settings.memory, mine, job.shape, place.local_world_size)
        self.stream = torch.cuda.Stream(form.device) if on_gpu else None

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """epoch None: the held-out part."""
        known = frozenset(self.kept) if epoch is None else frozenset[bytes]()
        ahead, now = tee(requests)
        chunks = self.pool.chunks(self.tasks(ahead, epoch, known))

        def make(indices: Ints) -> tuple[Tensor, Tensor]:
            source = self.test if epoch is None else self.train
            labels = to_device(torch.from_numpy(source.labels[indices]), self.form.device)
            if indices.tobytes() in known:
                return self.normalised(self.kept[indices.tobytes()]), labels
            return self.batch(indices, chunks, self.keep and epoch is None), labels

        try:
            yield from on_side_stream(now, make, self.stream) if self.stream else map(make, now)
        finally:
            chunks.close()

    def tasks(self, requests: Iterable[Ints], epoch: int | None, known: frozenset[bytes]) -> Iterator[Task]:
        for request in requests:
            if request.tobytes() not in known:
                for start in range(0, len(request), self.pool.chunk):
                    yield Task(request[start : start + self.pool.chunk], epoch)

    def batch(self, indices: Ints, chunks: Iterator[Tensor], keep: bool) -> Tensor:
        """Uses up the chunks of this request."""
        if not (self.form.on_gpu or keep):  # each chunk is normalised right into its place
            images, ready = self.form.empty(len(indices)), 0
            while ready < len(indices):
                chunk = next(chunks)
                self.normalise.into(images[ready : ready + len(chunk)], self.planes_first(chunk))
                ready += len(chunk)
            return images
        pixels, ready = self.host_bytes(len(indices)), 0
        while ready < len(indices):
            chunk = next(chunks)
            pixels[ready : ready + len(chunk)] = chunk
            ready += len(chunk)
        if keep:
            self.kept[indices.tobytes()] = pixels
        return self.normalised(pixels)

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty((count, *self.pool.job.shape), dtype=torch.uint8, pin_memory=self.form.on_gpu)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Sends bytes to a GPU, not floats."""
        return self.normalise(self.planes_first(pixels.to(self.form.device, non_blocking=True)))

    def planes_first(self, chunk: Tensor) -> Tensor:
        return chunk.permute(0, 3, 1, 2) if self.form.channels_last else chunk

    def close(self) -> None:
        self.pool.close()
        self.kept = {}
