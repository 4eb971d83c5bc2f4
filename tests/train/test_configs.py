"""Promises of the ready configs: each is right as it stands, and says what to expect of it."""

import pytest

from train.settings import CONFIGS, Settings, parse, problems

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def test_there_is_one_for_each_size_of_problem() -> None:
    assert NAMES == ["digits", "imagenet-resnet50", "stl10-resnet18"]


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_config_has_nothing_wrong_for_any_usual_number_of_ranks(name: str) -> None:
    settings = parse(["--config", name, "--run-dir", "runs/x"])
    assert [problems(settings, ranks) for ranks in (1, 2, 64)] == [[], [], []]


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_config_opens_with_command_time_and_accuracy(name: str) -> None:
    opening = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\nmodel:")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    assert f"--config {name}" in opening
    for word in ("Expected", "accuracy", "measured" if "verified" not in opening else "verified"):
        assert word in opening


def test_digits_are_what_is_trained_without_any_setting() -> None:
    ready, default = parse(["--config", "digits", "--run-dir", "runs"]), Settings()
    different = {name for name in vars(default) if getattr(ready, name) != getattr(default, name)}
    assert different <= {"image_size"}  # 0: what suits the dataset
