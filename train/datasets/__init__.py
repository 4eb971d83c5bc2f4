"""Datasets on local disk: which there are, how one is loaded, and that all hosts hold the same one.

May import: settings, order, start. Writes no document; the fingerprint of a dataset is compared by start.proof.

    dataset = load(settings, place)            raises DataError: what is missing or wrong, where, and what to do
    loader = Loader(dataset, settings, device, place)     (train.datasets.loader)
    for images, labels in loader.training(requests, epoch): ...

Small datasets (digits, mnist, fashion-mnist, cifar10, cifar100, stl10, fake) are arrays in memory, or the files
themselves mapped into it; imagefolder decodes its files for each batch. All are read in the layout in
which torchvision leaves them on disk. Importing this package imports neither torch nor torchvision: a reader is
imported only when its dataset is needed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from train.datasets.base import DataError, Dataset, Files, data_dir_of
from train.datasets.fingerprint import fingerprint
from train.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from train.start.group import Place

__all__ = ["DATASETS", "DataError", "Dataset", "fingerprint", "load"]

# name: module of this package that has `read(files: Files) -> Dataset`
DATASETS = {
    "digits": "small",
    "fake": "small",
    "mnist": "mnist",
    "fashion-mnist": "mnist",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "stl10": "stl10",
    "imagefolder": "folder",
}


def load(settings: Settings, place: "Place", wait: Callable[[], None] | None = None) -> Dataset:
    """The dataset of `settings` from this host's disk.

    With --download local rank 0 fetches what is missing; every rank calls `wait` exactly once (a barrier that the
    caller makes, needed where a host has more than one rank), also where the download fails.
    Raises DataError.
    """
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
    return dataset
