"""Placeholders in the arguments of a user's script, which reach each rank filled in. Pure.

The rule. `{name}` with a name of letters, digits and _ that does not begin with a digit is a placeholder. `{{` is a
brace, and so is the `}}` that closes it: `{{rank}}` reaches the script as `{rank}`. All other braces reach it as they
are, so JSON such as `{"a": {"b": 1}}`, `{}`, `{0}`, `{x:.2f}` and a lone `{` or `}` need no care.

An unknown one is refused before a start (launch/job/placeholders.py); the agent fills them in (train/start/hooks.py).
"""

from __future__ import annotations

import re
from typing import Iterator, List, Mapping, Optional, Sequence, Tuple

#: Placeholder -> the variable of a rank's environment that holds its value. Of a rank: its numbers as torchrun counts
#: them. Of the run: the master's address on the training network, the port of torchrun's own store there, and one more
#: port, free there, for a store that the script opens by itself.
VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "free_port": "MUSTER_FREE_PORT",
}

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _pieces(word: str) -> Iterator[Tuple[str, Optional[str]]]:
    """A word in pieces: (text that the script gets, None), or (placeholder, its name)."""
    at = 0
    open_braces: List[str] = []  # what closes each of them
    while at < len(word):
        found = _PLACEHOLDER.match(word, at)
        if word.startswith("{{", at):
            open_braces.append("}}")
            yield "{", None
            at += 2
        elif found:
            yield found[0], found[1]
            at = found.end()
        elif open_braces and word.startswith(open_braces[-1], at):
            yield "}", None
            at += len(open_braces.pop())
        else:
            if word[at] == "{":
                open_braces.append("}")
            yield word[at], None
            at += 1


def names(words: Sequence[str]) -> List[str]:
    """The names of the placeholders in the arguments, known or not, each once."""
    return list(dict.fromkeys(name for word in words for _, name in _pieces(word) if name is not None))


def fill(words: Sequence[str], environment: Mapping[str, str]) -> List[str]:
    """The arguments of the rank that has this environment; an unknown placeholder stays.

    Raises ValueError where the environment lacks a value.
    """
    return ["".join(_filled(list(_pieces(word)), environment)) for word in words]


def _filled(pieces: Sequence[Tuple[str, Optional[str]]], environment: Mapping[str, str]) -> Iterator[str]:
    for number, (text, name) in enumerate(pieces):
        variable = VARIABLES.get(name or "")
        if variable is None:
            yield text
            continue
        if variable not in environment:
            raise ValueError(f"{text} in the script's arguments: {variable} is not set here")
        value = environment[variable]
        before_port = pieces[number + 1 : number + 2] == [(":", None)]
        yield f"[{value}]" if ":" in value and before_port else value  # an IPv6 address in a URL
