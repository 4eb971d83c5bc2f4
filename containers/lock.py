"""The locks of the training image's wheels: every package, exactly, with the SHA-256 of each file that it may be.

There is one for each build of torch, because pip takes the one that it finds here: `requirements.lock` for the
registry's own (with CUDA), `requirements-cpu.lock` for torch ...+cpu. wheels.py fetches by them.

`make lock` (python -m containers.lock) writes them and installs nothing: uv resolves pyproject.toml's group `train`
against one index, for Linux on x86-64 and aarch64, and writes the SHA-256 of every file that the index has of each
version. What is locked stays as far as pyproject.toml allows: for newer versions of what pyproject.toml does not name,
remove the locks first.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from containers.base import PYTHON
from containers.engine import REPOSITORY, CommandFailed, ContainersError, follow, output
from containers.pip import HERE, PIP, PIP_FIX, group_requirements, normal, own_cross

GROUP = "train"
LOCKS = Path(__file__).parent / "train"
LOCK_NAME = "requirements.lock"  # of the registry's torch; in a folder of wheels the one that they fit
ENTRY = re.compile(r"^\w.*(?:\n +.*)*", re.MULTILINE)  # a package with its hashes
PIN = re.compile(r"^([\w.-]+)==([\w.+!]+)", re.MULTILINE)
VERSIONS = re.compile(r"^Available versions: (.*)$", re.MULTILINE)
UV = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--system-certs")
WORDS = (
    f"--group={REPOSITORY / 'pyproject.toml'}:{GROUP}", f"--python-version={PYTHON}", "--only-binary=:all:",
    "--universal", "--fork-strategy=fewest", "--generate-hashes", "--no-annotate", "--custom-compile-command=make lock",
)  # fmt: skip


def training_requirements() -> list[str]:
    """What pyproject.toml's group `train` asks for."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return group_requirements(project["dependency-groups"], GROUP)


def torch_build(requirements: Iterable[str], machine: str = HERE) -> str:
    """The build of torch that pip takes here for images of `machine`: "" is the registry's own, "cpu" torch ...+cpu.

    Raises ContainersError if pip finds no torch of the version that is required.
    """
    version = pins_of(requirements).get("torch")
    if version is None:
        return ""
    try:
        said = output([*PIP, "index", "versions", "torch", *own_cross(machine)])
    except CommandFailed as failure:
        what = f"pip finds no torch for the training image. Its last lines:\n{failure.tail}"
        raise ContainersError(what, "the control machine", PIP_FIX) from failure
    found = [version for line in VERSIONS.findall(said) for version in line.split(", ")]
    builds = [one.partition("+")[2] for one in found if one.partition("+")[0] == version]
    if not builds:
        what = f"pip finds no torch {version} for the training image, only {', '.join(found[:5])}"
        raise ContainersError(what, "the control machine", PIP_FIX)
    return builds[0]  # the newest, which pip prefers


def lock_of(requirements: Iterable[str], build: str) -> Path:
    """The lock for a build of torch. Raises ContainersError if there is none, or it is not of these requirements."""
    path, fix = lock_path(build), "run `make lock`, look at what it changes, then run this again"
    if not path.is_file():
        raise ContainersError(f"pip takes torch ...+{build} here, and no wheels are locked for it", str(path), fix)
    pins = pins_of([path.read_text()])
    for name, version in pins_of(requirements).items():
        if pins.get(name, "").partition("+")[0] != version:
            what = f"pyproject.toml asks for {name} {version}, but {name} {pins.get(name, 'at no version')} is locked"
            raise ContainersError(what, str(path), fix)
    return path


def lock_path(build: str) -> Path:
    """Where the lock for a build of torch is, or would be."""
    return LOCKS / (f"requirements-{build}.lock" if build else LOCK_NAME)


def pins_of(requirements: Iterable[str]) -> dict[str, str]:
    """Normalized name -> exact version, of the requirements that have one."""
    return {normal(name): version for text in requirements for name, version in PIN.findall(text)}


def main() -> int:
    """Write the lock for the registry's torch, and that for the build of torch that pip takes here, if it is another.

    Returns 0, or 1 after one message.
    """
    try:
        for build in sorted({"", torch_build(training_requirements())}):
            _write(build)
            print(f"muster: wrote {lock_path(build).relative_to(REPOSITORY)}")
    except ContainersError as error:
        print(f"muster: {error}", file=sys.stderr)
        return 1
    return 0


def pip_setting(listed: str, name: str) -> list[str]:
    """The values of a setting of pip, from what `pip config list` prints; one of the environment takes precedence."""
    found = re.findall(rf"^(?:global|:env:)\.{name}='(.*)'$", listed, re.MULTILINE)
    return found[-1].replace("\\n", " ").split() if found else []


def _write(build: str) -> None:
    listed = output([*PIP, "config", "list"])
    words = [f"--default-index={url}" for url in pip_setting(listed, "index-url")]
    with tempfile.TemporaryDirectory() as name:
        if build:  # a folder, or a page of links, that has this build of torch
            override = Path(name) / "torch.txt"
            override.write_text(f"torch=={pins_of(training_requirements())['torch']}+{build}\n")
            words += [f"--overrides={override}", *(f"--find-links={url}" for url in pip_setting(listed, "find-links"))]
        follow([*UV, *WORDS, *words, f"--output-file={lock_path(build)}"])


if __name__ == "__main__":
    sys.exit(main())
