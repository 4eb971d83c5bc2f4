"""Finds NVIDIA GPUs, and says in words why one that is there cannot be used. Pure parsers first, readers last.

Runs on bare hosts: standard library alone, Python 3.8 and later.
Exit codes of nvidia-smi: its manual page, section RETURN VALUE. Written from documentation; not
tried on a machine with a broken driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.muster_host import Result, read, run

QUERY = [
    "nvidia-smi",
    "--query-gpu=index,name,uuid,memory.total,driver_version,compute_cap",
    "--format=csv,noheader,nounits",
]
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Lines of nvidia-smi's csv as [{"index", "name", "uuid", "memory_mib", "driver", "compute_capability"}].

    memory_mib is None where the GPU shares the machine's memory ("[N/A]"). Raises ValueError for any other line.
    """
    gpus = []
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].isdigit():
            raise ValueError(f"nvidia-smi: cannot read {line!r}")
        gpus.append(
            {
                "index": int(fields[0]),
                "name": fields[1],
                "uuid": fields[2],
                "memory_mib": int(fields[3]) if fields[3].isdigit() else None,
                "driver": fields[4],
                "compute_capability": fields[5],
            }
        )
    return gpus


def explain(result: Result, devices: list[str]) -> str | None:
    """Why there are no GPUs to use: None if the machine simply has none, else what is wrong and the mend.

    devices: signs of NVIDIA hardware that do not depend on the driver (PCI addresses, /dev/nvidia0).
    """
    said = " ".join((result.out + " " + result.err).split())
    there = ", ".join(devices)
    if not devices and result.rc in (6, 9, 12, 127):
        return None
    if result.rc == 127:
        return f"an NVIDIA device ({there}) but no nvidia-smi. Mend: install NVIDIA's driver, reboot, make deploy"
    if "version mismatch" in said.lower():
        return f"NVIDIA's driver was updated under a loaded kernel module ({said}). Mend: reboot the host"
    if result.rc == 124:
        return f"a GPU hangs: {result.err}. Mend: look for Xid in dmesg, reboot the host"
    if result.rc == 6 or "no devices were found" in said.lower():
        return f"NVIDIA's driver does not find the GPU ({there}). Mend: dmesg | grep NVRM; reboot or reseat it"
    reasons = {
        9: "NVIDIA's kernel module is not loaded. Mend: modprobe nvidia, or install the driver for this kernel",
        12: "NVIDIA's library libnvidia-ml.so is not found. Mend: install the driver's user-space packages again",
        15: "a GPU has fallen off the bus. Mend: power-cycle the host, look for Xid 79 in dmesg",
    }
    reason = reasons.get(result.rc, "nvidia-smi failed. Mend: run nvidia-smi on that host by hand")
    return f"{reason} (it said: {said or 'nothing'}; exit status {result.rc})"


def nvidia_pci_devices(pci: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """PCI addresses of NVIDIA's display and 3D controllers (class 03): seen without any driver."""
    if not pci.is_dir():
        return []
    return sorted(
        device.name
        for device in pci.iterdir()
        if read(device / "vendor") == "0x10de" and (read(device / "class") or "").startswith("0x03")
    )


def find_gpus() -> tuple[list[dict[str, Any]], str | None]:
    """(GPUs, what is wrong with them or None). No GPU and nothing wrong is a normal answer."""
    devices = nvidia_pci_devices() or sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    result = run(QUERY, timeout=30.0)
    if result.rc != 0:
        return [], explain(result, devices)
    try:
        gpus = parse_gpus(result.out)
    except ValueError as error:
        return [], f"{error}. Mend: run `{' '.join(QUERY)}` on that host by hand"
    return gpus, cdi_problem(gpus, [str(path) for folder in CDI_FOLDERS for path in Path(folder).glob("nvidia*")])


def cdi_problem(gpus: list[dict[str, Any]], specifications: list[str]) -> str | None:
    """A container gets GPUs through a CDI specification: says so where there is none."""
    if not gpus or specifications:
        return None
    return (
        "containers cannot use the GPUs: no CDI specification in /etc/cdi. Mend: install NVIDIA's Container Toolkit "
        "(nvidia-ctk), then make deploy"
    )
