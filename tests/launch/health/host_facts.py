"""Facts of a host as muster_survey reports them, and what the checks say about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.health.host_checks import GIB, check_host
from launch.health.verdicts import Asked, Verdict

NOW = 1_795_283_600.0


def gpu(index: int, **more: Any) -> dict[str, Any]:
    return {
        "vendor": "nvidia",
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "driver": "550.54.15",
        "pci_bus_id": f"0000:{index:02x}:00",
        "mig": False,
        "mig_instances": [],
        "usable": True,
        "unusable_reason": None,
        **more,
    }


def health(index: int, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "pci_bus_id": f"0000:{index:02x}:00",
        "temperature_c": 33,
        "throttle": [],
        "ecc_uncorrected": 0,
        "repair_pending": False,
        "repair_failed": False,
        "processes": [],
        **more,
    }


def nic(name: str = "eno2", address: str = "10.78.0.12", **more: Any) -> dict[str, Any]:
    addresses = [{"address": address, "prefix": 24}] if address else []
    return {"name": name, "up": True, "carrier": True, "mtu": 1500, "speed_mbits": 1000, "addresses": addresses, **more}


def host(**more: Any) -> dict[str, Any]:
    """A healthy host with two GPUs, as muster_survey reports it, cut down to what checks read."""
    return {
        "ended": NOW,
        "muster_disk_free_bytes": 200 * GIB,
        "disk_free_bytes": 200 * GIB,
        "memory_bytes": 64 * GIB,
        "memory_free_bytes": 60 * GIB,
        "limits": {"nofile": 1024, "nofile_hard": 1048576},
        "gpus": [gpu(0), gpu(1)],
        "gpu_problems": [],
        "gpu_health": [health(0), health(1)],
        "xid": [],
        "xid_problem": None,
        "runs": [],
        "busy": 0.031,
        "machine_cpus": 16,
        "data": {"path": "/srv/data", "present": True},
        "rdma": [],
        "nics": [nic()],
        **more,
    }


ASKED = Asked(
    ranks=2,
    checkpoint_bytes=GIB,
    clock_offset=0.01,
    clock_uncertainty=0.02,
    data_dir="/srv/data",
    interface="eno2",
    address="10.78.0.12",
)


def about(check: str, found: Mapping[str, Any], asked: Asked = ASKED) -> list[Verdict]:
    return [verdict for verdict in check_host("h2", found, asked) if verdict.check == check]


def one(check: str, found: Mapping[str, Any], asked: Asked = ASKED) -> Verdict:
    verdicts = about(check, found, asked)
    assert len(verdicts) == 1, verdicts
    return verdicts[0]
