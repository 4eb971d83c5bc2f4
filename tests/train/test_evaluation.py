"""Promises of the evaluation: it costs no epoch, however it ends; how often it is made; what the best is, also without
an accuracy."""

import json
import os
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import pytest
import torch

from tests.processes import GUARD_SECONDS
from tests.train.fake_keeper import FakeKeeper
from tests.train.resume_ranks import CRASH, STEPS, Change, crash_in_step, end_of, in_evaluation, train
from tests.train.test_resume import PARTS, RICH, assert_equal, settings_in, starts
from train import losses
from train.checkpoints import saved_steps
from train.checkpoints.prune import metric_of, to_keep
from train.evaluate import Score
from train.session import Position
from train.settings import EXIT_STOPPED, Settings, problems

PER_EPOCH = 4
# The checkpoint is on the disk when the evaluation begins; which has four batches on each of two ranks.
SAFE: dict[str, Any] = {"checkpoint_every": "epoch", "blocking_checkpoints": True, "micro_batch": 20}


def asked() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def crash() -> None:
    os._exit(CRASH)


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def manifest(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "checkpoints" / f"step-{step}.json").read_text())
    return found


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def counting(path: Path) -> Change:
    """Notes each evaluation in a file."""

    def note() -> None:
        with path.open("a") as file:
            file.write("x")

    def change() -> None:
        for number in range(1, 10):
            in_evaluation(number, note)()

    return change


# -- a stop or a failure within it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing ends."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert train(2, settings_in(folder, **(RICH | SAFE))) == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "how", "status"), [(1, crash, CRASH), (3, asked, EXIT_STOPPED)], ids=["first-crash", "last-stop"]
)
def test_a_run_that_ends_in_an_evaluation_goes_on_with_it_and_trains_no_step_again(
    number: int, how: Any, status: int, tmp_path: Path, unbroken: Path
) -> None:
    """With all that a step can have beside the usual, such as averaged weights, which are those evaluated."""
    settings = settings_in(tmp_path, **(RICH | SAFE))
    both = {1: in_evaluation(number, how)} | ({0: in_evaluation(number, how)} if how is crash else {})
    assert train(2, settings, changes=both) == [status, status]
    folder, step = settings.run_dir, number * PER_EPOCH
    assert saved_steps(folder / "checkpoints")[-1] == step
    assert manifest(folder, step)["metric"] is None and not (folder / "result.json").exists()
    assert [event["epoch"] for event in events(folder, "epoch")] == list(range(1, number))
    assert train(2, settings) == [0, 0]
    assert starts(folder) == [None, step]
    assert [event["step"] for event in events(folder, "step")] == list(range(1, STEPS + 1))
    assert [event["epoch"] for event in events(folder, "epoch")] == [1, 2, 3]
    assert [event["step"] for event in events(folder, "checkpoint")] == [4, 8, 12]  # none is written twice
    assert_equal({part: end_of(folder)[part] for part in PARTS}, {part: end_of(unbroken)[part] for part in PARTS})
    figures = [{name: value for name, value in event.items() if name.startswith(("t", "e"))} for event in
               (*events(folder, "epoch"), *events(unbroken, "epoch"))]  # fmt: skip
    for event in figures:
        del event["time"]
    assert figures[:3] == figures[3:]
    assert result(folder)["test_accuracy"] == result(unbroken)["test_accuracy"]
    assert [manifest(folder, at)["metric"] for at in saved_steps(folder / "checkpoints")] == [
        manifest(unbroken, at)["metric"] for at in saved_steps(unbroken / "checkpoints")
    ]


@pytest.mark.slow
def test_an_evaluation_that_had_ended_is_not_made_again(tmp_path: Path) -> None:
    """The run is killed in the evaluation of epoch 2, then in epoch 3, whose checkpoint is not there yet."""
    settings = settings_in(tmp_path / "run", **SAFE)
    assert train(2, settings, changes=dict.fromkeys((0, 1), crash_in_step(10))) == [CRASH, CRASH]
    assert manifest(settings.run_dir, 8)["evaluation"]["samples"] == 128
    noted = tmp_path / "noted"
    assert train(2, settings, changes={0: counting(noted)}) == [0, 0]
    assert noted.read_text() == "x"
    assert [event["epoch"] for event in events(settings.run_dir, "epoch")] == [1, 2, 3]


@pytest.mark.slow
def test_a_stop_in_the_last_batch_of_an_evaluation_keeps_what_it_found(tmp_path: Path) -> None:
    """One batch, so that the answer of the others comes after it."""
    settings = settings_in(tmp_path, **(SAFE | {"micro_batch": 0}))
    assert train(2, settings, changes={0: in_evaluation(1, asked)}) == [EXIT_STOPPED, EXIT_STOPPED]
    assert manifest(tmp_path, 4)["metric"] == events(tmp_path, "epoch")[0]["test_accuracy"]
    assert train(2, settings) == [0, 0]
    assert [event["epoch"] for event in events(tmp_path, "epoch")] == [1, 2, 3]
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [4, 8, 12]


@pytest.mark.slow
def test_a_run_in_another_folder_goes_on_with_the_evaluation_and_has_a_checkpoint_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_in(tmp_path / "first", **SAFE)
    assert train(2, settings, changes={0: in_evaluation(3, asked)}) == [EXIT_STOPPED, EXIT_STOPPED]
    second = settings_in(tmp_path / "second", resume=str(tmp_path / "first"), **SAFE)
    assert train(2, second) == [0, 0]
    assert "all of its 3 epochs are trained: there is nothing left to train" in capfd.readouterr().out
    assert saved_steps(second.run_dir / "checkpoints") == [STEPS]
    assert manifest(second.run_dir, STEPS)["metric"] == result(second.run_dir)["test_accuracy"]
    assert manifest(settings.run_dir, STEPS)["metric"] is None


@pytest.mark.slow
def test_a_run_that_goes_on_from_the_end_of_another_one_has_its_checkpoint_and_can_be_continued(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = settings_in(tmp_path / "first", **SAFE)
    assert train(2, first) == [0, 0]
    second = settings_in(tmp_path / "second", resume=str(tmp_path / "first"), **SAFE)
    assert train(2, second) == [0, 0]
    assert "there is nothing left to train (for more: --epochs)" in capfd.readouterr().out
    for folder in (first.run_dir, second.run_dir):
        assert saved_steps(folder / "checkpoints")[-1] == STEPS
        assert manifest(folder, STEPS)["metric"] == result(folder)["test_accuracy"]
    third = settings_in(tmp_path / "third", resume=str(tmp_path / "second"), **{**SAFE, "epochs": 4})
    assert train(2, third) == [0, 0]
    whole = settings_in(tmp_path / "whole", resume=str(tmp_path / "first"), **{**SAFE, "epochs": 4})
    assert train(2, whole) == [0, 0]
    ends = [torch.load(one.run_dir / "checkpoints" / "step-16.pt", weights_only=True) for one in (third, whole)]
    assert_equal(ends[0]["model"], ends[1]["model"])


SLOW_TO_EVALUATE = """
import time
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(192, classes)

    def forward(self, images):
        time.sleep(0.0 if self.training else 0.5)
        return self.head(images.flatten(1))

net = Net
"""


@pytest.mark.long
def test_ctrl_c_in_an_evaluation_of_spawned_ranks_ends_them_soon(tmp_path: Path) -> None:
    keeper = FakeKeeper(tmp_path)
    (tmp_path / "parts.py").write_text(SLOW_TO_EVALUATE)
    words = "train --spawn=2 --project=. --model=parts:net --epochs=9 --batch-size=16 --image-size=8"
    environment = {**keeper.environment(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    words += " --loggers=none --run-dir=run --dataset=fake"
    process = Popen([sys.executable, "-m", *words.split()], cwd=tmp_path, env=environment, stdout=DEVNULL)
    try:
        keeper.wait(lambda: bool(keeper.of(0, phase="evaluating")))
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_SECONDS) == EXIT_STOPPED
        batches = [said["step"] for _, said in keeper.messages if said["phase"] == "evaluating"]
        assert max(batches) < keeper.of(0, phase="evaluating")[0]["steps"]
    finally:
        process.kill()
        process.wait()
        keeper.close()
    (step,) = saved_steps(tmp_path / "run" / "checkpoints")
    assert step == 33 and events(tmp_path / "run", "epoch") == []


# -- how often, and until when ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_last_epoch_is_evaluated_whatever_eval_every_says(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, eval_every=2, epochs=5, **SAFE)
    assert train(2, settings) == [0, 0]
    tested = [event["test_accuracy"] for event in events(tmp_path, "epoch")]
    assert [accuracy is None for accuracy in tested] == [True, False, True, False, False]
    assert [event["train_accuracy"] is None for event in events(tmp_path, "epoch")] == [False] * 5
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [4, 8, 12, 16, 20]
    kept = {step: manifest(tmp_path, step)["metric"] for step in saved_steps(tmp_path / "checkpoints")}
    assert kept[16] == tested[3] and kept[20] == tested[4] and kept[12] is None


@pytest.mark.slow
def test_early_stop_ends_the_run_as_succeeded_and_a_resumption_keeps_the_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that changes nothing: no evaluation is better than the first one."""
    settings = settings_in(tmp_path, early_stop=3, epochs=9, lr=1e-30, ema=0.0, **SAFE)
    assert train(2, settings, normalised=False, changes={0: in_evaluation(3, asked)}) == [EXIT_STOPPED, EXIT_STOPPED]
    assert train(2, settings, normalised=False) == [0, 0]
    assert [event["epoch"] for event in events(tmp_path, "epoch")] == [1, 2, 3, 4]
    found = result(tmp_path)
    assert (found["early_stop"], found["epochs"], found["steps"]) == (4, 9, 16)
    assert "--early-stop 3: no better evaluation in the last 3" in capfd.readouterr().out
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(2, settings, normalised=False) == [0, 0]
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and "nothing to do" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "wrong"), [(Settings(eval_every=0), "--eval-every 0"), (Settings(early_stop=-1), "--early-stop -1")]
)
def test_no_such_frequency_is_taken(settings: Settings, wrong: str) -> None:
    assert any(wrong in problem for problem in problems(settings, 1))


# -- what is right, and what is best ----------------------------------------------------------------------------------


def test_right_answers_are_counted_where_there_are_classes() -> None:
    outputs = torch.eye(7)[[0, 1, 2, 3]] + 0.1 * torch.arange(7)
    targets = torch.tensor([0, 1, 6, 0])
    assert losses.right(outputs, targets) is not None
    assert [int(found.sum()) for found in (losses.right(outputs, targets),) if found is not None] == [2]
    five = losses.right_among_five(outputs, targets)
    assert five is not None and five.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((4, 3), torch.zeros(4)), ((4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)), ((4,), torch.zeros(4)),
     ((4, 3), torch.zeros(4, 3))],
)  # fmt: skip
def test_of_other_outputs_and_targets_there_is_no_accuracy(outputs: tuple[int, ...], targets: torch.Tensor) -> None:
    assert losses.right(torch.zeros(outputs), targets) is None
    assert losses.right_among_five(torch.zeros(outputs), targets) is None


def test_of_five_classes_the_first_five_say_nothing() -> None:
    assert losses.right_among_five(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)) is None


def test_without_an_accuracy_the_lowest_loss_is_the_best() -> None:
    scores = [Score(10, None, loss) for loss in (2.0, 1.0, 1.5, 1.5, float("nan"))]
    position = Position()
    worse = []
    for score in scores:
        position.end_epoch(score)
        worse.append(position.worse)
    assert worse == [0, 0, 1, 2, 3] and position.best_loss == 1.0
    metrics = {step: score.metric for step, score in enumerate(scores[:4], 1)}
    assert to_keep(dict(metrics), 1, 4) == {2, 4}


def test_with_an_accuracy_the_loss_does_not_matter() -> None:
    position = Position()
    worse = []
    for correct, loss in ((0, float("nan")), (0, 1.0), (5, 2.0), (5, 0.5), (4, float("nan")), (6, 3.0)):
        position.end_epoch(Score(10, correct, loss))
        worse.append(position.worse)
    assert worse == [0, 1, 0, 1, 2, 0] and position.best_accuracy == 0.6


@pytest.mark.slow
def test_a_run_without_an_accuracy_goes_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The loss falls, and then a learning rate spoils it: the checkpoint of the lowest loss stays."""

    def nothing_is_right() -> None:
        from train import evaluate, step

        for module in (evaluate, step):
            module.right = lambda outputs, targets: None  # type: ignore[attr-defined]
        evaluate.right_among_five = lambda outputs, targets: None  # type: ignore[attr-defined]

    settings = settings_in(tmp_path, loggers="tensorboard", keep=1, **SAFE)
    assert train(2, settings, changes=dict.fromkeys((0, 1), nothing_is_right), draws=True) == [0, 0]
    found, epochs = result(tmp_path), events(tmp_path, "epoch")
    assert found["test_accuracy"] is None and found["best_accuracy"] is None and found["test_top5"] is None
    assert found["best_loss"] == min(event["test_loss"] for event in epochs)
    assert all(event["accuracy"] is None for event in events(tmp_path, "step"))
    assert all(event["test_accuracy"] is None and event["train_accuracy"] is None for event in epochs)
    best = min(epochs, key=lambda event: event["test_loss"])
    assert metric_of(tmp_path / "checkpoints", best["step"]) == -best["test_loss"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    said = capfd.readouterr().out
    assert f"test loss {found['test_loss']:.4f}" in said and "test accuracy" not in said and "%" not in said
