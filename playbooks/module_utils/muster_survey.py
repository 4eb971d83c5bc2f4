"""Everything Muster wants to know of a host, in one call: `survey`. It reads and changes nothing.

Part of what muster_answer does on a host. Needs root for the engine's containers and the kernel's log. Not for the
network between hosts: that is muster_meeting and muster_links.
Runs on bare hosts: standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.muster_engines import IMAGE_PREFIX, Engine, noted, place
from ansible.module_utils.muster_firewalls import opened
from ansible.module_utils.muster_gpu_health import amd_health, gpu_health, read_processes, read_xid
from ansible.module_utils.muster_gpus import find_gpus, in_words
from ansible.module_utils.muster_host import (
    Result,
    available_memory,
    busy_part,
    disk,
    head,
    parse_os_release,
    read,
    read_stat,
    run,
    threads_max,
    usable_cores,
    usable_memory,
)
from ansible.module_utils.muster_nics import fill_speeds, read_nics, read_rdma
from ansible.module_utils.muster_ready import Wanted, change_of_engine, is_ready, lacking
from ansible.module_utils.muster_vpn import about as about_vpn

DATASETS = Path(place().folder, "data")  # what `make data` has brought: muster_data
ANSWERED_SECONDS = 20.0
#: With these, kernels of torch and oneDNN compute in another order, so that their results are rounded differently.
NUMERIC_FLAGS = {
    *("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "sve2", "bf16", "i8mm"),
}
#: How long the use of the processors is measured.
BUSY_SECONDS = 0.3
#: Of a data set: how long it may take, how many files are looked into, and how much at each end.
DATA_SECONDS, SAMPLED_FILES, END_BYTES = 8.0, 2000, 65536


def about_engine(of: Engine, full: bool) -> dict[str, Any]:
    """{"engine": as in `survey`, "storage": the folder of its images}."""
    absent = {"engine": None, "storage": of.storage}
    try:
        if not full:
            version = of.read_version(run(of.version_words, ANSWERED_SECONDS).out)
            known = {"name": of.name, "version": version, "storage_driver": None}
            return {"engine": known, "storage": configured_storage(of)} if version else absent
        answer = run(of.about_words, ANSWERED_SECONDS)
        if answer.rc != 0:
            return absent
        about = of.read_about(answer.out)
    except (ValueError, KeyError):
        return absent
    known = {"name": of.name, "version": about.version, "storage_driver": about.storage_driver}
    known["controllers"] = about.controllers
    return {"engine": known, "storage": about.storage}


def configured_storage(of: Engine) -> str:
    """The folder of an engine's images, without asking it."""
    return of.read_storage(read(of.configuration) or "") or of.storage


def parse_images(of: Engine, images: Result) -> dict[str, str] | None:
    """Muster's images as {ref: id}; empty where there is no engine, None where it does not answer."""
    if images.rc != 0:
        return {} if images.rc == 127 else None
    names = of.read_images(images.out).names
    return {name: identity for name, identity in names.items() if name.startswith(IMAGE_PREFIX)}


def parse_runs(of: Engine, containers: Result, now: float) -> list[dict[str, Any]] | None:
    """Containers of runs, ended ones too: [{"run", "container", "state", "owner", "created" (unix seconds),
    "age_seconds"}]; the times are None where the engine does not say. None, in the place of the list, if the engine is
    there and does not answer."""
    if containers.rc != 0:
        return [] if containers.rc == 127 else None
    return [
        {
            "run": one.run,
            "container": one.name,
            "state": one.state,
            "owner": one.owner,
            "created": one.created,
            "age_seconds": None if one.created is None else max(0.0, round(now - one.created, 1)),
        }
        for one in of.read_containers(containers.out)
    ]


def parse_cpu_model(cpuinfo: str) -> str:
    """The processor's name from /proc/cpuinfo; empty where the kernel gives none (arm64)."""
    return _first_core(cpuinfo, "model name", "Model", "cpu model")


def parse_cpu_flags(cpuinfo: str) -> list[str]:
    """The processor's features that change numerics, sorted."""
    return sorted(NUMERIC_FLAGS.intersection(_first_core(cpuinfo, "flags", "Features").split()))


def _first_core(cpuinfo: str, *keys: str) -> str:
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() in keys), "")


def watch_processors() -> float | None:
    """How busy the processors are now, this process asleep."""
    before = read_stat()
    time.sleep(BUSY_SECONDS)
    return busy_part(before, read_stat())


def limits() -> dict[str, int]:
    """Limits of this process, which are those of the shell it was started from; RLIM_INFINITY, no limit, is -1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"nofile": soft, "nofile_hard": hard}


def fingerprint(folder: Path, seconds: float = DATA_SECONDS) -> dict[str, Any]:
    """What a data set is: {"path", "present", "complete", "files", "bytes", "sha256", "closed", "seconds"}.

    sha256: of a manifest, sorted relative paths and sizes of all files, and the first and last 64 KiB of 2,000 of them
    (of all, where there are no more): those whose paths have the smallest SHA-256, so that every host takes the same.
    closed: the first folder or file that not all users of the host may read: ranks, which are none, cannot; or None.
    complete is False, and sha256 None, where the time did not suffice or a file could not be read; counts are then of
    what was seen.
    """
    begun = time.monotonic()
    deadline = begun + seconds
    found: dict[str, Any] = {"path": str(folder), "present": folder.is_dir(), "complete": False, "sha256": None}
    found.update(files=0, bytes=0, closed=None)
    if found["present"]:
        sizes, found["closed"], whole = _walk(folder, deadline)
        digest = _manifest(folder, sizes, deadline) if whole else None
        found.update(files=len(sizes), bytes=sum(sizes.values()), sha256=digest, complete=digest is not None)
    found["seconds"] = round(time.monotonic() - begun, 2)
    return found


def _walk(folder: Path, deadline: float) -> tuple[dict[str, int], str | None, bool]:
    """({relative path: bytes} of all files, `closed` of `fingerprint`, whether that is all). Links are followed, each
    folder once."""
    sizes: dict[str, int] = {}
    closed: str | None = None
    seen, waiting, whole = set(), [""], True
    while waiting:
        relative = waiting.pop()
        try:
            here = os.stat(folder / relative)
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
            if closed is None and not _is_open(folder / relative, here, 0o005):
                closed = relative or "."
            with os.scandir(folder / relative) as entries:
                for entry in entries:
                    if time.monotonic() > deadline:
                        return sizes, closed, False
                    path = os.path.join(relative, entry.name)
                    if entry.is_dir():
                        waiting.append(path)
                    elif entry.is_file():  # a link to nowhere is neither
                        sizes[path] = entry.stat().st_size
                        if closed is None and not _is_open(folder / path, entry.stat(), 0o004):
                            closed = path
        except OSError:
            whole = False  # a folder that may not be read
    return sizes, closed, whole


def _is_open(path: Path, found: os.stat_result, needed: int) -> bool:
    """Whether all users have these permissions; or there is an access control list, which may have given them."""
    if found.st_mode & needed == needed:
        return True
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:
        return False


def _manifest(folder: Path, sizes: dict[str, int], deadline: float) -> str | None:
    """SHA-256, hexadecimal; None: not in time, or a file cannot be read."""
    names = {path: os.fsencode(path) for path in sizes}
    sampled = sorted(sizes, key=lambda path: hashlib.sha256(names[path]).digest())[:SAMPLED_FILES]
    total = hashlib.sha256()
    for path in sorted(sizes, key=lambda path: names[path]):
        total.update(b"%s\0%d\n" % (names[path], sizes[path]))
    for path in sampled:
        if time.monotonic() > deadline:
            return None
        try:
            with open(folder / path, "rb") as file:
                total.update(file.read(END_BYTES))
                if sizes[path] > END_BYTES:
                    file.seek(max(END_BYTES, sizes[path] - END_BYTES))
                    total.update(file.read(END_BYTES))
        except OSError:
            return None
    return total.hexdigest()


def used_dataset() -> dict[str, Any] | None:
    """Which dataset `make data` has brought last: {"name", "version", "at"}; None: there is none."""
    return _document(DATASETS / "used.json")


def _document(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(read(path) or "null") or {}) or None
    except (ValueError, TypeError):
        return None


def _data(data_dir: str | None, full: bool) -> dict[str, Any] | None:
    if not data_dir:
        return None
    found = fingerprint(Path(data_dir)) if full else {"path": data_dir, "present": Path(data_dir).is_dir()}
    noted = _document(Path(f"{data_dir.rstrip('/')}.json")) if Path(data_dir).parent.parent == DATASETS else None
    return {**found, "brought": noted} if noted else found


def survey(options: dict[str, Any]) -> dict[str, Any]:
    """The facts of this host.

    options, all of them optional: train_interface and train_network (what the user chose for this host: NICs that it
    names are not refused for their kind), data_dir (absolute path), full (bool: also how busy the processors are,
    watched for 0.3 s before all else, the engine's storage driver, and the fingerprint of data_dir, for at most 8 s
    more), wanted (of the engine, as muster_ready.Wanted), ports (that the other hosts call: muster_firewalls.Ports),
    engine (bool, true by default: else engine, images and runs are null, which saves its three commands). The commands
    run side by side.

    Raises RuntimeError if `ip` does not answer, ValueError if the engine's answer cannot be read. Returns:
    ended (unix seconds), kernel, arch, os {id, version}, python, cpus (usable), machine_cpus, cpu_model,
    cpu_flags [those that change numerics],
    busy (share of the machine's processor time in use when the survey began, 0.0 to 1.0; null unless full),
    limits {nofile, nofile_hard} (-1 is none), threads_max (of all processes; null: not known), memory_bytes,
    memory_free_bytes, disk_free_bytes (of the engine's storage), muster_disk_free_bytes,
    place {folder, private} of Muster's own,
    engine {name, version, storage_driver (null unless full), controllers (if full: see muster_engines.About)} or null,
    nics [{name, kind, up, carrier, mtu, mac, speed_mbits, master, parent (what a VLAN is on),
    addresses [{address, prefix, family, scope}], refused (why, or null)}],
    rdma (see read_rdma), gpus and gpu_problems (see find_gpus), gpu_problem (the fatal ones in words, or null),
    gpu_health (see gpu_health), xid (see parse_xid) or null with xid_problem (why the kernel's log cannot be read),
    images {ref: id} or null, runs (see parse_runs) or null (the engine fails),
    data {path, present} or null (no data_dir); if full, see fingerprint; of a dataset that `make data` has brought also
    brought {name, version, files, bytes, fingerprint, at}: what it was then
    dataset {name, version, at} or null: the one that `make data` has brought last
    ready (whether make deploy has nothing to do for the engine; null: not asked),
    engine_change ([from, to], or empty; it and `ready` are all that a host says which lacks packages),
    firewalls (see muster_firewalls.opened; null: not asked),
    vpn (see muster_vpn.about; null: not asked, it comes with firewalls)
    """
    wanted = Wanted(**options["wanted"]) if options.get("wanted") else None
    if wanted and lacking(wanted):
        return {"ready": False, "engine_change": change_of_engine(wanted)}
    full, asked, of = bool(options.get("full")), options.get("engine", True), noted()
    busy = watch_processors() if full else None  # before the commands below keep them busy
    with ThreadPoolExecutor(max_workers=8) as pool:

        def ask(words: list[str]) -> Result:
            return run(words, ANSWERED_SECONDS) if asked else Result(1, "", "not asked")

        about = pool.submit(about_engine, of, full) if asked else None
        images, containers = pool.submit(ask, of.image_words), pool.submit(ask, of.containers())
        found, processes, log = pool.submit(find_gpus), pool.submit(read_processes), pool.submit(read_xid)
        ready = pool.submit(is_ready, wanted) if wanted else None
        firewalls = pool.submit(opened, options["ports"]) if options.get("ports") else None
        data = pool.submit(_data, options.get("data_dir"), full)
        nics, rdma = read_nics(options.get("train_interface"), options.get("train_network")), read_rdma()
        fill_speeds(nics, rdma)
        cpuinfo = head("/proc/cpuinfo", 16384)
        system = parse_os_release(read("/etc/os-release") or "")
        known = about.result() if about else {"engine": None, "storage": configured_storage(of)}
        gpus, (xid, xid_problem) = found.result(), log.result()
        facts = {
            "kernel": platform.release(),
            "arch": platform.machine(),
            "os": {"id": system["id"], "version": system["version"]},
            "python": platform.python_version(),
            "cpus": usable_cores(),
            "machine_cpus": os.cpu_count(),
            "cpu_model": parse_cpu_model(cpuinfo),
            "cpu_flags": parse_cpu_flags(cpuinfo),
            "busy": busy,
            "limits": limits(),
            "threads_max": threads_max(),
            "memory_bytes": usable_memory(),
            "memory_free_bytes": available_memory(),
            "disk_free_bytes": disk(known["storage"])[0],
            "muster_disk_free_bytes": disk(place().folder)[0],
            "place": place()._asdict(),
            "engine": known["engine"],
            "nics": nics,
            "rdma": rdma,
            "gpus": gpus["gpus"],
            "gpu_problems": gpus["gpu_problems"],
            "gpu_problem": in_words(gpus["gpu_problems"]),
            "gpu_health": [*gpu_health(gpus["rows"], processes.result()), *amd_health(gpus["gpus"])],
            "xid": xid,
            "xid_problem": xid_problem,
            "images": parse_images(of, images.result()),
            "runs": parse_runs(of, containers.result(), time.time()),
            "data": data.result(),
            "dataset": used_dataset(),
            "ready": ready.result() if ready else None,
            "engine_change": change_of_engine(wanted) if wanted else [],
            "firewalls": firewalls.result() if firewalls else None,
            "vpn": about_vpn() if options.get("ports") else None,
        }
    facts["ended"] = time.time()
    return facts
