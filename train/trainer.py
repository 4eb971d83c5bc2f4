"""The training loop: epochs of steps, each epoch evaluated and kept in a checkpoint; the figures of the run.

Knows nothing of command lines and process groups: `train.__main__` hands it all that it works on.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train import checkpoint, model
from train.batches import Batches
from train.data import Dataset
from train.evaluate import evaluate, sum_over_ranks
from train.metrics import Metrics
from train.order import random_words, shares, steps_per_epoch
from train.process import Place
from train.progress import Progress, progress_for
from train.settings import Settings, as_document


@dataclass
class Reporter:
    """Rank 0's metrics and progress; other ranks have none and stay silent."""

    metrics: Metrics
    progress: Progress


@contextmanager
def reporter(settings: Settings, place: Place, steps: int, **start: Any) -> Iterator[Reporter | None]:
    if place.rank != 0:
        yield None
        return
    progress = progress_for(settings.epochs, steps)
    with Metrics(settings.run_dir) as metrics:
        metrics.write("start", **start)
        try:
            yield Reporter(metrics, progress)
        finally:
            progress.close()


def train(
    settings: Settings,
    place: Place,
    device: torch.device,
    dataset: Dataset,
    network: nn.Module,
    started: float,
) -> dict[str, Any]:
    """Trains `network` in place. Returns result.json's content (the same on every rank but for times).

    `started`: time.monotonic() at this process's start, for the time to the first optimizer step.
    Raises NonFiniteLoss, CheckpointError.
    """
    samples = len(dataset.train)
    total_steps = settings.epochs * steps_per_epoch(samples, settings.batch_size)
    network = network.to(device)
    ids = [device.index] if device.type == "cuda" else None
    # Within an epoch buffers (batch statistics) are each rank's own; average_buffers makes them equal.
    ddp = DistributedDataParallel(network, device_ids=ids, forward_sync_buffers=False, gradient_as_bucket_view=True)
    optimizer = model.optimizer_for(network, settings.lr)
    schedule = model.Schedule(settings.lr, total_steps)
    training = Batches(dataset, dataset.train, settings.image_size, device)
    held_out = Batches(dataset, dataset.test, settings.image_size, device)
    config = as_document(settings)

    begun, train_time, values = time.monotonic(), 0.0, dict[str, Any]()
    with reporter(settings, place, total_steps, world_size=place.world_size, device=str(device), **config) as report:
        for epoch in range(settings.epochs):
            epoch_begun = time.monotonic()
            loss, accuracy = train_epoch(settings, place, ddp, optimizer, schedule, training, epoch, report, started)
            epoch_time = time.monotonic() - epoch_begun
            train_time += epoch_time
            average_buffers(network)
            score = evaluate(network, held_out, settings.batch_size, place.rank, place.world_size)
            position = {"epoch": epoch + 1, "batch": 0, "step": (epoch + 1) * total_steps // settings.epochs}
            if place.local_rank == 0:
                state = {
                    "weights": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": dataclasses.asdict(schedule),
                    "position": position,
                    "config": config,
                }
                checkpoint.save(settings.run_dir / "checkpoints", position["step"], state)
            values = {
                "epoch": epoch + 1,
                "train_loss": loss,
                "train_accuracy": accuracy,
                "test_accuracy": score.accuracy,
                "test_loss": score.loss,
                "images_per_second": samples / epoch_time,
                "seconds": time.monotonic() - epoch_begun,
            }
            if report:
                report.metrics.write("epoch", **values)
                report.progress.epoch(values)
        result = {
            "test_accuracy": values["test_accuracy"],
            "images_per_second": settings.epochs * samples / train_time,
            "train_seconds": time.monotonic() - begun,
            "epochs": settings.epochs,
            "steps": total_steps,
            "world_size": place.world_size,
            "model": settings.model,
            "dataset": settings.dataset,
        }
        if report:
            report.metrics.write("end", **result)
    return result


def train_epoch(
    settings: Settings,
    place: Place,
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: model.Schedule,
    batches: Batches,
    epoch: int,
    report: Reporter | None,
    started: float,
) -> tuple[float, float]:
    """One pass over the training part. Returns (mean loss, accuracy) of all ranks, as seen in training."""
    ddp.train()
    samples = len(batches.labels)
    step = epoch * steps_per_epoch(samples, settings.batch_size)
    begun, images = time.monotonic(), 0
    sums = torch.zeros(2, dtype=torch.float64, device=batches.device)
    log = StepLog(report)
    for share in shares(samples, settings.batch_size, settings.seed, epoch, place.rank, place.world_size):
        lr = schedule.at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.manual_seed(int(random_words(settings.seed, step, place.rank)[0]))  # dropout and its like
        inputs, labels = batches.training(share.indices, settings.seed, epoch)
        where = f"epoch {epoch + 1}, step {step + 1}"
        mine = model.step(
            ddp,
            optimizer,
            inputs,
            labels,
            share.count,
            share.global_count,
            place.rank,
            place.world_size,
            where,
        )
        sums += mine
        step += 1
        images += share.global_count
        if step == 1 and report:
            if batches.device.type == "cuda":
                torch.cuda.synchronize()
            report.progress.say(f"first optimizer step after {time.monotonic() - started:.2f} s")
        log.add(mine, share.global_count, epoch + 1, step, lr, images / (time.monotonic() - begun))
    log.flush()
    loss, correct = sum_over_ranks(sums.tolist(), batches.device)
    return loss / samples, correct / samples


class StepLog:
    """The mean loss of each global batch, written by rank 0.

    The sum over the ranks runs beside the next step and is read only then, so that no step waits for its
    logging.
    """

    def __init__(self, report: Reporter | None) -> None:
        self.report = report
        self.pending: tuple[Any, torch.Tensor, dict[str, Any], float] | None = None

    def add(self, sums: torch.Tensor, images: int, epoch: int, step: int, lr: float, images_per_second: float) -> None:
        self.flush()
        total = sums.clone()
        work = dist.all_reduce(total, async_op=True)
        self.pending = (
            work,
            total,
            {"epoch": epoch, "step": step, "lr": lr, "images": images},
            images_per_second,
        )

    def flush(self) -> None:
        if self.pending is None:
            return
        work, total, values, rate = self.pending
        self.pending = None
        work.wait()
        if self.report:
            values["loss"] = float(total[0]) / values["images"]
            self.report.metrics.write("step", **values)
            self.report.progress.step(values["epoch"], values["step"], values["loss"], rate)


@torch.no_grad()
def average_buffers(network: nn.Module) -> None:
    """Batch statistics become the mean over all ranks: replicas, and the hosts' checkpoints, are equal."""
    floating = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    if not floating or dist.get_world_size() == 1:
        return
    flat = torch.cat([buffer.reshape(-1).float() for buffer in floating])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    pieces = torch.split(flat, [buffer.numel() for buffer in floating])
    for buffer, piece in zip(floating, pieces, strict=True):
        buffer.copy_(piece.view_as(buffer))


def prepare_run_dir(path: Path) -> None:
    """Raises OSError where the folder cannot be made or written to."""
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".writable-{os.getpid()}"  # every rank tries
    probe.touch()
    probe.unlink()
