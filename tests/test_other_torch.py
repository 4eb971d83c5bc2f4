"""Promises of `make test-torch`: another release of torch, with all else as it is pinned."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from containers.pip import group_requirements
from tests import other_torch

PROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()


def test_all_but_torch_is_as_pinned() -> None:
    lines = other_torch.requirements("2.11.0", PROJECT)
    assert lines[:2] == ["torch==2.11.0", "torchvision"]
    pinned = group_requirements(tomllib.loads(PROJECT)["dependency-groups"], "train")
    assert set(lines) >= {line for line in pinned if not line.startswith("torch")}
    assert not any(line.startswith(("ansible", "fabric")) for line in lines)
    assert "pytest" in {other_torch.name_of(line) for line in lines}


def test_what_is_no_release_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(other_torch, "installed", lambda release: pytest.fail("it was installed"))
    monkeypatch.setenv("TORCH", "2.11 --pre")
    assert other_torch.main([]) == 2
    assert capsys.readouterr().err == "TORCH=2.11 --pre is no release of torch: TORCH=2.11.0\n"
