"""What a survey of one host says about a run on it: healthy, warning, error or incomplete, with figures and a fix.

Pure functions over the facts of playbooks/module_utils/muster_survey.py (its docstring is the schema).
Not for GPUs (gpu_checks), for what hosts must have in common (sameness), nor for the links between them (link_checks).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

from keeper import engines
from launch.cli.units import age, size
from launch.health import gpu_checks
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Asked, Facts, Missing, Verdict, fact, of_host
from launch.hosts import clustermap

MIB, GIB = 2**20, 2**30
#: Seconds that a clock may be off.
CLOCK_WARNING, CLOCK_ERROR = 2.0, 60.0
#: Bytes free on a disk, whatever a checkpoint needs.
DISK_WARNING, DISK_ERROR = 5 * GIB, GIB
#: Bytes of memory for each rank.
MEMORY_PER_RANK_WARNING, MEMORY_PER_RANK_ERROR = GIB, 256 * MIB
#: Open files per rank: data workers pass tensors by file descriptors.
NOFILE_PER_RANK = 4096
#: The part of the machine's processor time that is in use during the survey, from which on it counts as busy.
SURPRISING_LOAD = 0.5
#: An engine's states of a container that is alive.
RUNNING = engines.LIVING


def check_host(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """All checks of one host. A fact that is missing makes its check incomplete."""
    verdicts, fix = [], "run `make deploy`, or log in there and see what is wrong"
    for title, check in CHECKS.items():
        try:
            verdicts += check(name, facts, asked)
        except Missing as missing:
            verdicts.append(of_host(title, name, INCOMPLETE, f"the host's answer lacks `{missing}`", fix))
    return verdicts


def training_nic(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """The NIC of the training network: it exists, is up, has a link, and holds the training address.

    Nothing is said of a NIC in order: what it can do is said of its links.
    """
    if asked.interface is None:
        return []
    nics = {nic["name"]: nic for nic in fact(facts, "nics")}
    nic, address = nics.get(asked.interface), asked.address
    holders = [n for n, entry in nics.items() if address in (one["address"] for one in entry["addresses"])]
    deploy = "run `make deploy`, which detects the networks again"
    label = f"{asked.interface}, the NIC of the training network,"
    if nic is None:
        what, fix = f"{label} is gone", deploy
    elif not nic["up"]:
        what, fix = f"{label} is down", f"`ip link set dev {asked.interface} up`"
    elif not nic["carrier"]:
        what, fix = f"{label} has no link", "plug in its cable, and check the switch port"
    elif asked.interface in holders:
        return []
    elif holders:
        what, fix = f"the training address {address} is now on {holders[0]}, no longer on {asked.interface}", deploy
    else:
        what = f"{label} lacks the training address {address}"
        fix = f"give it the address again, or {deploy}"
    return [of_host("nic", name, ERROR, what, fix)]


def clock(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Where clocks differ, files have dates in the future, and the logs of several hosts do not fit together."""
    offset, uncertainty = asked.clock_offset, asked.clock_uncertainty
    if offset is None:
        return [of_host("clock", name, INCOMPLETE, "the clock was not compared", "check again")]
    fix = "set it and keep it set: `timedatectl set-ntp true`, or install chrony"
    side = "ahead of" if offset >= 0 else "behind"
    what = f"clock {abs(offset):.2f} s (± {uncertainty:.2f} s) {side} this machine's"
    if abs(offset) <= uncertainty:
        what = f"clock within {abs(offset) + uncertainty:.2f} s of this machine's"
    certain = abs(offset) - uncertainty
    if certain <= CLOCK_WARNING < abs(offset):
        return [of_host("clock", name, INCOMPLETE, f"{what}: the answer came too slowly to say more", "check again")]
    level = ERROR if certain > CLOCK_ERROR else WARNING if certain > CLOCK_WARNING else HEALTHY
    return [of_host("clock", name, level, what, fix)]


def disk(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Space for two checkpoints (the new one is written before the old one is removed), and for images."""
    free, storage = fact(facts, "muster_disk_free_bytes"), fact(facts, "disk_free_bytes")
    need = None if asked.checkpoint_bytes is None else 2 * asked.checkpoint_bytes
    needed = "" if need is None else f"; two checkpoints need {size(need)}"
    folder = (facts.get("place") or {}).get("folder", engines.ROOTS.folder)
    fix = f"remove old runs in {folder}/runs, or put {folder} on a larger disk"
    short = need is not None and free < need
    level = ERROR if short or free < DISK_ERROR else WARNING if free < DISK_WARNING else HEALTHY
    verdicts = [of_host("disk", name, level, f"{size(free)} free for runs{needed}", fix)]
    if storage != free and storage < DISK_WARNING:
        level = ERROR if storage < DISK_ERROR else WARNING
        engine = (facts.get("engine") or {}).get("name", "podman")
        fix = f"`{engine} image prune --all` removes images that no container uses"
        verdicts.append(of_host("disk", name, level, f"{size(storage)} free for images", fix))
    return verdicts


def memory(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Memory that is free now, per rank."""
    free, total = fact(facts, "memory_free_bytes"), fact(facts, "memory_bytes")
    each = free / max(1, asked.ranks)
    level = ERROR if each < MEMORY_PER_RANK_ERROR else WARNING if each < MEMORY_PER_RANK_WARNING else HEALTHY
    what = f"{size(free)} of {size(total)} memory free for {asked.ranks} rank{'s' if asked.ranks != 1 else ''}"
    return [of_host("memory", name, level, what, "end what uses it (`ps aux --sort=-rss | head`), or run fewer ranks")]


def limits(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """How many files a process may open. Podman raises the soft limit to the hard one, so the hard one counts."""
    known = fact(facts, "limits")
    soft, hard = known.get("nofile"), known.get("nofile_hard")
    if soft is None or hard is None:
        raise Missing("limits")
    needed = asked.ranks * NOFILE_PER_RANK
    if 0 <= hard < needed:
        what = f"at most {hard} open files; {asked.ranks} ranks with data workers may need {needed}"
        fix = "raise it for root: `* hard nofile 1048576` in /etc/security/limits.d/muster.conf, then log in again"
        return [of_host("limits", name, WARNING, what, fix)]
    shown = ["unlimited" if count < 0 else str(count) for count in (hard, soft)]
    return [of_host("limits", name, HEALTHY, f"{shown[0]} open files (soft limit {shown[1]})")]


def runs(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Runs in progress, which prevent a new one from starting, and containers that ended runs have left behind."""
    verdicts, containers = [], dict[str, list[Facts]]()
    for entry in fact(facts, "runs"):
        containers.setdefault(entry["run"], []).append(entry)
    for run, entries in containers.items():
        alive = [entry for entry in entries if entry["state"] in RUNNING]
        first = (alive or entries)[0]
        since = "of unknown age" if first.get("age_seconds") is None else f"{age(first['age_seconds'])} old"
        who = f"run {run} of {first['owner'] or 'an unknown user'}, {since}"
        if alive:
            fix = f"wait until it ends, or `make stop RUN={run}`"
            verdicts.append(of_host("runs", name, ERROR, f"another run is in progress: {who}", fix))
        else:
            what = f"a container is left of {who} ({first['container']}, {first['state']})"
            fix = f"`make gather RUN={run}` fetches its results; where there are none `make stop RUN={run}` removes it"
            verdicts.append(of_host("leftovers", name, WARNING, what, fix))
    return verdicts or [of_host("runs", name, HEALTHY, "no other run, and nothing left of one")]


def load(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """How much of the machine's processor time was in use during the survey, by something else than a run of ours.

    Nothing is said where it was not sampled (the quick form). The load average is not used: it is of the minutes
    before, in which our own deploy may have run.
    """
    busy = facts.get("busy")
    if busy is None:
        return []
    cores = fact(facts, "machine_cpus")
    what = f"{busy:.0%} of the processor time of {cores} cores is in use"
    ours = any(entry["state"] in RUNNING for entry in facts.get("runs") or [])
    if busy < SURPRISING_LOAD or ours:
        return [of_host("load", name, HEALTHY, what + (", some of it by a run of Muster" if ours else ""))]
    fix = "find out what it is (`top`) and end it: it slows down every step"
    return [of_host("load", name, WARNING, f"{what} now: another program keeps it busy", fix)]


def data(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """Whether the data set is there. Whether it is the same on all hosts is a question for sameness.py."""
    if asked.data_dir is None:
        return []
    known, dataset = fact(facts, "data"), clustermap.dataset_in(asked.data_dir)
    if not known["present"]:
        return [of_host("data", name, ERROR, *clustermap.no_data(asked.data_dir))]
    bring = f"`make data SRC=<folder> NAME={dataset}` brings it"
    if known.get("closed"):
        what = f"ranks, which run as a user that the host does not have, cannot read {asked.data_dir}/{known['closed']}"
        return [of_host("data", name, ERROR, what, f"sudo chmod -R o+rX {shlex.quote(asked.data_dir)}")]
    if "complete" not in known:
        return [of_host("data", name, HEALTHY, f"{asked.data_dir} is there")]
    what = f"{asked.data_dir}: {known['files']} files, {size(known['bytes'])}"
    brought = known.get("brought")
    if not known["complete"]:
        if brought:
            what += (
                f" seen in {known.get('seconds', 0):.0f} s; compared by what `make data` brought, {brought['files']}"
            )
            return [of_host("data", name, HEALTHY, f"{what} files, {size(brought['bytes'])}")]
        fix = "nothing to do: the trainer compares the data itself before the first step"
        what += f" read in {known.get('seconds', 0):.0f} s: that is not all of it, so it was not compared"
        return [of_host("data", name, INCOMPLETE, what, fix)]
    if brought and brought["fingerprint"] != known["sha256"]:
        what += (
            f"; they are no longer those that `make data` brought: {brought['files']} files, {size(brought['bytes'])}"
        )
        return [of_host("data", name, ERROR, what, bring.replace("`make data", "`make data VERIFY=1"))]
    if not known["files"]:
        return [of_host("data", name, ERROR, f"{asked.data_dir} is empty", "put the data there")]
    return [of_host("data", name, HEALTHY, what)]


def rdma(name: str, facts: Facts, asked: Asked) -> list[Verdict]:
    """The state of RDMA ports, where there are any that are made of hardware."""
    ports = [port for port in fact(facts, "rdma") if not port.get("soft")]
    waiting = [f"{port['device']}:{port['port']}" for port in ports if port["state"] in ("INIT", "ARMED")]
    if waiting:
        what = f"RDMA port {', '.join(waiting)} has a link but is not active"
        fix = "InfiniBand needs a subnet manager: start opensm on one host or on the switch"
        return [of_host("rdma", name, WARNING, what, fix)]
    known = [f"{p['device']}:{p['port']} {p['link_layer']} {p['rate_gbits'] or '?'} Gbit/s {p['state']}" for p in ports]
    return [of_host("rdma", name, HEALTHY, ", ".join(known))] if ports else []


CHECKS: dict[str, Callable[[str, Facts, Asked], list[Verdict]]] = {
    "nic": training_nic,
    "clock": clock,
    "runs": runs,
    "gpus": gpu_checks.gpus,
    "gpu health": gpu_checks.gpu_health,
    "gpu use": gpu_checks.gpu_use,
    "xid": gpu_checks.xid,
    "data": data,
    "disk": disk,
    "memory": memory,
    "limits": limits,
    "load": load,
    "rdma": rdma,
}
