"""The trainer's arguments, ARGS: split as a shell does, completed with a config file's content, checked before a start.

`--config FILE` may name a file of the control machine: its settings then travel in the plan. The trainer reads YAML in
place of a file's name too; the plan carries it as one line of JSON, which is YAML.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.cli import exits
from launch.cli.refusal import refuse
from launch.files import ROOT
from launch.job.project import refuse_by_hand

CHECK_SECONDS = 60  # it takes 0.1 s


def split(text: str) -> list[str]:
    """The words of ARGS. Raises Refusal for an open quotation."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise refuse("ARGS", f"ARGS={text}: {error}", "close the quotation") from None


def check(args: Sequence[str], world_size: int, own: Path | None = None) -> dict[str, Any]:
    """Let the trainer itself check its arguments, as `inline` returns them; it needs no torch for that. Returns what
    they mean, by the names of train/settings.py; {} where that is not known.

    own: the folder of a project, here, for which the names of own parts are checked too.
    What only a rank can know (data, memory) is not checked here, and nothing is if only the hosts have the config file.
    Raises Refusal with the trainer's message.
    """
    configs = (Path(word) for flag, word in itertools.pairwise(args) if flag == "--config")
    if any(config.is_absolute() and not config.is_file() for config in configs):
        return {}
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-P", "-m", "train", "--check-settings", *args]
    words += ["--project", str(own.resolve())] if own else []
    env = os.environ | {"PYTHONPATH": search, "WORLD_SIZE": str(world_size), "RANK": "0"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False)
    if done.returncode == exits.REFUSED:
        fix = "correct it in ARGS or in the file it names (`.venv/bin/python -m train --help` lists all settings)"
        raise refuse("ARGS", done.stderr.strip().removeprefix("train: "), fix)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        fix = "run `.venv/bin/python -m train --check-settings` with them here, and fix what it shows"
        raise refuse("ARGS", f"the check of the settings ended with {done.returncode}: {said}", fix, exits.FAILED)
    settings: dict[str, Any] = json.loads(done.stdout)
    return settings


def may_leave_communication_open(args: Sequence[str], script: str | None) -> bool:
    """Whether --communication auto may be meant, so that it is worth asking the trainer; script: which is not ours."""
    return script is None and any("communication" in word for word in args)


#: What overrides a config that asks for a choice of --communication: it is made.
CHOICE_MADE = ("--communication", "as-given", "--no-allow-approximate")


def without_choice(args: Sequence[str]) -> tuple[str, ...]:
    """The arguments without those that ask for a choice of --communication."""
    flags = ("--communication", "--allow-approximate")
    kept = [
        word
        for before, word in itertools.pairwise(["", *args])
        if word.split("=")[0] not in flags and before != "--communication"
    ]
    return (*kept, *(CHOICE_MADE if "--config" in kept else ()))


def inline(args: Sequence[str]) -> tuple[str, ...]:
    """The arguments, with the content of a config file in place of its name. The name of a ready config stays.

    Raises Refusal for a file that cannot be read as settings, and for a project, which PROJECT names.
    """
    parted = (word.split("=", 1) if word.startswith("--config=") else [word] for word in args)
    words = ["", *itertools.chain.from_iterable(parted)]
    inlined = tuple(content(word) if before == "--config" else word for before, word in itertools.pairwise(words))
    refuse_by_hand(inlined)
    return inlined


def content(name: str) -> str:
    """The settings in a config file, as one line of JSON. Without such a file its name, which may be a ready one's."""
    path = Path(name)
    if not path.is_file():
        return name
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(settings, dict):
            raise ValueError(f"expected lines like `epochs: 90`, found {type(settings).__name__}")
        return json.dumps(settings)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise refuse("ARGS", f"--config {name}: {' '.join(str(error).split())}", "fix the file") from None
