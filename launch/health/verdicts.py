"""What a check says: healthy, warning, error or incomplete, about whom, and how to fix it. The words that all checks
share; what is checked stands in launch.health.host_checks, launch.health.link_checks and launch.health.sameness.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEALTHY, WARNING, ERROR, INCOMPLETE = "healthy", "warning", "error", "incomplete"
#: From harmless to grave. `incomplete` is graver than `warning`: nobody knows what it hides.
LEVELS = (HEALTHY, WARNING, INCOMPLETE, ERROR)


@dataclass(frozen=True)
class Verdict:
    """One check's word on one host, pair of hosts or the whole cluster."""

    check: str  # "clock", "disk", ...
    where: str  # "host h2", "h1 -> h2", "cluster"
    level: str  # one of LEVELS
    what: str  # one line, with figures
    fix: str = ""  # what to do; empty where healthy


def worst(verdicts: Iterable[Verdict]) -> str:
    """The gravest level of all; healthy when there is none."""
    return max((verdict.level for verdict in verdicts), key=LEVELS.index, default=HEALTHY)
