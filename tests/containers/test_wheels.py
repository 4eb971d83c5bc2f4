"""Which wheels are fetched for an image: decisions, without pip."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers import wheels


def test_included_groups_are_resolved() -> None:
    groups = {"train": ["torch==2.13.0"], "test": [{"include-group": "train"}, "pytest"]}
    assert wheels.group_requirements(groups, "test") == ["torch==2.13.0", "pytest"]


def test_pins_are_exact_builds_under_normalized_names() -> None:
    files = ["torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl", "Typing_Extensions-4.16.0-py3-none-any.whl"]
    assert wheels.pinned(files) == {"torch": "2.13.0+cpu", "typing-extensions": "4.16.0"}


def test_a_control_machine_like_the_image_lets_pip_choose() -> None:
    assert wheels.cross_arguments((3, 11), ("glibc", "2.36"), "x86_64") == []


@pytest.mark.parametrize(
    ("python", "libc"), [((3, 13), ("glibc", "2.36")), ((3, 11), ("glibc", "2.41")), ((3, 11), ("", ""))]
)
def test_another_python_or_a_newer_libc_asks_for_the_images(python: tuple[int, int], libc: tuple[str, str]) -> None:
    arguments = wheels.cross_arguments(python, libc, "x86_64")
    assert "--python-version=3.11" in arguments
    assert "--platform=manylinux_2_28_x86_64" in arguments
    assert "--platform=manylinux_2_37_x86_64" not in arguments


def test_a_changed_requirement_in_an_included_file_is_another_set_of_wheels(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r more.txt\neinops\n")
    (tmp_path / "more.txt").write_text("tqdm==4.66\n")
    before = wheels.requirements_texts(tmp_path / "requirements.txt")
    (tmp_path / "more.txt").write_text("tqdm==4.67\n")
    assert wheels.requirements_texts(tmp_path / "requirements.txt") != before
