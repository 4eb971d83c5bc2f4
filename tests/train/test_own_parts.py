"""Promises of own parts: a user's model, dataset, loss and transform get all that built-in ones get, and what is wrong
with them is said before anything is trained.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from tests.train.own_runs import (
    EXAMPLE,
    EXAMPLE_PARTS,
    NOISY,
    ODD,
    REGRESSION,
    ROOT,
    SEGMENTATION,
    importable,  # noqa: F401
    newest,
    own,
    result,
    trained,
)
from tests.train.resume_ranks import CRASH, train
from tests.train.test_probe import two_ranks
from tests.train.test_resume import assert_equal
from train import losses, own_parts
from train.datasets import DataError
from train.datasets import load as load_dataset
from train.datasets.own import unequal
from train.inference import export, predict
from train.model.build import build
from train.model.freeze import freeze
from train.settings import EXIT_REFUSED, Settings, SettingsError, flag, parse, problems
from train.start.group import Place
from train.start.proof import facts_here
from train.trial import trial

# -- whole trainings ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_trains_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    runs = [own(EXAMPLE, batch_size=480, **EXAMPLE_PARTS, run_dir=tmp_path / str(ranks)) for ranks in (1, 2)]
    for ranks, settings in enumerate(runs, 1):
        assert trained(ranks, settings) == [0] * ranks
    one, two = map(newest, runs)
    for name, weights in one["model"].items():
        torch.testing.assert_close(two["model"][name], weights, rtol=1e-4, atol=1e-5)
    assert result(runs[0])["test_accuracy"] == result(runs[1])["test_accuracy"] > 0.5
    assert one["config"]["data"]["class_names"] == [str(digit) for digit in range(10)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"micro_batch": 3}, id="micro-batches"),
        pytest.param({}, id="plain", marks=pytest.mark.long),
        pytest.param({"micro_batch": 3, "workers": 2}, id="micro-batches, workers", marks=pytest.mark.long),
    ],
)
def test_a_run_that_broke_in_an_epoch_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    whole, broken = (
        own(**NOISY, checkpoint_every="1", blocking_checkpoints=True, run_dir=tmp_path / name, **changes)
        for name in ("whole", "b")
    )
    assert trained(2, whole) == [0, 0]
    assert trained(2, broken, crash=5) == [CRASH, CRASH]
    assert trained(2, broken) == [0, 0]
    for part in ("model", "rank_buffers", "optimizer"):
        assert_equal(newest(broken)[part], newest(whole)[part], part)


@pytest.mark.slow
def test_masks_are_learned_and_counted_by_pixels(tmp_path: Path) -> None:
    settings = own(**SEGMENTATION, epochs=10, lr=0.03, run_dir=tmp_path)
    assert trained(2, settings) == [0, 0]
    assert 0.9 < result(settings)["test_accuracy"] <= 1


@pytest.mark.slow
def test_without_class_numbers_there_is_no_accuracy_and_the_lowest_loss_is_best(tmp_path: Path) -> None:
    settings = own(**REGRESSION, epochs=4, lr=0.1, schedule="constant", run_dir=tmp_path)
    assert trained(2, settings) == [0, 0]
    events = [json.loads(line, parse_constant=None) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "result.json").read_text()
    assert {event["accuracy"] for event in events if event["event"] == "step"} == {None}
    epochs = [event for event in events if event["event"] == "epoch"]
    assert {(event["train_accuracy"], event["test_accuracy"]) for event in epochs} == {(None, None)}
    assert (result(settings)["test_accuracy"], result(settings)["best_accuracy"]) == (None, None)
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "checkpoints").glob("step-*.json")]
    found = {each["step"]: each["metric"] for each in manifests if each["metric"] is not None}
    best = max(found, key=lambda step: found[step])
    assert found[best] == pytest.approx(-min(event["test_loss"] for event in epochs))


@pytest.mark.slow
def test_mixing_and_shares_and_a_built_in_dataset_with_a_transform(tmp_path: Path) -> None:
    own_model = {"model": "parts:net", "loss": "parts:loss", "dataset": "parts:digits", "batch_size": 480}
    settings = own(EXAMPLE, **own_model, mixup=0.4, cutmix=1.0, shares="3,1", ema=0.9, epochs=1, run_dir=tmp_path / "a")
    assert trained(2, settings) == [0, 0]
    settings = own(EXAMPLE, dataset="fake", transform="parts:shaken", epochs=1, batch_size=300, run_dir=tmp_path / "b")
    assert train(2, dataclasses.replace(settings, image_size=32), changes={}) != [0, 0]  # the network is for 8 pixels
    assert train(1, dataclasses.replace(settings, dataset="digits", run_dir=tmp_path / "c")) == [0]


@pytest.mark.slow
def test_what_is_wrong_ends_all_ranks_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = own(**REGRESSION | {"loss": "odd:mean_squares"}, run_dir=tmp_path / "run")
    assert trained(2, settings) == [EXIT_REFUSED, EXIT_REFUSED]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train: ")]
    assert len(said) == 1 and "--loss odd:mean_squares: it returned float32 [] for 2 samples, and [2]" in said[0]
    assert not (tmp_path / "run").exists()


# -- what is wrong -----------------------------------------------------------------------------------------------------


def tried(settings: Settings) -> None:
    dataset = load_dataset(settings, Place())
    network = build(settings.model, dataset.classes, settings.image_size or dataset.image_size, settings.seed)
    trial(settings, dataset, network)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model": "odd:raising"},
            r"--model odd:raising: ValueError: no such depth \(.*odd\.py, line \d+\); it is called",
        ),
        ({"model": "odd:two_arguments"}, r"missing a required argument: 'depth'.*called as two_arguments\(1\)"),
        ({"model": "odd:no_module"}, r"it returned a int, and torch's Module is needed"),
        ({"model": "odd:not_a_function"}, r"that is a int, and a function is needed"),
        ({"model": "odd:segment"}, r"--model odd:segment: RuntimeError: .* given inputs float32 \[2, 4\]"),
        (
            {"dataset": "odd:pixels"},
            r"--model odd:linear: .* uint8 \[2, 4\]; v2\.ToDtype\(torch\.float32, scale=True\)",
        ),
        ({"model": "resnet18"}, r"--model resnet18: .* it was given inputs float32 \[2, 4\]"),
        ({"model": "nowhere.parts:net"}, r"--model nowhere\.parts:net: there is no module nowhere\.parts"),
        ({"dataset": "odd:iterable"}, r"it returned a .*iterator without __len__ and __getitem__: a map-style"),
        ({"dataset": "odd:line", "classes": 0}, r"how many classes, or outputs of the model\? Give --classes N"),
        ({"dataset": "odd:alone"}, r"reading sample 0 of train failed: TypeError: a sample is \(input, target\)"),
        ({"dataset": "odd:uneven"}, r"samples 0, 1 of train do not fit into one batch"),
        (
            {"loss": "cross-entropy"},
            r"--loss cross-entropy: .* it was given outputs float32 \[2, 1\] and targets float32",
        ),
        (
            {"loss": "odd:mean_squares"},
            r"it returned float32 \[\] for 2 samples.*wrongly where ranks have different",
        ),
        ({"mixup": 0.2}, r"--mixup 0\.2: it mixes images.*inputs float32 \[2, 4\] and targets float32 \[2\]"),
        ({"transform": "odd:raising"}, r"--transform odd:raising: ValueError: no such depth"),
        (
            {"transform": "odd:of_one_argument"},
            r"for split 'train' it returned a function that does not take two arguments \(too many positional",
        ),
        ({"image_size": 9}, r"--image-size 9: your own dataset or transform makes inputs of \[4\]"),
    ],
    ids=str,
)
def test_each_mistake_is_named_with_its_place(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((SettingsError, DataError), match=said):
        tried(own(**REGRESSION | changes))


def test_an_own_logger_that_is_not_there_is_found_without_importing_anything() -> None:
    parts = own(**REGRESSION, loggers="tensorboard,odd:nothing")
    (said,) = own_parts.problems(parts)
    assert said.startswith("--loggers odd:nothing: ") and "has no nothing" in said
    assert not own_parts.problems(own(**REGRESSION, loggers="odd:linear,mlflow"))


def test_another_number_of_classes_than_the_datasets_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--model odd:narrow: its outputs are .*, and there are 3 classes"):
        tried(own(**NOISY | {"model": "odd:narrow"}))
    with pytest.raises(SettingsError, match=r"--classes 2: the dataset says that it has 3"):
        tried(own(**NOISY, classes=2))


def test_what_is_wrong_with_a_file_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = [\n")
    wrong = own_parts.problems(Settings(project=tmp_path, model="broken:net", dataset="broken:data"))
    assert wrong == [f"--model broken:net, --dataset broken:data: {tmp_path}/broken.py, line 1: '[' was never closed"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import notthere\n", r"notthere is not installed here: put it .* requirements\.txt.*pip install -r"),
        ("import sys\nsys.exit(3)\n", r"importing early failed: SystemExit: 3 \(.*early\.py, line 2\)"),
        ("x = [\n", r"importing early failed: SyntaxError.*early\.py, line 1"),
        ("1 / 0\n", r"ZeroDivisionError: division by zero \(.*early\.py, line 1\)"),
    ],
)
def test_what_fails_in_an_import_is_named_with_its_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=said):
        own_parts.load("--model", "early:net")


# -- the folder --------------------------------------------------------------------------------------------------------


def test_the_folder_comes_last_and_reaches_processes_that_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", ["first"])
    monkeypatch.setenv("PYTHONPATH", "first")
    own_parts.use(tmp_path)
    own_parts.use(tmp_path)
    assert sys.path == ["first", str(tmp_path)]
    assert os.environ["PYTHONPATH"] == f"first{os.pathsep}{tmp_path}"


def test_another_file_in_the_folder_is_another_project(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("x = 1\n")
    first = facts_here(own(tmp_path), "")["project"]
    for name in (".git/HEAD.txt", "__pycache__/parts.py", "env/pyvenv.cfg", "data.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert facts_here(own(tmp_path), "")["project"] == first
    (tmp_path / "runs" / "7").mkdir(parents=True)
    (tmp_path / "runs" / "summary.json").write_text("{}")
    (tmp_path / "lost.py").symlink_to(tmp_path / "nowhere.py")
    running = own(tmp_path, run_dir=tmp_path / "runs" / "7")
    assert facts_here(running, "")["project"] == first
    for name in ("classes.json", "more.yaml", "parts.py"):
        before = facts_here(own(tmp_path), "")["project"]
        (tmp_path / name).write_text("x = 2\n")
        assert facts_here(own(tmp_path), "")["project"] != before
    assert facts_here(Settings(), "")["project"] == "none" and "--project" not in facts_here(own(tmp_path), "")


def test_weights_of_an_own_model_are_a_function_of_the_seed() -> None:
    state = torch.default_generator.get_state()
    first, again, other = (build("odd:net", 3, 0, seed).state_dict() for seed in (1, 1, 2))
    assert torch.default_generator.get_state().equal(state)
    assert_equal(dict(first), dict(again))
    assert not first["head.weight"].equal(other["head.weight"])


def test_a_loss_that_is_no_tensor_or_of_another_length_is_refused() -> None:
    answers: list[Any] = [1.0, torch.zeros(2), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64)]
    for answer in answers:
        with pytest.raises(losses.LossError, match=r"and \[3\] is needed"):
            losses.checked(lambda outputs, targets: outputs, answer, torch.zeros(3))


# -- examples and documents --------------------------------------------------------------------------------------------


def test_the_page_shows_the_example_that_is_tested_here() -> None:
    page = (ROOT / "docs" / "own-parts.md").read_text()
    assert f"```python\n{(EXAMPLE / 'parts.py').read_text()}```" in page
    flags = set(re.findall(r"--[a-z][a-z-]+", page)) - {"--project"}
    assert flags <= {flag(field.name) for field in dataclasses.fields(Settings)} | {"--config"}


@pytest.mark.long  # in `make test` a run of make local has a part of the example, and the example trains on two ranks
@pytest.mark.parametrize("workers", [0, 1])
def test_the_example_runs_by_the_command_of_the_page(workers: int, tmp_path: Path) -> None:
    """Two ranks that --spawn starts, and a worker of each: fresh interpreters that must find the folder."""
    command = [sys.executable, "-m", "train", "--spawn", "2", "--project", "examples/own_parts", "--epochs", "1"]
    command += [word for name, value in EXAMPLE_PARTS.items() for word in (f"--{name}", value)]
    command += ["--workers", str(workers), "--batch-size", "480", "--run-dir", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "training parts:net on parts:digits (1437 images, 360 held out, 8 px)" in done.stdout
    assert (tmp_path / "result.json").exists()


@pytest.mark.long
def test_the_plain_script_runs_under_torchrun(tmp_path: Path) -> None:
    """By hand, where nothing waits for gloo's threads: now and then torch then aborts after the script's last line
    (train.start.muster_run.let_go)."""
    launcher = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, "-m", *launcher, "examples/plain_ddp.py", "--epochs", "1"]
    environment = os.environ | {"MUSTER_RUN_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert "epoch 1: loss" in done.stdout and (tmp_path / "model.pt").exists()


def test_the_example_of_fine_tuning_fits_its_model() -> None:
    settings = parse(["--config", "examples/fine_tune.yaml"])
    assert problems(settings, 1) == []
    with torch.device("meta"):
        network = torchvision.models.get_model(settings.model)
    freeze(network, settings.freeze)
    first = next(name for name, each in network.named_parameters() if each.requires_grad)
    assert first.startswith("layer3.")


@pytest.mark.slow
def test_weights_of_an_own_model_are_exported_and_its_images_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = own(EXAMPLE, batch_size=480, epochs=1, **EXAMPLE_PARTS, run_dir=tmp_path)
    assert trained(1, settings) == [0]
    assert export.main([str(tmp_path), "--project", str(EXAMPLE)]) == 0
    said = capsys.readouterr()
    file = Path(said.out.split()[0])
    assert file == tmp_path / "export" / "net.pt"
    assert f'from parts import net; net(10).load_state_dict(torch.load("{file}"))' in said.err
    build("parts:net", 10, 0, 0).load_state_dict(torch.load(file, weights_only=True))
    assert predict.main(["--checkpoint", str(tmp_path), "--project", str(EXAMPLE), "a.png"]) == EXIT_REFUSED
    assert "its images were prepared by code of your own (--dataset parts:digits" in capsys.readouterr().err
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if "own_parts" not in entry])
    monkeypatch.delitem(sys.modules, "parts")
    assert export.main([str(tmp_path)]) == EXIT_REFUSED
    assert (
        "its model cannot be made: --model parts:net: there is no module parts: name its folder"
        in capsys.readouterr().err
    )


@pytest.mark.long
def test_a_forecast_measures_own_parts(tmp_path: Path) -> None:
    words = [word for name, value in NOISY.items() for word in (f"--{name}", value)]
    words += ["--project", str(ODD), "--batch-size", "16", "--workers", "0"]
    statuses, said, document = two_ranks(tmp_path, "--forecast", "--", *words)
    assert statuses == [0, 0], said
    assert document["forecast"]["samples"] == 47


def test_the_sample_of_another_form_is_named_with_its_form() -> None:
    numbers = torch.arange(10, 14).numpy()
    samples = [(torch.zeros(4), 1), (torch.zeros(4), 2), (torch.zeros(3), 1), (torch.zeros(4), 2)]
    named = unequal(numbers, samples)
    assert named is not None
    assert named[0].tolist() == [10, 12] and named[1] == "(float32 [4], an int); (float32 [3], an int)"
    assert unequal(numbers[:2], samples[:2]) is None
