"""What a run was started from, beside its plan: runs/<id>/origin.json, on the machine that started it.

The document: {"schema", "commit": of Muster, as `commit_here` says it, or "", "workload": the user's own folder
(WORKLOAD or PROJECT) as launch.files.stored, or "", "secrets": their names, "hosts": {host: {property: value}}, as
launch.health.check.own_facts gives them at the start, {} with SKIP_CHECK, "reproduces": the run that this one repeats,
or null, "differences": what was known before the start to differ from that one}.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launch import files
from launch.cli.refusal import refuse

NAME = "origin.json"
SCHEMA = "muster.origin/1"
GIT_SECONDS = 10
#: What of Muster decides how a run computes: it is in the image.
CODE = ("train", "keeper", "containers", "pyproject.toml")
CHANGED = "+"  # behind a commit: there were changes that it does not hold


@dataclass(frozen=True)
class Origin:
    """origin.json; its fields are those of the document."""

    commit: str = ""
    workload: str = ""
    secrets: Sequence[str] = ()
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    reproduces: str | None = None
    differences: Sequence[str] = ()


def read(folder: Path) -> Origin | None:
    """The origin of the run in this folder; None where it was started elsewhere, or by another version of Muster."""
    found = files.read_json(folder / NAME)
    if found.pop("schema", None) != SCHEMA:
        return None
    try:
        return Origin(**found)
    except TypeError:
        return None


def write(folder: Path, origin: Origin) -> None:
    """Raises OSError."""
    files.write_json(folder / NAME, {"schema": SCHEMA, **asdict(origin)})


def note_hosts(folder: Path, hosts: Mapping[str, Mapping[str, str]]) -> None:
    """Add what the hosts are. Raises OSError."""
    if origin := read(folder):
        write(folder, replace(origin, hosts=hosts))


def project_of(run: str) -> str:
    """The folder of the project with which a run was started here. Raises Refusal where it is not to be had."""
    begun_from = read(files.runs_dir() / run)
    folder = files.ROOT / begun_from.workload if begun_from and begun_from.workload else None
    if folder and folder.is_dir():
        return str(folder)
    gone = f"its folder, {files.shown(folder)}, is gone" if folder else "its folder is not noted here"
    what = f"run {run} trained with a project of your own, and {gone}"
    raise refuse("PROJECT", what, f"name the folder: `make train RESUME={run} PROJECT=dir`")


def commit_here() -> str:
    """The git commit of this Muster, with CHANGED behind it where CODE has changed since; "" where git does not say."""
    commit = _git("rev-parse", "HEAD").strip()
    return commit + (CHANGED if _git("status", "--porcelain", "--", *CODE).strip() else "") if commit else ""


def changed_since(commit: str) -> list[str]:
    """The files of CODE that differ from this commit, as far as git knows it."""
    return _git("diff", "--name-only", commit.removesuffix(CHANGED), "--", *CODE).split()


def _git(*words: str) -> str:
    """What git says of this folder; nothing where it is no repository, or git is not there."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(files.ROOT), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
