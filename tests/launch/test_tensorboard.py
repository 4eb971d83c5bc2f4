"""Promises of `make tensorboard`: it says where it is to be seen, on this machine alone, and Ctrl-C ends all of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from launch import files, tensorboard
from launch.cli.refusal import Refusal

START = """
import sys
from pathlib import Path
from launch import files, tensorboard
files.ROOT = Path(sys.argv[1])
sys.exit(tensorboard.main())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with a run that has curves, and one that has none."""
    for name in ("some-run", "other-run"):
        files.write_json(tmp_path / "runs" / name / "summary.json", {"status": "succeeded"})
    curves = tmp_path / "runs" / "some-run" / "tensorboard"
    curves.mkdir()
    (curves / "events.out.tfevents.1").write_bytes(b"")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("run", ["", "some-run"])
def test_it_says_where_it_is_and_ctrl_c_ends_it(project: Path, run: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(project)],
        env={**os.environ, "RUN": run},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        found = re.search(r"TensorBoard of .*runs(/some-run)?: http://127\.0\.0\.1:(\d+)/  \(Ctrl-C ends it\)", line)
        assert found and bool(found[1]) == bool(run), line
        port = int(found[2])
        with urlopen(f"http://127.0.0.1:{port}/data/logdir", timeout=30) as answer:
            assert str(project / "runs" / run).rstrip("/") in answer.read().decode()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "\nTensorBoard has ended\n", "")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_run_without_curves_and_one_that_is_not_here_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROOT", project)
    with pytest.raises(Refusal, match=r"there are no curves of TensorBoard in .*other-run"):
        tensorboard.serve(files.runs_dir() / "other-run")
    monkeypatch.setenv("RUN", "no-such-run")
    assert tensorboard.main() == 2


@pytest.mark.slow
def test_what_tensorboard_said_when_it_does_not_start_is_shown(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", project)
    monkeypatch.setattr(tensorboard, "COMMAND", ("-c", "import sys; sys.exit('no such thing')"))
    with pytest.raises(Refusal, match="TensorBoard ended with status 1: no such thing"):
        tensorboard.serve(files.runs_dir() / "some-run")
