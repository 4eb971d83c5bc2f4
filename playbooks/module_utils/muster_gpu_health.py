"""The state of GPUs beyond their presence: temperature, throttling, memory errors, who uses them, Xid lines.

Pure parsers first, readers last. How grave each finding is, the control machine decides. Runs on bare hosts:
standard library alone, Python 3.8 and later. Written from documentation (AMD: the kernel's, of amdgpu) and recorded
output: not verified on a machine with a GPU.
"""

from __future__ import annotations

import pwd
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Callable

from ansible.module_utils.muster_gpus import KFD, PCI_DEVICES, kfd_nodes, number, pci_id, render_node, yes_or_no
from ansible.module_utils.muster_host import Result, read, run

#: Bits of nvmlClocksEventReasons (nvml.h) in words. Idle is left out: it slows nobody.
THROTTLE_BITS = (
    (0x2, "application clocks"),
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
)
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")


def parse_throttle(text: str | None) -> list[str] | None:
    """Why a GPU runs slower than it could, in words, from 0x0000000000000044; None where the GPU does not say."""
    try:
        bits = int(text or "", 16)
    except ValueError:
        return None
    return [words for bit, words in THROTTLE_BITS if bits & bit]


def parse_processes(text: str, owner: Callable[[int], str | None]) -> dict[str, list[dict[str, Any]]]:
    """{uuid of the GPU: [{"pid", "user", "name", "memory_mib"}]} from nvidia-smi's csv of compute processes.

    Fields gpu_uuid, pid, process_name, used_memory; a name may hold commas. user is None for a process that has
    ended, or that lives where this one does not see it. memory_mib is None for "[N/A]".
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) < 4 or not fields[1].isdigit():
            continue
        pid = int(fields[1])
        entry = {"pid": pid, "user": owner(pid), "name": ", ".join(fields[2:-1]), "memory_mib": number(fields[-1])}
        found.setdefault(fields[0], []).append(entry)
    return found


def gpu_health(rows: list[dict[str, str]], processes: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """NVIDIA GPUs as [{"vendor", "index", "pci_bus_id", "uuid", "temperature_c", "throttle", "ecc_uncorrected",
    "repair_pending", "repair_failed", "processes"}] from the rows of muster_gpus.find_gpus.

    throttle: words, or None where the GPU does not say. repair_pending: pages or rows wait for a reset or reboot to be
    replaced; repair_failed: none are left to replace them with. None where the GPU does not say.
    """
    return [
        {
            "vendor": "nvidia",
            "index": int(row["index"]),
            "pci_bus_id": pci_id(row.get("pci.bus_id", "")),
            "uuid": row["uuid"],
            "temperature_c": number(row.get("temperature.gpu")),
            "throttle": parse_throttle(
                row.get("clocks_event_reasons.active", row.get("clocks_throttle_reasons.active"))
            ),
            "ecc_uncorrected": number(row.get("ecc.errors.uncorrected.volatile.total")),
            "repair_pending": _any(row, "retired_pages.pending", "remapped_rows.pending"),
            "repair_failed": _any(row, "remapped_rows.failure"),
            "processes": processes.get(row["uuid"], []),
        }
        for row in rows
    ]


def _any(row: dict[str, str], *fields: str) -> bool | None:
    known = [answer for answer in (yes_or_no(row.get(field)) for field in fields) if answer is not None]
    return any(known) if known else None


def amd_health(
    gpus: list[dict[str, Any]], pci: Path = PCI_DEVICES, kfd: Path = KFD, proc: Path = Path("/proc")
) -> list[dict[str, Any]]:
    """AMD GPUs as `gpu_health` has NVIDIA's, from the GPUs of muster_gpus.find_gpus and what the kernel says of them.

    It does not say why one is slow. The temperature is that of the GPU's edge, which the largest have no sensor for.
    """
    processes, nodes, found = read_amd_processes(kfd, proc), kfd_nodes(kfd), []
    for gpu in (one for one in gpus if one["vendor"] == "amd"):
        folder = pci / f"{gpu['pci_bus_id']}.0"
        pages, errors = read(folder / "ras" / "gpu_vram_bad_pages"), read(folder / "ras" / "umc_err_count")
        sensor = next((read(file) for file in sorted(folder.glob("hwmon/hwmon*/temp1_input"))), None)
        degrees, counted = number(sensor), re.search(r"^ue: (\d+)", errors or "", re.MULTILINE)
        states = None if pages is None else re.findall(r": ([RPF])$", pages, re.MULTILINE)
        entry = {
            "vendor": "amd",
            "index": gpu["index"],
            "pci_bus_id": gpu["pci_bus_id"],
            "uuid": gpu["uuid"],
            "temperature_c": None if degrees is None else degrees // 1000,
            "throttle": None,
            "ecc_uncorrected": int(counted.group(1)) if counted else None,
            "repair_pending": None if states is None else "P" in states,
            "repair_failed": None if states is None else "F" in states,
            "processes": processes.get(nodes.get(render_node(gpu["pci_bus_id"], pci) or "", ""), []),
        }
        found.append(entry)
    return found


def read_amd_processes(kfd: Path = KFD, proc: Path = Path("/proc")) -> dict[str, list[dict[str, Any]]]:
    """The programs that hold memory of an AMD GPU, by the compute driver's id of it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(kfd.glob("proc/*/vram_*")):
        held, pid = number(read(file)), int(file.parent.name)
        if held:
            name = read(proc / str(pid) / "comm") or ""
            entry = {"pid": pid, "user": owner_of(pid, proc), "name": name, "memory_mib": held // 1048576}
            found.setdefault(file.name[len("vram_") :], []).append(entry)
    return found


def parse_xid(log: str, booted: float | None) -> list[dict[str, Any]]:
    """Xid lines as [{"pci", "xid", "when", "count", "line"}], one entry for each GPU and number, the last line of it.

    log: of `dmesg` ("[  12.3] ..."), or with ISO or unix times before the line (`dmesg --time-format iso`,
    `journalctl -k -o short-unix`). when: unix seconds, None where the line has no time. booted: unix time of the
    boot, that seconds since the boot are counted from.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in log.splitlines():
        match = XID.search(line)
        if not match:
            continue
        key = pci_id(match.group(1)), int(match.group(2))
        count = found[key]["count"] + 1 if key in found else 1
        said = line[match.start() :].strip()
        found[key] = {"pci": key[0], "xid": key[1], "when": _when(line, booted), "count": count, "line": said}
    return list(found.values())


def _when(line: str, booted: float | None) -> float | None:
    since_boot = re.match(r"\s*(?:<\d+>)?\[\s*(\d+\.\d+)\]", line)
    if since_boot:
        return None if booted is None else round(booted + float(since_boot.group(1)), 1)
    first = line.split(" ", 1)[0]
    if re.fullmatch(r"\d{9,}\.\d+", first):
        return float(first)
    try:
        # Python before 3.11 reads neither a comma nor an offset without a colon.
        return datetime.fromisoformat(re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", first.replace(",", "."))).timestamp()
    except ValueError:
        return None


def owner_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The name of a process's user, or their number where they have no name; None if the process is not there."""
    try:
        uid = (proc / str(pid)).stat().st_uid
        return pwd.getpwuid(uid).pw_name
    except OSError:
        return None
    except KeyError:
        return str(uid)


def read_processes(command: Callable[..., Result] = run) -> dict[str, list[dict[str, Any]]]:
    """The programs that compute on each GPU, by its UUID. Empty where nvidia-smi does not answer."""
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    result = command(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    return parse_processes(result.out, owner_of) if result.rc == 0 else {}


def boot_time(uptime: str | None, now: float) -> float | None:
    """Unix time of the boot from /proc/uptime."""
    try:
        return now - float((uptime or "").split()[0])
    except (ValueError, IndexError):
        return None


def read_xid(command: Callable[..., Result] = run) -> tuple[list[dict[str, Any]] | None, str | None]:
    """(Xid lines of the kernel's log since the boot, None), or (None, why it cannot be read)."""
    log = command(["dmesg"], timeout=5.0)
    if log.rc != 0:
        journal = command(["journalctl", "--dmesg", "--boot", "--output=short-unix", "--no-pager"], timeout=5.0)
        # Without any journal it says so and still ends with 0.
        if journal.rc != 0 or "no journal files" in (journal.out + journal.err).lower():
            return None, f"the kernel's log cannot be read: {log.complaint}"
        log = journal
    return parse_xid(log.out, boot_time(read("/proc/uptime"), time.time())), None
