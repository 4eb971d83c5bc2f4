"""Where Muster's files lie, whatever the working directory is, and the one way in which documents are written and read.

Imports nothing of launch: every room may use it. The writer is that of containers/, which may not import launch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from containers.files import write_whole as write_whole

#: The folder of the project: the one that holds the Makefile.
ROOT = Path(__file__).resolve().parent.parent


def build_dir() -> Path:
    """What can be made again: cluster maps, images, checks."""
    return ROOT / "build"


def runs_dir() -> Path:
    """One folder for each run: runs/<id>/."""
    return ROOT / "runs"


def shown(path: Path) -> str:
    """A path as the user would type it: relative to the working directory where it lies below that."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def stored(path: Path) -> str:
    """A path as documents hold it: from the project's folder where it lies there. `ROOT / stored(path)` is the path."""
    full = path.resolve()
    return str(full.relative_to(ROOT) if full.is_relative_to(ROOT) else full)


#: A longer document is one line: Python takes ten times as long to indent it, and nobody reads it from top to bottom.
INDENTED_CHARACTERS = 1_000_000


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document as `write_whole` does. Raises OSError when it cannot be written."""
    text = json.dumps(document)
    write_whole(path, (json.dumps(document, indent=2) if len(text) <= INDENTED_CHARACTERS else text) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, or {} when the file is absent, torn or holds something else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
