"""Whole trainings on real gloo ranks, forked from one interpreter: broken off at a step, continued, compared.

The network is tiny and has what resuming can get wrong: batch statistics, dropout, several layers.
"""

import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from train import resume, run, session, step, trainer
from train.checkpoints import load
from train.reporting import picture
from train.settings import Settings

CRASH = 9
STEPS = 12  # 4 in each of 3 epochs
SETTINGS = Settings(
    dataset="fake", image_size=8, epochs=3, batch_size=130, lr=0.01, checkpoint_every="2", loggers="none", keep=3
)
Change = Callable[[], None]  # made in a rank's process before it begins


def network(normalised: bool) -> nn.Module:
    torch.manual_seed(7)
    norm: list[nn.Module] = [nn.BatchNorm2d(6)] if normalised else []
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.2 if normalised else 0.0),
        nn.Linear(6 * 36, 16), nn.ReLU(), nn.Linear(16, 10),
    )  # fmt: skip


def crash_in_step(number: int, how: Callable[[], None] = lambda: os._exit(CRASH)) -> Change:
    """Ends the process (or does `how`) in the middle of the optimizer step of this number, counted from 1."""

    def change() -> None:
        made, position = step.optimizer_step, {"step": 0}
        begin = resume.begin

        def noting(begun: session.Session) -> list[str]:
            notes = begin(begun)
            position["step"] = begun.position.step
            return notes

        def counted(*arguments: Any) -> Any:
            position["step"] += 1
            if position["step"] == number:
                how()
            return made(*arguments)

        mock.patch.object(resume, "begin", noting).start()
        mock.patch.object(trainer, "optimizer_step", counted).start()

    return change


def in_evaluation(number: int, how: Callable[[], None]) -> Change:
    """Does `how` when the evaluation of this number begins, counted from 1 since this start."""

    def change() -> None:
        made, position = vars(trainer)["evaluate"], {"number": 0}

        def counted(*arguments: Any) -> Any:
            position["number"] += 1
            if position["number"] == number:
                how()
            return made(*arguments)

        mock.patch.object(trainer, "evaluate", counted).start()

    return change


def own_fork_server() -> None:
    """Makes this forked process start a fork server of its own: one that another test has started is not its child."""
    server = forkserver.ForkServer()
    forkserver._forkserver = server
    for name in ("ensure_running", "get_inherited_fds", "connect_to_new_process", "set_forkserver_preload"):
        setattr(forkserver, name, getattr(server, name))


def one_rank(rank: int, world_size: int, settings: Settings, normalised: bool, draws: bool, change: Change) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mock.patch.object(run, "build_model", lambda *arguments: network(normalised)).start()
    if not draws:
        mock.patch.object(picture, "draw").start()
    own_fork_server()
    change()
    os._exit(run.run(settings))


def train(
    world_size: int,
    settings: Settings,
    normalised: bool = True,
    changes: dict[int, Change] | None = None,
    draws: bool = False,
) -> list[int]:
    """Exit statuses of the ranks. changes: by rank; those that are not named change nothing.

    draws: curves.png as well, which takes longer than all else.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        settings = dataclasses.replace(settings, init=f"file://{folder}/store", timeout=100.0)
        ranks = []
        for rank in range(world_size):
            change = (changes or {}).get(rank, lambda: None)
            ranks.append(fork.Process(target=one_rank, args=(rank, world_size, settings, normalised, draws, change)))
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
        statuses = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()  # no-op for those that have ended
            process.join()
        assert None not in statuses, f"ranks that did not end: {statuses}"
        return [int(status or 0) for status in statuses]


def own_host(folder: Path) -> Change:
    """The rank is on a host of its own, under a keeper, with this run's folder there."""

    def change() -> None:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MUSTER_KEEPER="none")
        made = session.build

        def build(settings: Settings, *rest: Any) -> session.Session:
            return made(dataclasses.replace(settings, run_dir=folder), *rest)

        mock.patch.object(session, "build", build).start()

    return change


def in_order(*changes: Change) -> Change:
    def change() -> None:
        for each in changes:
            each()

    return change


def end_of(folder: Path) -> dict[str, Any]:
    return load(folder / "checkpoints", STEPS)
