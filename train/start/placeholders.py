"""Placeholders in the arguments of a user's script, filled in for each rank. Pure.

What is one and what is not: launch/job/placeholders.py, which refuses unknown ones before a start.
"""

import re
from collections.abc import Mapping, Sequence

PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][A-Za-z0-9_]*)\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")

#: Placeholder -> the variable of a rank's environment that holds its value.
VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "free_port": "MUSTER_FREE_PORT",
}


def uses(words: Sequence[str], name: str) -> bool:
    """Whether the arguments hold this placeholder."""
    return any(found[2] == name for word in words for found in PLACEHOLDER.finditer(word))


def fill(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments of the rank that has this environment. Raises ValueError where the environment lacks a value."""

    def value(found: re.Match[str]) -> str:
        quoted, name = found.groups()
        if quoted:
            return f"{{{quoted}}}"
        if name not in VARIABLES:
            return found[0]
        if VARIABLES[name] not in environment:
            raise ValueError(f"{found[0]} in the script's arguments: {VARIABLES[name]} is not set here")
        text = environment[VARIABLES[name]]
        before_port = found.string.startswith(":", found.end())
        return f"[{text}]" if ":" in text and before_port else text  # an IPv6 address in a URL

    return [PLACEHOLDER.sub(value, word) for word in words]
