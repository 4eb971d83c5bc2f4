"""Promises of --loggers: figures also go to MLflow, W&B and a logger of one's own, none of which can harm a training.

The modules mlflow and wandb are stand-ins with the calls of the real ones; the real services are not tried.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Forked
from train.reporting import loggers, trackers
from train.reporting.metrics import Metrics
from train.settings import Settings, SettingsError, loggers_of, problems

ROOT = Path(__file__).resolve().parents[2]
NOTE = """
import json, os, threading
def note(*said):
    with open(os.environ["NOTED"], "a") as file:
        file.write(json.dumps(said) + "\\n")
"""
MLFLOW = (
    NOTE
    + """
from types import SimpleNamespace
known = []
def search_runs(*, filter_string, max_results, output_format):
    note("search", filter_string, output_format)
    return [SimpleNamespace(info=SimpleNamespace(run_id=one)) for one in known]
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None):
    note("start", run_id, run_name, tags)
def log_params(params): note("params", sorted(params))
def log_metrics(metrics, step=None): note("metrics", metrics, step)
def end_run(status="FINISHED"): note("end", status)
"""
)
WANDB = (
    NOTE
    + """
class Run:
    class summary:
        update = staticmethod(lambda values: note("summary", values))
    def log(self, data, step=None, commit=None): note("log", data, step)
    def finish(self, exit_code=None): note("finish", exit_code)
def init(*, project, id, name, resume, config, dir):
    note("init", project, id, name, resume, sorted(config), dir, os.environ.get("WANDB_API_KEY"))
    return Run()
"""
)
OWN = (
    NOTE
    + """
import threading
ended = threading.Event()
class Own:
    def begin(self, settings, name): note("begin", settings["lr"], name)
    def log(self, values, step, when): note("log", values, step)
    def end(self, result): note("end", result)
class Failing(Own):
    def log(self, values, step, when): raise ConnectionError("the network is away")
class Hanging(Own):
    def log(self, values, step, when): ended.wait(3600)
"""
)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the stand-ins were called with."""
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in (("mlflow", MLFLOW), ("wandb", WANDB), ("mine", OWN)):
        (folder / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.setenv("MUSTER_RUN_ID", "run-1")
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "noted"
    for name in ("mlflow", "wandb", "mine"):
        sys.modules.pop(name, None)


def lines(noted: Path) -> list[list[Any]]:
    return [json.loads(line) for line in noted.read_text().splitlines()]


def written(folder: Path, names: str, ends: bool = True) -> None:
    with Metrics(folder, loggers=names, settings={"lr": 0.1}) as log:
        log.write("step", step=1, loss=2.0, lr=0.1, accuracy=None)
        log.write("epoch", epoch=1, test_loss=1.5, test_accuracy=0.5)
        if ends:
            log.write("end", test_accuracy=0.5, model="net", early_stop=None)


STEP = {"step/loss": 2.0, "step/learning_rate": 0.1}
EPOCH = {"loss/held_out": 1.5, "accuracy/held_out": 0.5}


def test_mlflow_gets_settings_figures_and_the_end(noted: Path, tmp_path: Path) -> None:
    written(tmp_path, "mlflow")
    assert lines(noted) == [
        ["search", "tags.`muster.run` = 'run-1'", "list"],
        ["start", None, "run-1", {"muster.run": "run-1"}],
        ["params", ["lr", "run_dir"]],
        ["metrics", STEP, 1],
        ["metrics", EPOCH, 1],
        ["metrics", {"test_accuracy": 0.5}, None],
        ["end", "FINISHED"],
    ]


def test_a_run_that_is_started_again_goes_on_in_mlflow(noted: Path, tmp_path: Path) -> None:
    import mlflow

    mlflow.known.append("abc")
    written(tmp_path, "mlflow", ends=False)
    assert lines(noted)[1] == ["start", "abc", None, None] and lines(noted)[-1] == ["end", "KILLED"]
    assert not any(said[0] == "params" for said in lines(noted))


@pytest.mark.parametrize("ends", [True, False])
def test_wandb_gets_settings_figures_and_the_end_and_its_key_from_a_secret(
    ends: bool, noted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that it is put back
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setattr(trackers, "SECRETS", tmp_path)
    (tmp_path / "WANDB_API_KEY").write_text("a secret\n")
    written(tmp_path, "wandb", ends)
    assert lines(noted) == [
        ["init", "muster", "run-1", "run-1", "allow", ["lr", "run_dir"], str(tmp_path), "a secret"],
        ["log", STEP, 1],
        ["log", EPOCH, 1],
        ["summary", {"test_accuracy": 0.5} if ends else {}],
        ["finish", 0 if ends else 1],
    ]
    os.environ.pop("WANDB_API_KEY", None)


def test_a_logger_of_ones_own_gets_the_same_beside_tensorboard(noted: Path, tmp_path: Path) -> None:
    written(tmp_path, "tensorboard,mine:Own")
    assert lines(noted) == [
        ["begin", 0.1, "run-1"], ["log", STEP, 1], ["log", EPOCH, 1],
        ["end", {"test_accuracy": 0.5, "model": "net", "early_stop": None}],
    ]  # fmt: skip
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_logger_that_fails_is_given_up_with_one_warning(
    noted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "mine:Failing")
    (warning,) = capfd.readouterr().err.splitlines()
    assert warning.startswith("--loggers mine:Failing: it ends here (the network is away); the training goes on")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_logger_that_hangs_holds_up_neither_a_step_nor_the_end(
    noted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "LONGEST_END_SECONDS", 0.2)
    monkeypatch.setattr(loggers, "MOST_WAITING", 10)
    begun = time.monotonic()
    with Metrics(tmp_path, loggers="mine:Hanging", settings={"lr": 0.1}) as log:
        log.write("epoch", epoch=1, test_loss=1.5)
        for step in range(1, 1000):
            log.write("step", step=step, loss=2.0)
        log.write("end", test_accuracy=0.5)
    sys.modules["mine"].ended.set()
    assert time.monotonic() - begun < 60  # 0.2 s, and what a busy machine adds; else it would be an hour
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1001
    (warning,) = capfd.readouterr().err.splitlines()
    assert "slower than the training" in warning


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_that_is_missing_is_refused_with_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        SettingsError, match=f"--loggers {name}: the package {name} is not installed here.*requirements"
    ):
        loggers.check(f"tensorboard,{name}")


@pytest.mark.parametrize(("name", "why"), [("nowhere:f", "there is no module nowhere"), ("json:f", "no attribute 'f'"),
                                           ("json:__name__", "a function is needed")])  # fmt: skip
def test_a_logger_of_ones_own_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(SettingsError, match=f"--loggers {name}: .*{why}"):
        loggers.check(name)


def test_names_are_checked_without_torch() -> None:
    assert loggers_of("none") == [] and loggers_of("mlflow, wandb,mlflow") == ["mlflow", "wandb"]
    (wrong,) = problems(Settings(loggers="tensorboard,mlfow"), 1)
    assert wrong.startswith("--loggers mlfow: none of tensorboard, mlflow, wandb, package.module:function, none")


@pytest.mark.slow
def test_a_training_refuses_a_missing_package_before_the_first_step(tmp_path: Path) -> None:
    words = ["--dataset=fake", "--loggers=wandb", f"--run-dir={tmp_path / 'run'}"]
    process = Forked("train", words, ROOT, os.environ)
    assert process.wait() == 2 and "the package wandb is not installed" in process.errors()
    assert not (tmp_path / "run").exists()
