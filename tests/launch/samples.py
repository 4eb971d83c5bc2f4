"""Facts, cluster maps and plans for the tests of this room, small and made by hand."""

from __future__ import annotations

from typing import Any

from keeper.engines import ROOTS
from launch.hosts import clustermap
from launch.hosts.clustermap import ClusterMap, MapHost, MapImage, Network


def nic(
    name: str, *addresses: str, refused: str | None = None, speed: int | None = None, mac: str = ""
) -> dict[str, Any]:
    """A NIC as muster_survey reports it; addresses as `10.0.0.1/24`."""
    return {
        "name": name,
        "kind": "physical",
        "mac": mac,
        "speed_mbits": speed,
        "refused": refused,
        "addresses": [
            {"address": a.split("/")[0], "prefix": int(a.split("/")[1]), "family": 6 if ":" in a else 4}
            for a in addresses
        ],
    }


def facts(*nics: dict[str, Any], gpus: int = 0, problem: str | None = None) -> dict[str, Any]:
    """Facts of one host, cut down to what decisions need."""
    return {
        "nics": list(nics),
        "gpus": [{"index": i, "name": "NVIDIA H200"} for i in range(gpus)],
        "gpu_problem": problem,
        "gpu_problems": [{"vendor": "nvidia", "gpu": None, "fatal": True, "what": problem, "fix": "fix it"}]
        if problem
        else [],
        "cpus": 4,
    }


def full_reach(known: dict[str, Any], broken: set[tuple[str, str]] = frozenset()) -> dict[str, list[dict[str, Any]]]:  # type: ignore[assignment]
    """Every host reaches every address of every other, but for (from, address) in `broken`."""
    return {
        a: [
            {
                "peer": b,
                "address": entry["address"],
                "ok": (a, entry["address"]) not in broken,
                "milliseconds": 1.0,
                "error": "timed out" if (a, entry["address"]) in broken else None,
            }
            for b in known
            if b != a
            for one in known[b]["nics"]
            if not one["refused"]
            for entry in one["addresses"]
        ]
        for a in known
    }


def cluster(*nprocs: int, gpus: bool = False) -> ClusterMap:
    """A cluster map with one host per number of ranks."""
    return ClusterMap(
        schema=clustermap.SCHEMA,
        created="2026-01-01T00:00:00+00:00",
        inventory="inventory/lab",
        inventory_sha256="0" * 64,
        known_hosts="inventory/lab/known_hosts",
        hosts=[
            MapHost(
                name=f"h{i + 1}",
                ssh={"address": f"192.0.2.{11 + i}", "port": 22, "user": "muster", "needs_sudo_password": False},
                address=f"10.78.0.{11 + i}",
                interface=f"eno{i}",
                nproc_per_node=nproc,
                gpus=list(range(nproc)) if gpus else [],
                cpus=4,
                data_dir="/srv/data" if i == 0 else None,
                facts={"place": ROOTS._asdict()},
            )
            for i, nproc in enumerate(nprocs)
        ],
        network=Network("10.78.0.0/24", "all pairs connect", []),
        image=MapImage("localhost/muster/train:latest", "ab" * 32, 1),
        measured={},
        measured_at="2026-01-01T00:00:00+00:00",
        measured_key="",
    )
