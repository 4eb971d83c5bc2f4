"""Promises of --profile: a trace of the steps asked for on every rank, and the same training."""

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.resume_ranks import crash_in_step, train
from tests.train.test_resume import losses, settings_in
from train.settings import EXIT_STOPPED


def traced(path: Path) -> list[str]:
    """The names of the profiler's steps in a trace."""
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return sorted({str(one["name"]) for one in document["traceEvents"] if "ProfilerStep" in str(one.get("name"))})


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "steps", "found"), [(3, 2, 2), (1, 9, 3)])
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
    settings = settings_in(tmp_path / "stopped", profile=50, epochs=40)
    asked = crash_in_step(9, how=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(2, settings, changes={1: asked}) == [EXIT_STOPPED, EXIT_STOPPED]
    assert traced(settings.run_dir / "profile" / "rank-0.pt.trace.json.gz")
    said = capfd.readouterr().out
    assert said.count(f"--profile 50: the traces of the ranks are in {settings.run_dir / 'profile'}") == 1
