"""One rank, from its settings to its exit status: process group, data and model, proof, where to begin, training.

Where any rank has a complaint, all end together before the first step, and rank 0 prints it in one line.
"""

import dataclasses
import time
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from train import own_parts, resume, session
from train.checkpoints import CheckpointError, Writer, fit, load_weights
from train.datasets import FETCH_SECONDS, DataError, Dataset, data_dir_of, fingerprint, load
from train.model import pretrained, torchvision_cpu
from train.model.build import build as build_model
from train.reporting import loggers
from train.reporting.report import Report
from train.session import Session
from train.settings import EXIT_STOPPED, Settings, SettingsError, refuse
from train.start import group, memory, proof
from train.start.group import Place
from train.start.muster_run import keep_stacks, tell
from train.trainer import Training
from train.trial import trial

SAVE_SECONDS = 600.0  # in which the last checkpoint of a run that stops has to be on the disk
Wrong = (SettingsError, DataError, CheckpointError, proof.ProofError)
NOT_CHOSEN = (
    "--communication auto: nothing was chosen: `make train` alone does that, where it can read all settings; give "
    "--compress or --sync-every instead (docs/slow-links.md), or leave it out"
)


def run(settings: Settings, complaint: str = "", started: float | None = None) -> int:
    """Returns the exit status. `complaint`: what is wrong with this rank's settings; all ranks learn of it.

    `started`: time.monotonic() at this process's start. Raises what a training raises: NonFiniteLoss, CheckpointError,
    DataError.
    """
    started = time.monotonic() if started is None else started
    keep_stacks()
    tell("starting")
    torchvision_cpu.watch()
    memory.keep_freed_memory()
    try:
        place = Place.from_environment()
        device = group.device_of(place)
        group.backend_for(device, settings.backend)
    except SettingsError as error:  # every host finds the same, or torchrun ends the others
        return refuse(str(error))
    timeout = Settings.timeout if complaint else settings.timeout
    with group.process_group(place, device, timeout, settings.backend, settings.init):
        try:
            made, notes = prepare(settings, complaint, place, device)
        except Wrong as error:  # the same on all ranks
            with suppress(OSError):  # fails, as it should, where the folder holds anything
                settings.run_dir.rmdir()
            return refuse(str(error), shown=place.rank == 0)
        try:
            if finished(made):
                return say_finished(made)
            return train(made, notes, started)
        finally:
            made.close()


def prepare(settings: Settings, complaint: str, place: Place, device: torch.device) -> tuple[Session, list[str]]:
    """(what to train, at the position where it begins; what a user should know). Collective.

    Raises one of Wrong, on all ranks alike.
    """
    materials, notes = None, list[str]()
    if settings.communication == "auto" and place.world_size > place.local_world_size:
        complaint = complaint or NOT_CHOSEN
    if not complaint:
        try:
            materials = gather(settings, place, notes)
        except Wrong as error:
            complaint = str(error)
    if complaint := group.first_complaint(complaint, place):
        raise SettingsError(complaint)
    assert materials is not None
    dataset, network, data = materials
    settings = dataclasses.replace(settings, image_size=settings.image_size or dataset.image_size)
    proof.prove(settings, data)
    made = session.build(settings, place, device, dataset, network)
    notes += [made.strategy.note, *session.fine_tuning(made), *session.slow_links(made)]
    notes += resume.begin(made)
    if settings.communication == "auto":
        notes.append("--communication auto: all ranks are on one host; nothing is changed")
    if settings.shares == "auto":
        notes.append(f"--shares auto: {', '.join(f'{weight / sum(made.weights):.1%}' for weight in made.weights)}")
    if settings.amp == "fp16" and device.type == "cpu":
        notes.append("--amp fp16: very slow on CPUs; take bf16 or off there")
    return made, [note for note in notes if note]


def gather(settings: Settings, place: Place, notes: list[str]) -> tuple[Dataset, nn.Module, str]:
    """This rank's dataset and network, and the dataset's fingerprint; its run folder is made. Raises one of Wrong, on
    this rank alone."""
    own_parts.use(settings.project)
    folder = data_dir_of(settings.data_dir) / "weights"
    if settings.download:
        tell("fetching")
    fetch = partial(pretrained.fetch, settings.model, settings.weights, folder) if settings.weights else lambda: None
    dataset = load(settings, place, lambda done: group.wait_for_all(done, "fetching", FETCH_SECONDS, place), fetch)
    tell("starting")
    size = settings.image_size or dataset.image_size
    network = build_model(settings.model, dataset.classes, size, settings.seed)
    if settings.init_from:
        weights, said = fit(network, load_weights(settings.init_from))
        network.load_state_dict(weights)
        notes += [f"--init-from: {line}" for line in said]
    if settings.weights:
        weights, said = fit(network, load_weights(pretrained.find(settings.model, settings.weights, folder)))
        network.load_state_dict(weights)
        notes += [f"--weights: {line}" for line in said]
    trial(settings, dataset, network)
    if place.rank == 0:
        loggers.check(settings.loggers)
    session.make_run_dir(settings.run_dir)
    return dataset, network, fingerprint(dataset)


def finished(made: Session) -> bool:
    """Whether the run folder's run has all of its epochs: what it says of itself must stay."""
    folder = made.settings.run_dir
    complete = made.ended and (folder / "result.json").exists()
    return not group.first_complaint("" if made.place.rank or complete else "no", made.place)


def say_finished(made: Session) -> int:
    if made.place.rank == 0:
        print(
            f"{made.settings.run_dir} has trained its {made.position.epoch} epochs: nothing to do (more: --epochs N; "
            "anew: another --run-dir, or --resume none)",
            flush=True,
        )
    return 0


def train(made: Session, notes: list[str], started: float) -> int:
    settings, place = made.settings, made.place
    folder = settings.run_dir / "checkpoints"
    writes = place.local_rank == 0 or (made.members is not None and made.members.leads)
    writer = Writer(folder, settings.keep, settings.blocking_checkpoints) if writes else None
    with Report(made, notes, started) as report:
        training = Training(made, writer, report)
        try:
            score = training.train()
            if score is None:
                with training.stop.watched():
                    group.wait_for_all(lambda: not writer or writer.idle(), "saving", SAVE_SECONDS, place)
        finally:
            tell("saving")  # all ranks: what is left to do has no steps
            if writer:
                writer.close()
        if score is not None:
            report.end(score, lost=writer.lost if writer else 0.0)
            return 0
        report.stopped()
    # Whoever started the ranks ends the others soon after the first one has ended.
    group.wait_for_all(lambda: True, "saving", SAVE_SECONDS, place)
    return EXIT_STOPPED
