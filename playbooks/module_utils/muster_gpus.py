"""Finds GPUs of NVIDIA and AMD, and says in words why one that is there cannot be used. Parsers first, readers last.

Runs on bare hosts: standard library alone, Python 3.8 and later.
Exit statuses of nvidia-smi: its manual page, section RETURN VALUE, the same numbers as NVML's nvmlReturn_t. Written
from documentation and recorded output: not tried on a machine with a GPU, with a broken driver, or with MIG. Of AMD
GPUs: the kernel's documentation of amdgpu, and ROCm's "Running ROCm Docker containers".
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable

from ansible.module_utils.muster_engines import Engine, noted
from ansible.module_utils.muster_host import Result, find_command, read, run

#: What every driver since 510 knows.
BASE_FIELDS = ("index", "name", "uuid", "memory.total", "driver_version", "compute_cap")
#: What some driver may not know: one such field, and nvidia-smi refuses the whole query, so it is asked without.
FIELDS = (
    *BASE_FIELDS,
    "pci.bus_id",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
#: The name that older drivers have for a field (renamed with 535).
OLDER_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")
INSTALL = "or let make deploy install it (`install_driver: true` in the inventory)"
NVIDIA, AMD = "0x10de", "0x1002"
PCI_DEVICES, DEVICES, KFD = Path("/sys/bus/pci/devices"), Path("/dev"), Path("/sys/class/kfd/kfd")
MIG_REASON = "MIG mode is on: NCCL cannot join ranks on MIG slices, and a rank gets a whole GPU or none"


def parse_table(text: str, fields: tuple[str, ...]) -> tuple[list[dict[str, str]], list[str]]:
    """(one dict of texts by field for each GPU, the other lines) of nvidia-smi's csv without header and units."""
    rows, others = [], []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields) and values[0].isdigit() and "GPU-" in line:
            rows.append(dict(zip(fields, values)))
        elif len(values) == len(fields) and values[0].isdigit():  # [Unknown Error] or [GPU is lost] in every field
            others.append(f"GPU {values[0]}: {values[1]}")
        elif line.strip():
            others.append(" ".join(line.split()))
    return rows, others


def number(text: str | None) -> int | None:
    """A whole number; None for "[N/A]", "[Not Supported]", "[Unknown Error]" and what is not there."""
    return int(text) if text is not None and text.isdigit() else None


def yes_or_no(text: str | None) -> bool | None:
    """nvidia-smi's Yes, No, Enabled, Disabled, 1 and 0; None for all else."""
    words = {"yes": True, "no": False, "enabled": True, "disabled": False, "1": True, "0": False}
    return words.get((text or "").lower())


def pci_id(text: str) -> str:
    """A PCI address in one form, 0000:3b:00: nvidia-smi, the kernel and the driver's log each write it differently."""
    found = re.search(r"([0-9a-fA-F]{1,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})", text)
    return f"{int(found.group(1), 16):04x}:{found.group(2)}:{found.group(3)}".lower() if found else text.lower()


def nvidia_gpus(rows: list[dict[str, str]], instances: dict[str, list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Rows of parse_table as GPUs: see find_gpus. instances: parse_mig's."""
    return [
        {
            "vendor": "nvidia",
            "index": int(row["index"]),
            "name": row["name"],
            "uuid": row["uuid"],
            "memory_mib": number(row["memory.total"]),
            "driver": row["driver_version"],
            "compute_capability": row["compute_cap"],
            "pci_bus_id": pci_id(row.get("pci.bus_id", "")),
            "ecc_uncorrected": number(row.get("ecc.errors.uncorrected.volatile.total")),
            "mig": mig,
            "mig_instances": instances.get(row["uuid"], []),
            "usable": not mig,
            "unusable_reason": MIG_REASON if mig else None,
        }
        for row in rows
        for mig in [yes_or_no(row.get("mig.mode.current")) is True]
    ]


def parse_mig(text: str) -> dict[str, list[dict[str, str]]]:
    """MIG instances as {uuid of the GPU: [{"name", "uuid"}]} from `nvidia-smi -L`."""
    found: dict[str, list[dict[str, str]]] = {}
    here: list[dict[str, str]] = []
    for line in text.splitlines():
        gpu = re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line)
        slice_ = re.match(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)", line)
        if gpu:
            here = found.setdefault(gpu.group(1), [])
        elif slice_:
            here.append({"name": slice_.group(1), "uuid": slice_.group(2)})
    return found


def explain(result: Result, devices: list[str]) -> tuple[str, str] | None:
    """Why no NVIDIA GPU can be used, as (what, fix): None if the machine simply has none.

    devices: signs of NVIDIA hardware that do not depend on the driver (PCI addresses, /dev/nvidia0).
    """
    said = " ".join((result.out + " " + result.err).split())
    there = ", ".join(devices)
    if not devices and (result.rc in (6, 9, 12, 127) or (result.rc == 0 and not result.out.strip())):
        return None
    if result.rc == 127:
        return f"an NVIDIA device ({there}) but no nvidia-smi", f"install NVIDIA's driver, make deploy; {INSTALL}"
    if result.rc == 18 or "version mismatch" in said.lower():
        return f"NVIDIA's driver was updated under a loaded kernel module ({said})", "reboot the host"
    if result.rc == 124:
        return f"a GPU hangs: {result.err}", "look for Xid in dmesg, reboot the host"
    if result.rc == 6 or "no devices were found" in said.lower():
        return f"NVIDIA's driver does not find the GPU ({there})", "dmesg | grep NVRM; reboot or reseat it"
    reasons = {
        4: ("nvidia-smi may not read the GPU", "log in as a user that may become root"),
        8: ("a GPU's power cables are not properly attached", "attach them"),
        9: ("NVIDIA's kernel module is not loaded", f"modprobe nvidia, or a driver for this kernel; {INSTALL}"),
        12: ("NVIDIA's library libnvidia-ml.so is not found", f"install the driver's user-space packages; {INSTALL}"),
        14: ("a GPU's infoROM is corrupted", "reboot the host; if it stays, have the GPU replaced"),
        15: ("a GPU has fallen off the bus", "power-cycle the host, look for Xid 79 in dmesg"),
        16: ("a GPU has to be reset before it can be used", "nvidia-smi --gpu-reset, or reboot the host"),
        17: ("the system keeps nvidia-smi from the GPU (cgroups)", "look at the devices that this host may use"),
    }
    what, fix = reasons.get(result.rc, ("nvidia-smi failed", "run nvidia-smi on that host by hand"))
    return f"{what} (it said: {said or 'nothing'}; exit status {result.rc})", fix


def explain_line(line: str, answering: int) -> dict[str, Any]:
    """A line that nvidia-smi prints about one GPU while it reports others, as an entry of gpu_problems.

    "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error", "... for GPU1: 0000:34:00.0: ...",
    "WARNING: infoROM is corrupted at gpu 0000:0B:00.0". gpu: its PCI address, "GPU 1", or None where it is not named.
    """
    pci = re.search(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}", line)
    index = re.search(r"GPU ?(\d+)\b(?!:[0-9a-fA-F]{2}:)", line)
    gpu = pci_id(pci.group(0)) if pci else f"GPU {index.group(1)}" if index else None
    named = gpu if gpu is None or gpu.startswith("GPU") else f"GPU {gpu}"
    if "inforom" in line.lower():
        what, fix = f"{named or 'a GPU'} has a corrupted infoROM", "reboot the host; if it stays, have it replaced"
        return {"vendor": "nvidia", "gpu": gpu, "fatal": False, "what": what, "fix": fix}
    what = f"{named or 'a GPU'} does not answer; {answering} {'does' if answering == 1 else 'do'} ({line})"
    fix = "look for its Xid in dmesg and reboot the host; or name the other GPUs with `gpus` in the inventory"
    return {"vendor": "nvidia", "gpu": gpu, "fatal": True, "what": what, "fix": fix}


def container_problem(gpus: list[dict[str, Any]], engine: Engine, found: list[str]) -> tuple[str, str] | None:
    """(what, fix) where containers cannot get the GPUs. found: CDI specifications, or the toolkit's program."""
    if not any(gpu["usable"] for gpu in gpus) or found:
        return None
    lacks = "no CDI specification in /etc/cdi" if engine.by_cdi else f"no {engine.gpu_tool} for {engine.name}"
    fix = f"install NVIDIA's Container Toolkit there, then make deploy; {INSTALL}"
    return f"containers cannot use the GPUs: {lacks}", fix


def json_in(text: str) -> Any:
    """The JSON in a tool's output, which may begin with warnings. Raises ValueError if there is none."""
    starts = [place for place in (text.find("{"), text.find("[")) if place >= 0]
    for start in sorted(starts):
        try:
            return json.loads(text[start:])
        except ValueError:
            continue
    raise ValueError("no JSON in it")


def parse_amd_smi(static: str, listed: str) -> list[dict[str, Any]]:
    """AMD GPUs from `amd-smi static --json` and `amd-smi list --json` (for the UUIDs; may be empty).

    ROCm 7 puts the list under "gpu_data". Raises ValueError for other text.
    """
    uuids = {entry.get("gpu"): entry.get("uuid") for entry in _amd_entries(listed)} if listed.strip() else {}
    gpus = []
    for entry in _amd_entries(static):
        asic, driver = _section(entry, "asic"), _section(entry, "driver")
        uuid = uuids.get(entry.get("gpu")) or asic.get("asic_serial") or ""
        memory, name = _mib(_section(entry, "vram").get("size")), str(asic.get("market_name", ""))
        version = str(driver.get("version") or driver.get("driver_version") or "")
        gpus.append(_amd_gpu(entry.get("gpu"), name, uuid, memory, version, _section(entry, "bus").get("bdf")))
    return gpus


def _amd_entries(text: str) -> list[dict[str, Any]]:
    found = json_in(text)
    entries = found.get("gpu_data", [found]) if isinstance(found, dict) else found
    return [entry for entry in entries if isinstance(entry, dict) and "gpu" in entry]


def _section(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of amd-smi's answer; the text "N/A" stands in the place of one that it cannot read."""
    section = entry.get(name)
    return section if isinstance(section, dict) else {}


def _mib(size: Any) -> int | None:
    """amd-smi's {"value": 65520, "unit": "MB"}, where MB are MiB."""
    if not isinstance(size, dict) or not isinstance(size.get("value"), int):
        return None
    factors = {"B": 1 / 1048576, "KB": 1 / 1024, "MB": 1, "GB": 1024}
    factor = factors.get(str(size.get("unit")).upper())
    return None if factor is None else int(size["value"] * factor)


def parse_rocm_smi(text: str) -> list[dict[str, Any]]:
    """AMD GPUs from `rocm-smi` with the words of _ask_amd.

    Cases of its keys differ between versions. Raises ValueError for other text.
    """
    found = json_in(text)
    if not isinstance(found, dict):
        raise ValueError("no object in it")
    cards = {key: value for key, value in found.items() if re.fullmatch(r"card\d+", key)}
    common = {key.lower(): value for key, value in found.get("system", {}).items()}
    gpus = []
    for key in sorted(cards, key=lambda name: int(name[4:])):
        card = {name.lower(): value for name, value in cards[key].items()}
        total = number(str(card.get("vram total memory (b)", "")))
        name = str(card.get("card series") or card.get("device name") or card.get("card model") or "")
        driver = str(common.get("driver version") or card.get("driver version") or "")
        memory = None if total is None else total // 1048576
        gpus.append(_amd_gpu(int(key[4:]), name, str(card.get("unique id", "")), memory, driver, card.get("pci bus")))
    return gpus


def _amd_gpu(index: int | None, name: str, uuid: str, memory: int | None, driver: str, pci: Any) -> dict[str, Any]:
    """A GPU as find_gpus has it, without what `amd_device` finds out."""
    return {
        "vendor": "amd",
        "index": index,
        "name": name if name not in ("", "N/A") else "AMD GPU",
        "uuid": uuid,
        "memory_mib": memory,
        "driver": driver,
        "compute_capability": "",
        "pci_bus_id": pci_id(pci) if isinstance(pci, str) and ":" in pci else "",
        "ecc_uncorrected": None,
        "mig": False,
        "mig_instances": [],
    }


def kfd_nodes(kfd: Path = KFD) -> dict[str, str]:
    """{render node: the compute driver's id of the GPU}, as {"renderD128": "51557"}; processors have the id 0."""
    found = {}
    for node in kfd.glob("topology/nodes/*"):
        minor = re.search(r"^drm_render_minor (\d+)$", read(node / "properties") or "", re.MULTILINE)
        identity = read(node / "gpu_id")
        if minor and identity and identity != "0":
            found[f"renderD{minor.group(1)}"] = identity
    return found


def render_node(pci_bus_id: str, pci: Path = PCI_DEVICES) -> str | None:
    """The render node of the GPU at a PCI address, such as renderD128."""
    return next((node.name for node in sorted((pci / f"{pci_bus_id}.0" / "drm").glob("renderD*"))), None)


def amd_device(pci_bus_id: str, pci: Path = PCI_DEVICES, dev: Path = DEVICES, kfd: Path = KFD) -> dict[str, Any]:
    """{"devices", "groups", "usable", "unusable_reason"} of the AMD GPU at a PCI address: see find_gpus."""
    render, partition = render_node(pci_bus_id, pci), read(pci / f"{pci_bus_id}.0" / "current_compute_partition")
    devices = [dev / "kfd", *([dev / "dri" / render] if render else [])]
    absent = [str(device) for device in devices if not device.exists()]
    groups, closed = owning_groups([device for device in devices if device.exists()])
    reason = None
    if not render:
        reason = "it has no render node in /dev/dri: amdgpu does not drive it"
    elif absent:
        reason = f"there is no {' and no '.join(absent)}"
    elif render not in kfd_nodes(kfd):
        reason = "amdgpu's compute driver (KFD) does not know it"
    elif partition not in (None, "SPX"):
        undo = "`amd-smi set --compute-partition SPX` makes it one"
        reason = f"it is divided into partitions ({partition}), and a rank gets a whole GPU or none; {undo}"
    elif closed:
        reason = f"root alone may use {', '.join(closed)}"
    return {
        "devices": [] if reason else [str(device) for device in devices],
        "groups": [] if reason else groups,
        "usable": reason is None,
        "unusable_reason": reason,
    }


def owning_groups(devices: list[Path]) -> tuple[list[int], list[str]]:
    """(numbers of the groups without which a user may not use these devices, devices that no group but root's may)."""
    groups, closed = set(), []
    for device in devices:
        found = device.stat()
        if found.st_mode & 0o006 == 0o006:
            continue
        if found.st_mode & 0o060 == 0o060 and found.st_gid != 0:
            groups.add(found.st_gid)
        else:
            closed.append(str(device))
    return sorted(groups), closed


def amd_gpus_of_kernel(devices: list[str], pci: Path = PCI_DEVICES) -> list[dict[str, Any]]:
    """AMD GPUs without AMD's tools, in the order of their PCI addresses: those that have a render node."""
    driven = [device for device in devices if render_node(pci_id(device), pci)]
    gpus = []
    for index, device in enumerate(driven):
        about = {name: read(pci / device / name) or "" for name in ("product_name", "unique_id", "mem_info_vram_total")}
        total = number(about["mem_info_vram_total"])
        memory = None if total is None else total // 1048576
        gpus.append(_amd_gpu(index, about["product_name"], about["unique_id"], memory, "of the kernel", device))
    return gpus


def explain_amd(results: list[Result], devices: list[str], driver_loaded: bool) -> dict[str, Any]:
    """Why nothing is known of AMD GPUs that are there, as an entry of gpu_problems.

    results: what amd-smi and rocm-smi said; driver_loaded: /dev/kfd is there. It is fatal where the kernel does not
    know them either.
    """
    there = ", ".join(devices)
    if not driver_loaded:
        what, fix = f"AMD GPUs ({there}), but amdgpu's compute driver is not loaded (no /dev/kfd)", "modprobe amdgpu"
    elif all(result.rc == 127 for result in results):
        what, fix = f"AMD GPUs ({there}), but neither amd-smi nor rocm-smi", "install amd-smi-lib to see them named"
    else:
        said = "; ".join(f"exit status {result.rc}: {result.complaint}" for result in results if result.rc != 127)
        what, fix = f"AMD GPUs ({there}), but their tools fail ({said})", "run amd-smi on that host by hand"
    return {"vendor": "amd", "gpu": None, "fatal": True, "what": what, "fix": fix}


def pci_devices(vendor: str, classes: tuple[str, ...], pci: Path = PCI_DEVICES) -> list[str]:
    """PCI addresses of a vendor's devices of some classes, seen without any driver; "0x03" is display."""
    return sorted(
        device.name
        for device in pci.glob("*")
        if read(device / "vendor") == vendor and (read(device / "class") or "").startswith(classes)
    )


def nvidia_devices(pci: Path = PCI_DEVICES, dev: Path = DEVICES) -> list[str]:
    """Signs of NVIDIA GPUs: display and 3D controllers on PCI, or else /dev/nvidia0."""
    return pci_devices(NVIDIA, ("0x03",), pci) or sorted(str(path) for path in dev.glob("nvidia[0-9]*"))


def amd_devices(pci: Path = PCI_DEVICES, kfd: Path = DEVICES / "kfd") -> list[str]:
    """PCI addresses of AMD's compute GPUs: accelerators (class 12), display controllers without a screen (0380).

    A screen's (0300) counts only with the compute driver: old servers and many processors carry one that nobody
    would train on.
    """
    return pci_devices(AMD, ("0x03", "0x12") if kfd.exists() else ("0x0380", "0x12"), pci)


def ask_nvidia(fields: tuple[str, ...], command: Callable[[list[str]], Result]) -> tuple[Result, tuple[str, ...]]:
    """(nvidia-smi's answer, the fields in it): without those that this driver does not know, or by older names."""
    while True:
        result = command(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        unknown = re.search(r'Field "([^"]+)" is not a valid field to query', result.out + result.err)
        field = unknown.group(1) if unknown else ""
        if field not in fields or field in BASE_FIELDS:
            return result, fields
        older = OLDER_NAMES.get(field)
        fields = tuple(older if name == field else name for name in fields if name != field or older)


def find_gpus(command: Callable[[list[str]], Result] = run) -> dict[str, Any]:
    """{"gpus", "gpu_problems", "rows"}: the GPUs, what is wrong with any, and nvidia-smi's texts for muster_gpu_health.

    gpus: [{"vendor" (nvidia, amd), "index" (its vendor's own), "name", "uuid", "memory_mib" (None where it shares the
    machine's), "driver", "compute_capability", "pci_bus_id" (0000:3b:00), "ecc_uncorrected" (None: no ECC), "mig",
    "mig_instances" [{"name", "uuid"}], "usable" (for a rank whose torch is for this vendor), "unusable_reason"}]; of
    AMD's also "devices" [paths that a container needs] and "groups" [numbers of the groups that own them].
    gpu_problems: [{"vendor", "gpu" (its PCI address, or "GPU 1"; None: all of them), "fatal" (no rank can use it),
    "what", "fix"}].
    No GPU and nothing wrong is a normal answer.
    """
    gpus, problems, rows = _find_nvidia(nvidia_devices(), command)
    if devices := amd_devices():
        amd, problem = find_amd(devices, command)
        gpus += amd
        problems += [problem] if problem else []
    return {"gpus": gpus, "gpu_problems": problems, "rows": rows}


def _find_nvidia(
    devices: list[str], command: Callable[[list[str]], Result]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, str]]]:
    result, fields = ask_nvidia(FIELDS, command)
    rows, others = parse_table(result.out, fields)
    if not rows:
        return [], _of_all(explain(result, devices)), []
    mig = any(yes_or_no(row.get("mig.mode.current")) for row in rows)
    gpus = nvidia_gpus(rows, parse_mig(command(["nvidia-smi", "-L"]).out) if mig else {})
    complaints = [line for line in others + result.err.splitlines() if re.search(r"\bgpu", line, re.IGNORECASE)]
    problems = [explain_line(line, len(rows)) for line in complaints]
    if result.rc != 0 and not problems:
        problems = _of_all(explain(result, devices))
    engine = noted()
    tool = find_command(engine.gpu_tool)
    specifications = [str(path) for folder in CDI_FOLDERS for path in Path(folder).glob("nvidia*")]
    missing = container_problem(gpus, engine, specifications if engine.by_cdi else [tool] if tool else [])
    return gpus, problems + _of_all(missing), rows


def _of_all(reason: tuple[str, str] | None) -> list[dict[str, Any]]:
    """(what, fix) of all NVIDIA GPUs as entries of gpu_problems."""
    return [{"vendor": "nvidia", "gpu": None, "fatal": True, "what": reason[0], "fix": reason[1]}] if reason else []


def find_amd(
    devices: list[str],
    command: Callable[[list[str]], Result],
    pci: Path = PCI_DEVICES,
    dev: Path = DEVICES,
    kfd: Path = KFD,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """(AMD's GPUs, what is wrong with all of them): named by AMD's tools, or else by the kernel, whose they are."""
    gpus, problem = _ask_amd(devices, (dev / "kfd").exists(), command)
    if problem and (dev / "kfd").exists() and (gpus := amd_gpus_of_kernel(devices, pci)):
        problem = None
    return [{**gpu, **amd_device(gpu["pci_bus_id"], pci, dev, kfd)} for gpu in gpus], problem


def _ask_amd(
    devices: list[str], driver_loaded: bool, command: Callable[[list[str]], Result]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    newer = command(["amd-smi", "static", "--asic", "--bus", "--vram", "--driver", "--json"])
    if newer.rc == 0:
        listed = command(["amd-smi", "list", "--json"])
        try:
            return parse_amd_smi(newer.out, listed.out if listed.rc == 0 else ""), None
        except ValueError as error:
            newer = Result(1, "", f"amd-smi: {error}")
    words = ["--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--showbus", "--showdriverversion"]
    older = command(["rocm-smi", *words, "--json"])
    if older.rc == 0:
        try:
            return parse_rocm_smi(older.out), None
        except ValueError as error:
            older = Result(1, "", f"rocm-smi: {error}")
    return [], explain_amd([newer, older], devices, driver_loaded)


def in_words(problems: list[dict[str, Any]]) -> str | None:
    """What stands in the way of training on GPUs, in one text with the fixes; None: nothing."""
    return "; ".join(f"{problem['what']}. Fix: {problem['fix']}" for problem in problems if problem["fatal"]) or None
