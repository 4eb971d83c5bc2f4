"""A project folder of the test's own, with every kind of run in it."""

from __future__ import annotations

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


@pytest.fixture
def runs(project: Path) -> Path:
    """runs/ with every kind of run, but for the large one; the cluster map and a check made before them."""
    made_runs.all_of_them(with_large=False)
    return files.runs_dir()
