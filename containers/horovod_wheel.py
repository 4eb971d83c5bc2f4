"""The Horovod wheel: built once from its source against this environment's torch, and kept in build/.

Nobody publishes wheels of Horovod: it must be compiled against the very torch that it will run with. Its sources come
through pip and follow pip's settings (mirrors, folders). The same sources and compiler give the same wheel, byte by
byte. Not for installing: launch/ puts the wheels into .venv, containers/image.py into the training image.

Without a CUDA toolkit Horovod is built for gloo alone, and the trainer hands it GPU gradients through host memory. With
one (CUDA_HOME), `HOROVOD_GPU_OPERATIONS=NCCL make horovod` builds the NCCL path: HOROVOD_* variables reach the build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import sysconfig
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from containers.base import GLIBC, PYTHON, SOURCE_DATE_EPOCH, SUITE
from containers.engine import BUILD, REPOSITORY, CommandFailed, ContainersError, Progress, as_root, follow
from containers.files import drafted, locked, scratch
from containers.pip import HERE, PIP, group_requirements, own_cross, pinned

GROUP = "horovod"
NAME = re.compile(r"horovod\s*==")
PERCENT = re.compile(r"^\s*\[\s*(\d+)%\] Building")
PERCENT_BETWEEN_LINES = 10

#: Programs that a build needs; Debian's packages have the same names.
PROGRAMS = ("g++", "make", "cmake")

#: Horovod's own names for what is built in: torch over gloo, nothing else.
SWITCHES = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
}

#: A script that calls the compiler. torch's headers need C++17, but Horovod asks for C++14. Names of this machine's
#: folders and debugging information (nine tenths of the size) are left out of the wheel.
COMPILER = """#!/bin/sh
for word do
    shift
    case "$word" in -Wl,-rpath,*) ;; *) set -- "$@" "$word" ;; esac
done
exec {compiler} "$@" -std=c++17 -g0 {source} {packages}
"""


def horovod_wheels(progress: Progress) -> Path:
    """Folder with Horovod's wheel for this Python and its torch, and with the wheels that it depends on.

    Takes about 2.5 minutes on two cores the first time, and no time after that. Missing compilers are installed from
    Debian's packages if this user is root, or has sudo without a password.

    Raises ContainersError if this Python has no torch, a compiler is missing and cannot be installed, or pip or the
    compiler failed.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    requirements = group_requirements(project["dependency-groups"], GROUP)
    torch = torch_version()
    folder = BUILD / f"horovod-{torch}-{sys.implementation.cache_tag}-{_key(requirements, os.environ)}"
    with locked(BUILD / "horovod.lock"):
        if not folder.exists():
            _ensure_build_tools(progress)
            started = time.monotonic()
            progress(f"horovod: building for torch {torch}; this takes about 2.5 minutes on two cores")
            with drafted(folder) as draft:
                needs = [entry for entry in requirements if not NAME.match(entry)]
                _pip(["wheel", f"--wheel-dir={draft}", *needs], {}, lambda line: None)
                _compile(draft, requirements, progress)
            progress(f"horovod: built in {time.monotonic() - started:.0f} s")
    progress(f"horovod: {wheel_of(folder).name}")
    return folder


def wheel_of(folder: Path) -> Path:
    """Horovod's own wheel in a folder that horovod_wheels() made."""
    return next(folder.glob("horovod-*.whl"))


def wheels_beyond(folder: Path, present: Mapping[str, str]) -> list[Path]:
    """The wheels of such a folder, without those of the distributions in `present` (normalized names)."""
    return [path for path in sorted(folder.glob("*.whl")) if not set(pinned([path.name])) & set(present)]


def torch_version() -> str:
    """Version of this environment's torch, read without importing it; raises ContainersError if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        what = "Horovod is compiled against torch, and this Python has no torch"
        raise ContainersError(what, sys.executable, "run `make horovod`") from None


def refuse_other_platform(image_torch: str, machine: str = HERE) -> None:
    """Raise ContainersError if a wheel that is built here would not load in the training image with its torch.

    machine: the image's architecture.
    """
    if own_cross(machine):
        raise ContainersError(
            f"Horovod compiled here (Python {platform.python_version()}, {' '.join(platform.libc_ver())}, {HERE}) "
            f"would not load in the training image (Python {PYTHON}, glibc {GLIBC[0]}.{GLIBC[1]}, {machine})",
            "the control machine",
            f"deploy from a machine with Debian {SUITE}, or without HOROVOD=1",
        )
    if torch_version() != image_torch:
        what = f".venv has torch {torch_version()}, but the training image has {image_torch}"
        fix = "remove .venv and build/wheels-*, then run it again"
        raise ContainersError(f"{what}: pip's settings have changed", "the control machine", fix)


def missing_packages() -> list[str]:
    """Debian's names of the packages that a build needs and this machine lacks."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    header = Path(sysconfig.get_path("include"), "Python.h")
    return missing if header.is_file() else [*missing, f"python3.{sys.version_info.minor}-dev"]


def _ensure_build_tools(progress: Progress) -> None:
    missing = missing_packages()
    if missing and shutil.which("apt-get"):
        _install(missing, progress)
        missing = missing_packages()
    if missing:
        what = f"Horovod is compiled on this machine, which lacks {', '.join(missing)} (Debian's package names)"
        raise ContainersError(what, "the control machine", f"as root: apt-get install {' '.join(missing)}")


def _install(packages: list[str], progress: Progress) -> None:
    """Ask apt-get for packages. The caller sees by what is still missing whether that worked."""
    try:
        prefix = [*as_root(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    except ContainersError:
        return
    progress(f"horovod: installing {', '.join(packages)}")
    for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        try:
            follow([*prefix, *words])
        except CommandFailed as failure:
            progress(f"horovod: {failure.what}")


def _compile(draft: Path, requirements: list[str], progress: Progress) -> None:
    own = next(entry for entry in requirements if NAME.match(entry))
    with scratch(BUILD, "horovod-source-") as folder:
        words = ["download", "--no-deps", "--no-build-isolation", "--no-binary=horovod", f"--dest={folder}"]
        _pip([*words, own], SWITCHES, lambda line: None)
        shutil.unpack_archive(next(folder.glob("horovod-*.tar.gz")), folder)
        source = next(path for path in folder.glob("horovod-*") if path.is_dir())
        reached = -PERCENT_BETWEEN_LINES

        def on_line(line: str) -> None:
            nonlocal reached
            if (match := PERCENT.match(line)) and int(match.group(1)) >= reached + PERCENT_BETWEEN_LINES:
                reached = int(match.group(1))
                progress(f"horovod: {reached} % compiled")

        words = ["wheel", "--verbose", "--no-cache-dir", "--no-deps", "--no-build-isolation", f"--wheel-dir={draft}"]
        _pip([*words, str(source)], _build_environment(folder, source), on_line)


def _build_environment(folder: Path, source: Path) -> dict[str, str]:
    compiler = folder / "c++"
    renamed = {"source": f"{source}=horovod", "packages": f"{sysconfig.get_path('platlib')}=packages"}
    words = {name: shlex.quote(f"-ffile-prefix-map={value}") for name, value in renamed.items()}
    compiler.write_text(COMPILER.format(compiler=shlex.quote(str(shutil.which("g++"))), **words))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    return {
        **SWITCHES,
        "CXX": str(compiler),
        "HOROVOD_CMAKE": str(shutil.which("cmake")),
        # The torch that the wheel is built for: with another torch, pip installs again.
        "HOROVOD_LOCAL_VERSION": f"torch{re.sub(r'[^a-z0-9]+', '.', torch_version().lower())}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the older version that its gloo asks for
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH,
    }


def _pip(words: list[str], settings: Mapping[str, str], on_line: Progress) -> None:
    """Run pip with `settings` added to the environment."""
    try:
        follow(["env", *(f"{name}={value}" for name, value in settings.items()), *PIP, *words], on_line)
    except CommandFailed as failure:
        raise ContainersError(
            f"Horovod could not be built: pip or the compiler failed. The last lines:\n{failure.tail}",
            "the control machine, pyproject.toml, group `horovod`",
            "fix what they name (network, mirror, memory: a compiler takes about 1 GB per core), then run it again",
        ) from failure


def _key(requirements: list[str], environment: Mapping[str, str]) -> str:
    """SHA-256 over what a build depends on besides torch and Python: pins, recipe, the caller's HOROVOD_* settings."""
    own = {name: value for name, value in environment.items() if name.startswith("HOROVOD_")}
    text = json.dumps([requirements, SWITCHES, COMPILER, sorted(own.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
