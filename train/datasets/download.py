"""Fetching a dataset that is not there, by torchvision's addresses and checksums. Only where --download asks for it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.datasets.base import DataError, Dataset, Files

SILENCE_SECONDS = 60.0  # of a server, after which the download has failed: other ranks wait for it


def download_missing(files: Files, read: Callable[[Files], Dataset]) -> None:
    """Leaves complete data alone. Raises DataError where it cannot be fetched, or was fetched and is still wrong."""
    try:
        read(files)
        return
    except DataError as error:
        if files.dataset not in FETCH:
            raise DataError(f"{error} (--download cannot fetch {files.dataset}: it has no public address)") from error
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        FETCH[files.dataset](files)
    except Exception as error:  # torchvision raises what urllib, tarfile and its own checks do
        raise DataError(
            f"dataset {files.dataset}: cannot be downloaded to {files.root} ({type(error).__name__}: {error}). "
            "Check this host's way to the internet and the free disk, or copy the files there from another host"
        ) from error
    read(files)


@contextmanager
def silence_ends_a_connection() -> Iterator[None]:
    """torchvision and torch.hub give urllib no timeout, which then waits for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def archive(files: Files) -> None:
    """The archive is checked by its MD5 and unpacked; nothing of it is loaded."""
    from torchvision import datasets
    from torchvision.datasets.utils import download_and_extract_archive

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "stl10": datasets.STL10}[files.dataset]
    download_and_extract_archive(kind.url, str(files.root), filename=kind.filename, md5=kind.tgz_md5)


def idx_files(files: Files) -> None:
    from torchvision import datasets

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[files.dataset]
    kind(str(files.root), download=True)


FETCH: dict[str, Callable[[Files], None]] = {
    "mnist": idx_files,
    "fashion-mnist": idx_files,
    "cifar10": archive,
    "cifar100": archive,
    "stl10": archive,
}
