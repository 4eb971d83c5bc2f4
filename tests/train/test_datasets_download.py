"""--download: by one rank of the host while the other waits, longer than a collective may; a failure reaches both, and
nobody waits forever."""

import os
import socket
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import Forked
from tests.train import dataset_files as disk
from train.datasets import DataError, download, load
from train.datasets.base import Files
from train.settings import Settings
from train.start.group import Place, wait_for_all


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    disk.write_cifar_python(tmp_path / "source", 10)
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(tmp_path / "source" / "cifar-10-batches-py", "cifar-10-batches-py")
    return path


@pytest.mark.slow
def test_one_rank_fetches_for_both_and_both_tell_of_a_failure(archive: Path, tmp_path: Path) -> None:
    process = Forked("tests.train.datasets_download_ranks", [str(archive), str(tmp_path)], Path.cwd(), os.environ)
    assert process.wait() == 0, process.errors()
    lines = sorted(line for line in process.out().splitlines() if " rank " in line)
    assert lines[2:] == ["good rank 0: 50+5", "good rank 1: 50+5"]
    assert "cannot be downloaded" in lines[0] and "copy the files there" in lines[0]
    assert lines[1].startswith("bad rank 1: dataset cifar10") and "--download" in lines[1]


def test_complete_data_is_left_alone(tmp_path: Path) -> None:
    disk.write_stl10(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    waits = list[int]()

    def wait(done: Callable[[], bool]) -> bool:
        waits.append(1)
        return True

    load(Settings(dataset="stl10", data_dir=tmp_path, download=True), Place(), wait)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert len(waits) == 1


def test_nothing_is_fetched_unasked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--download"):
        load(Settings(dataset="mnist", data_dir=tmp_path / "none"), Place())
    assert not (tmp_path / "none").exists()


def test_imagefolder_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot fetch imagefolder"):
        load(Settings(dataset="imagefolder", data_dir=tmp_path, download=True), Place(), lambda done: True)


def test_a_download_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    threads = list[threading.Thread]()

    def fetch(files: Files) -> None:
        threads.append(threading.current_thread())
        ended.wait()

    monkeypatch.setitem(download.FETCH, "cifar10", fetch)
    settings = Settings(dataset="cifar10", data_dir=tmp_path, download=True)
    with pytest.raises(DataError, match="--download has not ended"):
        load(settings, Place(), lambda done: wait_for_all(done, "fetching", 0.3, Place()))
    ended.set()
    threads[0].join()  # it puts the process's timeout of sockets back, which the next test would find otherwise


def test_a_server_that_falls_silent_ends_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SILENCE_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}/cifar-10-python.tar.gz"
        monkeypatch.setattr("torchvision.datasets.CIFAR10.url", url)
        with pytest.raises(DataError, match=r"cannot be downloaded to .* \(TimeoutError: timed out\)"):
            load(Settings(dataset="cifar10", data_dir=tmp_path, download=True), Place())
    assert socket.getdefaulttimeout() is None
