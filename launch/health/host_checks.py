"""What a survey of one host says about a run on it: healthy, warning, error or incomplete, with figures and a fix.

Pure functions over the facts of playbooks/module_utils/muster_survey.py (its docstring is the schema).
Not for what hosts have in common or not (launch.health.sameness), nor for the links between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict

Facts = Mapping[str, Any]

MIB, GIB = 2**20, 2**30
#: Seconds that a clock may be off.
CLOCK_WARNING, CLOCK_ERROR = 2.0, 60.0
#: Bytes free on a disk, whatever a checkpoint needs.
DISK_WARNING, DISK_ERROR = 5 * GIB, GIB
#: Bytes of /dev/shm: a data worker hands over whole batches there, NCCL about 32 MiB of buffers per rank.
SHM_PER_RANK_WARNING, SHM_ERROR = 512 * MIB, 64 * MIB
MEMORY_PER_RANK_WARNING, MEMORY_PER_RANK_ERROR = GIB, 256 * MIB
#: Open files per rank: data workers pass tensors by file descriptors.
NOFILE_PER_RANK = 4096
TEMPERATURE_C = 90
#: Of the machine's processor time, busy in the moment of the survey.
BUSY_PART = 0.5
#: An Xid line stays in the kernel's log until the reboot, also after what it says has been fixed.
XID_SECONDS = 86400
SLOW_REASONS = ("hardware slowdown", "hardware thermal slowdown", "software thermal slowdown", "power brake")
RUNNING = ("running", "paused", "stopping", "restarting")

_RESTART = "start the run again; if it comes with other programs too, test the GPU (dcgmi diag -r 3)"
_RESET = "drain the host and reset the GPU (nvidia-smi --gpu-reset -i {gpu}) or reboot; if it comes again, replace it"
_REBOOT = "reboot the host, power-cycle it if that does not help; if it comes again, reseat or replace the GPU"

#: Xid numbers that matter: (what, whether the GPU is of no use until fixed, fix). By NVIDIA's "Analyzing Xid Errors
#: with the Xid Catalog", column Resolution Bucket (Immediate Action); what is not here is named by its number.
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
    63: (
        "memory page retired or row remapped",
        False,
        "reset the GPU when it is idle, so that the repair takes effect",
    ),
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


@dataclass(frozen=True)
class Asked:
    """What a run would ask of one host."""

    gpus: Sequence[int] | None = None  # as the inventory sets it; None: all that are usable
    ranks: int = 1
    checkpoint_bytes: int | None = None  # of one checkpoint; None: not known
    clock_offset: float | None = None  # seconds by which the host is ahead; see clock_offset()
    clock_uncertainty: float = 0.0
    data_dir: str | None = None


class Missing(Exception):
    """A fact that the host's answer lacks."""


def fact(found: Facts, key: str) -> Any:
    """A fact that has to be known.

    Raises:
        Missing: when it is not.
    """
    if found.get(key) is None:
        raise Missing(key)
    return found[key]


def judge(name: str, found: Facts | None, asked: Asked) -> list[Verdict]:
    """All checks of one host; found None: it did not answer. A fact that is missing makes its check incomplete."""
    if found is None:
        fix = "see what the host is busy with, and check again"
        return [Verdict("survey", _where(name), INCOMPLETE, "the host did not answer", fix)]
    verdicts = []
    for title, check in CHECKS.items():
        try:
            verdicts += check(name, found, asked)
        except Missing as missing:
            what = f"the host's answer lacks `{missing}`"
            verdicts.append(Verdict(title, _where(name), INCOMPLETE, what, "run `make deploy` or look on the host"))
    return verdicts


def clock(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Files get dates from the future and logs of several hosts do not fit together when clocks differ."""
    offset, uncertainty = asked.clock_offset, asked.clock_uncertainty
    if offset is None:
        return [Verdict("clock", _where(name), INCOMPLETE, "the clock was not compared", "check again")]
    side = "ahead of" if offset >= 0 else "behind"
    what = f"clock {abs(offset):.2f} s (+-{uncertainty:.2f} s) {side} this machine's"
    certain = abs(offset) - uncertainty
    fix = "set it and keep it set: `timedatectl set-ntp true`, or install chrony"
    if certain > CLOCK_ERROR:
        return [Verdict("clock", _where(name), ERROR, what, fix)]
    if certain > CLOCK_WARNING:
        return [Verdict("clock", _where(name), WARNING, what, fix)]
    if abs(offset) > CLOCK_WARNING:
        return [Verdict("clock", _where(name), INCOMPLETE, f"{what}: the answer took too long to tell", "check again")]
    return [Verdict("clock", _where(name), HEALTHY, what)]


def disk(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Room for two checkpoints (the new one is written before the old one goes), and for images."""
    free, storage = fact(found, "muster_disk_free_bytes"), fact(found, "disk_free_bytes")
    need = None if asked.checkpoint_bytes is None else 2 * asked.checkpoint_bytes
    wants = "" if need is None else f"; two checkpoints need {size(need)}"
    fix = "remove old runs in /var/lib/muster/runs, or put /var/lib/muster on a larger disk"
    short = need is not None and free < need
    level = ERROR if short or free < DISK_ERROR else WARNING if free < DISK_WARNING else HEALTHY
    verdicts = [_verdict("disk", name, level, f"{size(free)} free for runs{wants}", fix)]
    if storage != free and storage < DISK_WARNING:
        level = ERROR if storage < DISK_ERROR else WARNING
        fix = "`podman image prune --all` removes images that no container uses"
        verdicts.append(_verdict("disk", name, level, f"{size(storage)} free for images", fix))
    return verdicts


def shared_memory(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """/dev/shm, which the run's container shares with the host: too small, and data workers die of SIGBUS."""
    total, free = fact(found, "shm_bytes"), fact(found, "shm_free_bytes")
    short = free < asked.ranks * SHM_PER_RANK_WARNING
    level = ERROR if free < SHM_ERROR else WARNING if short else HEALTHY
    fix = "remove what fills it, or enlarge it: `mount -o remount,size=50% /dev/shm`"
    return [_verdict("shm", name, level, f"{size(free)} of {size(total)} free in /dev/shm", fix)]


def memory(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Memory that is free now, by rank."""
    free, total = fact(found, "memory_free_bytes"), fact(found, "memory_bytes")
    each = free / max(1, asked.ranks)
    level = ERROR if each < MEMORY_PER_RANK_ERROR else WARNING if each < MEMORY_PER_RANK_WARNING else HEALTHY
    what = f"{size(free)} of {size(total)} memory free for {asked.ranks} rank{'s' if asked.ranks != 1 else ''}"
    return [_verdict("memory", name, level, what, "end what uses it (`ps aux --sort=-rss | head`), or run fewer ranks")]


def limits(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Open files. Podman raises the soft limit to the hard one: that counts. Locked memory is only told."""
    known = fact(found, "limits")
    files, hard, locked = (known.get(key) for key in ("nofile", "nofile_hard", "memlock_bytes"))
    if files is None or hard is None or locked is None:
        raise Missing("limits")
    verdicts = []
    if 0 <= hard < asked.ranks * NOFILE_PER_RANK:
        what = (
            f"at most {hard} open files; {asked.ranks} ranks with data workers may need {asked.ranks * NOFILE_PER_RANK}"
        )
        fix = "raise it for root: `* hard nofile 1048576` in /etc/security/limits.d/muster.conf, then log in anew"
        verdicts.append(Verdict("limits", _where(name), WARNING, what, fix))
    healthy = f"{_count(hard)} open files (soft limit {_count(files)}), "
    healthy += f"{'unlimited' if locked < 0 else size(locked)} locked memory"
    return verdicts or [Verdict("limits", _where(name), HEALTHY, healthy)]


# -- GPUs --------------------------------------------------------------------------------------------------------------


def nvidia_gpus(found: Facts) -> list[Facts]:
    """The host's NVIDIA GPUs; facts of older deploys name no vendor."""
    return [gpu for gpu in fact(found, "gpus") if gpu.get("vendor", "nvidia") == "nvidia"]


def usable_gpus(found: Facts, wanted: Sequence[int] | None) -> list[int]:
    """Indices of the GPUs that ranks get: NVIDIA's, whole, and among those that the inventory names if it does."""
    return [
        gpu["index"]
        for gpu in nvidia_gpus(found)
        if gpu.get("usable", True) and (wanted is None or gpu["index"] in wanted)
    ]


def gpu_obstacles(found: Facts, wanted: Sequence[int] | None) -> list[tuple[str, str]]:
    """What keeps a host from training on its GPUs as asked, as (what, fix). Nothing does where `gpus: []` is set.

    A GPU that is broken or cut into MIG slices is an obstacle unless the inventory names others.
    """
    if wanted is not None and not wanted:
        return []
    gpus = nvidia_gpus(found)
    have = {gpu["index"]: gpu for gpu in gpus}
    obstacles = []
    absent = sorted(set(wanted or []) - set(have))
    if absent:
        obstacles.append((f"has no GPU {absent}; it has {sorted(have) or 'none'}", "correct `gpus` in the inventory"))
    whole = [gpu["index"] for gpu in gpus if gpu.get("usable", True)]
    for index in sorted(have if wanted is None else set(have) & set(wanted)):
        gpu = have[index]
        if not gpu.get("usable", True):
            slices = ", ".join(entry["name"] for entry in gpu.get("mig_instances", []))
            what = f"GPU {index} ({gpu['name']}{', slices ' + slices if slices else ''}): {gpu.get('unusable_reason')}"
            others = [number for number in whole if wanted is None or number in wanted]
            fix = f"`nvidia-smi -i {index} -mig 0` and reset it, or leave it out: `gpus: {others}`"
            obstacles.append((what, fix))
    for problem in fact(found, "gpu_problems"):
        if problem["fatal"] and _concerns(problem, gpus, wanted):
            fix = f"{problem['fix']}; or set `gpus: []` to train on the CPU"
            obstacles.append((problem["what"], fix))
    return obstacles


def _concerns(problem: Facts, gpus: Sequence[Facts], wanted: Sequence[int] | None) -> bool:
    """Whether a problem is of a GPU that ranks would get; one that no longer answers has no index to be named by."""
    if problem["gpu"] is None or wanted is None:
        return True
    index = next((gpu["index"] for gpu in gpus if gpu.get("pci_bus_id") == problem["gpu"]), None)
    if index is None and problem["gpu"].startswith("GPU "):
        index = int(problem["gpu"].split()[1])
    return index in wanted


def gpus(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Whether the GPUs that the host has can be used as asked."""
    obstacles = gpu_obstacles(found, asked.gpus)
    verdicts = [Verdict("gpus", _where(name), ERROR, what, fix) for what, fix in obstacles]
    used = [gpu for gpu in nvidia_gpus(found) if gpu["index"] in usable_gpus(found, asked.gpus)]
    problems = fact(found, "gpu_problems")
    for problem in problems:
        minor = not problem["fatal"] and problem["vendor"] == "nvidia"
        if minor and _concerns(problem, nvidia_gpus(found), asked.gpus):
            verdicts.append(Verdict("gpus", _where(name), WARNING, problem["what"], problem["fix"]))
    amd = models([gpu for gpu in fact(found, "gpus") if gpu.get("vendor") == "amd"])
    amd = amd or next((problem["what"] for problem in problems if problem["vendor"] == "amd"), "")
    if amd and not used and asked.gpus is None:
        what = f"{amd}: not used, the training image's torch is built for CUDA; ranks run on the CPU"
        fix = "leave this host out, or set `gpus: []` to say that its CPU is meant"
        verdicts.append(Verdict("gpus", _where(name), WARNING, what, fix))
    if len({gpu["name"] for gpu in used}) > 1:
        what = f"GPUs of several models: {models(used)}; every step waits for the slowest"
        fix = "name those of one model with `gpus` in the inventory, or cut the batch to measure: `--shares auto`"
        verdicts.append(Verdict("gpus", _where(name), WARNING, what, fix))
    if verdicts:
        return verdicts
    if not used:
        return [Verdict("gpus", _where(name), HEALTHY, "no GPU used: ranks run on the CPU")]
    return [Verdict("gpus", _where(name), HEALTHY, f"{models(used)}, driver {used[0].get('driver', 'unknown')}")]


def models(gpus: Sequence[Facts]) -> str:
    """GPUs by model: "2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA L4"."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpu["name"] for gpu in gpus).items())


def _watched(found: Facts, asked: Asked) -> list[Facts]:
    """The health of the GPUs that ranks would get.

    Raises:
        Missing: when one of them has none.
    """
    used = usable_gpus(found, asked.gpus)
    known = {entry["index"]: entry for entry in fact(found, "gpu_health")} if used else {}
    if any(index not in known for index in used):
        raise Missing("gpu_health")
    return [known[index] for index in used]


def gpu_health(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Memory errors, throttling and heat of the GPUs that ranks would get."""
    verdicts, watched = [], _watched(found, asked)
    for gpu in watched:
        index, errors, degrees = gpu["index"], gpu["ecc_uncorrected"] or 0, gpu["temperature_c"]
        reset = f"drain the host and `nvidia-smi --gpu-reset -i {index}`, or reboot"
        if gpu["repair_failed"]:
            what = f"GPU {index} has memory errors and no spare rows left"
            verdicts.append(
                Verdict("gpu health", _where(name), ERROR, what, "have it replaced, leave it out with `gpus`")
            )
        elif gpu["repair_pending"]:
            what = (
                f"GPU {index} has memory waiting to be repaired ({errors} uncorrected errors since the driver loaded)"
            )
            verdicts.append(Verdict("gpu health", _where(name), ERROR, what, reset))
        elif errors:
            what = f"GPU {index} has {errors} uncorrected memory errors since the driver loaded"
            fix = f"{reset}; if they come again, test it (dcgmi diag -r 3) and have it replaced"
            verdicts.append(Verdict("gpu health", _where(name), WARNING, what, fix))
        slowed = [reason for reason in gpu["throttle"] or [] if reason in SLOW_REASONS]
        if slowed or (degrees or 0) >= TEMPERATURE_C:
            what = f"GPU {index} at {degrees} C{' is slowed down: ' + ', '.join(slowed) if slowed else ''}"
            fix = "look at fans, dust and the room's air; for the power brake, at the power supply"
            verdicts.append(Verdict("gpu health", _where(name), WARNING, what, fix))
    if verdicts or not watched:
        return verdicts
    degrees = [gpu["temperature_c"] for gpu in watched if gpu["temperature_c"] is not None]
    hottest = f", hottest {max(degrees)} C" if degrees else ""
    ecc = "0 uncorrected errors" if all(gpu["ecc_uncorrected"] == 0 for gpu in watched) else "no ECC on some"
    return [Verdict("gpu health", _where(name), HEALTHY, f"{len(watched)} GPUs: {ecc}, not slowed down{hottest}")]


def gpu_use(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Programs that already compute on the GPUs that ranks would get."""
    verdicts, watched = [], _watched(found, asked)
    for gpu in watched:
        used = gpu["processes"]
        if used:
            told = ", ".join(_process(process) for process in used[:3]) + (
                f", {len(used) - 3} more" if used[3:] else ""
            )
            fix = "ask their owners, or name free GPUs with `gpus` in the inventory"
            verdicts.append(Verdict("gpu use", _where(name), WARNING, f"GPU {gpu['index']} is in use: {told}", fix))
    if verdicts or not watched:
        return verdicts
    return [Verdict("gpu use", _where(name), HEALTHY, f"nothing else runs on {len(watched)} GPUs")]


def _process(process: Facts) -> str:
    amount = "" if process["memory_mib"] is None else f", {process['memory_mib']} MiB"
    return f"{process['name']} of {process['user'] or 'an unknown user'} (pid {process['pid']}{amount})"


def xid(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """The driver's error lines in the kernel's log about GPUs that ranks would get, or that no longer answer."""
    if asked.gpus is not None and not asked.gpus:
        return []
    nvidia = nvidia_gpus(found)
    broken = any(problem["vendor"] == "nvidia" for problem in fact(found, "gpu_problems"))
    lines = found.get("xid")
    if lines is None:
        if not nvidia and not broken:
            return []
        why = found.get("xid_problem") or "the kernel's log was not read"
        return [Verdict("xid", _where(name), INCOMPLETE, why, "let root read it: `sysctl kernel.dmesg_restrict=0`")]
    indices = {gpu.get("pci_bus_id"): gpu["index"] for gpu in nvidia}
    used = usable_gpus(found, asked.gpus)
    mine = [line for line in lines if indices.get(line["pci"]) in (None, *used)]
    verdicts = [_xid(name, line, indices.get(line["pci"]), fact(found, "ended")) for line in mine]
    told = [verdict for verdict in verdicts if verdict.level != HEALTHY]
    if told or not (nvidia or broken):
        return told
    what = f"{len(mine)} old Xid lines of programs" if mine else "no Xid line in the kernel's log"
    return [Verdict("xid", _where(name), HEALTHY, what)]


def _xid(name: str, line: Facts, index: int | None, now: float) -> Verdict:
    """An error of the GPU that is fresh, or of unknown age, is grave; an old one may have been fixed by a reset."""
    unlisted = ("not in our list", False, "look it up in NVIDIA's Xid catalog")
    meaning, fatal, fix = XIDS.get(line["xid"], unlisted)
    seconds = None if line["when"] is None else max(0.0, now - line["when"])
    old = seconds is not None and seconds > XID_SECONDS
    level = (WARNING if old else ERROR) if fatal else (HEALTHY if old else WARNING)
    gpu = f"GPU {index} ({line['pci']})" if index is not None else f"GPU {line['pci']}"
    times = "" if line.get("count", 1) == 1 else f"{line['count']} times, last "
    when = "at an unknown time" if seconds is None else f"{age(seconds)} ago"
    what = f"{gpu}: Xid {line['xid']}, {meaning}; {times}{when}"
    fix = fix.format(gpu=line["pci"] if index is None else index)
    return _verdict("xid", name, level, what, fix)


# -- what else is on the host ------------------------------------------------------------------------------------------


def runs(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Another run in progress, which keeps a new one from starting, and containers that dead runs have left."""
    verdicts = []
    for run, entries in _by_run(fact(found, "runs")).items():
        alive = [entry for entry in entries if entry["state"] in RUNNING]
        first = (alive or entries)[0]
        old = first.get("age_seconds")
        since = "of unknown age" if old is None else f"{age(old)} old"
        who = f"run {run} of {first['owner'] or 'an unknown user'}, {since}"
        if alive:
            fix = f"wait until it ends, or `make stop RUN={run}`"
            verdicts.append(Verdict("runs", _where(name), ERROR, f"another run is in progress: {who}", fix))
        else:
            what = f"a container is left of {who} ({first['container']}, {first['state']})"
            verdicts.append(Verdict("leftovers", _where(name), WARNING, what, f"`make stop RUN={run}` removes it"))
    return verdicts or [Verdict("runs", _where(name), HEALTHY, "no other run, and nothing left of one")]


def _by_run(entries: Sequence[Facts]) -> dict[str, list[Facts]]:
    found: dict[str, list[Facts]] = {}
    for entry in entries:
        found.setdefault(entry["run"], []).append(entry)
    return found


def load(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """How busy the machine's processors are with something else than a run of ours, now.

    Nothing is said where it was not sampled (the quick form). The load average holds the minutes before, our own
    deploy among them: it is not judged.
    """
    busy = found.get("busy")
    if busy is None:
        return []
    cores = fact(found, "machine_cpus")
    what = f"{busy:.0%} of the processor time of {cores} cores is in use"
    ours = any(entry["state"] in RUNNING for entry in found.get("runs") or [])
    if busy < BUSY_PART or ours:
        return [Verdict("load", _where(name), HEALTHY, what + (", a run of Muster among it" if ours else ""))]
    fix = "see what it is (`top`) and end it: it slows every step down"
    return [Verdict("load", _where(name), WARNING, f"{what} now: something else keeps it busy", fix)]


def data(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """Whether the data set is there. Whether it is the same everywhere is launch.health.sameness's."""
    if asked.data_dir is None:
        return []
    known = fact(found, "data")
    if not known["present"]:
        fix = "put the data there, or correct `data_dir` in the inventory"
        return [Verdict("data", _where(name), ERROR, f"there is no folder {asked.data_dir}", fix)]
    if "complete" not in known:
        return [Verdict("data", _where(name), HEALTHY, f"{asked.data_dir} is there")]
    what = f"{asked.data_dir}: {known['files']} files, {size(known['bytes'])}"
    if not known["complete"]:
        fix = "the trainer compares the data itself before the first step"
        what += f" seen in {known.get('seconds', 0):.0f} s: not all could be read, so it was not compared"
        return [Verdict("data", _where(name), INCOMPLETE, what, fix)]
    if not known["files"]:
        return [Verdict("data", _where(name), ERROR, f"{asked.data_dir} is empty", "put the data there")]
    return [Verdict("data", _where(name), HEALTHY, what)]


def rdma(name: str, found: Facts, asked: Asked) -> list[Verdict]:
    """The state of RDMA ports, where there are any."""
    ports = [port for port in fact(found, "rdma") if not port.get("soft")]
    waiting = [f"{port['device']}:{port['port']}" for port in ports if port["state"] in ("INIT", "ARMED")]
    if waiting:
        what = f"RDMA port {', '.join(waiting)} has a link but is not active"
        fix = "InfiniBand needs a subnet manager: start opensm on one host or the switch"
        return [Verdict("rdma", _where(name), WARNING, what, fix)]
    if not ports:
        return []
    told = ", ".join(
        f"{port['device']}:{port['port']} {port['link_layer']} {port['rate_gbits'] or '?'} Gbit/s {port['state']}"
        for port in ports
    )
    return [Verdict("rdma", _where(name), HEALTHY, told)]


Check = Callable[[str, Facts, Asked], list[Verdict]]
CHECKS: dict[str, Check] = {
    "clock": clock,
    "runs": runs,
    "gpus": gpus,
    "gpu health": gpu_health,
    "gpu use": gpu_use,
    "xid": xid,
    "data": data,
    "disk": disk,
    "memory": memory,
    "shm": shared_memory,
    "limits": limits,
    "load": load,
    "rdma": rdma,
}


# -- words -------------------------------------------------------------------------------------------------------------


def size(count: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def age(seconds: float) -> str:
    """Seconds for people: "40 s", "3 min", "2.5 h", "6 days"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _where(name: str) -> str:
    return f"host {name}"


def _verdict(check: str, name: str, level: str, what: str, fix: str) -> Verdict:
    return Verdict(check, _where(name), level, what, "" if level == HEALTHY else fix)
