"""Promises of train.settings: what is wrong is said, all of it, before training."""

import subprocess
import sys
from pathlib import Path

import pytest

from train.settings import Settings, SettingsError, parse, problems

ROOT = Path(__file__).resolve().parents[2]


def test_the_defaults_are_right() -> None:
    assert problems(parse([]), 8) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(epochs=0), "--epochs 0"),
        (Settings(batch_size=3), "--batch-size 3"),
        (Settings(lr=float("nan")), "--lr nan"),
        (Settings(lr=-1), "--lr -1"),
        (Settings(seed=-1), "--seed -1"),
        (Settings(image_size=0), "--image-size 0"),
        (Settings(timeout=0), "--timeout 0"),
    ],
)
def test_each_wrong_setting_is_named(settings: Settings, named: str) -> None:
    (problem,) = problems(settings, 4)
    assert problem.startswith(named)


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert len(problems(Settings(epochs=0, batch_size=1, seed=-1), 2)) == 3


@pytest.mark.parametrize("arguments", [["--epochs", "two"], ["--dataset", "imagenet"], ["--frobnicate"]])
def test_the_command_line_is_refused_without_leaving(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        parse(arguments)


def test_the_run_folder_of_the_launcher_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", "/somewhere")
    assert parse([]).run_dir == Path("/somewhere")
    assert parse(["--run-dir", "here"]).run_dir == Path("here")


def test_help_and_refusal_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.argv[1:] = {}; runpy.run_module('train', run_name='__main__')"
    for arguments, status in ((["--help"], 0), (["--epochs", "0"], 2)):
        program = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
        command = [sys.executable, "-c", program.format(arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "False"), done.stderr
