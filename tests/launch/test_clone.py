"""Promise: a clone works whole in a folder whose path has blanks, from any working directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Makefile", "ansible.cfg", "fabfile.py", "pyproject.toml", "launch", "train", "containers", "inventory")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What of this clone the commands need, in a folder with blanks, with this clone's .venv."""
    folder = tmp_path / "my own" / "clone of it"
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "lab*"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, folder)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make -C clone`, typed elsewhere; nothing is installed."""
    command = ["make", "-s", "-C", str(clone), "PYTHON=true", *words]
    return subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, timeout=120, check=False)


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


def test_bootstrap_finds_its_clone_from_anywhere(clone: Path) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); from launch import bootstrap; print(bootstrap.VENV)"
    words = [sys.executable, "-P", "-c", script, str(clone)]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{clone}/.venv\n"
