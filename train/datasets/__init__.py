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

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from train.datasets.base import DataError, Dataset, Files, data_dir_of
from train.datasets.download import download_missing, silence_ends_a_connection
from train.datasets.fingerprint import fingerprint
from train.names import DATASETS, is_own
from train.settings import Settings

if TYPE_CHECKING:  # it imports torch
    from train.start.group import Place

__all__ = ["FETCH_SECONDS", "DataError", "Dataset", "data_dir_of", "fingerprint", "load"]

FETCH_SECONDS = 6 * 3600.0  # in which --download has to end


def load(
    settings: Settings,
    place: "Place",
    wait: Callable[[Callable[[], bool]], bool] | None = None,
    fetch_more: Callable[[], None] = lambda: None,
) -> Dataset:
    """The dataset of `settings` from this host's disk.

    With --download local rank 0 fetches what is missing, `fetch_more` first; of a dataset of the user's own it calls
    the function alone: that may fetch something. Every rank calls `wait` exactly once (needed where a host has more
    than one rank), also where the download fails. It is given a function that says whether this rank has nothing to
    fetch any more, and returns when that is so on all ranks; False: it has given up.
    Raises DataError, and SettingsError for parts of the user's own.
    """
    files = Files(settings.dataset, data_dir_of(settings.data_dir))
    if is_own(settings.dataset):
        from train.datasets import own

        read: Callable[[], Dataset] = partial(own.read, settings)
        fetch: Callable[[], object] = read
    else:
        reader = import_module(f"train.datasets.{DATASETS[files.dataset]}").read
        read, fetch = partial(reader, files), partial(download_missing, files, reader)
    if settings.download:
        fetch_once([fetch_more, fetch], files, place, wait)
    dataset = read()
    if is_own(settings.dataset) or is_own(settings.transform):
        from train.datasets import own

        return own.finished(dataset, settings)
    return dataset


def fetch_once(
    work: Sequence[Callable[[], object]],
    files: Files,
    place: "Place",
    wait: Callable[[Callable[[], bool]], bool] | None,
) -> None:
    """By local rank 0, while the others wait."""
    fetched = Future[None]()
    if place.local_rank:
        fetched.set_result(None)
    else:
        in_background(fetched, partial(all_of, work))
    if wait is not None and not wait(fetched.done):
        raise DataError(
            f"dataset {files.dataset}: --download has not ended in all this time: copy the files to "
            f"{files.root} from elsewhere, on each host"
        )
    fetched.result()


def all_of(work: Sequence[Callable[[], object]]) -> None:
    with silence_ends_a_connection():
        for each in work:
            each()


def in_background(ended: "Future[None]", work: Callable[[], object]) -> None:
    """Does the work in a thread that does not hold up the end of the process, as an executor's would."""

    def do() -> None:
        try:
            work()
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    Thread(target=do, daemon=True).start()
