"""The words that all checks share: what a check says (healthy, warning, error, incomplete), and what it is given.

Not for what is checked: see host_checks, gpu_checks, link_checks and sameness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.hosts.clustermap import NVIDIA

#: What one host says of itself, as playbooks/module_utils/muster_survey.py collects it.
Facts = Mapping[str, Any]

HEALTHY, WARNING, ERROR, INCOMPLETE = "healthy", "warning", "error", "incomplete"
#: From harmless to grave. `incomplete` is graver than `warning`: nobody knows what it hides.
LEVELS = (HEALTHY, WARNING, INCOMPLETE, ERROR)


@dataclass(frozen=True)
class Verdict:
    """What one check says of one host, of a pair of hosts or of the whole cluster."""

    check: str  # "clock", "disk", ...
    where: str  # "host h2", "h1 -> h2", "cluster"
    level: str  # one of LEVELS
    what: str  # one line, with figures
    fix: str = ""  # what to do; empty where healthy


@dataclass(frozen=True)
class Asked:
    """What a run asks of one host."""

    gpus: Sequence[int] | None = None  # as the inventory sets it; None: all that are usable
    gpu_vendor: str = NVIDIA  # whose GPUs these are, as in clustermap.MapHost
    gpu_access: Sequence[str] | None = None  # gpu_checks.access at the last deploy; None: not known
    ranks: int = 1
    checkpoint_bytes: int | None = None  # of one checkpoint; None: not known
    clock_offset: float | None = None  # seconds by which the host's clock is ahead of this machine's; None: not known
    clock_uncertainty: float = 0.0  # seconds by which clock_offset may be wrong
    data_dir: str | None = None
    interface: str | None = None  # the NIC of the training network; None: not to be checked
    address: str = ""  # on that NIC


class Missing(Exception):
    """A fact that the host's answer lacks."""


def fact(facts: Facts, key: str) -> Any:
    """A fact that a check cannot do without. Raises Missing when the host's answer lacks it."""
    if facts.get(key) is None:
        raise Missing(key)
    return facts[key]


def of_host(check: str, name: str, level: str, what: str, fix: str = "") -> Verdict:
    """A verdict on the host called `name`; a healthy one has no fix."""
    return Verdict(check, f"host {name}", level, what, "" if level == HEALTHY else fix)


def worst(verdicts: Iterable[Verdict]) -> str:
    """The gravest level of all; healthy when there is none."""
    return max((verdict.level for verdict in verdicts), key=LEVELS.index, default=HEALTHY)
