"""`--config FILE` in ARGS may name a file of the control machine: its settings then travel in the plan.

The trainer reads YAML also in place of a file's name; the plan carries it as one line of JSON, which is YAML.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from launch.cli.refusal import refuse


def inline(args: Sequence[str]) -> tuple[str, ...]:
    """The arguments with what is in the config file in the place of its name; a ready config's name stays.

    Raises:
        Refusal: for a file that cannot be read as settings.
    """
    words: list[str] = []
    for word in args:
        flag, equals, value = word.partition("=")
        if flag == "--config" and equals:
            words.append(f"--config={content(value)}")
        elif words and words[-1] == "--config":
            words.append(content(word))
        else:
            words.append(word)
    return tuple(words)


def content(name: str) -> str:
    """One line of JSON, or the name itself where there is no such file here: the trainer then looks for it."""
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
