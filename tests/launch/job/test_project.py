"""Promise: a project is a folder that PROJECT names; in a plan it stands where its image holds it, and nowhere else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from keeper import PROJECT_DIR
from launch.cli.refusal import Refusal
from launch.job import plan as plans
from launch.job import project, trainer_arguments
from launch.job.plan import Options, Plan
from tests.launch.fake_hosts import ports
from tests.launch.samples import cluster
from train.settings import parse


def test_a_project_is_a_folder_from_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    assert project.folder_of("") is None
    assert project.folder_of("mine") == project.folder_of(f"{tmp_path}/mine/") == tmp_path / "mine"
    for bad, said in (("mine.py", "PROJECT=mine.py is a file"), ("yours", "PROJECT=yours is not there")):
        with pytest.raises(Refusal, match=rf"PROJECT: {said}.*\n.*fix: give the folder"):
            project.folder_of(bad)


def test_a_project_is_not_named_among_the_trainers_arguments(tmp_path: Path) -> None:
    """The folder would not be brought to the hosts."""
    (tmp_path / "my.yaml").write_text("project: mine\n")
    for words in (["--project", "mine"], ["--project=mine"], ["--epochs", "1", "--config", "{project: mine}"]):
        with pytest.raises(Refusal, match=r"ARGS: .*project.*\n.*PROJECT=dir"):
            trainer_arguments.inline(words)
    for words in (["--config", f"{tmp_path}/my.yaml"], [f"--config={tmp_path}/my.yaml"]):
        with pytest.raises(Refusal, match="`project` in the settings of --config"):
            trainer_arguments.inline(words)
    for good in (["--config", "digits"], ["--config", "{epochs: 1}"], ["--config", "{no: [yaml"], ["--model", "a:b"]):
        assert trainer_arguments.inline(good) == tuple(good)


def made(options: Options) -> Plan:
    return plans.make_plan(cluster(1, 1), options, "20260101-000000-abcd", ports(2), "me@here", "now")


def test_the_trainer_finds_the_project_where_the_image_holds_it_and_stays_our_trainer() -> None:
    plan = made(Options(args=("--model", "mine:net"), project=True, image="ef" * 32))
    words = plan.ranks_command
    assert words[words.index("train") :] == ["train", "--project", PROJECT_DIR, "--model", "mine:net"]
    assert parse(words[words.index("train") + 1 :]).project == Path(PROJECT_DIR)
    command = plan.hosts[1].command
    assert "ef" * 32 in command and "/workload" not in " ".join(command)  # it is no script with a folder of its own
    assert plan.script is None and plan.args == ["--project", PROJECT_DIR, "--model", "mine:net"]


def test_what_was_typed_comes_back_from_a_plan() -> None:
    for has in (True, False):
        plan = made(Options(args=("--model", "mine:net"), project=has))
        found = json.loads(json.dumps(plans.document(plan)))
        assert project.parted(found["script"], found["args"]) == (has, ("--model", "mine:net"))
    of_a_script = made(Options(args=("--project", PROJECT_DIR), script="main.py"))
    assert project.parted("main.py", of_a_script.args) == (False, ("--project", PROJECT_DIR))


def test_the_check_of_the_settings_is_given_the_folder_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], **more: object) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 0, '{"epochs": 1}\n', "")

    monkeypatch.setattr(subprocess, "run", run)
    assert trainer_arguments.check(["--epochs", "1"], 2, tmp_path) == {"epochs": 1}
    trainer_arguments.check(["--epochs", "1"], 2)
    assert [words[-3:] for words in asked] == [["1", "--project", str(tmp_path)], ["--check-settings", "--epochs", "1"]]
