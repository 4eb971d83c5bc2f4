"""The start-up proof: before the first step all ranks compare what they run, and those that differ are named.

Ranks that differ in plan, image, code, versions, settings or data would train something unintended, or hang.
A rank describes itself by a flat dict of short texts; `prove` gathers them (collective), `difference` compares them
(pure).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train.own_parts import project_hash

Facts = dict[str, str]

DEPLOY = "make deploy, then start the run again"
START = "start all hosts with one command: make train"
DATA = "copy the same dataset to every host, to the folder that the inventory names (data_dir)"

#: Settings that may differ between hosts: the folders of the run, of the data and of the user's own parts (whose
#: contents are compared).
OWN_AFFAIRS = frozenset({"run_dir", "data_dir", "config", "project"})


class ProofError(Exception):
    """Ranks that must not train together. The message is the same on all of them: rank 0 says it."""


@dataclass(frozen=True)
class Claim:
    """The facts of one rank."""

    rank: int
    host: str
    facts: Facts


def code_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of the folder's .py files, in hexadecimal."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def versions() -> Facts:
    """The software that has to agree for collectives and arithmetic to agree."""
    import torchvision

    nccl = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "NCCL": nccl or "none",
    }


def settings_facts(settings: Any) -> Facts:
    """Each field of the resolved settings (a dataclass) as the flag that sets it."""
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {f"--{name.replace('_', '-')}": str(value) for name, value in fields.items() if name not in OWN_AFFAIRS}


def facts_here(settings: Any, data_fingerprint: str, environment: Mapping[str, str] = os.environ) -> Facts:
    """All facts of this rank. Outside a cluster there is neither plan nor image: they are "none" on every rank."""
    return {
        "plan": environment.get("MUSTER_PLAN_SHA256") or "none",
        "image": environment.get("MUSTER_IMAGE") or "none",
        "code": code_hash(Path(__file__).parents[1]),
        "project": project_hash(getattr(settings, "project", None), getattr(settings, "run_dir", None)),
        **versions(),
        **settings_facts(settings),
        "data": data_fingerprint,
    }


def difference(claims: Sequence[Claim]) -> str:
    """One message that names every rank that differs, or "" where all ranks agree. Pure.

    For each field the value that most hosts have counts as right; of equally many hosts, the one that most ranks have,
    then the one of the lowest rank.
    """
    names = dict.fromkeys(name for claim in claims for name in claim.facts)
    found: list[str] = []
    fixes: dict[str, None] = {}
    for name in names:
        groups: dict[str, list[Claim]] = {}
        for claim in claims:
            groups.setdefault(claim.facts.get(name, "none"), []).append(claim)
        if len(groups) == 1:
            continue
        right = max(groups, key=lambda value: _weight(groups[value]))
        for value, members in groups.items():
            if value != right:
                found.append(f"{_who(members)}: {name} is {shortened(value, right)}, not {shortened(right, value)}")
                fixes[fix_for(name)] = None
    if not found:
        return ""
    return f"the ranks do not agree, so nothing was trained. {'; '.join(found)}. Fix: {'; '.join(fixes)}"


def _weight(members: Sequence[Claim]) -> tuple[int, int, int]:
    return len({claim.host for claim in members}), len(members), -min(claim.rank for claim in members)


def _who(members: Sequence[Claim]) -> str:
    """ "h2 (ranks 1, 2) and h3 (rank 3)" """
    hosts: dict[str, list[int]] = {}
    for claim in members:
        hosts.setdefault(claim.host, []).append(claim.rank)
    return " and ".join(
        f"{host} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})" for host, ranks in hosts.items()
    )


def shortened(value: str, other: str) -> str:
    """The first 12 digits of a hash, as everywhere else, if they differ from the other's; other values in full."""
    is_hash = len(value) == 64 and all(letter in "0123456789abcdef" for letter in value)
    return value[:12] if is_hash and value[:12] != other[:12] else value


def fix_for(field: str) -> str:
    if field == "data":
        return DATA
    return START if field in ("plan", "project") or field.startswith("--") else DEPLOY


def prove(settings: Any, data_fingerprint: str, host: str = "") -> Facts:
    """Compares all ranks of the default process group (collective); returns this rank's facts, for the run's record.

    `host`: how messages name this host; default MUSTER_HOST, else the host's own name.
    Raises ProofError, on every rank and with one message, where any rank differs from the others.
    """
    host = host or os.environ.get("MUSTER_HOST") or socket.gethostname()
    mine = Claim(dist.get_rank(), host, facts_here(settings, data_fingerprint))
    claims: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(claims, mine)
    if message := difference(claims):
        raise ProofError(message)
    return mine.facts
