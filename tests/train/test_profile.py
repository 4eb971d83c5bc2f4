"""Promises of --profile: a trace of the steps asked for on every rank, and the same training."""

import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.train.resume_ranks import crash_in_step, train
from tests.train.test_resume import losses, settings_in
from train.reporting.profile import Profile
from train.reporting.step_stats import StepRecord, StepStats
from train.settings import EXIT_STOPPED


def traced(path: Path, what: str = "ProfilerStep") -> list[str]:
    """The names in a trace that begin with `what`, each once, sorted; by default those of the profiler's steps."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return sorted({name for one in document["traceEvents"] if (name := str(one.get("name"))).startswith(what)})


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "steps", "found"), [pytest.param(3, 2, 2, marks=pytest.mark.long), (1, 9, 3)])
def test_every_rank_traces_its_steps_and_the_training_is_the_same(
    epochs: int, steps: int, found: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a run that is too short as many as there are."""
    for name, profile in (("with", steps), ("without", 0)):
        assert train(2, settings_in(tmp_path / name, epochs=epochs, profile=profile)) == [0, 0]
    folder = tmp_path / "with"
    assert losses(folder) == losses(tmp_path / "without")
    for rank in (0, 1):
        assert len(traced(folder / "profile" / f"rank-{rank}.pt.trace.json.gz")) == found
        assert "aten::" in (folder / "profile" / f"rank-{rank}.txt").read_text()
    said = capfd.readouterr().out
    assert f"--profile {steps}: the traces of the ranks are in {folder / 'profile'}" in said
    assert json.loads((folder / "result.json").read_text())["profile"] == "profile/rank-0.pt.trace.json.gz"
    assert json.loads((tmp_path / "without" / "result.json").read_text())["profile"] is None
    assert not (tmp_path / "without" / "profile").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_amid_its_traced_steps_says_where_their_trace_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_in(tmp_path / "stopped", profile=50, epochs=20)
    asked = crash_in_step(9, how=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(2, settings, changes={1: asked}) == [EXIT_STOPPED, EXIT_STOPPED]
    assert traced(settings.run_dir / "profile" / "rank-0.pt.trace.json.gz")
    said = capfd.readouterr().out
    assert said.count(f"--profile 50: the traces of the ranks are in {settings.run_dir / 'profile'}") == 1


@pytest.mark.slow
def test_nothing_is_under_way_when_the_trace_is_written(tmp_path: Path) -> None:
    """The profiler would note its end in memory that is another's by then, and ranks die of that now and then."""
    begun: list[dist.Work] = []

    def watching() -> None:
        reduce, write = dist.all_reduce, Profile.write

        def noted(*arguments: Any, **options: Any) -> dist.Work | None:
            work = reduce(*arguments, **options)
            if options.get("async_op"):
                begun.append(work)
            return work

        def checked(self: Profile, profiler: Any) -> None:
            assert len(begun) > 4 and all(work.is_completed() for work in begun)
            write(self, profiler)

        mock.patch.object(dist, "all_reduce", noted).start()
        mock.patch.object(Profile, "write", checked).start()

    def late() -> None:
        add = StepStats.add

        def slow(self: StepStats, step: int, *rest: Any, **options: Any) -> StepRecord | None:
            time.sleep(1 if step == 7 else 0)  # the last that is traced
            return add(self, step, *rest, **options)

        mock.patch.object(StepStats, "add", slow).start()

    assert train(2, settings_in(tmp_path, profile=2, epochs=3), changes={0: watching, 1: late}) == [0, 0]
