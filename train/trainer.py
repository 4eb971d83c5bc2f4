"""The training loop: epochs of steps, evaluation, checkpoints, and an orderly stop.

Knows nothing of command lines and process groups: `train.run` gives it all that it works on.
"""

import dataclasses
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType

import torch

from train import losses, order
from train.checkpoints.writer import Writer
from train.datasets import DataError
from train.datasets.loader import Batch
from train.evaluate import Score, evaluate
from train.model.running_statistics import evaluating_with, mean_buffers
from train.reporting.profile import Profile
from train.reporting.report import Report
from train.reporting.step_stats import StepRecord, StepStats
from train.reporting.work import Work
from train.resume import own_state_of, state_of
from train.session import Session
from train.settings import Every, every
from train.start import memory
from train.start.muster_run import tell
from train.step import optimizer_step

SLACK = 4  # steps that the figures are late with --sync-every: so far hosts may drift apart in time


@dataclass
class StopRequest:
    """SIGTERM or Ctrl-C: finish the step, write a checkpoint, end. A second one changes nothing: torchrun passes on
    a terminal's Ctrl-C that the ranks have received already."""

    by: str = ""

    @contextmanager
    def watched(self) -> Iterator["StopRequest"]:
        previous = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.by = signal.Signals(number).name


@dataclass
class CheckpointClock:
    """When the next checkpoint is due. Seconds are rank 0's: the others learn of it with the step's figures."""

    every: Every
    written: float = field(default_factory=time.monotonic)

    def due_by_time(self) -> bool:
        return self.every.seconds is not None and time.monotonic() - self.written >= self.every.seconds

    def due_by_steps(self, step: int) -> bool:
        return self.every.steps is not None and step % self.every.steps == 0

    def reset(self) -> None:
        self.written = time.monotonic()


@dataclass
class Training:
    """One run of the loop. `train` returns the last evaluation, or None after a stop that was asked for."""

    session: Session
    writer: Writer | None  # of the rank that writes for its host, and of one that is a member of its own
    report: Report
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        session = self.session
        self.clock = CheckpointClock(every(session.settings.checkpoint_every))
        behind = SLACK if session.exchange else 1
        self.stats = StepStats(session.place.world_size, session.place.rank, session.device, behind)
        if self.writer and session.settings.parallel in ("ddp", "none"):  # whose states are the live tensors
            self.writer.guard(session.optimizer)
        self.memory_is_prepared = False
        self.due = self.stopping = False  # what all ranks have agreed on, not this rank's own state
        self.work = Work()
        left = session.total_steps - session.position.step
        where = session.settings.run_dir, session.place.rank
        self.profile = Profile(*where, session.settings.profile, left, session.device, self.stats.settle)

    def train(self) -> Score | None:
        """The last evaluation; None after a stop. Raises NonFiniteLoss, CheckpointError, DataError."""
        with self.stop.watched(), self.profile:
            score = self.epochs()
            if self.profile.end():
                self.report.profiled(self.profile)
            return score

    def epochs(self) -> Score | None:
        if self.session.ended:
            return self.ended_before()
        score = None
        while not self.session.ended:
            if not self.epoch():
                return None
            score = self.end_epoch()
            if self.stopping and not self.session.ended:
                return None
        return score

    def ended_before(self) -> Score | None:
        """Of a run that goes on from another one's end: its checkpoint and evaluation become this one's, too."""
        if self.session.kept != self.session.position.step:
            self.checkpoint()
        score = self.session.score or self.evaluate()
        if score is not None:
            self.note(score)
        return score

    def note(self, score: Score) -> None:
        """With the newest checkpoint, of which it is."""
        if self.writer and self.session.place.local_rank == 0:
            self.writer.evaluated(self.session.position.step, score.metric, dataclasses.asdict(score))

    def epoch(self) -> bool:
        """The steps that are left of the current epoch. False after a stop within it."""
        session, position, settings = self.session, self.session.position, self.session.settings
        if session.epoch_is_trained:
            return True
        session.strategy.module.train()
        tell("training", position.step, session.total_steps)
        self.report.begin_epoch()
        steps = list(
            order.steps(session.samples, settings.batch_size, settings.seed, position.epoch, session.cut,
                        session.place.rank, settings.micro_batch, session.mixes, done=position.batch,
                        group=session.group)
        )  # fmt: skip
        batches = session.loader.training((piece.indices for step in steps for piece in step.passes), position.epoch)
        begun = time.monotonic() - position.seconds
        for number, step in enumerate(steps, 1):
            self.step(step, batches, begun)
            if self.profile.step():
                self.report.profiled(self.profile)
            if number < len(steps) and (self.checkpoint_is_due() or self.stopping):
                self.checkpoint()
                if self.stopping:
                    return False
        if session.exchange and session.evaluation_is_due:
            session.exchange.settle()
        self.take(*self.stats.flush())
        if not position.images:
            raise DataError("no training image can be decoded: `python -m train verify-data` says why of each")
        position.seconds = time.monotonic() - begun  # with the work that the device still had
        return True

    def step(self, step: order.Step, batches: Iterator[Batch], begun: float) -> None:
        session, position, settings = self.session, self.session.position, self.session.settings
        lr = session.schedule.set(session.optimizer, position.step)
        torch.manual_seed(order.word(settings.seed, position.step, session.place.rank))  # for dropout
        waited = session.loader.waited
        sums = optimizer_step(
            session.strategy, session.optimizer, session.precision, batches, step, session.mix(),
            session.loss, settings.clip, session.place.world_size,
        )  # fmt: skip
        self.work.waited += session.loader.waited - waited
        self.report.stepped()
        self.prepare_memory()
        position.step, position.batch = position.step + 1, position.batch + 1
        if session.ema:
            session.ema.update(position.step)
        session.after_step(step.global_count)
        position.seconds = time.monotonic() - begun
        times = self.work.add(session.strategy.computing_seconds(), session.comm_share())
        record = self.stats.add(
            position.step, position.epoch + 1, sums.loss, sums.correct, sums.finite, sums.images, sums.grad_norm,
            stop=bool(self.stop.by), due=self.clock.due_by_time(), times=times, lr=lr,
            seconds=position.seconds,
        )  # fmt: skip
        if record:
            self.take(record)
        tell(
            "training", position.step, session.total_steps, epoch=position.epoch + 1, epochs=settings.epochs,
            loss=record.loss if record else None, rate=position.images / position.seconds or None,
            work=self.work.told(),
        )  # fmt: skip

    def prepare_memory(self) -> None:
        """After the first step: memory for the copies of the state, prepared while the next steps run; and what steps
        free is kept."""
        if self.memory_is_prepared:
            return
        self.memory_is_prepared = True
        place = self.session.place
        if not self.session.settings.blocking_checkpoints:
            state, own = state_of(self.session), own_state_of(self.session)
            if self.writer:
                self.writer.reserve(state if place.local_rank == 0 else None, own)
        memory.keep_large_blocks(place.local_world_size, self.session.device)

    def take(self, *records: StepRecord) -> None:
        """Adds up the figures of steps, which come some steps later; the same on all ranks."""
        for record in records:
            position = self.session.position
            self.due = self.due or record.due
            self.stopping = self.stopping or bool(record.stop)
            position.loss += record.loss_sum
            position.correct += record.correct
            position.images += record.images
            self.report.step(record)

    def checkpoint_is_due(self) -> bool:
        return self.clock.due_by_steps(self.session.position.step) or self.due

    def checkpoint(self) -> None:
        """Raises NonFiniteLoss rather than keep weights that a step just spoilt."""
        self.take(*self.stats.flush())
        begun = time.monotonic()
        state, own = state_of(self.session), own_state_of(self.session)
        if self.writer:
            tell("saving", self.session.position.step)
            self.writer.save(self.session.position.step, state if self.session.place.local_rank == 0 else None, own=own)
            tell("training", self.session.position.step, self.session.total_steps)
        self.report.checkpoint(time.monotonic() - begun)
        self.report.bad_samples()
        self.clock.reset()
        self.due, self.session.kept = False, self.session.position.step

    def evaluate(self) -> Score | None:
        """With averaged batch statistics, and averaged weights if there are any; leaves the training as it was. None
        after a stop within it."""
        session, settings = self.session, self.session.settings
        network = session.strategy.network
        rank_batch = settings.micro_batch or -(-settings.batch_size // session.place.world_size)
        if self.writer and session.ema:
            self.writer.settle()  # weights are about to be swapped, which only optimizer steps may do unasked
        averaged = session.ema.swapped_in() if session.ema else nullcontext()
        with evaluating_with(network, mean_buffers(network)), averaged:
            score = evaluate(
                network, session.loader, len(session.dataset.test), rank_batch, session.cut, session.place,
                session.precision, losses.make(settings, smoothing=False), lambda: self.stats.vote(bool(self.stop.by)),
            )  # fmt: skip
        self.stopping = self.stats.no_votes() or score is None or self.stopping
        return score

    def end_epoch(self) -> Score | None:
        """Checkpoint, evaluation, figures of the epoch. None after a stop, and where no evaluation is due.

        The checkpoint comes first, so that nothing that happens in the evaluation costs the epoch: a run that goes on
        from it begins with the evaluation. What that finds is added to the checkpoint's manifest.
        """
        session, position = self.session, self.session.position
        self.report.trained()
        if not session.evaluation_is_due:
            self.report.epoch(None)
            position.end_epoch(None)
            self.checkpoint()
            return None
        if session.kept != position.step:
            self.checkpoint()
        score = None if self.stopping else self.evaluate()
        if score is None:
            return None
        self.report.epoch(score)
        self.report.bad_samples()
        position.end_epoch(score)
        self.note(score)
        return score
