"""Promise: commands find their files in a folder whose path has blanks, from any working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import copy_clone, make


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_clone(tmp_path)


@pytest.mark.slow
def test_commands_find_their_files(clone: Path) -> None:
    assert "make train" in make(clone, "help").stdout
    local = make(clone, "local", "NPROC=1", "ARGS=--epochs 0")
    assert "ARGS: --epochs 0: at least 1" in local.stderr, local.stderr
    train = make(clone, "train", "ARGS=--seed 1'2")
    assert "ARGS=--seed 1'2: No closing quotation" in train.stderr, train.stderr
    train = make(clone, "train")
    assert "build/hosts/cluster.json: there is no cluster map" in train.stderr, train.stderr
    (clone / "my hosts.yml").write_bytes((clone / "inventory/hosts.yml").read_bytes())
    train = make(clone, "train", "INVENTORY=my hosts.yml")
    assert "`make deploy INVENTORY='my hosts.yml'`" in " ".join(train.stderr.split()), train.stderr


@pytest.mark.slow
def test_bootstrap_finds_its_clone_from_anywhere(clone: Path) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); from launch import bootstrap; print(bootstrap.VENV)"
    words = [sys.executable, "-P", "-c", script, str(clone)]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == f"{clone}/.venv\n"
