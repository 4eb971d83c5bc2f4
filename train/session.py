"""What a run is made of: model, strategy, optimizer, data and their settings, built once and in the right order.

What of it goes into a checkpoint, and how it comes back, is in train.resume.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from train import losses, optim, order, parallel
from train.checkpoints import Member, head_of
from train.datasets import Dataset
from train.datasets.base import DataError
from train.datasets.loader import Loader
from train.evaluate import Score
from train.losses import Loss, Mix
from train.model.ema import Ema
from train.model.freeze import trained
from train.model.precision import Precision
from train.model.prepare import choose_kernels, prepare
from train.parallel import shares
from train.parallel.exchange import Exchange, make_exchange
from train.parallel.members import Members, find_members
from train.settings import Settings, SettingsError, compression
from train.start.group import Place, first_complaint, from_all_ranks
from train.start.muster_run import tell

Made = TypeVar("Made")


@dataclass
class Position:
    """How far a run is: `epoch` whole epochs, `batch` steps of the next one, `step` steps in all.

    The sums are those of the unfinished epoch over all ranks, so that its figures come out as if never interrupted. An
    epoch whose steps are all made is unfinished until it is evaluated, where an evaluation is due.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: float = 0.0
    images: int = 0
    seconds: float = 0.0  # of training in the unfinished epoch
    train_seconds: float = 0.0  # of training in all
    best_accuracy: float | None = None  # None before the first evaluation that has one
    best_loss: float | None = None  # the lowest one of held-out samples; None before the first evaluation
    worse: int = 0  # evaluations since the best one

    def end_epoch(self, score: Score | None) -> None:
        """score: of the evaluation after it, if there was one."""
        if score:
            self.evaluated(score)
        self.train_seconds += self.seconds
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss, self.correct, self.images, self.seconds = 0.0, 0.0, 0, 0.0

    def evaluated(self, score: Score) -> None:
        is_lower = not math.isnan(score.loss) and (self.best_loss is None or score.loss < self.best_loss)
        is_better = is_lower
        if score.accuracy is not None:
            is_better = self.best_accuracy is None or score.accuracy > self.best_accuracy
            self.best_accuracy = max(self.best_accuracy or 0.0, score.accuracy)
        if is_lower:
            self.best_loss = score.loss
        self.worse = 0 if is_better else self.worse + 1


@dataclass
class Session:
    settings: Settings
    place: Place
    device: torch.device
    dataset: Dataset
    strategy: parallel.Strategy
    optimizer: torch.optim.Optimizer
    loss: Loss  # of training
    schedule: optim.Schedule
    precision: Precision
    loader: Loader
    ema: Ema | None
    members: Members | None  # where each has what the others do not know
    exchange: Exchange | None  # of weights, with --sync-every
    weights: Sequence[float]  # the ranks' parts of a global batch
    position: Position
    resumed_from: Path | None = None
    kept: int | None = None  # the step of the newest checkpoint of this run on all of its hosts
    score: Score | None = None  # of the evaluation at which the run goes on, where it had been made before

    @property
    def epoch_is_trained(self) -> bool:
        """Whether all steps of the current epoch are made."""
        return self.position.batch >= order.steps_per_epoch(self.samples, self.settings.batch_size)

    @property
    def evaluation_is_due(self) -> bool:
        """At the end of the current epoch."""
        return is_evaluated(self.settings, self.position.epoch + 1)

    @property
    def gave_up(self) -> bool:
        """Whether --early-stop ends the run."""
        return 0 < self.settings.early_stop <= self.position.worse

    @property
    def ended(self) -> bool:
        return self.gave_up or self.position.epoch >= self.settings.epochs

    @property
    def cut(self) -> order.Cut:
        return shares.cut_by(self.weights)

    @property
    def group(self) -> range | None:
        """The ranks that make an update together; None: all."""
        return self.exchange.members.here if self.exchange else None

    @property
    def member(self) -> Member | None:
        """This rank's, as checkpoints name it; None where members have no files of their own."""
        return Member(self.members.mine, len(self.members.ranks)) if self.members else None

    @property
    def part(self) -> float:
        """This member's part of a global batch, 0 to 1."""
        ranks = self.group or range(self.place.world_size)
        return sum(self.weights[rank] for rank in ranks) / sum(self.weights)

    @property
    def samples(self) -> int:
        return len(self.dataset.train)

    @property
    def mixes(self) -> bool:
        return self.settings.mixup > 0 or self.settings.cutmix > 0

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def mix(self) -> Mix | None:
        """What mixes the samples of the next step; None where mixing is off."""
        settings = self.settings
        return Mix(settings.seed, self.position.step, settings.mixup, settings.cutmix) if self.mixes else None

    def after_step(self, global_count: int) -> None:
        """After the optimizer step of `position.step`, of so many samples. Collective."""
        if self.exchange:
            self.exchange.after_step(self.position.step, self.exchange.members.sums(self.cut(global_count)))

    def comm_share(self) -> float | None:
        """Part of the last steps, 0 to 1, that waited for communication. None if not known."""
        if self.exchange is None:
            return self.strategy.comm_share()
        waited, self.exchange.waited = self.exchange.waited, 0.0
        return waited / ((self.strategy.computing_seconds() or 0.0) + waited) if waited else 0.0

    def close(self) -> None:
        self.loader.close()
        self.strategy.close()
        if self.exchange:
            self.exchange.close()


def is_evaluated(settings: Settings, epoch: int) -> bool:
    """Whether an evaluation comes after the epoch, counted from 1."""
    return epoch % settings.eval_every == 0 or epoch >= settings.epochs


def build(settings: Settings, place: Place, device: torch.device, dataset: Dataset, network: nn.Module) -> Session:
    """`network`: on the CPU, the same on all ranks. Collective. Raises SettingsError, on all ranks alike."""
    choose_kernels(settings)
    network = prepare(network, settings, device, place.world_size)
    precision, loss = Precision(settings, device), losses.make(settings)
    per_epoch = order.steps_per_epoch(len(dataset.train), settings.batch_size)
    strategy = parallel.make(settings, network, place, device, settings.epochs * per_epoch)
    if settings.compile:
        say_when_compiling()
        # A batch of another size, such as a short last one, gets a graph of its own: torch's own way, one graph for
        # sizes that vary, is slower for all of them.
        strategy.compile(mode=settings.compile_mode, dynamic=False)
    groups = optim.make_groups(strategy.network, settings.weight_decay, *head(settings, strategy.network))
    optimizer = strategy.optimizer(lambda groups: optim.make_optimizer(settings, groups, device), groups)
    loader = on_all_ranks(lambda: Loader(dataset, settings, device, place), place)
    loader.share(place)
    knows_alone = settings.sync_every > 0 or compression(settings.compress).kind == "powersgd"
    members = find_members(place) if knows_alone and place.world_size > 1 else None
    weights = share_weights(settings, place, dataset, strategy, precision, loader, loss)
    exchange = None
    if members and settings.sync_every:
        exchange = make_exchange(settings, strategy.network, members, settings.epochs * per_epoch, optimizer)
    return Session(
        settings=settings,
        place=place,
        device=device,
        dataset=dataset,
        strategy=strategy,
        optimizer=optimizer,
        loss=loss,
        schedule=optim.Schedule(settings, per_epoch, settings.epochs * per_epoch),
        precision=precision,
        loader=loader,
        ema=Ema(strategy.network, settings.ema) if settings.ema else None,
        members=members,
        exchange=exchange,
        weights=weights,
        position=Position(),
    )


def on_all_ranks(make: Callable[[], Made], place: Place) -> Made:
    """What this rank makes. Collective. Raises SettingsError, on all ranks alike, where one meets a DataError."""
    made, complaint = None, ""
    try:
        made = make()
    except DataError as error:
        complaint = str(error)
    if complaint := first_complaint(complaint, place):
        raise SettingsError(complaint)
    return cast(Made, made)


def head(settings: Settings, network: nn.Module) -> tuple[str | None, float]:
    """(the layer with a learning rate of its own, how many times the others'). Raises SettingsError."""
    if not settings.head_lr:
        return None, 1.0
    name, outputs = head_of(network)
    layer = network.get_submodule(name)
    if not outputs or not any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
        why = f"{name} is frozen" if outputs else f"{settings.model} has no linear or convolutional layer"
        raise SettingsError(f"--head-lr {settings.head_lr}: {why}: leave it out")
    return name, settings.head_lr / settings.lr


def fine_tuning(session: Session) -> list[str]:
    """What is trained, and how, where it is not all alike: for the user."""
    settings, network = session.settings, session.strategy.network
    frozen = [f"--freeze {settings.freeze}: {trained(network)}"] if settings.freeze else []
    return frozen + ([f"--head-lr {settings.head_lr}: for {head_of(network)[0]}"] if settings.head_lr else [])


def slow_links(session: Session) -> list[str]:
    """How hosts talk, where it is not by whole gradients: for the user."""
    settings, exchange = session.settings, session.exchange
    if not settings.sync_every and settings.compress == "none":
        return []
    if session.place.world_size == 1:
        return ["--sync-every and --compress: there is nobody to send anything to"]
    hosts = from_all_ranks(session.place.local_rank, session.place).count(0)
    who = f"{hosts} hosts" if hosts > 1 else f"{session.place.world_size} ranks of one host, each counted as a host,"
    if exchange is None:
        how = compression(settings.compress)
        form = f"as matrices of rank {how.rank}" if how.rank else f"rounded to {how.kind}"
        return [f"--compress {settings.compress}: {who} send each other gradients {form}"]
    form = "" if settings.compress == "none" else f" (changes are sent as {settings.compress})"
    pieces = f" in {len(exchange.pieces)} pieces" if settings.stream else ""
    first = f", more often in the first {exchange.warmup} steps" if exchange.warmup else ""
    few = f" (the run has {session.total_steps} in all)" if settings.sync_every >= session.total_steps else ""
    often = f"{settings.sync_every} steps" if settings.sync_every > 1 else "step"
    return [
        f"--sync-every {settings.sync_every}: {who} train alone, and average their weights{form}{pieces} every "
        f"{often}{few}{first}, and before evaluations"
    ]


def say_when_compiling() -> None:
    """A step or an evaluation in which torch compiles, also for another batch size, may take very long."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: tell("compiling"))


def share_weights(
    settings: Settings,
    place: Place,
    dataset: Dataset,
    strategy: parallel.Strategy,
    precision: Precision,
    loader: Loader,
    loss: Loss,
) -> list[float]:
    """The ranks' parts of a global batch as --shares says (collective where they are measured: also where a run that
    was given shares goes on with fewer ranks)."""
    if not settings.shares or place.world_size == 1:
        return [1.0] * place.world_size
    if settings.shares != "auto" and not (was_restarted() and len(settings.shares.split(",")) != place.world_size):
        return shares.parse_shares(settings.shares, place.world_size)
    images, labels = on_all_ranks(lambda: some_samples(settings, place, dataset, loader), place)
    return shares.measured(strategy, precision, images, labels, loss)


def some_samples(settings: Settings, place: Place, dataset: Dataset, loader: Loader) -> tuple[Any, Any]:
    """Training images as many as a rank's usual pass has: to measure with."""
    usual = min(-(-settings.batch_size // place.world_size), settings.micro_batch or settings.batch_size)
    indices = np.arange(min(max(usual, order.LEAST), len(dataset.train)), dtype=np.int64)
    images, labels, *_ = next(iter(loader.training([indices], 0)))
    return images, labels


def was_restarted() -> bool:
    """Whether this is not the first attempt of a run."""
    return os.environ.get("MUSTER_ATTEMPT", "1") != "1"


def make_run_dir(path: Path) -> None:
    """Raises SettingsError where the folder, or the one of its checkpoints, cannot be made or written to."""
    checkpoints = path / "checkpoints"
    for folder in (path, *([checkpoints] if os.path.lexists(checkpoints) else [])):
        probe = folder / f".writable-{os.getpid()}"  # every rank tries
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise SettingsError(
                f"--run-dir {path}: cannot write to {folder} ({error.strerror or error}): make it a folder "
                "that you may write to, or give another --run-dir"
            ) from error
