#!/usr/bin/python3
"""Everything Muster wants to know of a host, in one call: system, memory, disk, engine, NICs, GPUs, images, runs.

The reader is launch/deploy.py (through playbooks/prepare.yml); the schema is RETURN below. It only looks and changes
nothing. Needs root for Podman's images and containers. Not for the network between hosts: that is muster_reach.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_gpus import find_gpus
from ansible.module_utils.muster_host import Result, disk, parse_os_release, read, run, usable_cores, usable_memory
from ansible.module_utils.muster_nics import candidates, read_nics

DOCUMENTATION = r"""
module: muster_facts
short_description: Everything about a host in one call
options:
  root:
    description: Muster's folder on the host.
    type: path
    default: /var/lib/muster
  train_interface:
    description: The NIC that the user chose for this host. It is not refused, whatever its kind.
    type: str
  train_network:
    description: The network (CIDR) that the user chose. NICs with an address in it are not refused.
    type: str
author: [Muster]
"""

RETURN = r"""
facts:
  description: >-
    time (unix seconds), hostname, machine_id, kernel, arch, os {id, version}, python, cpus (usable), cpu_model,
    memory_bytes, disk_free_bytes and disk_total_bytes (of Podman's storage), muster_disk_free_bytes, shm_bytes,
    engine {name, version, runtime, storage_driver} or null,
    nics [{name, kind, up, carrier, mtu, mac, speed_mbits, master,
    addresses [{address, prefix, family, scope}], refused (why, or null)}],
    candidates [address] (what muster_reach shall try),
    gpus [{index, name, uuid, memory_mib, driver, compute_capability}], gpu_problem (words or null),
    images {ref, id}, runs [{run, container, state, owner}]
  returned: always
  type: dict
"""

IMAGE_PREFIX = "localhost/muster/"


def parse_engine(info: Result) -> tuple[dict[str, str] | None, str]:
    """(engine or None, folder of its storage) from `podman info --format json`."""
    if info.rc != 0:
        return None, "/var/lib/containers"
    data = json.loads(info.out)
    engine = {
        "name": "podman",
        "version": data["version"]["Version"],
        "runtime": data["host"]["ociRuntime"]["name"],
        "storage_driver": data["store"]["graphDriverName"],
    }
    return engine, data["store"]["graphRoot"]


def parse_images(images: Result) -> dict[str, str]:
    """Muster's images as {ref: id} from `podman images --no-trunc --format json`."""
    found = {}
    for image in json.loads(images.out or "[]") if images.rc == 0 else []:
        for name in image.get("Names") or []:
            if name.startswith(IMAGE_PREFIX):
                found[name] = image["Id"].split(":")[-1]
    return found


def parse_runs(containers: Result) -> list[dict[str, str]]:
    """Containers of runs from `podman ps --all --filter label=muster.run --format json`."""
    return [
        {
            "run": container["Labels"]["muster.run"],
            "container": container["Names"][0],
            "state": container["State"],
            "owner": container["Labels"].get("muster.owner", ""),
        }
        for container in (json.loads(containers.out or "[]") if containers.rc == 0 else [])
    ]


def parse_cpu_model(cpuinfo: str) -> str:
    """The processor's name from /proc/cpuinfo; empty where the kernel gives none (arm64)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return ""


def gather(root: str, train_interface: str | None, train_network: str | None) -> dict[str, Any]:
    """The facts. Commands run side by side: each costs about 0.1 s."""
    label = ["--filter", "label=muster.run"]
    with ThreadPoolExecutor(max_workers=4) as pool:
        info = pool.submit(run, ["podman", "info", "--format", "json"])
        images = pool.submit(run, ["podman", "images", "--no-trunc", "--format", "json"])
        containers = pool.submit(run, ["podman", "ps", "--all", *label, "--format", "json"])
        found = pool.submit(find_gpus)
        nics = read_nics(train_interface, train_network)
        engine, storage = parse_engine(info.result())
        gpus, gpu_problem = found.result()
        system = parse_os_release(read("/etc/os-release") or "")
        free, total = disk(storage)
        shared = os.statvfs("/dev/shm")
        return {
            "time": time.time(),
            "hostname": socket.gethostname(),
            "machine_id": read("/etc/machine-id") or "",
            "kernel": platform.release(),
            "arch": platform.machine(),
            "os": {"id": system["id"], "version": system["version"]},
            "python": platform.python_version(),
            "cpus": usable_cores(),
            "cpu_model": parse_cpu_model(read("/proc/cpuinfo") or ""),
            "memory_bytes": usable_memory(),
            "disk_free_bytes": free,
            "disk_total_bytes": total,
            "muster_disk_free_bytes": disk(Path(root))[0],
            "shm_bytes": shared.f_blocks * shared.f_frsize,
            "engine": engine,
            "nics": nics,
            "candidates": candidates(nics),
            "gpus": gpus,
            "gpu_problem": gpu_problem,
            "images": parse_images(images.result()),
            "runs": parse_runs(containers.result()),
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/var/lib/muster"},
            "train_interface": {"type": "str"},
            "train_network": {"type": "str"},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        facts = gather(options["root"], options["train_interface"], options["train_network"])
    except (RuntimeError, ValueError) as error:
        module.fail_json(msg=str(error))
    if facts["engine"] and facts["engine"]["storage_driver"] == "vfs":
        module.warn(
            "Podman stores images with vfs on this host: every layer is a full copy, slow and large. Mend: put "
            "/var/lib/containers on ext4, xfs or btrfs (not on another overlay), or install fuse-overlayfs"
        )
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
