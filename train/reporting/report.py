"""What rank 0 reports of a run: its opening line, progress, metrics, and at the end the picture and result.json.

Other ranks have the same object, which reports nothing; but the metrics are kept on every host.
"""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from train.evaluate import Score
from train.reporting import metrics, picture
from train.reporting.loggers import Event
from train.reporting.profile import Profile
from train.reporting.progress import percent, progress_for
from train.reporting.step_stats import StepRecord
from train.session import Session
from train.settings import as_document
from train.start import proof
from train.start.devices import describe
from train.start.group import from_all_ranks
from train.whole_files import write_file, write_json

BAD_FILE = "bad-samples.txt"  # in the run's folder: a line for each, its name, a tab, and why
NAMED = 10  # of them, in a message


class Report:
    def __init__(self, session: Session, notes: list[str], started: float) -> None:
        """started: time.monotonic() at this process's start, for the time to the first optimizer step."""
        self.session, self.notes, self.started = session, notes, started
        self.reports = session.place.rank == 0
        # Under a keeper each host has a run folder of its own, and any host may be the first one of another attempt.
        self.keeps = self.reports or (session.place.local_rank == 0 and "MUSTER_KEEPER" in os.environ)
        self.begun = time.monotonic()
        self.first = True
        self.epoch_waited = session.loader.waited  # when this epoch began
        self.images = 0  # of this process's steps
        self.bad = dict[str, str]()  # name -> why, of the samples that were left out, over all ranks
        self.sent = set[str]()  # of this rank's
        self.profile = ""  # the trace of --profile, from the run's folder

    def __enter__(self) -> "Report":
        session, settings = self.session, self.session.settings
        document = as_document(settings)
        if self.reports:
            self.progress = progress_for(settings.epochs, session.total_steps)
            for line in (opening(session), *filter(None, self.notes)):
                self.progress.say(line)
        given = self.missed()
        if self.keeps:
            self.metrics = metrics.Metrics(
                settings.run_dir, session.position.step, earlier_run(session),
                settings.loggers if self.reports else "none", given, session.position.epoch, document,
            )  # fmt: skip
            write_json(settings.run_dir / "settings.json", document)
            for event in self.metrics.before:
                self.bad |= event["samples"] if event["event"] == "bad_samples" else {}
            self.list_bad_samples()
            resumed = session.position.step if session.resumed_from else None
            self.metrics.write(
                "start",
                world_size=session.place.world_size,
                device=str(session.device),
                host=os.environ.get("MUSTER_HOST"),
                resumed_from=resumed,
                versions=proof.versions(),
                notes=self.notes,
                **document,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.reports:
            self.progress.close()
        if self.keeps:
            self.metrics.__exit__(kind, error, trace)

    def missed(self) -> list[Event] | None:
        """The events before this start, where this host has fewer steps and epochs of them than another: it was not in
        an attempt that made them. None where it has as many. Collective.
        """
        session = self.session
        if not session.position.step or session.place.world_size == 1:
            return None
        own, steps = list[Event](), -1  # of a rank that keeps none
        if self.keeps:
            position, folder = session.position, session.settings.run_dir
            own = metrics.events_before(folder, position.step, earlier_run(session), position.epoch)
            steps = sum(event["event"] in ("step", "epoch") for event in own)
        known = from_all_ranks(steps, session.place)
        most = max(known)
        if all(number in (-1, most) for number in known):
            return None
        shared = [own]
        dist.broadcast_object_list(shared, src=known.index(most))
        return shared[0] if -1 < steps < most else None

    def stepped(self) -> None:
        """After each optimizer step; says when the first one was done."""
        if self.first and self.reports:
            if self.session.device.type == "cuda":
                torch.cuda.synchronize()
            self.progress.say(f"first optimizer step after {time.monotonic() - self.started:.2f} s")
        self.first = False

    def step(self, record: StepRecord) -> None:
        """`record`: booked already in the session's position."""
        if not self.keeps:
            return
        self.metrics.write(
            "step",
            epoch=record.epoch,
            step=record.step,
            lr=record.values["lr"],
            images=record.images,
            loss=record.loss,
            accuracy=record.accuracy,
            grad_norm=record.grad_norm if math.isfinite(record.grad_norm) else None,
            seconds=record.values["seconds"],
            **rank_times(record),
        )
        if self.reports:
            self.show(record)

    def show(self, record: StepRecord) -> None:
        """In the line of progress."""
        position = self.session.position
        self.progress.step(
            record.epoch,
            record.step,
            record.loss,
            position.images / record.values["seconds"],
            part(position.correct, max(1, position.images)),
            self.data_wait(),
            self.session.strategy.comm_share(),
        )

    def data_wait(self) -> float:
        """Part of this epoch's time that the model waited for data."""
        seconds = self.session.position.seconds
        return min(1.0, (self.session.loader.waited - self.epoch_waited) / seconds) if seconds else 0.0

    def epoch(self, score: Score | None) -> None:
        """After an epoch and its evaluation, if it has one."""
        if not self.keeps:
            return
        session, position = self.session, self.session.position
        values = {
            "epoch": position.epoch + 1,
            "step": position.step,
            "train_loss": position.loss / position.images,
            "train_accuracy": part(position.correct, position.images),
            "test_accuracy": score.accuracy if score else None,
            "test_top5": score.top5 if score else None,
            "test_loss": score.loss if score else None,
            "images_per_second": position.images / position.seconds,
            "seconds": position.seconds,
            "data_wait": self.waited_in_training / position.seconds,
            "comm": session.strategy.comm_share(),
        }
        self.metrics.write("epoch", **values)
        if self.reports:
            self.progress.epoch(values)

    def trained(self) -> None:
        """Between an epoch's last step and its evaluation, whose waiting for data is another matter."""
        self.waited_in_training = self.session.loader.waited - self.epoch_waited

    def begin_epoch(self) -> None:
        self.epoch_waited = self.session.loader.waited

    def checkpoint(self, seconds: float) -> None:
        """After the state was copied; it is written beside the training. seconds: that the training waited for it."""
        if self.keeps:
            self.metrics.write("checkpoint", step=self.session.position.step, seconds=seconds)

    def bad_samples(self) -> None:
        """With --bad-samples skip: what was left out since the last call, on any rank. Collective."""
        session = self.session
        if session.settings.bad_samples != "skip":
            return
        mine = {name: why for name, why in session.loader.bad.items() if name not in self.sent}
        self.sent |= mine.keys()
        found = [(name, why) for each in from_all_ranks(mine, session.place) for name, why in each.items()]
        new = {name: why for name, why in sorted(found) if name not in self.bad}
        self.bad |= new
        if not (new and self.keeps):
            return
        self.metrics.write("bad_samples", step=session.position.step, samples=new)
        self.list_bad_samples()
        if self.reports:
            self.progress.say(left_out(new))

    def list_bad_samples(self) -> None:
        if self.bad:
            lines = [f"{name}\t{why}\n" for name, why in sorted(self.bad.items())]
            write_file(self.session.settings.run_dir / BAD_FILE, "".join(lines).encode())

    def profiled(self, profile: Profile) -> None:
        """After --profile's steps."""
        self.profile = profile.written
        if not self.reports:
            return
        # In a run of `make train` the folder is the container's, and is gathered.
        inside = f"{profile.folder.name}/ of the run's folder"
        where = inside if "MUSTER_KEEPER" in os.environ else self.session.settings.run_dir / profile.folder.name
        said = f"no trace could be written: {profile.complaint}" if profile.complaint else (
            f"the traces of the ranks are in {where}, for https://ui.perfetto.dev; rank-0.txt there lists the "
            "operations that took longest"
        )  # fmt: skip
        self.progress.say(f"--profile {self.session.settings.profile}: {said}")

    def stopped(self) -> None:
        if self.reports:
            position = self.session.position
            # In a run of `make train` the folder is the container's, and the control machine says how to go on.
            how = f": --resume {self.session.settings.run_dir} goes on from there"
            self.progress.say(
                f"stopped as asked after step {position.step} of {self.session.total_steps}; its checkpoint is written"
                + ("" if "MUSTER_KEEPER" in os.environ else how)
            )

    def end(self, score: Score, lost: float) -> None:
        """The picture, then result.json: whoever sees that file sees a whole folder.

        lost: seconds that training waited for checkpoints.
        """
        if not self.reports:
            return
        session, folder = self.session, self.session.settings.run_dir
        result = result_of(session, score) | {
            "train_seconds": time.monotonic() - self.begun,
            "checkpoint_seconds": lost,
            "data_wait_seconds": session.loader.waited,
            "profile": self.profile or None,
            **metrics.peak_memory(session.device),
        }
        if session.settings.bad_samples == "skip":
            result["bad_samples"] = len(self.bad)
            if self.bad:
                self.progress.say(f"{images(len(self.bad))} could not be decoded and did not count; see {BAD_FILE}")
        if session.gave_up:
            self.progress.say(gave_up(session))
        self.metrics.write("end", **result)
        events = metrics.read_metrics(folder / metrics.METRICS_FILE)
        title = f"{session.settings.model} on {session.settings.dataset}, {ranks(session)}"
        try:
            picture.draw(events, title, folder / "curves.png")
        except ModuleNotFoundError as missing:
            self.progress.say(f"curves.png is not drawn: {missing}")
        write_json(folder / "result.json", result)
        top5 = f" ({percent(score.top5)} among the first five)" if score.top5 is not None else ""
        reached = (
            f"test loss {score.loss:.4f}"
            if score.accuracy is None
            else f"test accuracy {percent(score.accuracy)}{top5}"
        )
        self.progress.say(
            f"{reached}, {result['images_per_second']:.0f} images/s, {result['train_seconds']:.1f} s of training"
        )


def part(correct: float, images: int) -> float | None:
    """The accuracy; None where there is none, and the count of what is right is not a number."""
    return None if math.isnan(correct) else correct / images


def gave_up(session: Session) -> str:
    """Why the run ends before its last epoch."""
    position, number = session.position, session.settings.early_stop
    best = "no test loss was a number"
    if position.best_accuracy is not None:
        best = f"the best test accuracy {percent(position.best_accuracy)}"
    elif position.best_loss is not None:
        best = f"the best test loss {position.best_loss:.4f}"
    return (
        f"--early-stop {number}: no better evaluation in the last {number} ({best}); the run ends after "
        f"epoch {position.epoch} of {session.settings.epochs}"
    )


def result_of(session: Session, score: Score) -> dict[str, Any]:
    """The part of result.json that is the same on every rank, except for times. Of accuracies, null: there is none.

    early_stop: the epoch after which the run ended because of that setting, else null.
    """
    settings, position = session.settings, session.position
    trained = position.train_seconds
    return {
        "test_accuracy": score.accuracy,
        "test_top5": score.top5,
        "test_loss": score.loss,
        "best_accuracy": None if score.accuracy is None else max(score.accuracy, position.best_accuracy or 0.0),
        "best_loss": score.loss if position.best_loss is None else min(score.loss, position.best_loss),
        "early_stop": position.epoch if session.gave_up else None,
        "images_per_second": position.epoch * session.samples / trained if trained else 0.0,
        "epochs": settings.epochs,
        "steps": position.step,
        "world_size": session.place.world_size,
        "parallel": settings.parallel,
        "model": settings.model,
        "dataset": settings.dataset,
        "comm": session.strategy.comm_share(),
        "resumed_from": str(session.resumed_from) if session.resumed_from else None,
    }


def left_out(samples: Mapping[str, str]) -> str:
    """samples: name -> why, at least one."""
    rest = len(samples) - NAMED
    names = ", ".join(list(samples)[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
    return f"{images(len(samples))} cannot be decoded and {'is' if len(samples) == 1 else 'are'} left out: {names}"


def images(number: int) -> str:
    return "1 image" if number == 1 else f"{number} images"


def rank_times(record: StepRecord) -> dict[str, list[float | None]]:
    """The fields of a step's event for the ranks' times, in microseconds' precision: none where no rank has news."""
    named = {"computing": record.computing, "waiting": record.waiting} if record.computing else {}
    known = [bool(seconds) for seconds in record.computing]
    return {
        name: [round(seconds, 6) if is_known else None for seconds, is_known in zip(times, known, strict=True)]
        for name, times in named.items()
    }


def earlier_run(session: Session) -> Path | None:
    """The folder of the run that this one continues, where it is another one."""
    if session.resumed_from is None:
        return None
    given = os.environ.get("MUSTER_RESUME_DIR")
    return Path(given) if given else session.resumed_from.parent.parent


def ranks(session: Session) -> str:
    number = session.place.world_size
    return "1 rank" if number == 1 else f"{number} ranks"


def opening(session: Session) -> str:
    settings, data = session.settings, session.dataset
    where = "the CPU" if session.device.type == "cpu" else f"GPUs, rank 0 on {describe(session.device)}"
    size = f", {settings.image_size} px" if settings.image_size else ""
    return (
        f"training {settings.model} on {settings.dataset} ({len(data.train)} images, {len(data.test)} held out{size}): "
        f"{settings.epochs} epoch{'s' * (settings.epochs > 1)}, global batch {settings.batch_size}, "
        f"{ranks(session)} on {where}, --parallel {settings.parallel}, seed {settings.seed}"
    )
