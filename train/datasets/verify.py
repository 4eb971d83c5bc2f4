"""python -m train verify-data: reads a whole dataset before a run, and names each image that cannot be decoded.

By training's own code, on all cores. Memory is bounded: of the files only their names are held, and a few tasks wait.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from train.names import DATASETS
from train.settings import EXIT_REFUSED, Settings

if TYPE_CHECKING:  # they import torch
    from train.datasets.base import Dataset
    from train.datasets.decode import Job

EXIT_BAD = 1
FILES = 64  # of one task
TASKS_AHEAD = 4  # for each worker
LINE_SECONDS = 2.0  # between plain lines of progress, at least
BLOCK = 64 << 20  # bytes of an array that are read at a time

Found = tuple[str, str]  # path, and why it is bad; empty: it is good

_job: Job


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m train verify-data",
        description="Reads a whole dataset as training does, on all cores, and prints each image that cannot be "
        "decoded, with the reason. Datasets that are no folders of images are read and checked whole.",
        epilog="Exit status: 0 all is good; 1 some images are bad, each is named; 2 refused: the dataset as a whole is "
        "missing or wrong. Training with --bad-samples skip leaves bad images out.",
    )
    p.add_argument("--dataset", default="imagefolder", choices=tuple(DATASETS), help="(default: imagefolder)")
    p.add_argument("--data-dir", type=Path, help="as in training (default: MUSTER_DATA_DIR, else /data, else ./data)")
    p.add_argument("--workers", type=int, default=0, metavar="N", help="processes that decode (default: one per core)")
    p.add_argument(
        "--json", action="store_true", help="one JSON object for each bad image and line, a count at the end"
    )
    return p


def main(arguments: list[str]) -> int:
    p = parser()
    options = p.parse_args(arguments)
    if options.workers < 0:
        p.error(f"--workers {options.workers}: at least 1")
    from train.datasets import DataError, load
    from train.start.group import Place

    try:
        dataset = load(Settings(dataset=options.dataset, data_dir=options.data_dir), Place())
        return verify(dataset, options.workers or len(os.sched_getaffinity(0)), options.json)
    except (DataError, OSError) as error:
        say(str(error))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        say("interrupted: not all was read")
        return 130


def verify(dataset: Dataset, workers: int, as_json: bool) -> int:
    """Prints what is bad, then the count. Returns the exit status. Raises DataError, OSError."""
    total, bad, checked = len(dataset.train) + len(dataset.test), 0, 0
    with progress(total) as shown:
        for path, reason in results(dataset, workers):
            checked += 1
            if reason:
                bad += 1
                shown.print(json.dumps({"path": path, "reason": reason}) if as_json else f"{path}: {reason}")
            if checked % FILES == 0 or checked == total:
                shown.at(checked, bad)
    if as_json:
        print(json.dumps({"dataset": dataset.name, "images": checked, "bad": bad}), flush=True)
    else:
        print(f"{dataset.name}: {checked} images read, {bad or 'none'} bad", flush=True)
    return EXIT_BAD if bad else 0


def results(dataset: Dataset, workers: int) -> Iterator[Found]:
    """For each image of both parts, in order."""
    from train.datasets.base import ArraySource
    from train.datasets.decode import Job
    from train.datasets.folder import FolderSource

    train, test = dataset.train, dataset.test
    if isinstance(train, FolderSource) and isinstance(test, FolderSource):
        job = Job(train, test, None, 0, dataset.image_size, channels_last=False)
        yield from in_processes(job, workers)
        return
    for source in (train, test):
        assert isinstance(source, ArraySource)
        step = max(1, BLOCK // source.images[0].nbytes)
        for start in range(0, len(source), step):
            source.images[start : start + step].max()  # reads them: a mapped file was only looked at so far
            yield from (("", "") for _ in range(len(source.labels[start : start + step])))


def in_processes(job: Job, workers: int) -> Iterator[Found]:
    """A fork server's processes, as in training, which end with this one. Raises DataError."""
    from train.datasets.base import DataError

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.datasets.decode"])
    waiting = deque[Future[list[Found]]]()
    with ProcessPoolExecutor(workers, context, initialise, (job.for_workers(),)) as executor:
        try:
            for names, held_out in tasks(job):
                waiting.append(executor.submit(check, names, held_out))
                if len(waiting) >= workers * TASKS_AHEAD:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a process that decodes images was ended from outside, often because memory ran out: take fewer "
                "--workers"
            ) from error
        finally:
            executor.shutdown(cancel_futures=True)


def tasks(job: Job) -> Iterator[tuple[list[bytes], bool]]:
    for source, held_out in ((job.train, False), (job.test, True)):
        for start in range(0, len(source), FILES):
            yield source.names[start : start + FILES].tolist(), held_out


def initialise(job: Job) -> None:
    import torch

    from train.datasets.workers import end_with_parent

    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def check(names: list[bytes], held_out: bool) -> list[Found]:
    source = _job.test if held_out else _job.train
    return [(str(source.path_of(name)), _job.check(name, held_out)) for name in names]


def say(text: str) -> None:
    print(f"verify-data: {text}", file=sys.stderr, flush=True)


class Lines:
    """Progress as plain lines on stderr. What is bad goes to stdout at once."""

    def __init__(self, total: int) -> None:
        self.total, self.begun = total, time.monotonic()
        self.spoke = self.begun

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def print(self, text: str) -> None:
        print(text.encode(errors="backslashreplace").decode(), flush=True)

    def at(self, checked: int, bad: int) -> None:
        if (now := time.monotonic()) - self.spoke >= LINE_SECONDS:
            self.spoke = now
            say(f"{checked} of {self.total} images, {bad} bad, {checked / (now - self.begun):.0f} images/s")


class Bar(Lines):
    """A bar on a terminal's stderr, which makes way for what is printed."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[bad]} bad")
        self.bar = Progress(
            *(*columns, TimeRemainingColumn()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else what is printed would not reach its file
        )
        self.task = self.bar.add_task("", total=total, bad=0)

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def at(self, checked: int, bad: int) -> None:
        self.bar.update(self.task, completed=checked, bad=bad)


def progress(total: int) -> Lines:
    return (Bar if sys.stderr.isatty() else Lines)(total)
