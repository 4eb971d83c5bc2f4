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
from concurrent.futures import Future
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from train.datasets.base import DataError, Dataset, Files, data_dir_of
from train.datasets.fingerprint import fingerprint
from train.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from train.start.group import Place

__all__ = ["DATASETS", "FETCH_SECONDS", "DataError", "Dataset", "fingerprint", "load"]

FETCH_SECONDS = 6 * 3600.0  # in which --download has to end
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


def load(settings: Settings, place: "Place", wait: Callable[[Callable[[], bool]], bool] | None = None) -> Dataset:
    """The dataset of `settings` from this host's disk.

    With --download local rank 0 fetches what is missing; every rank calls `wait` exactly once (needed where a host has
    more than one rank), also where the download fails. It is given a function that says whether this rank has nothing
    to fetch any more, and returns when that is so on all ranks; False: it has given up.
    Raises DataError.
    """
    files = Files(settings.dataset, data_dir_of(settings.data_dir))
    read = import_module(f"train.datasets.{DATASETS[files.dataset]}").read
    if settings.download:
        from train.datasets.download import download_missing

        fetched = Future[None]()
        if place.local_rank:
            fetched.set_result(None)
        else:
            in_background(fetched, lambda: download_missing(files, read))
        if wait is not None and not wait(fetched.done):
            raise DataError(
                f"dataset {files.dataset}: --download has not ended in all this time: copy the files to "
                f"{files.root} from elsewhere, on each host"
            )
        fetched.result()
    dataset: Dataset = read(files)
    return dataset


def in_background(ended: "Future[None]", work: Callable[[], None]) -> None:
    """Does the work in a thread that does not hold up the end of the process, as an executor's would."""

    def do() -> None:
        try:
            work()
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=do, daemon=True).start()
