"""Promise: what a project's requirements.txt asks for is there for its run, once installed; .venv stays as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from launch import files, packages
from launch.cli import exits
from launch.cli.refusal import Refusal
from tests.wheels import write_wheel


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project beside two wheels, in a path with blanks."""
    folder = tmp_path / "my own" / "Project 1"
    folder.mkdir(parents=True)
    monkeypatch.setattr(files, "ROOT", tmp_path / "my own")
    for number in ("1", "2"):
        write_wheel(tmp_path / "index", "tiny", number)
    for name in ("rich", "torch"):
        write_wheel(tmp_path / "index", name, "0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return folder


def found(beside: Path, expression: str) -> str:
    """What Python says with these packages before its own."""
    words = [sys.executable, "-c", f"import importlib.metadata; print({expression})"]
    env = os.environ | {"PYTHONPATH": str(beside)}
    return subprocess.run(words, env=env, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


@pytest.mark.slow
def test_what_is_lacking_is_installed_once_beside_what_is_there(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packages.folder_of(project) is None
    (project / "requirements.txt").write_text("tiny<2\nnumpy\ntorch\n")
    beside = packages.folder_of(project)
    assert beside and "installing" in capsys.readouterr().out
    assert beside.is_relative_to(files.build_dir() / "projects")
    assert sorted(path.name for path in beside.glob("*.dist-info")) == ["tiny-1.dist-info"]
    assert found(beside, "importlib.metadata.version('tiny')") == "1"
    assert packages.folder_of(project) == beside and capsys.readouterr().out == ""
    (project / "requirements.txt").write_text("tiny\n")
    assert (newer := packages.folder_of(project)) and newer != beside
    assert found(newer, "importlib.metadata.version('tiny')") == "2"


@pytest.mark.slow
def test_another_version_than_ours_goes_before_ours_and_ours_stays(project: Path) -> None:
    ours = version("rich")
    (project / "requirements.txt").write_text("rich==0.0.1\n")
    beside = packages.folder_of(project)
    assert beside and found(beside, "importlib.metadata.version('rich')") == "0.0.1"
    assert found(Path(), "importlib.metadata.version('rich')") == ours == version("rich")


@pytest.mark.slow
@pytest.mark.parametrize("line", ["torch==0.0.1", pytest.param("no-such-package-of-muster", marks=pytest.mark.long)])
def test_what_cannot_be_installed_is_said_with_pips_last_lines_and_leaves_nothing(project: Path, line: str) -> None:
    (project / "requirements.txt").write_text(f"{line}\n")
    with pytest.raises(Refusal) as refused:
        packages.folder_of(project)
    (problem,) = refused.value.problems
    assert refused.value.status == exits.DEPLOY_FAILED and problem.where == str(project / "requirements.txt")
    assert line.partition("=")[0] in problem.what and f"torch {version('torch')}" in problem.fix
    assert not list((files.build_dir() / "projects").iterdir())


@pytest.mark.parametrize("included", [False, True])
def test_requirements_that_cannot_be_read_are_one_message(included: bool, project: Path) -> None:
    wrong = project / ("more.txt" if included else "requirements.txt")
    (project / "requirements.txt").write_text("-r more.txt\n")
    wrong.write_bytes("tiny\n".encode("utf-16"))
    with pytest.raises(Refusal, match="not text in UTF-8") as refused:
        packages.folder_of(project)
    assert [problem.where for problem in refused.value.problems] == [str(wrong)]
