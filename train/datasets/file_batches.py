"""Batches whose samples are made by worker processes, and normalised on the device: image files, which are decoded;
arrays, where a policy changes them.
"""

import shutil
from collections.abc import Iterable, Iterator
from itertools import tee

import torch
from torch import Tensor

from train.datasets.array_job import ArrayJob
from train.datasets.base import ArraySource, Dataset
from train.datasets.decode import Bad, Job, Task
from train.datasets.folder import FolderSource
from train.datasets.memory import keeps
from train.datasets.policy import Erasing, Policy
from train.datasets.sidestream import on_side_stream
from train.datasets.transform import Form, Normaliser, to_device
from train.datasets.workers import SHARED, Pool, Work, auto_workers, chunk_of, slots_for
from train.order import Ints
from train.settings import POLICIES, Settings
from train.start.group import Place


class FileBatches:
    """bad: name -> why, of the samples that were left out so far (--bad-samples skip)."""

    def __init__(
        self,
        dataset: Dataset,
        train: FolderSource | ArraySource,
        test: FolderSource | ArraySource,
        settings: Settings,
        form: Form,
        place: Place,
    ) -> None:
        self.form, self.train, self.test = form, train, test
        self.skip = settings.bad_samples == "skip"
        self.bad: dict[str, str] = {}
        self.normalise = Normaliser(dataset.mean, dataset.std, form)
        self.erasing = Erasing(settings.random_erasing, settings.seed) if settings.random_erasing else None
        work = work_of(dataset, train, test, settings, form)
        workers = workers_for(work, settings, place, form.on_gpu)
        batch = -(-settings.batch_size // place.world_size)
        chunk = chunk_of(batch, workers)
        slots = slots_for(3 * form.size**2, chunk, batch, workers, place.local_world_size) if workers else 0
        self.pool = Pool(work, workers, slots, chunk)
        # Held-out images are the same in every epoch: their pixels may be kept, by request.
        self.kept: dict[bytes, tuple[Tensor, list[Bad]]] = {}
        mine = -(-len(test) // place.world_size)
        self.keep = keeps(settings.memory, mine, work.shape, place.local_world_size)
        self.stream = torch.cuda.Stream(form.device) if form.on_gpu else None

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[tuple[Tensor, ...]]:
        """epoch None: the held-out part."""
        known = frozenset(self.kept) if epoch is None else frozenset[bytes]()
        ahead, now = tee(requests)
        chunks = self.pool.chunks(self.tasks(ahead, epoch, known))

        def make(indices: Ints) -> tuple[Tensor, ...]:
            source = self.test if epoch is None else self.train
            labels = to_device(torch.from_numpy(source.labels[indices]), self.form.device)
            if indices.tobytes() in known:
                pixels, bad = self.kept[indices.tobytes()]
                images = self.normalised(pixels)
            else:
                images, bad = self.batch(indices, chunks, self.keep and epoch is None)
            if self.erasing and epoch is not None:
                self.erasing.change(images, epoch, indices)
            return (images, labels, self.good(source, indices, bad)) if self.skip else (images, labels)

        try:
            yield from on_side_stream(now, make, self.stream) if self.stream else map(make, now)
        finally:
            chunks.close()

    def tasks(self, requests: Iterable[Ints], epoch: int | None, known: frozenset[bytes]) -> Iterator[Task]:
        for request in requests:
            if request.tobytes() not in known:
                for start in range(0, len(request), self.pool.chunk):
                    yield self.pool.work.task(request[start : start + self.pool.chunk], epoch)

    def batch(self, indices: Ints, chunks: Iterator[tuple[Tensor, list[Bad]]], keep: bool) -> tuple[Tensor, list[Bad]]:
        """Uses up the chunks of this request. A bad sample's place has its nearest neighbour's image."""
        at_once = not (self.form.on_gpu or keep)  # each chunk is normalised right into its place
        images = self.form.empty(len(indices)) if at_once else self.host_bytes(len(indices))
        ready, bad = 0, list[Bad]()
        while ready < len(indices):
            chunk, wrong = next(chunks)
            part = images[ready : ready + len(chunk)]
            if at_once:
                self.normalise.into(part, self.planes_first(chunk))
            else:
                part.numpy()[:] = chunk.numpy()  # one copy: torch's would share it out to cores that decode
            bad += [(ready + place, reason) for place, reason in wrong]
            ready += len(chunk)
        replace_bad(images, [place for place, _ in bad])
        if keep:
            self.kept[indices.tobytes()] = images, bad
        return images if at_once else self.normalised(images), bad

    def good(self, source: FolderSource | ArraySource, indices: Ints, bad: list[Bad]) -> Tensor:
        """bool [n], on the CPU. Notes the names of the others."""
        good = torch.ones(len(indices), dtype=torch.bool)
        for place, reason in bad:
            good[place] = False
            assert isinstance(source, FolderSource)
            self.bad[source.name(int(indices[place]))] = reason
        return good

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty((count, *self.pool.work.shape), dtype=torch.uint8, pin_memory=self.form.on_gpu)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Sends bytes to a GPU, not floats."""
        return self.normalise(self.planes_first(pixels.to(self.form.device, non_blocking=True)))

    def planes_first(self, chunk: Tensor) -> Tensor:
        return chunk.permute(0, 3, 1, 2) if self.form.channels_last else chunk

    def close(self) -> None:
        self.pool.close()
        self.kept = {}


def work_of(
    dataset: Dataset,
    train: FolderSource | ArraySource,
    test: FolderSource | ArraySource,
    settings: Settings,
    form: Form,
) -> Work:
    policy = Policy(settings.augment, settings.seed) if settings.augment in POLICIES else None
    if isinstance(train, ArraySource) and isinstance(test, ArraySource):
        assert policy is not None
        return ArrayJob.of(train, test, dataset.augmentation, form.size, form.channels_last, policy)
    assert isinstance(train, FolderSource) and isinstance(test, FolderSource)
    change = dataset.augmentation if settings.augment != "none" else None
    skip = settings.bad_samples == "skip"
    return Job(train, test, change, settings.seed, form.size, form.channels_last, policy, skip)


def workers_for(work: Work, settings: Settings, place: Place, on_gpu: bool) -> int:
    """As --workers says, or by the cores. Of arrays none where the model is on the CPU, which takes far longer than a
    policy, or where shared memory has no room for them.
    """
    if settings.workers >= 0:
        return settings.workers
    if isinstance(work, ArrayJob):
        room = shutil.disk_usage(SHARED).free // 2 // place.local_world_size if SHARED.is_dir() else 0
        if not on_gpu or work.train.nbytes + work.test.nbytes > room:
            return 0
    return auto_workers(place.local_world_size, on_gpu)


def replace_bad(images: Tensor, bad: list[int]) -> None:
    """An image in place of each bad one: the nearest good one's, so that batch statistics are those of real images.
    Black where there is none.
    """
    good = sorted(set(range(len(images))) - set(bad)) if bad else []
    for place in bad:
        images[place] = images[min(good, key=lambda one: abs(one - place))] if good else 0
