"""Placeholders in ARGS of a user's script, as scripts need them that take their place from arguments. Pure.

    ARGS="--init-method tcp://{master_addr}:{free_port} --rank {rank} --world-size {world_size}"

The rule. `{name}` with a name of letters, digits and _ that does not begin with a digit is a placeholder: one of NAMES
reaches each rank filled in, any other is refused before the start. `{{name}}` reaches the script as `{name}`. All other
braces reach it as they are, so JSON such as `{"a": {"b": 1}}`, `{}`, `{0}`, `{x:.2f}` and a lone `{` need no care.

The agent fills them in, rank by rank: train/start/placeholders.py. Not for our trainer's arguments.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from launch.cli.refusal import Problem, Refusal

#: Of a rank: its numbers as torchrun counts them. Of the run: the master's address on the training network, the port of
#: torchrun's own store there, and one more port, free there, for a store that the script opens by itself.
NAMES = ("rank", "local_rank", "world_size", "node_rank", "master_addr", "master_port", "free_port")

PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


def check(args: Sequence[str]) -> None:
    """Raises Refusal that names every placeholder that is none of NAMES."""
    named = (found[2] for word in args for found in PLACEHOLDER.finditer(word) if found[2])
    unknown = dict.fromkeys(name for name in named if name not in NAMES)
    if unknown:
        raise Refusal(Problem("ARGS", f"{{{name}}} is not known", _fix(name)) for name in unknown)


def _fix(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    known = f"{{{near[0]}}}" if near else f"one of {', '.join(f'{{{known}}}' for known in NAMES)}"
    return f"write {known}, or {{{{{name}}}}} if the script is to get {{{name}}} as it stands"
