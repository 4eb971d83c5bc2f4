"""Run by test_datasets_folder.py as a program: workers need a main module that can be imported again.

Arguments: what to do, the data folder, the result's file.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from train.datasets import load
from train.datasets.file_batches import FileBatches
from train.datasets.loader import Loader
from train.settings import Settings
from train.start.group import Place


def workers_of(loader: Loader) -> list[int]:
    assert isinstance(loader.maker, FileBatches)
    return sorted({done.result() for done in loader.maker.pool.first})


def main() -> int:
    action, root, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    settings = Settings(dataset="imagefolder", data_dir=root, workers=2, image_size=32, batch_size=6)
    dataset = load(settings, Place())
    with Loader(dataset, settings, torch.device("cpu"), Place()) as loader:
        out.with_suffix(".pids").write_text(" ".join(map(str, [os.getpid(), *workers_of(loader)])))
        samples = np.arange(len(dataset.train), dtype=np.int64)
        if action == "batches":
            # An iteration that is left in the middle, and an evaluation begun within one.
            next(loader.training([samples[:4]] * 50, 1))
            training = loader.training([samples[:5], samples[5:]], 1)
            first = next(training)[0]
            held_out = torch.cat([images for images, _ in loader.held_out([np.arange(len(dataset.test))] * 9)])
            torch.save([torch.cat([first, *(images for images, _ in training)]), held_out[: len(dataset.test)]], out)
        elif action == "killed":
            os.kill(os.getpid(), 9)
    return 0


if __name__ == "__main__":
    sys.exit(main())
