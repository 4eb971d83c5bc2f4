"""`make test-torch TORCH=2.11.0`: the trainer's tests with another release of torch than the one that is pinned.

    python3 -m tests.other_torch [pytest's arguments]

They run in build/torch-<release>, which has that torch, the torchvision made for it, and all else as pyproject.toml
pins it. It is made once (a CUDA build of torch is 5 GB), and again when what is pinned changes. ARGS are pytest's:
without them all of tests/train and tests/gpu. Standard library alone, as pip is all that it needs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from containers.pip import group_requirements

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "2.11.0"  # that the trainer runs on
NEEDED = ("train", "report", "test")  # groups of pyproject.toml
NOT_NEEDED = {"ansible", "fabric", "paramiko", "selenium"}  # by the trainer's tests
WHERE = ("tests/train", "tests/gpu")


def requirements(release: str, project: str) -> list[str]:
    """What is installed beside pip. release: of torch. project: the text of pyproject.toml."""
    groups = tomllib.loads(project)["dependency-groups"]
    pinned = [line for name in NEEDED for line in group_requirements(groups, name)]
    kept = [line for line in pinned if name_of(line) not in NOT_NEEDED | {"torch", "torchvision"}]
    return [f"torch=={release}", "torchvision", *dict.fromkeys(kept)]  # pip takes the torchvision made for this torch


def name_of(requirement: str) -> str:
    return re.split(r"[=<>~!\[ ]", requirement)[0]


def installed(release: str) -> Path:
    """The interpreter that has it. Raises subprocess.CalledProcessError; pip has said why."""
    folder = ROOT / "build" / f"torch-{release}"
    lines = requirements(release, (ROOT / "pyproject.toml").read_text())
    wanted = hashlib.sha256("\n".join([sys.version, *lines]).encode()).hexdigest()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"muster: installing torch {release} and what its tests need into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *lines], check=True)
        stamp.write_text(wanted)
    return python


def main(arguments: list[str]) -> int:
    release = os.environ.get("TORCH") or OLDEST
    if not re.fullmatch(r"\d+\.\d+\.\d+", release):
        print(f"TORCH={release} is no release of torch: TORCH={OLDEST}", file=sys.stderr)
        return 2
    try:
        python = installed(release)
    except subprocess.CalledProcessError as error:
        print(f"muster: {shlex.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
        return 1
    words = [*arguments, *shlex.split(os.environ.get("ARGS", ""))]
    # All of tests/gpu: without a GPU on the CPU.
    device = {} if shutil.which("nvidia-smi") else {"MUSTER_TEST_DEVICE": "cpu"}
    command = [python, "-m", "pytest", *(words or WHERE)]
    return subprocess.run(command, cwd=ROOT, env={**device, **os.environ}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
