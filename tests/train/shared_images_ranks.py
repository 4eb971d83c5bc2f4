"""Run by test_shared_images.py: two gloo ranks of one host, whose loaders keep prepared images in one memory.

python -m tests.train.shared_images_ranks DATA OUT [lost]: what each rank saw, as JSON. `lost`: the second one cannot
map the first one's memory.
"""

import json
import multiprocessing
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from train.datasets import load
from train.datasets.array_batches import ArrayBatches
from train.datasets.loader import Loader
from train.datasets.memory import Offer
from train.datasets.transform import Store
from train.settings import Settings
from train.start.group import Place

EPOCHS = 2


def one_rank(rank: int, data: Path, out: Path, lost: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    place, settings = Place(rank, rank, 2, 2), Settings(dataset="stl10", data_dir=data, image_size=32, workers=0)
    dataset = load(settings, Place())
    half = np.arange(len(dataset.train), dtype=np.int64).reshape(2, -1)
    prepared = list[int]()  # how many in each epoch
    sized = Store.sized

    def count(store: Store, indices: Any) -> torch.Tensor:
        prepared[-1] += len(indices)
        return sized(store, indices)

    with Loader(dataset, settings, torch.device("cpu"), place) as loader:
        descriptors = len(os.listdir("/proc/self/fd"))
        with mock.patch.object(Offer, "map", lambda offer: []) if lost and rank else nullcontext():
            loader.share(place)
        images = list[str]()
        with mock.patch.object(Store, "sized", count):
            for epoch in range(EPOCHS):  # in each the other half
                prepared.append(0)
                for made, _ in loader.training([half[(rank + epoch) % 2]], epoch):
                    images.append(made.numpy().tobytes().hex())
                dist.barrier()
        assert isinstance(loader.maker, ArrayBatches)
        said = {
            "prepared": prepared,
            "images": images,
            "keeps": [store.kept is not None for store in loader.maker.stores],
            "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
        }
    (out / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    data, out, *lost = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, Path(data), Path(out), bool(lost))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
