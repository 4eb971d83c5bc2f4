"""A project, PROJECT=dir: the folder of a user's own model, dataset, loss and transform for our trainer.

The trainer is given the folder with --project: in a container the image's copy of it, on this machine the folder
itself. What is in it: the README. How it is brought to the hosts: launch/deploy/workload.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import yaml

from keeper import PROJECT_DIR
from launch.cli.refusal import refuse

#: What the trainer's arguments begin with in the container of a run that has a project.
IN_CONTAINER = ("--project", PROJECT_DIR)


def folder_of(text: str) -> Path | None:
    """PROJECT as typed, as an absolute path; None for nothing. Raises Refusal where there is no such folder."""
    if not text:
        return None
    folder = Path(text)
    if not folder.is_dir():
        what = f"PROJECT={text} is {'a file, not a folder' if folder.exists() else 'not there'}"
        raise refuse("PROJECT", what, "give the folder that holds your own model, dataset, loss or transform")
    return folder.resolve()


def refuse_by_hand(args: Sequence[str]) -> None:
    """Raises Refusal where the trainer's arguments name a project, which is for PROJECT to do: it brings it along."""
    for before, word in itertools.pairwise(["", *args]):
        if word.split("=")[0] == "--project" or (before == "--config" and _names_project(word)):
            where = "--project" if before != "--config" else "`project` in the settings of --config"
            fix = "leave it out and give PROJECT=dir, which installs its requirements.txt and brings it to the hosts"
            raise refuse("ARGS", f"{where}: the folder of your own code is not named there", fix)


def _names_project(config: str) -> bool:
    """Whether settings that stand in place of a file's name hold a project."""
    if not config.startswith("{"):
        return False
    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return False  # which the trainer refuses
    return isinstance(settings, dict) and "project" in settings


def parted(script: str | None, args: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """From the arguments in a plan: whether the run has a project, and what was typed."""
    has = script is None and tuple(args[: len(IN_CONTAINER)]) == IN_CONTAINER
    return has, tuple(args[len(IN_CONTAINER) :] if has else args)
