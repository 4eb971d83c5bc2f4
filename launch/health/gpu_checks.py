"""What a survey of one host says about its GPUs: whether ranks can use them, how healthy they are, and who uses them.

Pure functions over the facts of playbooks/module_utils/muster_survey.py (its docstring is the schema).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from launch.cli.units import age, some
from launch.health.verdicts import (
    ERROR,
    HEALTHY,
    INCOMPLETE,
    WARNING,
    Asked,
    Facts,
    Missing,
    Verdict,
    fact,
    of_host,
)
from launch.hosts.clustermap import AMD, NVIDIA

#: What torch is built for, to run on a vendor's GPUs; the other vendor; how a GPU is reset.
BUILT_FOR = {NVIDIA: "CUDA", AMD: "ROCm"}
OTHER = {NVIDIA: AMD, AMD: NVIDIA}
RESETS = {NVIDIA: "nvidia-smi --gpu-reset -i {gpu}", AMD: "amd-smi reset --gpureset --gpu {gpu}"}
#: A GPU at this temperature or above is too hot.
TEMPERATURE_C = 90
#: Xid lines older than this may be of faults that have been fixed: they stay in the kernel's log until the next reboot.
XID_SECONDS = 86400
#: Why a GPU slows itself down, where that is a fault. The power cap is none: every busy GPU reaches it.
SLOW_REASONS = ("hardware slowdown", "hardware thermal slowdown", "software thermal slowdown", "power brake")

_RESTART = "start the run again; if it comes with other programs too, test the GPU (dcgmi diag -r 3)"
_RESET = "drain the host and reset the GPU (nvidia-smi --gpu-reset -i {gpu}) or reboot; if it comes again, replace it"
_RESET_IDLE = "reset the GPU when it is idle, so that the repair takes effect"
_REBOOT = "reboot the host, power-cycle it if that does not help; if it comes again, reseat or replace the GPU"

#: Xid numbers that matter: (meaning, whether the GPU is unusable until it is fixed, fix). From NVIDIA's "Analyzing Xid
#: Errors with the Xid Catalog", column Resolution Bucket (Immediate Action). Others are reported by their number.
XIDS: dict[int, tuple[str, bool, str]] = {
    8: ("the GPU stopped processing", False, _RESTART),
    13: ("graphics engine exception, mostly a program's fault", False, _RESTART),
    31: ("memory page fault, mostly a program's fault", False, _RESTART),
    32: ("corrupted push buffer", False, _RESTART),
    43: ("a program's channel was reset, mostly its own fault", False, _RESTART),
    45: ("clean-up after a program was killed or failed", False, _RESTART),
    46: ("the GPU stopped processing", True, _RESET),
    48: ("double-bit memory error", True, _RESET),
    61: ("micro-controller breakpoint", True, _RESET),
    62: ("micro-controller halt", True, _RESET),
    63: ("memory page retired or row remapped", False, _RESET_IDLE),
    64: ("memory page or row could not be repaired", True, _RESET),
    69: ("graphics engine class error", False, _RESTART),
    74: ("NVLink error", True, "check the NVLink bridges and seats, reset the GPU; if it comes again, replace it"),
    79: ("the GPU has fallen off the bus", True, _REBOOT),
    92: ("many single-bit memory errors", False, "watch it: test the GPU (dcgmi diag -r 3) when it is idle"),
    94: ("contained memory error: the program that met it was ended", False, _RESTART),
    95: ("uncontained memory error", True, _RESET),
    109: ("context switch timeout", True, _RESET),
    110: ("security fault", True, _RESET),
    119: ("the GPU's system processor does not answer", True, _RESET),
    120: ("error of the GPU's system processor", True, _RESET),
    136: ("NVLink training failed", True, _RESET),
    140: ("unrecovered memory error", True, _RESET),
    143: ("the GPU could not be initialised", True, _RESET),
    154: ("the driver asks for a recovery", True, "do what the line says: reset the GPU, or reboot the host"),
    155: ("NVLink error", True, _RESET),
    156: ("a part of the GPU was retired", True, _RESET),
    158: ("fatal timeout", True, _RESET),
}


def gpus_of(facts: Facts, vendor: str) -> list[Facts]:
    """The host's GPUs of one vendor. Facts from an older deploy name no vendor: they are of NVIDIA GPUs alone."""
    return [gpu for gpu in fact(facts, "gpus") if gpu.get("vendor", NVIDIA) == vendor]


def problems_of(facts: Facts, vendor: str) -> list[Facts]:
    """What is wrong with the host's GPUs of one vendor."""
    return [problem for problem in fact(facts, "gpu_problems") if problem["vendor"] == vendor]


def vendors(facts: Facts) -> set[str]:
    """Whose GPUs a host has, also such as do not work."""
    return {vendor for vendor in BUILT_FOR if gpus_of(facts, vendor) or problems_of(facts, vendor)}


def usable_gpus(facts: Facts, wanted: Sequence[int] | None, vendor: str = NVIDIA) -> list[int]:
    """Indices of the GPUs that ranks get: whole ones of one vendor, only those in `wanted` unless it is None."""
    return [
        gpu["index"]
        for gpu in gpus_of(facts, vendor)
        if gpu.get("usable", True) and (wanted is None or gpu["index"] in wanted)
    ]


def access(facts: Facts, indices: Sequence[int], vendor: str) -> list[str]:
    """What a container is given to use these GPUs, which a reboot may name otherwise: AMD's devices and groups."""
    used = [gpu for gpu in facts.get("gpus") or () if gpu.get("vendor", NVIDIA) == vendor and gpu["index"] in indices]
    words = {word for gpu in used for word in gpu.get("devices", ())}
    return sorted(words | {f"group {group}" for gpu in used for group in gpu.get("groups", ())})


def strangers(facts: Facts, wanted: Sequence[int] | None, vendor: str) -> tuple[str, str] | None:
    """(what, fix) of GPUs that the training image's torch cannot use, where the host has no others."""
    other = OTHER[vendor]
    if wanted == [] or vendors(facts) != {other}:
        return None
    found = models(gpus_of(facts, other)) or problems_of(facts, other)[0]["what"]
    what = f"{found}: not used, because the training image's torch is built for {BUILT_FOR[vendor]}"
    image = f"an image whose torch is built for {BUILT_FOR[other]}"
    fix = f"give {image} as `base_image`, or set `gpus: []` to confirm that this host shall train on its CPU"
    return what, fix


def mixed(
    hosts: Mapping[str, Facts], wanted: Mapping[str, Sequence[int] | None], vendor: str
) -> tuple[str, str] | None:
    """(what, fix) where some hosts have GPUs that the training image's torch can use, and some have only others."""
    asked = {name: facts for name, facts in hosts.items() if wanted.get(name) != []}
    others = [name for name, facts in asked.items() if strangers(facts, wanted.get(name), vendor)]
    right = [name for name, facts in asked.items() if vendor in vendors(facts)]
    if not others or not right:
        return None
    kinds = f"GPUs of {vendor.upper()} ({some(right)}) and of {OTHER[vendor].upper()} ({some(others)})"
    what = f"{kinds}: one image runs on all hosts, and NCCL and RCCL cannot train together"
    return what, "make an inventory for each kind, or set `gpus: []` on the hosts of one kind to train on their CPUs"


def gpu_obstacles(facts: Facts, wanted: Sequence[int] | None, vendor: str = NVIDIA) -> list[tuple[str, str]]:
    """What prevents a host from training on the GPUs that the inventory sets, as (what, fix); nothing for `gpus: []`.

    vendor: of the GPUs that the training image is for. A GPU that is broken or divided into slices is an obstacle,
    unless the inventory names other GPUs only. NVIDIA GPUs are one to an image for ROCm, which somebody chose.
    """
    if wanted is not None and not wanted:
        return []
    gpus = gpus_of(facts, vendor)
    have = {gpu["index"]: gpu for gpu in gpus}
    useless = strangers(facts, wanted, vendor)
    obstacles = [useless] if useless and vendor == AMD else []
    absent = sorted(set(wanted or []) - set(have))
    if absent:
        fix = f"correct `gpus` in the inventory{f', or {useless[1]}' if useless else ''}"
        obstacles.append((f"has no GPU {absent} for {BUILT_FOR[vendor]}; it has {sorted(have) or 'none'}", fix))
    for index in sorted(have if wanted is None else set(have) & set(wanted)):
        gpu = have[index]
        if not gpu.get("usable", True):
            slices = ", ".join(entry["name"] for entry in gpu.get("mig_instances", []))
            what = f"GPU {index} ({gpu['name']}{', slices ' + slices if slices else ''}): {gpu.get('unusable_reason')}"
            mend = f"`nvidia-smi -i {index} -mig 0` and reset it" if vendor == NVIDIA else "mend that"
            fix = f"{mend}, or leave it out: `gpus: {usable_gpus(facts, wanted, vendor)}`"
            obstacles.append((what, fix))
    for problem in problems_of(facts, vendor):
        if problem["fatal"] and _is_wanted(problem, gpus, wanted):
            fix = f"{problem['fix']}; or set `gpus: []` to train on the CPU"
            obstacles.append((problem["what"], fix))
    return obstacles


def _is_wanted(problem: Facts, gpus: Sequence[Facts], wanted: Sequence[int] | None) -> bool:
    """Whether a problem is of a GPU that ranks would get. A GPU that no longer answers may have no index."""
    if problem["gpu"] is None or wanted is None:
        return True
    index = next((gpu["index"] for gpu in gpus if gpu.get("pci_bus_id") == problem["gpu"]), None)
    if index is None and problem["gpu"].startswith("GPU "):
        index = int(problem["gpu"].split()[1])
    return index in wanted


def gpus(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Whether ranks can use the GPUs of the host as the inventory sets them."""
    vendor = asked.gpu_vendor
    obstacles = gpu_obstacles(facts, asked.gpus, vendor)
    verdicts = [of_host("gpus", name, ERROR, what, fix) for what, fix in obstacles]
    own, indices = gpus_of(facts, vendor), usable_gpus(facts, asked.gpus, vendor)
    used = [gpu for gpu in own if gpu["index"] in indices]
    for problem in problems_of(facts, vendor):
        if not problem["fatal"] and _is_wanted(problem, own, asked.gpus):
            verdicts.append(of_host("gpus", name, WARNING, problem["what"], problem["fix"]))
    useless = strangers(facts, asked.gpus, vendor)
    if useless and not obstacles:
        verdicts.append(of_host("gpus", name, WARNING, f"{useless[0]}; ranks run on the CPU", useless[1]))
    now = access(facts, indices, vendor)
    if asked.gpu_access is not None and not obstacles and now != asked.gpu_access:
        what = f"its GPUs are {', '.join(now)} now, and were {', '.join(asked.gpu_access)} at the last deploy"
        verdicts.append(of_host("gpus", name, ERROR, what, "run `make deploy`"))
    if len({gpu["name"] for gpu in used}) > 1:
        what = f"GPUs of several models: {models(used)}; every step waits for the slowest"
        fix = "choose GPUs of one model with `gpus` in the inventory, or divide the batch by speed: `--shares auto`"
        verdicts.append(of_host("gpus", name, WARNING, what, fix))
    if verdicts:
        return verdicts
    if not used:
        return [of_host("gpus", name, HEALTHY, "no GPU used: ranks run on the CPU")]
    return [of_host("gpus", name, HEALTHY, f"{models(used)}, driver {used[0].get('driver', 'unknown')}")]


def models(gpus: Sequence[Facts]) -> str:
    """The number of GPUs of each model: "2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA L4"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpu["name"] for gpu in gpus).items())


def _health_of_used(facts: Facts, asked: Asked) -> list[Facts]:
    """The entries of `gpu_health` for the GPUs that ranks would get. Raises Missing when one of them has none."""
    used = usable_gpus(facts, asked.gpus, asked.gpu_vendor)
    entries = fact(facts, "gpu_health") if used else []
    known = {entry["index"]: entry for entry in entries if entry.get("vendor", NVIDIA) == asked.gpu_vendor}
    if any(index not in known for index in used):
        raise Missing("gpu_health")
    return [known[index] for index in used]


def gpu_health(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Memory errors, throttling and heat of the GPUs that ranks would get."""
    verdicts, watched = [], _health_of_used(facts, asked)
    for gpu in watched:
        index, errors, degrees = gpu["index"], gpu["ecc_uncorrected"] or 0, gpu["temperature_c"]
        reset = f"drain the host and `{RESETS[asked.gpu_vendor].format(gpu=index)}`, or reboot"
        if gpu["repair_failed"]:
            what = f"GPU {index} has memory errors and no spare rows left"
            fix = "have it replaced; until then leave it out with `gpus`"
            verdicts.append(of_host("gpu health", name, ERROR, what, fix))
        elif gpu["repair_pending"]:
            known = f"{errors} uncorrected errors since the driver loaded"
            what = f"GPU {index} has memory waiting to be repaired ({known})"
            verdicts.append(of_host("gpu health", name, ERROR, what, reset))
        elif errors:
            what = f"GPU {index} has {errors} uncorrected memory errors since the driver loaded"
            test = " test it (dcgmi diag -r 3) and" if asked.gpu_vendor == NVIDIA else ""
            fix = f"{reset}; if they come again,{test} have it replaced"
            verdicts.append(of_host("gpu health", name, WARNING, what, fix))
        slowed = [reason for reason in gpu["throttle"] or [] if reason in SLOW_REASONS]
        if slowed or (degrees or 0) >= TEMPERATURE_C:
            what = f"GPU {index} at {degrees} C{' is slowed down: ' + ', '.join(slowed) if slowed else ''}"
            fix = "check the fans, dust and the room's air; for the power brake, check the power supply"
            verdicts.append(of_host("gpu health", name, WARNING, what, fix))
    if verdicts or not watched:
        return verdicts
    degrees = [gpu["temperature_c"] for gpu in watched if gpu["temperature_c"] is not None]
    hottest = f", hottest {max(degrees)} C" if degrees else ""
    ecc = "0 uncorrected errors" if all(gpu["ecc_uncorrected"] == 0 for gpu in watched) else "some have no ECC"
    return [of_host("gpu health", name, HEALTHY, f"{len(watched)} GPUs: {ecc}, none slowed down{hottest}")]


def gpu_use(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Programs that already compute on the GPUs that ranks would get."""
    verdicts, watched = [], _health_of_used(facts, asked)
    for gpu in watched:
        if used := gpu["processes"]:
            more = f", {len(used) - 3} more" if used[3:] else ""
            what = f"GPU {gpu['index']} is in use: {', '.join(map(_process, used[:3]))}{more}"
            fix = "ask their owners, or name free GPUs with `gpus` in the inventory"
            verdicts.append(of_host("gpu use", name, WARNING, what, fix))
    if verdicts or not watched:
        return verdicts
    return [of_host("gpu use", name, HEALTHY, f"nothing else runs on {len(watched)} GPUs")]


def _process(process: Facts) -> str:
    amount = "" if process["memory_mib"] is None else f", {process['memory_mib']} MiB"
    return f"{process['name']} of {process['user'] or 'an unknown user'} (pid {process['pid']}{amount})"


def xid(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """The driver's Xid error lines in the kernel's log, about GPUs that ranks would get or that no longer answer."""
    if asked.gpu_vendor != NVIDIA or (asked.gpus is not None and not asked.gpus):
        return []
    nvidia, broken = gpus_of(facts, NVIDIA), bool(problems_of(facts, NVIDIA))
    lines = facts.get("xid")
    if lines is None:
        if not nvidia and not broken:
            return []
        why = facts.get("xid_problem") or "the kernel's log was not read"
        return [of_host("xid", name, INCOMPLETE, why, "let root read it: `sysctl kernel.dmesg_restrict=0`")]
    indices = {gpu.get("pci_bus_id"): gpu["index"] for gpu in nvidia}
    used = usable_gpus(facts, asked.gpus)
    mine = [line for line in lines if indices.get(line["pci"]) in (None, *used)]
    verdicts = [_xid(name, line, indices.get(line["pci"]), fact(facts, "ended")) for line in mine]
    recent = [verdict for verdict in verdicts if verdict.level != HEALTHY]
    if recent or not (nvidia or broken):
        return recent
    what = f"{len(mine)} old Xid lines of programs" if mine else "no Xid line in the kernel's log"
    return [of_host("xid", name, HEALTHY, what)]


def _xid(name: str, line: Facts, index: int | None, now: float) -> Verdict:
    """A recent error of the GPU, or one of unknown age, is grave; a reset may have fixed an old one."""
    unlisted = ("not in our list", False, "look it up in NVIDIA's Xid catalog")
    meaning, fatal, fix = XIDS.get(line["xid"], unlisted)
    seconds = None if line["when"] is None else max(0.0, now - line["when"])
    old = seconds is not None and seconds > XID_SECONDS
    level = (WARNING if old else ERROR) if fatal else (HEALTHY if old else WARNING)
    gpu = f"GPU {index} ({line['pci']})" if index is not None else f"GPU {line['pci']}"
    repeated = "" if line.get("count", 1) == 1 else f"{line['count']} times, last "
    when = "at an unknown time" if seconds is None else f"{age(seconds)} ago"
    what = f"{gpu}: Xid {line['xid']}, {meaning}; {repeated}{when}"
    fix = fix.format(gpu=line["pci"] if index is None else index)
    return of_host("xid", name, level, what, fix)
