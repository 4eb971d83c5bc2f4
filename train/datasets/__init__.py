"""Datasets on local disk: which there are, how one is loaded, and that all hosts hold the same one.

May import: settings, names, order, own_parts, generators, start. Writes no document; the fingerprint of a dataset is
compared by start.proof.

    dataset = load(settings, place)            raises DataError: what is missing or wrong, where, and what to do
    loader = Loader(dataset, settings, device, place)     (train.datasets.loader)
    for images, labels in loader.training(requests, epoch): ...

Small datasets (digits, mnist, fashion-mnist, cifar10, cifar100, stl10, fake) are arrays in memory, or the files
themselves mapped into it; imagefolder decodes its files for each batch. All are read in the layout in
which torchvision leaves them on disk. A dataset or a transform of the user's own goes through own.py. Importing this
package imports neither torch nor torchvision: a reader is imported only when its dataset is needed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from train.datasets.base import DataError, Dataset, Files, data_dir_of
from train.datasets.fingerprint import fingerprint
from train.names import DATASETS, is_own
from train.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from train.start.group import Place

__all__ = ["DataError", "Dataset", "data_dir_of", "fingerprint", "load"]


def load(settings: Settings, place: "Place", wait: Callable[[], None] | None = None) -> Dataset:
    """The dataset of `settings` from this host's disk.

    With --download local rank 0 fetches what is missing; every rank calls `wait` exactly once (a barrier that the
    caller makes, needed where a host has more than one rank), also where the download fails.
    Of a dataset of the user's own local rank 0 calls the function first, alone: it may fetch something.
    Raises DataError, and SettingsError for parts of the user's own.
    """
    if is_own(settings.dataset):
        from train.datasets import own

        try:
            if settings.download and place.local_rank == 0:
                own.read(settings)
        finally:
            if settings.download and wait is not None:
                wait()
        return own.finished(own.read(settings), settings)
    files = Files(settings.dataset, data_dir_of(settings.data_dir))
    read = import_module(f"train.datasets.{DATASETS[files.dataset]}").read
    if settings.download:
        from train.datasets.download import download_missing

        try:
            if place.local_rank == 0:
                download_missing(files, read)
        finally:
            if wait is not None:
                wait()
    dataset: Dataset = read(files)
    if is_own(settings.transform):
        from train.datasets import own

        return own.finished(dataset, settings)
    return dataset
