"""What all hosts of a run must have in common, as a matrix of property by host with the odd host marked.

Pure functions over the facts of surveys and over what each host's image says of itself. PROPERTIES says which
differences stop a run (errors), which cost only speed or bit-equal results (warnings), and which do no harm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Facts, Verdict, of_host

#: None: not known. No value is an empty text: what a host does not have is "none".
Value = str | None

#: The oldest driver branch that runs a CUDA release, by its major number (CUDA's release notes, table of minor version
#: compatibility).
OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


@dataclass(frozen=True)
class Property:
    """One property of a host: where it comes from, and what a difference means."""

    key: str
    label: str
    level: str  # of a difference; HEALTHY: shown, and does no harm
    why: str  # what a difference does
    fix: str = ""
    inside: bool = False  # from the image, not from the host
    read: Callable[[Facts], Value] | None = None  # None: the text under `key`


@dataclass(frozen=True)
class Row:
    """A property of every host. `majority` is what most hosts have; a tie goes to the value of the first host."""

    property: Property
    values: dict[str, Value]
    majority: str
    odd: tuple[str, ...]  # hosts with another known value
    unknown: tuple[str, ...]  # hosts whose value is not known


def _driver(facts: Facts) -> Value:
    """None for a host without GPUs: that it has none is said of its GPUs, and not once more of its driver."""
    return " + ".join(sorted({gpu["driver"] for gpu in _nvidia(facts)})) or None


def _gpu_models(facts: Facts) -> Value:
    """The models, without the number of GPUs of each: that may differ from host to host."""
    return " + ".join(sorted({gpu["name"] for gpu in _nvidia(facts)})) or "none"


def _nvidia(facts: Facts) -> list[Facts]:
    return [gpu for gpu in facts["gpus"] if gpu.get("vendor", "nvidia") == "nvidia"]


def _kernel(facts: Facts) -> Value:
    """Major and minor number: what follows changes with every patch, and never changes how a rank computes."""
    version = re.match(r"\d+\.\d+", facts["kernel"])
    return version.group(0) if version else facts["kernel"]


def _cpu_flags(facts: Facts) -> Value:
    return " ".join(facts["cpu_flags"]) or "none"


def _engine(facts: Facts) -> Value:
    return f"{facts['engine']['name']} {facts['engine']['version']}"


def _data(facts: Facts) -> Value:
    """The path may differ from host to host, the files may not."""
    data = facts["data"]
    if data is None:
        return "none"
    if not data["present"]:
        return "missing"
    if data.get("brought") and not data["complete"]:  # there was no time to look into all of it
        data = {**data["brought"], "sha256": data["brought"]["fingerprint"]}
    return f"{data['files']} files, {data['bytes']} bytes, {data['sha256'][:12]}"


_DEPLOY = "run `make deploy`, which brings all hosts the same image"
_COPY = (
    "`make data SRC=<folder> NAME=<name>` brings all hosts the same; or copy it there from one that has the right data"
)
_ONE_ARCHITECTURE = "leave the odd host out: hosts of one architecture make a cluster"
_SAME_DRIVER = "install the same driver version there and reboot"
_BY_SPEED = 'divide the batch by speed with ARGS="--shares auto", or choose equal GPUs with `gpus` in the inventory'
_BIT_EQUAL = "leave the host out if results must be bit-equal"
_STRANGERS = "ranks of different versions do not understand each other"
_NUMERICS = "the same seed gives results that differ in the last digits"
_SLOWEST = f"every step waits for the slowest, and {_NUMERICS}"
PROPERTIES = (
    Property("image", "image", ERROR, "hosts would run different programs", _DEPLOY, inside=True),
    Property("code", "code", ERROR, "hosts would run different programs", _DEPLOY, inside=True),
    Property("torch", "torch", ERROR, _STRANGERS, _DEPLOY, inside=True),
    Property("torchvision", "torchvision", ERROR, "models and transforms may differ", _DEPLOY, inside=True),
    Property("nccl", "NCCL", ERROR, _STRANGERS, _DEPLOY, inside=True),
    Property("cuda", "CUDA", ERROR, "hosts would run different kernels", _DEPLOY, inside=True),
    Property("data", "data", ERROR, "ranks would train on different data", _COPY, read=_data),
    Property("arch", "architecture", ERROR, "one image cannot run on both", _ONE_ARCHITECTURE),
    Property("driver", "GPU driver", WARNING, "kernels and speeds may differ", _SAME_DRIVER, read=_driver),
    Property("gpus", "GPUs", WARNING, _SLOWEST, _BY_SPEED, read=_gpu_models),
    Property("cpu_flags", "CPU features", WARNING, f"on the CPU {_NUMERICS}", _BIT_EQUAL, read=_cpu_flags),
    Property("cpu_model", "CPU", HEALTHY, "speeds may differ"),
    Property("kernel", "kernel", HEALTHY, "speeds of the network may differ a little", read=_kernel),
    Property("engine", "engine", HEALTHY, "the image contains everything that ranks use", read=_engine),
    Property("python", "python", HEALTHY, "the host's own; ranks use the image's"),
)


def compare(
    hosts: Mapping[str, Facts | None],
    inside: Mapping[str, Mapping[str, Value] | None],
    wanted: Mapping[str, Sequence[int] | None] | None = None,
) -> list[Row]:
    """The matrix, hosts in the order given.

    Args:
        hosts: facts of playbooks/module_utils/muster_survey.py by host; {} or None for a host that did not answer.
        inside: what each host's image says, by host: image (id), code (hash), torch, torchvision, nccl, cuda; None,
            a key that is missing or a None value for what is not known.
        wanted: the inventory's `gpus` by host; GPUs that it does not name are not compared.
    """
    rows = []
    compared = {host: _chosen(facts or {}, (wanted or {}).get(host)) for host, facts in hosts.items()}
    for entry in PROPERTIES:
        source: Mapping[str, Facts | None] = inside if entry.inside else compared
        values = {host: _value_of(entry, source.get(host) or {}) for host in hosts}
        known = {host: value for host, value in values.items() if value is not None}
        if known and set(values.values()) != {"none"}:
            majority = Counter(known.values()).most_common(1)[0][0]  # the first of equals
            odd = tuple(host for host, value in known.items() if value != majority)
            rows.append(Row(entry, values, majority, odd, tuple(host for host in hosts if host not in known)))
    return rows


def own(facts: Facts, wanted: Sequence[int] | None = None) -> dict[str, str]:
    """What of a host itself, not of its image, changes what a run computes: label -> value, where it is known.

    facts, wanted: as `compare`, of this host.
    """
    chosen = _chosen(facts, wanted)
    counted = [entry for entry in PROPERTIES if not entry.inside and entry.level != HEALTHY]
    found = {entry.label: _value_of(entry, chosen) for entry in counted}
    return {label: value for label, value in found.items() if value is not None}


def _chosen(facts: Facts, wanted: Sequence[int] | None) -> Facts:
    if wanted is None or not facts.get("gpus"):
        return facts
    return {**facts, "gpus": [gpu for gpu in _nvidia(facts) if gpu["index"] in wanted]}


def _value_of(entry: Property, source: Facts) -> Value:
    """A host's value of a property; None where it is not known."""
    try:
        return (entry.read(source) if entry.read else source[entry.key]) or None
    except (KeyError, TypeError):  # a fact that is missing, or null because the host could not find it out
        return None


def verdicts(rows: Sequence[Row], on_gpus: bool = False) -> list[Verdict]:
    """What differs, host by host; what is not known; and in one line what is the same on all hosts.

    on_gpus: all ranks compute on GPUs, where the features of the hosts' CPUs do no harm.
    """
    result, same = [], []
    for line in rows:
        entry = line.property
        others = [name for name, value in line.values.items() if value == line.majority]
        for host in line.odd:
            what = f"{entry.label} {shown(line.values[host])}; {_names(others)} {shown(line.majority)}: {entry.why}"
            level = HEALTHY if on_gpus and entry.key == "cpu_flags" else entry.level
            result.append(of_host(entry.key, host, level, what, entry.fix))
        if line.unknown and entry.level == ERROR:
            fix = "see why those hosts do not report it; the ranks compare it again before the first step"
            what = f"{entry.label} of {', '.join(line.unknown)} is not known"
            result.append(Verdict(entry.key, "cluster", INCOMPLETE, what, fix))
        if not line.odd and not line.unknown:
            same.append(entry.label)
    if same and rows:
        count = len(rows[0].values)
        result.append(Verdict("sameness", "cluster", HEALTHY, f"the same on {count} hosts: {', '.join(same)}"))
    return result


def old_drivers(hosts: Mapping[str, Facts], inside: Mapping[str, Mapping[str, Value] | None]) -> list[Verdict]:
    """Hosts whose NVIDIA driver is too old for the image's CUDA. Nothing is said where either is not known."""
    result = []
    for host, facts in hosts.items():
        cuda = (inside.get(host) or {}).get("cuda") or ""
        need = OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
        for driver in sorted({gpu["driver"] for gpu in _nvidia(facts)} if facts.get("gpus") else ()):
            branch = driver.partition(".")[0]
            if branch.isdigit() and int(branch) < need:
                what = f"driver {driver} is too old for the image's CUDA {cuda}"
                fix = f"install driver {need} or newer there and reboot"
                result.append(of_host("driver", host, ERROR, what, fix))
    return result


def document(hosts: Sequence[str], rows: Sequence[Row]) -> dict[str, Any]:
    """The matrix as launch.health.records.document describes it."""
    return {
        "hosts": list(hosts),
        "rows": [
            {
                "property": row.property.label,
                "values": [shown(value) for value in row.values.values()],
                "odd": list(row.odd),
                "level": row.property.level if row.odd else HEALTHY,
                "majority": shown(row.majority),
            }
            for row in rows
        ],
    }


def shown(value: Value) -> str:
    """A value as people read it: the first 12 digits of a hash, "?" for what is not known."""
    if value is None:
        return "?"
    return value[:12] if re.fullmatch(r"(sha256:)?[0-9a-f]{40,}", value) else value


def _names(hosts: Sequence[str]) -> str:
    """`h1 has`, `h1, h2 have`; many hosts are counted."""
    if len(hosts) == 1:
        return f"{hosts[0]} has"
    return f"{', '.join(hosts)} have" if len(hosts) <= 3 else f"{len(hosts)} others have"
