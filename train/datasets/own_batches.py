"""Batches of a user's own dataset or transform, by torch's DataLoader: its workers read ahead of the model.

What comes is a function of the requests, the epoch and the seed alone, as for built-in datasets.
"""

import signal
import threading
from collections.abc import Iterable, Iterator
from pickle import PicklingError
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from train.datasets.base import DataError, Dataset
from train.datasets.own import OwnSource, Reader, Scale
from train.datasets.sidestream import on_side_stream
from train.datasets.transform import Form
from train.datasets.workers import auto_workers, end_with_parent, from_fork_server
from train.order import Ints
from train.settings import Settings
from train.start.group import Place

Batch = tuple[Any, ...]
Request = tuple[int | None, Ints]  # epoch, None: the held-out part; sample numbers


class Answers:
    """What DataLoader takes for a dataset: a request in, a batch out. An error is handed over as its message: in the
    training process it is raised as it is, not with a worker's traceback."""

    def __init__(self, train: Reader, test: Reader) -> None:
        self.train, self.test = train, test

    def __getitem__(self, request: Request) -> Batch | str:
        epoch, numbers = request
        try:
            batch: Batch = (self.test if epoch is None else self.train).batch(epoch, numbers)
            return batch
        except DataError as error:
            return str(error)


class Requests:
    """What DataLoader takes for a sampler: it hands on whatever is asked for now."""

    def __init__(self) -> None:
        self.coming: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.coming


def as_it_is(batch: Any) -> Any:
    return batch


def begin_worker(number: int) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()


class OwnBatches:
    """Raises DataError where the dataset cannot be sent to workers."""

    def __init__(
        self, dataset: Dataset, train: OwnSource, test: OwnSource, settings: Settings, form: Form, place: Place
    ) -> None:
        self.form = form
        self.bad: dict[str, str] = {}  # --bad-samples skip is for files of built-in datasets
        self.answers = Answers(Reader(train, settings.seed), Reader(test, settings.seed))
        self.scale = Scale(dataset, form.device) if train.stored is not None else as_it_is
        self.stream = torch.cuda.Stream(form.device) if form.on_gpu else None
        self.requests, self.busy = Requests(), False
        workers = settings.workers if settings.workers >= 0 else auto_workers(place.local_world_size, form.on_gpu)
        self.loader = self.make_loader(workers, self.requests)
        if workers:
            self.start_workers(train.name)

    def make_loader(self, workers: int, requests: Requests) -> "DataLoader[Any]":
        more: dict[str, Any] = {}
        if workers:  # from a fork server: see train.datasets.workers
            more = {"multiprocessing_context": from_fork_server(__name__), "persistent_workers": True}
        return DataLoader(
            self.answers,  # type: ignore[arg-type]
            batch_size=None,
            sampler=requests,
            collate_fn=as_it_is,
            num_workers=workers,
            worker_init_fn=begin_worker if workers else None,
            pin_memory=self.form.on_gpu,
            generator=torch.Generator(),  # it draws a seed for its workers: not from the one that dropout draws from
            **more,
        )

    def start_workers(self, name: str) -> None:
        """They start while the caller goes on."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD)
        try:
            iter(self.loader)
        except (PicklingError, AttributeError, TypeError) as error:
            raise DataError(
                f"dataset {name}: it cannot be sent to the processes that read it ahead ({error}): define its classes "
                "and functions at the top of a module, without lambdas, and open files when they are first read; or "
                "set --workers 0"
            ) from error
        finally:
            if is_main:  # torch's handler would raise in whatever line the training is when a worker dies
                signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)

    def batches(self, requests: Iterable[Ints], epoch: int | None) -> Iterator[Batch]:
        """epoch None: the held-out part."""
        loader, coming = self.loader, ((epoch, numbers) for numbers in requests)
        mine = not self.busy
        if mine:
            self.busy, self.requests.coming = True, coming
        else:  # another iteration, not yet ended, has the workers
            others = Requests()
            others.coming, loader = coming, self.make_loader(0, others)
        try:
            ready = self.received(loader)
            yield from on_side_stream(ready, self.on_device, self.stream) if self.stream else map(self.on_device, ready)
        finally:
            self.busy = self.busy and not mine

    def received(self, loader: "DataLoader[Any]") -> Iterator[Batch]:
        try:
            for batch in loader:
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:  # or it takes a batch along
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that reads samples was ended from outside, often because memory, or the shared memory of "
                "/dev/shm, ran out: set fewer --workers (0: none), or give the container more"
            ) from error

    def on_device(self, batch: Batch) -> Batch:
        inputs, targets = tree_map(self.moved, batch)
        inputs = self.scale(inputs)
        if self.form.channels_last and isinstance(inputs, Tensor) and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, targets

    def moved(self, leaf: Any) -> Any:
        return leaf.to(self.form.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf

    def close(self) -> None:
        del self.loader  # ends the workers
