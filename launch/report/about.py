"""What a run ran on: its hosts, versions and settings, its plan in words, and the check that was made before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launch.cli.units import age, size
from launch.files import ROOT, read_json
from launch.health import records
from launch.health.report import contents
from launch.health.verdicts import HEALTHY
from launch.hosts import clustermap
from launch.job import plan as plans
from launch.job.outcome import number
from launch.report.documents import HostPart, Run, Words

Pairs = list[tuple[str, str]]

#: The columns of `hosts`.
HOST_COLUMNS = ("host", "ranks", "training network", "hardware", "system", "ended")


@dataclass(frozen=True)
class Check:
    """The last check of the run's inventory before the run."""

    level: str
    when: str
    before: str  # how long before the run
    problems: Sequence[Words]  # verdicts that are not healthy, the gravest first
    found: str  # how many things were in order, and how many not
    forecast: str  # its recommendation, or empty


def inventory_of(run: Run) -> Path | None:
    """The inventory of a run on hosts."""
    given = run.plan.get("inventory")
    return ROOT / str(given) if given else None


def cluster_of(run: Run) -> Words:
    """The cluster map of the run's inventory as it is now; {} where this machine has none."""
    inventory = inventory_of(run)
    return read_json(clustermap.path_of(inventory)) if inventory else {}


def hosts(run: Run, cluster: Words) -> list[list[str]]:
    """A row for each host, under HOST_COLUMNS."""
    known = {str(host.get("name")): host.get("facts") or {} for host in cluster.get("hosts") or []}
    return [_host(part, known.get(part.host) or {}, run) for part in run.hosts]


def _host(part: HostPart, facts: Words, run: Run) -> list[str]:
    ranks = f"{part.ranks[0]}-{part.ranks[-1]}" if len(part.ranks) > 2 else ", ".join(map(str, part.ranks)) or "spare"
    ended = str(part.exit.get("status") or ("not gathered" if part.host in run.missing_hosts else "no word of its end"))
    return [part.host, ranks, f"{part.address} {part.interface}", hardware(facts), system(facts), ended]


def hardware(facts: Words) -> str:
    """GPUs, processors and memory of a host, from its facts (playbooks/module_utils/muster_survey.py)."""
    gpus = [str(gpu.get("name")) for gpu in facts.get("gpus") or ()]
    kinds = [f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus)]
    cpus = [f"{facts['cpus']} x {facts.get('cpu_model') or 'CPU'}"] if facts.get("cpus") else []
    memory = [size(facts["memory_bytes"])] if number(facts.get("memory_bytes")) else []
    return ", ".join([*kinds, *cpus, *memory])


def system(facts: Words) -> str:
    """What a host runs: distribution, kernel, container engine."""
    release, engine = facts.get("os") or {}, facts.get("engine") or {}
    parts = (
        f"{release.get('id', '')} {release.get('version', '')}".strip(),
        f"kernel {facts['kernel']}" if facts.get("kernel") else "",
        f"{engine.get('name', '')} {engine.get('version', '')}".strip(),
    )
    return ", ".join(filter(None, parts))


def versions(run: Run) -> Pairs:
    """What the ranks ran with, as they said at their start; and the image."""
    started = run.metrics.starts[-1] if run.metrics and run.metrics.starts else {}
    said = started.get("versions")
    found = [(str(name), str(value)) for name, value in said.items()] if isinstance(said, Mapping) else []
    if started.get("device"):
        found.append(("device of rank 0", str(started["device"])))
    if run.plan.get("image"):
        image = str(run.plan["image"])
        found.append(("image", image if "/" in image else image[:12]))
    return found


def settings(run: Run) -> Pairs:
    """The trainer's settings, all of them, as it resolved them."""
    return [(str(name), _written(value)) for name, value in run.settings.items()]


def _written(value: Any) -> str:
    return (
        "-"
        if value is None or value == ""
        else {True: "yes", False: "no"}.get(value, str(value))
        if isinstance(value, bool)
        else str(value)
    )


def plan_facts(run: Run) -> Pairs:
    """The plan in a few lines; empty for a run on this machine alone."""
    plan = run.plan
    if not plan:
        return []
    found = [
        ("master", f"{plan.get('master_host')} at {plan.get('master_addr')}:{plan.get('master_port')}"),
        ("ranks", str(plan.get("world_size"))),
        ("inventory", str(plan.get("inventory"))),
        ("script", str(plan.get("script") or "Muster's trainer")),
        ("arguments", " ".join(map(str, plan.get("args") or ())) or "-"),
        ("continues run", str(plan.get("resume") or "-")),
        ("seconds to save when stopped", str(plan.get("grace"))),
        ("restarts at most", str(plan.get("max_restarts", 0)).removeprefix("-")),
        ("SHA-256", str(plan.get("sha256"))[:12]),
    ]
    return found


def commands(run: Run) -> str:
    """Every host's exact command and environment; empty where the plan is of another version of Muster."""
    try:
        return plans.describe(plans.from_document(dict(run.plan)))
    except ValueError:
        return ""


def check_before(run: Run) -> Check | None:
    """The newest record of a check before the run; None where this machine has none."""
    inventory, created = inventory_of(run), str(run.plan.get("created") or "")
    if inventory is None:
        return None
    folder = clustermap.path_of(inventory).parent / "checks"
    try:
        found = records.last_before(folder, created)
    except (ValueError, TypeError):  # no time, or one without a time zone
        found = None
    if found is None:
        return None
    lasted = (datetime.fromisoformat(created) - datetime.fromisoformat(found["when"])).total_seconds()
    forecast, problems = found.get("forecast") or {}, contents.by_gravity(found)
    healthy = sum(verdict["level"] == HEALTHY for verdict in found["verdicts"])
    return Check(
        level=contents.level_of(found),
        when=records.moment_of(found["when"]),
        before=age(lasted),
        problems=problems,
        found=f"{healthy} {'thing' if healthy == 1 else 'things'} in order, {len(problems)} not",
        forecast=str(forecast.get("recommendation") or ""),
    )
