"""NVIDIA's driver and container toolkit: what a host lacks of them, and what forbids to install a driver on it.

For the survey, which asks whether there is anything to do, and for Ansible (library/muster_driver.py), which does it
where the inventory says `install_driver: true`. What is installed: roles/engine/defaults/main.yml. Written from
documentation and recorded output: not tried on a machine with a GPU. Pure functions first, readers last.
Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Set

from ansible.module_utils.muster_gpus import NVIDIA, pci_devices
from ansible.module_utils.muster_host import Result, disk, find_command, parse_os_release, read, run

DRIVER, TOOLKIT = "driver", "toolkit"
#: What NVIDIA or the system itself has packages for, by name and release.
SYSTEMS = {"debian": ("12",), "ubuntu": ("22.04", "24.04"), "rhel": ("9",)}
#: What driver, headers, compiler and the module's build take, with room to spare.
NEEDED_BYTES = 4 << 30
#: nvidia-smi's exit statuses where there is no driver for this kernel: not there, no module, no library.
ABSENT = (127, 9, 12)
SECURE_BOOT = Path("/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c")
#: What NVIDIA's installer for all systems (NVIDIA-Linux-*.run) leaves, and its packages do not.
RUNFILE = Path("/usr/bin/nvidia-uninstall")
PCI = Path("/sys/bus/pci/devices")
#: The driver's module, while it is loaded.
MODULE = Path("/sys/module/nvidia")
LISTS_SECONDS, BUILD_SECONDS = 300.0, 120.0
#: How to ask for a package that is in the lists, by system.
KNOWN = {"debian": ["apt-cache", "show"], "ubuntu": ["apt-cache", "show"], "rhel": ["dnf", "--quiet", "repoquery"]}


class Seen(NamedTuple):
    """A host, as far as its driver is concerned."""

    devices: List[str]  # PCI addresses of NVIDIA's GPUs
    smi: Result  # of `nvidia-smi -L`
    toolkit: bool  # nvidia-ctk is there
    system: str  # a name of SYSTEMS; others as os-release writes them
    version: str
    arch: str
    kernel: str
    headers: bool  # of the running kernel, are there
    container: str  # what kind of one this is; empty: none
    nouveau: bool  # is loaded
    secure_boot: bool  # is on
    runfile: bool  # NVIDIA's installer for all systems was used
    installed: str  # version of the package that nvidia-smi is of; empty: of none
    free_bytes: int  # where packages are installed


def works(smi: Result) -> bool:
    """Whether the driver answers for a GPU. Pure."""
    return smi.rc == 0 and smi.out.startswith("GPU ")


def needs_reboot(smi: Result) -> bool:
    """Whether the driver was updated under a loaded module. Pure."""
    return smi.rc == 18 or "version mismatch" in (smi.out + smi.err).lower()


def lacking(seen: Seen) -> List[str]:
    """What of DRIVER and TOOLKIT is to be installed. A driver that is there and finds a GPU broken is none. Pure."""
    if not seen.devices:
        return []
    absent = seen.smi.rc in ABSENT or needs_reboot(seen.smi)
    return [DRIVER] * absent + [TOOLKIT] * (not seen.toolkit)


def obstacles(seen: Seen, branch: int) -> List[str]:
    """What forbids to install what is lacking, each with its fix. branch: the driver's that would come. Pure."""
    release = seen.version.split(".")[0] if seen.system == "rhel" else seen.version
    found = []
    if release not in SYSTEMS.get(seen.system, ()) or seen.arch != "x86_64":
        what = f"Muster knows no packages of NVIDIA's for {seen.system} {seen.version} on {seen.arch}"
        found.append(f"{what}. Fix: install driver and container toolkit by hand, without `install_driver`")
    return found + (_of_driver(seen, branch) if DRIVER in lacking(seen) else [])


def _of_driver(seen: Seen, branch: int) -> List[str]:
    if seen.container:
        what = f"this host is a container ({seen.container}), which cannot load a kernel module"
        return [f"{what}. Fix: install the driver on the machine below it, without `install_driver`"]
    found = []
    if needs_reboot(seen.smi):
        found.append("the driver was updated under a loaded kernel module. Fix: reboot the host")
    if seen.nouveau:
        said = "`echo blacklist nouveau | sudo tee /etc/modprobe.d/blacklist-nouveau.conf`"
        image = "`sudo dracut --force`" if seen.system == "rhel" else "`sudo update-initramfs -u`"
        found.append(f"the module nouveau drives the GPU. Fix: {said}, {image}, and reboot")
    if seen.secure_boot:
        what = "Secure Boot is on, and the kernel refuses a module that is built here and signed by nobody"
        found.append(f"{what}. Fix: switch it off in the firmware, or install and enrol a signed driver by hand")
    if seen.runfile:
        what = f"NVIDIA's .run file was used here ({RUNFILE} is there), and packages must not be mixed with it"
        found.append(f"{what}. Fix: `sudo {RUNFILE}`, or repair that driver with its .run file")
    elif seen.installed and not re.match(rf"(\d+:)?{branch}\.", seen.installed):
        what = f"packages of another driver are there ({seen.installed}) and do not work ({seen.smi.complaint})"
        found.append(f"{what}. Fix: repair them (`dkms autoinstall`, `modprobe nvidia`), or remove them")
    if seen.free_bytes < NEEDED_BYTES and not seen.installed:
        room = f"{seen.free_bytes / 1e9:.1f} of {NEEDED_BYTES / 1e9:.1f} GB are free below /usr"
        found.append(f"too little room for a driver and its build: {room}. Fix: free some")
    return found


def headers_package(seen: Seen) -> str:
    """The headers of the running kernel. Pure."""
    return f"kernel-devel-{seen.kernel}" if seen.system == "rhel" else f"linux-headers-{seen.kernel}"


def unknown(seen: Seen, probes: List[Dict[str, str]], refresh: bool) -> List[str]:
    """What forbids it for want of packages. probes: {"package", "fix": for where it is in no list of this host's}.

    refresh: ask the mirrors, where something is not in the lists that are there.
    """
    old = f"reboot into the newest kernel that is installed, or install the headers of {seen.kernel} by hand"
    wanted = {} if seen.headers else {headers_package(seen): old}
    wanted.update({probe["package"]: probe["fix"] for probe in probes})
    missing = [name for name in wanted if not _is_known(seen.system, name)]
    if missing and refresh and seen.system != "rhel":
        run(["apt-get", "update"], LISTS_SECONDS)
        missing = [name for name in missing if not _is_known(seen.system, name)]
    return [f"this host's mirrors have no package {name}. Fix: {wanted[name]}" for name in missing]


def _is_known(system: str, package: str) -> bool:
    found = run([*KNOWN[system], package], LISTS_SECONDS)
    return found.rc == 0 and bool(found.out.strip())


def load() -> str:
    """Loads the module of a driver that was installed. Returns why the driver does not answer; empty where it does."""
    loaded = [run(["modprobe", name], BUILD_SECONDS) for name in ("nvidia", "nvidia-uvm")]
    smi = run(["nvidia-smi", "-L"])
    return "" if works(smi) else next((one for one in [*loaded, smi] if one.rc != 0), smi).complaint


def in_use(packages: Iterable[str]) -> Set[str]:
    """Those of a driver, while its module is loaded: whoever uses it would lose it."""
    if not MODULE.exists():
        return set()
    return {name for name in packages if re.search(r"nvidia(?!-container)|^libcuda|^dkms$|^linux-headers-", name)}


def apt_files(apt: Path = Path("/etc/apt")) -> List[Path]:
    """Sources and keys of the role; without those of a driver while that is in use."""
    found = [*apt.glob("sources.list.d/muster-nvidia-*"), *apt.glob("keyrings/muster-nvidia-*")]
    return [path for path in found if not (MODULE.exists() and path.stem.endswith(DRIVER))]


def look() -> Seen:
    """This host, now."""
    system = parse_os_release(read("/etc/os-release") or "")
    own = "rhel" if "rhel" in (system["id"], *system["like"].split()) else system["id"]
    devices = pci_devices(NVIDIA, ("0x03",), PCI)
    kernel = platform.release()
    return Seen(
        devices=devices,
        smi=run(["nvidia-smi", "-L"]) if devices else Result(127, "", ""),
        toolkit=find_command("nvidia-ctk") is not None,
        system=own,
        version=system["version"],
        arch=platform.machine(),
        kernel=kernel,
        headers=Path("/lib/modules", kernel, "build", "Makefile").exists(),
        container=container_kind(),
        nouveau=Path("/sys/module/nouveau").exists(),
        secure_boot=secure_boot(SECURE_BOOT),
        runfile=RUNFILE.exists(),
        installed=_package_version(own) if devices else "",
        free_bytes=disk("/usr")[0],
    )


def _package_version(system: str) -> str:
    tool = find_command("nvidia-smi")
    if tool is None:
        return ""
    path = os.path.realpath(tool)
    if system == "rhel":
        asked = run(["rpm", "--query", "--file", path, "--queryformat", "%{VERSION}"])
        return asked.out.strip() if asked.rc == 0 else ""
    owner = run(["dpkg-query", "--search", path]).out.partition(": ")[0]
    return run(["dpkg-query", "--show", "--showformat=${Version}", owner]).out if owner else ""


def container_kind(root: Path = Path("/")) -> str:
    """What kind of container this is; empty: none."""
    for mark, kind in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if (root / mark).exists():
            return kind
    found = re.search(r"\bcontainer=([\w-]+)", (read(root / "proc/1/environ") or "").replace("\0", " "))
    return read(root / "run/systemd/container") or (found.group(1) if found else "")


def secure_boot(variable: Path) -> bool:
    """Whether Secure Boot is on: the byte after four of attributes. Without UEFI it is not."""
    try:
        return variable.read_bytes()[4:5] == b"\x01"
    except OSError:
        return False
