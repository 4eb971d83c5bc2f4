"""Promises of train.settings: what is wrong is said, all of it, before training."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.names import MODELS
from train.settings import CONFIGS, GROUPS, Settings, SettingsError, flag, parse, parser, problems

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
        (Settings(image_size=-1), "--image-size -1"),
        (Settings(keep=0), "--keep 0"),
        (Settings(ema=1.0), "--ema 1.0"),
        (Settings(warmup=float("nan")), "--warmup nan"),
        (Settings(checkpoint_every="0s"), "--checkpoint-every 0s"),
        (Settings(checkpoint_every="often"), "--checkpoint-every often"),
        (Settings(parallel="none"), "--parallel none"),
        (Settings(parallel="fsdp", shares="1,1,1,1"), "--shares 1,1,1,1"),
        (Settings(gpu0_batch=8), "--gpu0-batch 8"),
        (Settings(nesterov=True), "--nesterov"),
        (Settings(find_unused_parameters=True, static_graph=True), "--find-unused-parameters"),
        (Settings(timeout=0), "--timeout 0"),
        (Settings(dataset="imagenet"), "--dataset imagenet: there is no such dataset"),
        (Settings(dataset="digit"), "--dataset digit: there is no such dataset; did you mean digits?"),
        (Settings(loss="mse"), "--loss mse: there is no such loss; your own is written package.module:function"),
        (Settings(transform="RandAugment"), "--transform RandAugment: it is your own"),
        (Settings(model="mine:Net:x"), "--model mine:Net:x"),
        (Settings(loss="mine:loss", label_smoothing=0.1), "--label-smoothing 0.1"),
        (Settings(dataset="mine:data", memory="gpu"), "--memory gpu"),
        (Settings(transform="mine:shaken", memory="ram"), "--memory ram"),
        (Settings(classes=3), "--classes 3"),
        (Settings(model="mine:net", weights="IMAGENET1K_V1"), "--weights IMAGENET1K_V1"),
        (Settings(weights="IMAGENET1K_V1", init_from=Path("a.pt")), "--weights IMAGENET1K_V1 --init-from a.pt"),
        (Settings(head_lr=-0.1), "--head-lr -0.1"),
    ],
)
def test_each_wrong_setting_is_named(settings: Settings, named: str) -> None:
    (problem,) = problems(settings, 4)
    assert problem.startswith(named)


def test_all_that_is_wrong_is_said_at_once() -> None:
    assert len(problems(Settings(epochs=0, batch_size=1, seed=-1), 2)) == 3


@pytest.mark.parametrize("arguments", [["--epochs", "two"], ["--optimizer", "adagrad"], ["--frobnicate"]])
def test_the_command_line_is_refused_without_leaving(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        parse(arguments)


def test_flags_win_over_the_config_and_the_config_over_the_defaults(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("epochs: 5\nlr: 1\nbatch-size: 64\ncheckpoint_every: 500\ndata_dir: /there\n")
    settings = parse(["--config", str(config), "--epochs", "7"])
    assert (settings.epochs, settings.lr, settings.batch_size) == (7, 1.0, 64)
    assert (settings.checkpoint_every, settings.data_dir, settings.momentum) == ("500", Path("/there"), 0.9)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epoch: 5", "epoch: no such setting; epochs?"),
        ("weight-decy: 0.1", "weight-decy: no such setting; weight_decay?"),
        ("batchsize: 8", "batchsize: no such setting; batch_size?"),
        ("epochs: many", "epochs: 'many' is no int"),
        ("epochs: true", "epochs: True is no int"),
        ("amp: fp8", "amp: 'fp8' is none of off, bf16, fp16"),
        ("- epochs", "expected lines like"),
        ("epochs: [", "not YAML"),
    ],
)
def test_a_wrong_config_is_named_with_its_key(text: str, named: str, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(named)):
        parse(["--config", str(config)])


def test_a_config_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"--config nowhere\.yaml: cannot be read"):
        parse(["--config", "nowhere.yaml"])


def test_ready_configs_are_right() -> None:
    for path in CONFIGS.glob("*.yaml"):
        assert problems(parse(["--config", path.stem]), 1) == []


def test_every_setting_has_a_flag_in_a_group() -> None:
    text = parser().format_help()
    for field in dataclasses.fields(Settings):
        assert flag(field.name) in text
    assert all(title in text for title in GROUPS)


def test_the_run_folder_of_the_launcher_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_RUN_DIR", "/somewhere")
    assert parse([]).run_dir == Path("/somewhere")
    assert parse(["--run-dir", "here"]).run_dir == Path("here")


def test_help_and_refusal_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, runpy; sys.argv[1:] = {}; runpy.run_module('train', run_name='__main__')"
    for arguments, status in ((["--help"], 0), (["--epochs", "0"], 2)):
        program = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
        command = [sys.executable, "-c", program.format(arguments)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "False"), done.stderr


def test_yaml_values_mean_what_people_write(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\namp: off\nshares: [3, 1]\n")
    settings = parse(["--config", str(file)])
    assert (settings.lr, settings.amp, settings.shares) == (0.001, "off", "3,1")


def check_settings(*arguments: str, world_size: int = 1, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m train --check-settings`, as launch/ asks it; a torch.py in `folder` takes torch's place."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "WORLD_SIZE": str(world_size), "RANK": "0"}
    command = [sys.executable, "-m", "train", "--check-settings", *arguments]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_settings_are_checked_without_torch_and_without_training(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = check_settings("--epochs", "3", '--config={"lr": 0.1}', folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    settings = json.loads(done.stdout)
    assert (settings["epochs"], settings["lr"], settings["communication"]) == (3, 0.1, "as-given")
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".pyc"] == ["torch.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "resnet18x"], "--model resnet18x: torchvision has no such model; did you mean resnet18"),
        (["--epochs", "0", "--model", "x"], "--epochs 0: at least 1; --model x: torchvision has no such model"),
        (["--batch-size", "3"], "at least one for each of the 4 ranks"),
        (["--spawn", "2"], "torchrun has started this rank already"),
        (["--config={lr: low}"], "lr: 'low' is no float"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_the_check(arguments: list[str], said: str) -> None:
    done = check_settings(*arguments, world_size=4)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of own parts that may not be imported by a check."""
    folder = tmp_path / "mine"
    (folder / "nets").mkdir(parents=True)
    (folder / "parts.py").write_text(
        "import torch\nraise SystemExit('imported')\ndef net(n): ...\nif True:\n    digits = lambda s, d: 0\n"
    )
    (folder / "nets" / "small.py").write_text("from elsewhere import *\n")
    (folder / "train.py").write_text("def net(n): ...\n")
    (folder / "torn.py").write_text("def net(:\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "parts:net", "--dataset", "parts:digits", "--loss", "nets.small:any"], ""),
        (["--model", "parts:nett"], "parts.py has no nett; did you mean net?"),
        (["--model", "part:net"], "has no module part; did you mean parts"),
        (["--loss", "net.small:loss"], "has no module net.small; did you mean nets.small"),
        (["--model", "train:net"], "another module is called train: give"),
        (["--model", "torn:net"], "torn.py, line 1: "),
        (["--model", "parts:no", "--loss", "parts:way"], "parts.py has no no; --loss parts:way: "),
    ],
)
def test_own_parts_are_found_by_the_check_without_torch_or_an_import(
    arguments: list[str], said: str, project: Path
) -> None:
    (project.parent / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = check_settings("--project", str(project), *arguments, folder=project.parent)
    assert (done.returncode, done.stdout == "") == (2 if said else 0, bool(said)), done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) == (1 if said else 0)


@pytest.mark.slow
def test_a_module_that_requirements_may_bring_is_left_to_the_ranks(project: Path) -> None:
    arguments = ["--project", str(project), "--model", "notimm:create_model"]
    assert "has no module notimm" in check_settings(*arguments).stderr
    (project / "requirements.txt").write_text("notimm\n")
    assert check_settings(*arguments).returncode == 0
    assert "has no missing" in check_settings("--project", str(project), "--model", "parts:missing").stderr


@pytest.mark.slow
def test_an_own_part_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    assert "name its folder with PROJECT=dir" in check_settings("--model", "nowhere_parts:net").stderr
    assert "there is no such folder" in check_settings("--project", str(tmp_path / "no"), "--model", "a:b").stderr


@pytest.mark.parametrize("part", ["dataset", "transform"])
@pytest.mark.parametrize("words", ["--augment trivial", "--random-erasing 0.5", "--bad-samples skip"])
def test_what_is_for_built_in_datasets_is_refused_beside_ones_own(words: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def part(*_): ...\n")
    given = ["--dataset", "fake", f"--{part}", "mine:part", "--project", str(tmp_path), *words.split()]
    (said,) = problems(parse(given), 1)
    assert said.startswith(f"{words}: ") and f"--{part}" in said


def test_the_known_models_are_those_of_torchvision() -> None:
    from train.model import torchvision_cpu

    torchvision_cpu.watch()
    import torchvision

    assert torchvision.models.list_models(module=torchvision.models) == MODELS


SWALLOWS_CTRL_C = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
except KeyboardInterrupt:
    pass
raise RuntimeError("the import went on")
"""


def test_ctrl_c_during_the_imports_ends_the_process_whatever_a_library_does(tmp_path: Path) -> None:
    swallow = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\n"
    (tmp_path / "torch.py").write_text(
        f"{swallow}except KeyboardInterrupt:\n    pass\nraise RuntimeError('trained on')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "train"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 130
    assert done.stderr == "train: interrupted before the first step: nothing was trained\n"


@pytest.mark.parametrize(
    "arguments", [["export", "a.pt"], ["predict", "--checkpoint", "a.pt", "a.png"], ["--epochs", "1"]]
)
def test_where_torch_is_not_installed_one_line_says_how_to_get_it(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module', name='torch')\n")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-P", "-m", "train", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "train: torch is not installed in this environment; `make local` installs it\n"
