"""Run by test_datasets_download.py: two ranks of one host load a dataset with --download; each prints what it got.

Once from a good archive into good/, once from one with a wrong checksum into bad/. The address is that of a server
in this process. Arguments: archive, folder.
"""

import functools
import hashlib
import multiprocessing
import os
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Barrier
from pathlib import Path

from torchvision import datasets

from train.datasets import DataError, load
from train.settings import Settings
from train.start.group import Place


def one_rank(rank: int, barrier: Barrier, root: Path) -> None:
    def wait() -> None:
        barrier.wait(timeout=120)

    settings = Settings(dataset="cifar10", data_dir=root, download=True)
    try:
        dataset = load(settings, Place(rank, rank, 2, 2), wait)
        said = f"{len(dataset.train)}+{len(dataset.test)}"
    except DataError as error:
        said = str(error)
    os.write(1, f"{root.name} rank {rank}: {said}\n".encode())


def main() -> None:
    os.environ["no_proxy"] = "127.0.0.1"
    archive, root = map(Path, sys.argv[1:])
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(archive.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    datasets.CIFAR10.url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
    fork = multiprocessing.get_context("fork")
    for case, md5 in (("good", hashlib.md5(archive.read_bytes()).hexdigest()), ("bad", "0" * 32)):
        datasets.CIFAR10.tgz_md5 = md5
        barrier = fork.Barrier(2)
        ranks = [fork.Process(target=one_rank, args=(rank, barrier, root / case)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
    server.shutdown()


if __name__ == "__main__":
    main()
