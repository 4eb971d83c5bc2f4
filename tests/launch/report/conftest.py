"""A project folder of the test's own, with every kind of run in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch import files
from launch.report import about
from tests.launch.report import made_runs


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one."""
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(about, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of run, but for the large one, to be copied."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "ROOT", folder)
        patch.setattr(about, "ROOT", folder)
        for name, make in made_runs.KINDS.items():
            make(folder / name)
    return folder


@pytest.fixture
def runs(project: Path, template: Path) -> Path:
    """runs/ with every kind of run, but for the large one; the cluster map and a check made before them."""
    made_runs.write_map_and_check()
    shutil.copytree(template, files.runs_dir())
    return files.runs_dir()
