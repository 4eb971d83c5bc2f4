"""Unknown placeholders in ARGS of a user's script are refused before a start. What is one: keeper/placeholders.py."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from keeper import placeholders
from launch.cli.refusal import Problem, Refusal


def check(args: Sequence[str]) -> None:
    """Raises Refusal that names every placeholder that nothing fills in."""
    unknown = [name for name in placeholders.names(args) if name not in placeholders.VARIABLES]
    if unknown:
        raise Refusal(Problem("ARGS", f"{{{name}}} is not known", _fix(name)) for name in unknown)


def _fix(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), placeholders.VARIABLES, n=1)
    known = f"{{{near[0]}}}" if near else f"one of {', '.join(f'{{{known}}}' for known in placeholders.VARIABLES)}"
    return f"write {known}, or {{{{{name}}}}} if the script is to get {{{name}}} as it stands"
