"""The cluster map, build/<inventory>/cluster.json: what `make deploy` learned of every host and pair of hosts.

Written by launch.deploy, read by everything that starts or follows runs. The schema is the dataclasses below;
a reader refuses another version, and a map older than its inventory.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keeper import engines
from launch.cli.make_variables import naming
from launch.cli.refusal import refuse
from launch.files import ROOT, build_dir, read_json, write_json
from launch.hosts import inventory

SCHEMA = "muster.cluster/7"

#: Whose GPUs the training image's torch can be built for: with CUDA, or with ROCm.
NVIDIA, AMD = "nvidia", "amd"

#: What must be open between the hosts on the training network, with MASTER_PORTS; the README states it.
REACH_PORTS = (29400, 29415)  # every pair of hosts is tested and measured here, below the ephemeral range
VPN_INTERFACE = "muster0"  # of the VPN, where training goes through one; muster_vpn has the same name
VPN_PORT = 51820  # of UDP, on the network below the VPN

#: Where `make data` puts datasets on the hosts: <name>/<version>/ (playbooks/module_utils/muster_data.py).
DATASET = re.compile(r"/.+/data/([A-Za-z0-9][A-Za-z0-9_-]{0,63})/[0-9a-f]{16}")  # its folder, wherever a host has it


def dataset_dir(place: engines.Place, name: str, version: str) -> str:
    """The folder of a version of a dataset on a host, which ranks see as /data."""
    return f"{place.folder}/data/{name}/{version}"


def dataset_in(data_dir: str | None) -> str | None:
    """The name of the dataset that `make data` has brought to this folder; None: the inventory names the folder."""
    found = DATASET.fullmatch(data_dir or "")
    return found[1] if found else None


def no_data(data_dir: str | None) -> tuple[str, str]:
    """What is wrong with a host that has no such folder, and how to fix it."""
    if dataset := dataset_in(data_dir):
        fix = f"`make data SRC=<folder> NAME={dataset}` brings it"
        return f"the dataset {dataset}, as `make data` last brought it, is not there", fix
    return f"has no folder {data_dir} (data_dir)", "create it, or correct data_dir"


@dataclass(frozen=True)
class MapHost:
    """One host as the last deploy found it."""

    name: str
    ssh: dict[str, Any]  # inventory.Target without its secrets, and needs_sudo_password: bool
    address: str  # on the training network, tested from every other host
    interface: str  # the host's own name for the NIC that holds `address`
    nproc_per_node: int
    gpus: list[int]  # indices to use, of those of gpu_vendor; empty: train on CPU
    cpus: int
    data_dir: str | None  # the inventory's, else that of the dataset that `make data` has brought last
    facts: dict[str, Any]  # all that playbooks/module_utils/muster_survey.py says
    firewall: bool = True  # a run answers its own hosts alone
    spare: bool = False  # as in inventory.Host
    gpu_vendor: str = NVIDIA  # the one of NVIDIA, AMD that the training image is for

    @property
    def place(self) -> engines.Place:
        """Where Muster keeps what it has there."""
        return engines.Place(**self.facts["place"])


@dataclass(frozen=True)
class Network:
    """The training network and why it was chosen."""

    name: str  # CIDR, or "routed" when the hosts share no subnet
    reason: str
    refused: list[dict[str, str]]  # {"network": ..., "reason": ...}
    below: str = ""  # the label of the network that was chosen for the VPN to go over; empty: there is no VPN


@dataclass(frozen=True)
class MapImage:
    """The training image that every host holds."""

    ref: str
    id: str
    bytes: int
    base_image: str = ""  # as in inventory.Inventory
    build_on: str = ""  # likewise


@dataclass(frozen=True)
class ClusterMap:
    """Everything a plan is made from; hosts in inventory order."""

    schema: str
    created: str  # ISO 8601, UTC
    inventory: str  # as launch.files.stored
    inventory_sha256: str
    known_hosts: str  # as launch.files.stored
    hosts: list[MapHost]
    network: Network
    image: MapImage
    measured: dict[str, Any]  # the fields of network.choose.Measurements
    measured_at: str  # ISO 8601, UTC
    measured_key: str  # of the networks, hosts and addresses that were measured


def path_of(inventory_path: Path) -> Path:
    """Where the cluster map of an inventory lies."""
    return build_dir() / inventory.build_name(inventory_path) / "cluster.json"


def to_target(host: MapHost, sudo_password: str | None = None) -> inventory.Target:
    """How to reach a host of the map."""
    fields = {key: value for key, value in host.ssh.items() if key != "needs_sudo_password"}
    return inventory.Target(name=host.name, sudo_password=sudo_password, **fields)


def ssh_fields(target: inventory.Target) -> dict[str, Any]:
    """What the map keeps of a target: everything but the password itself."""
    fields = dataclasses.asdict(target)
    fields["needs_sudo_password"] = fields.pop("sudo_password") is not None
    del fields["name"]
    return fields


def write(path: Path, cluster: ClusterMap) -> None:
    """Write the map whole or not at all."""
    write_json(path, dataclasses.asdict(cluster))


def read(inventory_path: Path, current: bool = True) -> ClusterMap:
    """The cluster map of an inventory.

    `current`: refuse one that is older than the inventory. To see and stop what runs, the hosts as deployed are right.
    Raises Refusal when there is none, or it is not of this version, or the inventory has changed since.
    """
    path = path_of(inventory_path)
    again = f"run `make deploy {naming(inventory_path)}`"
    if not inventory_path.exists():
        raise refuse(str(inventory_path), "there is no such inventory", "name one with INVENTORY=...")
    if not path.exists():
        known = (read_json(file).get("inventory") for file in build_dir().glob("*/cluster.json"))
        others = sorted(naming(Path(name)) for name in known if name and (ROOT / name).exists())
        again += f", or name one that is deployed: {', '.join(others)}" if others else ""
        raise refuse(str(path), "there is no cluster map of this inventory yet", again)
    try:
        raw = json.loads(path.read_text())
        if raw.get("schema") != SCHEMA:
            raise refuse(str(path), f"the cluster map is of version {raw.get('schema')}, not {SCHEMA}", again)
        hosts = [MapHost(**host) for host in raw["hosts"]]
        made = {"hosts": hosts, "network": Network(**raw["network"]), "image": MapImage(**raw["image"])}
        cluster = ClusterMap(**raw | made)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise refuse(str(path), f"the cluster map cannot be read ({error})", again) from None
    if current and cluster.inventory_sha256 != inventory.digest(inventory_path):
        raise refuse(str(path), f"the cluster map is older than {inventory_path}, which has changed", again)
    return cluster
