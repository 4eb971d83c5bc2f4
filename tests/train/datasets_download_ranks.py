"""Run by test_datasets_download.py: two ranks of one host load a dataset with --download; each prints what it got.

Once from a good archive into good/, once from one with a wrong checksum into bad/. The address is that of a server
in this process, which at first takes longer than a collective may wait. Arguments: archive, folder.
"""

import hashlib
import multiprocessing
import os
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from torchvision import datasets

from train.datasets import DataError, load
from train.settings import Settings
from train.start.group import Place, process_group, wait_for_all

TIMEOUT_SECONDS, DOWNLOAD_SECONDS = 4.0, 6.0


def one_rank(rank: int, root: Path) -> None:
    place = Place(rank, rank, 2, 2)
    settings = Settings(dataset="cifar10", data_dir=root, download=True)
    with process_group(place, torch.device("cpu"), TIMEOUT_SECONDS, init=f"file://{root}.store"):
        try:
            dataset = load(settings, place, lambda done: wait_for_all(done, "fetching", 120, place))
            said = f"{len(dataset.train)}+{len(dataset.test)}"
        except DataError as error:
            said = str(error)
        os.write(1, f"{root.name} rank {rank}: {said}\n".encode())


class Slow(SimpleHTTPRequestHandler):
    folder = ""
    takes = DOWNLOAD_SECONDS

    def translate_path(self, path: str) -> str:
        time.sleep(Slow.takes)
        Slow.takes = 0.0
        return self.folder + path


def main() -> None:
    os.environ["no_proxy"] = "127.0.0.1"
    archive, root = map(Path, sys.argv[1:])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    Slow.folder = str(archive.parent)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    datasets.CIFAR10.url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
    fork = multiprocessing.get_context("fork")
    for case, md5 in (("good", hashlib.md5(archive.read_bytes()).hexdigest()), ("bad", "0" * 32)):
        datasets.CIFAR10.tgz_md5 = md5
        ranks = [fork.Process(target=one_rank, args=(rank, root / case)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
    server.shutdown()


if __name__ == "__main__":
    main()
