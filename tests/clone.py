"""A copy of this clone in a folder whose path has blanks, and `make` in it, as a user types it elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Makefile", "ansible.cfg", "fabfile.py", "pyproject.toml", "inventory/hosts.yml")
FOLDERS = ("launch", "keeper", "train", "containers", "playbooks")


def copy_clone(parent: Path) -> Path:
    """What of this clone the commands need, with this clone's .venv; `parent` gets the copy."""
    folder = parent / "my own" / "clone of it"
    for part in FOLDERS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "inventory").mkdir()
    for part in PARTS:
        shutil.copy(ROOT / part, folder / part)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def make(clone: Path, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """`make -C clone`, typed elsewhere; nothing is installed."""
    command = ["make", "-s", "-C", str(clone), "PYTHON=true", *words]
    return subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, timeout=seconds, check=False)
