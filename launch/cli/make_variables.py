"""The variables on make's command line: misspelt ones are refused, and messages name the inventory in use. Pure."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path

from launch.cli.refusal import Problem, Refusal

#: Every variable that a target takes (`make` alone lists them by target).
KNOWN = (
    *("INVENTORY", "NODES", "ARGS", "WORKLOAD", "SCRIPT", "PROJECT", "DRY_RUN", "RUN", "YES", "RESUME", "GRACE"),
    *("MEASURE", "PACKAGES", "KILLED", "SKIP_CHECK", "JSON", "FORECAST", "WAIT", "DETACH"),
    *("KEEP_RUNS", "SECRETS", "VIEW", "LAUNCHER", "MAX_RESTARTS", "MIN_NODES", "MAX_HOST_FAILURES"),
    *("LAB", "HOSTS", "LINK", "CPUS", "NPROC", "HOROVOD", "PYTHON", "FAULT", "FAULTS", "SEED", "REPEATS", "ANYWAY"),
    *("TORCH", "OS", "UBUNTU_MIRROR", "SRC", "NAME", "VERIFY", "REMOVE"),
)
DEFAULT_INVENTORY = Path("inventory/hosts.yml")


def refuse_unknown_variables(makeflags: str) -> None:
    """Raises Refusal for variables in MAKEFLAGS, as make exports it, that no target takes: each one, with a guess."""
    problems = []
    for name in (given for given in names_given(makeflags) if given not in KNOWN):
        close = difflib.get_close_matches(name.upper(), KNOWN, n=1)
        what = f"no target takes this variable{f' (did you mean {close[0]}?)' if close else ''}"
        problems.append(Problem(f"{name}=", what, "`make` lists what each one takes"))
    if problems:
        raise Refusal(problems)


def names_given(makeflags: str) -> list[str]:
    """The names of the variables on make's command line.

    They follow ` -- ` in MAKEFLAGS, separated by a blank. In a value, make puts a backslash before a blank, a tab
    and a backslash, and doubles `$`; quotation marks and newlines stay as they were typed.
    """
    _, _, given = f" {makeflags}".partition(" -- ")
    words = re.findall(r"(?:\\.|[^\\ ])+", given, re.DOTALL)
    return [word.partition("=")[0].rstrip(":+?!") for word in words if "=" in word]


def name_inventory(message: str, inventory: Path | None) -> str:
    """A message whose `make` commands name the inventory, where it is not the default one."""
    if inventory is None or inventory == DEFAULT_INVENTORY:
        return message
    targets = "trust|deploy|data|check|train|reproduce|attach|status|logs|stop|gather|teardown"
    command = re.compile(rf"`make ({targets})((?: (?!INVENTORY=)[^`\s]+)*)`")
    return command.sub(lambda found: f"`make {found[1]}{found[2]} {naming(inventory)}`", message)


def naming(inventory: Path) -> str:
    """`INVENTORY=...` as a user types it in a shell, also for a path with a blank in it."""
    return f"INVENTORY={shlex.quote(str(inventory))}"
