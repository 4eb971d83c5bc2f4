"""Run by test_ranks.py: one epoch with 1, 2 and 3 real gloo ranks, forked from one interpreter; results to a folder.

The network has no batch normalisation, whose statistics are each rank's own.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train import data, trainer
from train.batches import Batches
from train.evaluate import evaluate
from train.model import Schedule
from train.process import Place
from train.settings import Settings

TRAIN, TEST, BATCH = 31, 13, 15  # the last batch has one sample: with 3 ranks two have none of it
CPU = torch.device("cpu")


def one_rank(rank: int, world_size: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    whole = data.fake()
    part = data.Part(whole.train.images[:TRAIN], whole.train.labels[:TRAIN])
    held_out = data.Part(whole.test.images[:TEST], whole.test.labels[:TEST])
    torch.manual_seed(5)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.Tanh(), nn.Linear(16, 10))
    network.register_buffer("statistic", torch.zeros(3))
    ddp = DistributedDataParallel(network, forward_sync_buffers=False)
    network.get_buffer("statistic").fill_(rank)  # after DDP has made the replicas equal
    settings = Settings(batch_size=BATCH, seed=3, image_size=8, run_dir=out)
    loss, accuracy = trainer.train_epoch(
        settings,
        Place(rank, rank, world_size, world_size),
        ddp,
        torch.optim.SGD(network.parameters(), lr=0.5),
        Schedule(0.5, 3),
        Batches(whole, part, 8, CPU),
        0,
        None,
        time.monotonic(),
    )
    trainer.average_buffers(network)
    score = evaluate(network, Batches(whole, held_out, 8, CPU), 4, rank, world_size)
    result = {
        "weights": [p.detach() for p in network.parameters()],
        "buffers": list(network.buffers()),
        "train": [loss, accuracy],
        "test": [score.samples, score.correct, score.loss],
    }
    torch.save(result, out / f"{world_size}-{rank}.pt")
    dist.destroy_process_group()


def main() -> int:
    out = Path(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    for world_size in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [(rank, world_size, f"{folder}/store", out) for rank in range(world_size)]
            ranks = [fork.Process(target=one_rank, args=each) for each in arguments]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
