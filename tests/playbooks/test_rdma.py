"""RDMA ports from trees like /sys/class/infiniband: InfiniBand, RoCE over a bond, ports that are down, none at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils import muster_nics


def port(
    root: Path,
    device: str,
    number: int = 1,
    *,
    state: str = "4: ACTIVE",
    rate: str = "100 Gb/sec (4X EDR)",
    layer: str = "InfiniBand",
    gids: tuple[str, ...] = (),
) -> Path:
    """One port of a device as the kernel shows it; returns the device's folder."""
    here = root / device / "ports" / str(number)
    (here / "gid_attrs" / "ndevs").mkdir(parents=True)
    for n, name in enumerate(gids):
        (here / "gid_attrs" / "ndevs" / str(n)).write_text(name + "\n")
    for name, text in (("state", state), ("rate", rate), ("link_layer", layer), ("phys_state", "5: LinkUp")):
        (here / name).write_text(text + "\n")
    (root / device / "device").mkdir(exist_ok=True)
    return root / device


def nic(device: Path, name: str, dev_port: int = 0) -> None:
    folder = device / "device" / "net" / name
    folder.mkdir(parents=True)
    (folder / "dev_port").write_text(f"{dev_port}\n")
    (folder / "dev_id").write_text("0x0\n")


def test_ports_are_reported_with_state_rate_layer_and_nics(tmp_path: Path) -> None:
    tmp_path, verbs = tmp_path / "infiniband", tmp_path / "infiniband_verbs"
    for number, name in enumerate(("mlx5_1", "mlx5_0")):
        (verbs / f"uverbs{number}").mkdir(parents=True)
        (verbs / f"uverbs{number}" / "ibdev").write_text(f"{name}\n")
    (verbs / "abi_version").write_text("6\n")
    nic(port(tmp_path, "mlx5_0", rate="400 Gb/sec (4X NDR)"), "ibp12s0")
    port(tmp_path, "mlx5_1", state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    port(tmp_path, "mlx5_bond_0", rate="25 Gb/sec (1X EDR)", layer="Ethernet", gids=("bond0", "bond0", "bond0.20"))
    assert muster_nics.read_rdma(tmp_path) == [
        {
            "device": "mlx5_0",
            "port": 1,
            "state": "ACTIVE",
            "rate_gbits": 400.0,
            "link_layer": "InfiniBand",
            "nics": ["ibp12s0"],
            "soft": False,
            "verbs": "uverbs1",
        },
        {
            "device": "mlx5_1",
            "port": 1,
            "state": "DOWN",
            "rate_gbits": 10.0,
            "link_layer": "InfiniBand",
            "nics": [],
            "soft": False,
            "verbs": "uverbs0",
        },
        {
            "device": "mlx5_bond_0",
            "port": 1,
            "state": "ACTIVE",
            "rate_gbits": 25.0,
            "link_layer": "Ethernet",
            "nics": ["bond0", "bond0.20"],
            "soft": False,
            "verbs": None,
        },
    ]


def test_each_port_of_a_device_has_its_own_nic(tmp_path: Path) -> None:
    device = port(tmp_path, "mlx4_0", 1)
    port(tmp_path, "mlx4_0", 2, state="2: INIT")
    nic(device, "ib0", 0)
    nic(device, "ib1", 1)
    found = muster_nics.read_rdma(tmp_path)
    assert [(entry["port"], entry["state"], entry["nics"]) for entry in found] == [
        (1, "ACTIVE", ["ib0"]),
        (2, "INIT", ["ib1"]),
    ]


def test_rdma_in_software_is_marked_as_such(tmp_path: Path) -> None:
    device = port(tmp_path, "rxe0", layer="Ethernet", rate="2.5 Gb/sec (1X SDR)")
    (device / "parent").write_text("eth0\n")
    found = muster_nics.read_rdma(tmp_path)[0]
    assert found["soft"] and found["nics"] == ["eth0"] and found["rate_gbits"] == 2.5


def test_a_port_that_says_nothing_is_unknown_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "mlx5_9" / "ports" / "1").mkdir(parents=True)
    found = muster_nics.read_rdma(tmp_path)[0]
    assert (found["state"], found["rate_gbits"], found["link_layer"]) == ("unknown", None, "unknown")


def test_a_machine_without_rdma_has_none(tmp_path: Path) -> None:
    assert muster_nics.read_rdma(tmp_path / "infiniband") == []


@pytest.mark.parametrize(("text", "rate"), [("56 Gb/sec (4X FDR)", 56.0), ("", None), (None, None), ("fast", None)])
def test_rates(text: str | None, rate: float | None) -> None:
    assert muster_nics.parse_rate(text) == rate


def test_an_ipoib_nic_without_a_speed_gets_its_ports(tmp_path: Path) -> None:
    nics: list[dict[str, object]] = [
        {"name": "ib0", "kind": "infiniband", "speed_mbits": None},
        {"name": "ib1", "kind": "infiniband", "speed_mbits": 56000},
        {"name": "eth0", "kind": "physical", "speed_mbits": None},
    ]
    muster_nics.fill_speeds(nics, [{"nics": ["ib0", "ib1", "eth0"], "rate_gbits": 100.0}])
    assert [entry["speed_mbits"] for entry in nics] == [100000, 56000, None]
