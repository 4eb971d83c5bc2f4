"""Promises of resuming: broken off anywhere and continued, a training ends as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.train.resume_ranks import (
    CRASH,
    SETTINGS,
    STEPS,
    Change,
    crash_in_step,
    end_of,
    in_order,
    network,
    own_host,
    train,
)
from tests.train.test_metrics import curve_of
from train import resume, run, session
from train.checkpoints.agree import StartPoint
from train.settings import EXIT_REFUSED, EXIT_STOPPED, Settings, SettingsError

RICH = {
    "optimizer": "sgd",
    "nesterov": True,
    "mixup": 0.4,
    "ema": 0.9,
    "clip": 1.0,
    "micro_batch": 20,
    "label_smoothing": 0.1,
    "augment": "trivial",
    "random_erasing": 0.3,
    "bad_samples": "skip",
}
PARTS = ("model", "rank_buffers", "optimizer", "ema", "ema_rank_buffers", "scaler")


def settings_in(folder: Path, **changes: Any) -> Settings:
    return dataclasses.replace(SETTINGS, run_dir=folder, **changes)


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Every tensor bit by bit, every other value as it is."""
    if isinstance(ours, torch.Tensor):
        assert ours.equal(theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}[{index}]")
    else:
        assert ours == theirs, where


def losses(folder: Path) -> list[float]:
    """Of each step, in order; a step that was done twice counts with its last time."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return [by_step[step] for step in sorted(by_step)]


def break_and_resume(folder: Path, world_size: int, step: int, **changes: Any) -> dict[str, Any]:
    settings = settings_in(folder, **changes)
    broken = train(world_size, settings, changes=dict.fromkeys(range(world_size), crash_in_step(step)))
    assert broken == [CRASH] * world_size
    assert train(world_size, settings) == [0] * world_size
    return end_of(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of so many ranks that nothing broke off; each one is made once."""
    made = dict[tuple[int, bool, bool], Path]()

    def folder_of(world_size: int, rich: bool = False, normalised: bool = True) -> Path:
        which = world_size, rich, normalised
        if which not in made:
            folder = tmp_path_factory.mktemp("unbroken")
            settings = settings_in(folder, **(RICH if rich else {}))
            assert train(world_size, settings, normalised=normalised) == [0] * world_size
            made[which] = folder
        return made[which]

    return folder_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "rich", "steps"),
    [
        pytest.param(1, False, (1, 12), id="plain-1"),
        pytest.param(2, True, (7,), id="rich-2"),
        pytest.param(1, False, (4, 7), id="plain-1, other steps", marks=pytest.mark.long),
        pytest.param(2, True, (1, 4, 12), id="rich-2, other steps", marks=pytest.mark.long),
        pytest.param(2, False, (1, 4, 7, 12), id="plain-2", marks=pytest.mark.long),
        pytest.param(1, True, (1, 4, 7, 12), id="rich-1", marks=pytest.mark.long),
        pytest.param(3, True, tuple(range(1, STEPS + 1)), id="rich-3", marks=pytest.mark.long),
        pytest.param(4, True, (1, 4, 7, 12), id="rich-4", marks=pytest.mark.long),
    ],
)
def test_a_run_killed_in_any_step_ends_with_the_same_bits(
    world_size: int, rich: bool, steps: tuple[int, ...], unbroken: Callable[..., Path], tmp_path: Path
) -> None:
    whole = end_of(unbroken(world_size, rich))
    for step in steps:
        folder = tmp_path / f"broken-{step}"
        resumed = break_and_resume(folder, world_size, step, **(RICH if rich else {}))
        for part in PARTS:
            assert_equal(resumed[part], whole[part], f"killed in step {step}: {part}")
        assert losses(folder)[-1] == losses(unbroken(world_size, rich))[-1]


@pytest.fixture(scope="module")
def three_broken_in_step_7(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three ranks without batch statistics and dropout, which tests copy."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    train(3, settings_in(folder), normalised=False, changes=dict.fromkeys(range(3), crash_in_step(7)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("other", [*(pytest.param(each, marks=pytest.mark.long) for each in (1, 2)), 4])
def test_another_number_of_ranks_goes_on_with_the_same_curve(
    other: int, unbroken: Callable[..., Path], three_broken_in_step_7: Path, tmp_path: Path
) -> None:
    """Without batch statistics and dropout, which are each rank's own."""
    whole = unbroken(3, normalised=False)
    folder = Path(shutil.copytree(three_broken_in_step_7, tmp_path / "run"))
    assert train(other, settings_in(folder), normalised=False) == [0] * other
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-4)
    ours, theirs = end_of(folder)["model"], end_of(whole)["model"]
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_stop_asked_of_one_rank_ends_all_after_a_checkpoint(unbroken: Callable[..., Path], tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "stopped", checkpoint_every="epoch")
    asked = crash_in_step(6, how=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(2, settings, changes={1: asked}) == [EXIT_STOPPED, EXIT_STOPPED]
    assert max(int(p.stem.removeprefix("step-")) for p in (settings.run_dir / "checkpoints").glob("step-*.pt")) in (
        6,
        7,
    )
    assert not (settings.run_dir / "result.json").exists()
    assert train(2, settings) == [0, 0]
    resumed, whole = end_of(settings.run_dir), end_of(unbroken(2))
    for part in PARTS:
        assert_equal(resumed[part], whole[part], part)


def starts(folder: Path) -> list[int | None]:
    """The step after which each start went on."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["resumed_from"] for event in events if event["event"] == "start"]


@pytest.mark.slow
def test_another_attempt_goes_on_from_the_runs_own_checkpoints_whatever_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path, resume="none", shares="3,2,1")
    train(3, settings, changes=dict.fromkeys(range(3), crash_in_step(7)))
    monkeypatch.setenv("MUSTER_ATTEMPT", "2")
    train(3, settings, changes=dict.fromkeys(range(3), crash_in_step(11)))
    first, second = starts(tmp_path)
    assert first is None and second in (4, 6)  # a checkpoint each second step, written in the background
    assert train(2, settings) == [0, 0]  # shares of three ranks mean nothing to two: they are measured
    assert len(starts(tmp_path)) == 3 and (starts(tmp_path)[-1] or 0) in (8, 10) and len(losses(tmp_path)) == STEPS


@pytest.mark.parametrize(
    ("attempt", "notes"), [("1", []), ("2", ["no checkpoint was kept before the failure: it begins anew"])]
)
def test_another_attempt_without_a_checkpoint_says_that_it_begins_anew(
    attempt: str, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_ATTEMPT", attempt)
    monkeypatch.setattr(resume, "where_to_begin", lambda session: StartPoint())
    made: Any = SimpleNamespace(settings=None, place=None)
    assert resume.begin(made) == notes


def note_graphs() -> None:
    """Compiles without a compiler; each rank notes the graphs: shapes of the inputs, and whether in mixed precision."""
    from train.parallel.single import Single

    rank, folder = os.environ["RANK"], Path(os.environ["GRAPHS"])

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        shapes = [list(each.shape) for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 4]
        with (folder / rank).open("a") as file:
            print(shapes, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), file=file)
        return graph.forward

    mock.patch.object(Single, "compile", lambda self, **_: self.network.compile(backend=backend)).start()
    mock.patch.object(run, "build_model", lambda *_: Whole(network(normalised=True))).start()


class Whole(torch.nn.Module):
    """torch compiles no forward of its own modules, such as Sequential's."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_resumed_run_compiles_nothing_that_an_unbroken_one_does_not(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its warm-up is a pass as those of training. 515 images are 5 equal batches of 103."""

    settings = settings_in(tmp_path, epochs=2, amp="bf16", compile=True, batch_size=103, micro_batch=26, mixup=0.4)

    def graphs(name: str, *more: Change) -> list[str]:
        folder = tmp_path / f"graphs-{name}"
        folder.mkdir()
        monkeypatch.setenv("GRAPHS", str(folder))
        changes = dict.fromkeys(range(ranks), in_order(note_graphs, *more))
        train(ranks, dataclasses.replace(settings, run_dir=tmp_path / name.split("-")[0]), changes=changes)
        return [(folder / str(rank)).read_text() for rank in range(ranks)]

    whole = graphs("whole")
    graphs("broken", crash_in_step(7))
    assert "True True" in whole[0]
    assert graphs("broken-resumed") == whole


@pytest.mark.slow
def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    assert train(1, settings_in(tmp_path, epochs=1)) == [0]
    assert train(1, settings_in(tmp_path, seed=1)) == [EXIT_REFUSED]
    assert train(1, settings_in(tmp_path, seed=1, epochs=1, resume="none")) == [0]


def test_checkpoints_that_cannot_be_written_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(
        SettingsError, match=f"cannot write to {tmp_path}/checkpoints .*: make it a folder that you may"
    ):
        session.make_run_dir(tmp_path)
    (tmp_path / "checkpoints").unlink()
    session.make_run_dir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    session.make_run_dir(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_ranks_and_keeps_no_spoilt_checkpoint(tmp_path: Path) -> None:
    assert train(2, settings_in(tmp_path, lr=1e30, checkpoint_every="1")) == [1, 1]
    states = [torch.load(path, weights_only=True) for path in (tmp_path / "checkpoints").glob("*.pt")]
    assert all(tensor.isfinite().all() for state in states for tensor in state["model"].values())


@pytest.mark.slow
def test_a_finished_run_keeps_its_record(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, run_dir=tmp_path, epochs=1)
    assert train(2, settings) == [0, 0]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert train(2, settings) == [0, 0]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("away", [0, 1])
def test_a_host_that_was_not_in_an_attempt_learns_of_its_steps(away: int, tmp_path: Path) -> None:
    hosts = [tmp_path / "h1", tmp_path / "h2"]
    settings = settings_in(tmp_path, loggers="tensorboard")
    for folder in hosts:
        folder.mkdir()

    def attempt(*folders: Path, crash: int = 0) -> list[int]:
        more = [crash_in_step(crash)] if crash else []
        changes = {rank: in_order(own_host(folder), *more) for rank, folder in enumerate(folders)}
        return train(len(folders), settings, changes=changes)

    attempt(*hosts, crash=5)
    attempt(hosts[1 - away], crash=10)
    assert attempt(*hosts) == [0, 0]
    for folder in hosts:
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, STEPS + 1))
        assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1, 2, 3]
    assert losses(hosts[0]) == losses(hosts[1])
    assert [step for step, _ in curve_of(hosts[0], "step/loss")] == list(range(1, STEPS + 1))


def spoil_gradient(number: int, value: float) -> Change:
    """In the step of this number, from 1, one weight's gradient is `value`; the loss is as ever."""

    def change() -> None:
        layers, passed = network(normalised=True), [0]

        def spoilt(gradient: torch.Tensor) -> torch.Tensor:
            passed[0] += 1
            return gradient * value if passed[0] == number else gradient

        next(layers.parameters()).register_hook(spoilt)
        mock.patch.object(run, "build_model", lambda *_: layers).start()

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "clip", "value"), [("ddp", 0.0, float("inf")), ("ddp", 1.0, float("nan")), ("none", 0.0, float("inf"))]
)
def test_a_gradient_that_is_not_finite_leaves_no_spoilt_checkpoint(
    parallel: str, clip: float, value: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even of the step at whose end a checkpoint is due, while its loss was finite."""
    ranks = 1 if parallel == "none" else 2
    settings = settings_in(tmp_path, parallel=parallel, clip=clip, checkpoint_every="1", blocking_checkpoints=True)
    found = train(ranks, settings, changes={0: spoil_gradient(3, value)})
    assert found == [1] * ranks
    assert (
        "the loss was finite and its gradient was not, at epoch 1, step 3: try a smaller --lr" in capfd.readouterr().err
    )
    states = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "checkpoints").glob("*.pt")}
    assert states.keys() == {"step-1.pt", "step-2.pt"}
    assert all(tensor.isfinite().all() for state in states.values() for tensor in state["model"].values())


def norms(folder: Path) -> list[float | None]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["grad_norm"] for event in events if event["event"] == "step"]


@pytest.mark.slow
def test_the_norm_of_a_step_is_that_of_the_whole_gradient_before_clipping(tmp_path: Path) -> None:
    def found(name: str, ranks: int, **changes: Any) -> list[float | None]:
        settings = settings_in(tmp_path / name, epochs=1, checkpoint_every="epoch", **changes)
        assert train(ranks, settings, normalised=False) == [0] * ranks
        return norms(tmp_path / name)

    alone = found("alone", 1, parallel="none", loggers="tensorboard")
    assert len(alone) == 4 and all(alone)
    assert [value for _, value in curve_of(tmp_path / "alone", "step/gradient_norm")] == pytest.approx(alone)
    ways: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel": "fsdp"}, "micro": {"micro_batch": 20}}
    for name, changes in ways.items():
        assert found(name, 2, **changes) == pytest.approx(alone, rel=1e-3)
    assert found("half", 2, amp="fp16") == pytest.approx(alone, rel=0.05)  # in its own size, not the scaled loss's
    assert found("clipped", 2, clip=0.01)[0] == pytest.approx(alone[0], rel=1e-3)


@pytest.mark.slow
def test_a_step_that_overflowed_in_fp16_is_skipped_and_has_no_norm(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, epochs=1, amp="fp16")
    assert train(2, settings, changes={0: spoil_gradient(2, float("inf"))}) == [0, 0]
    found = norms(tmp_path)
    assert [norm is None for norm in found] == [False, True, False, False]
