"""What the modules read of a machine, from recorded texts: GPUs, cgroups, Podman's answers, os-release."""

from __future__ import annotations

import json
import time
from pathlib import Path

import muster_facts
import pytest
from ansible.module_utils import muster_gpus, muster_host
from ansible.module_utils.muster_host import Result

TWO_GPUS = """\
0, NVIDIA GeForce RTX 4090, GPU-1d1b6bd1-7a34-26b2-3b5c-0a5f5a0f3b11, 24564, 550.54.15, 8.9
1, NVIDIA H100 80GB HBM3, GPU-7fb1a0c9-0b9e-4f6e-a6d2-2f0cb44d2c01, 81559, 550.54.15, 9.0
"""


def test_gpus_are_read_from_nvidia_smi() -> None:
    gpus = muster_gpus.parse_gpus(TWO_GPUS)
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    assert gpus[1] == {
        "index": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-7fb1a0c9-0b9e-4f6e-a6d2-2f0cb44d2c01",
        "memory_mib": 81559,
        "driver": "550.54.15",
        "compute_capability": "9.0",
    }


def test_a_gpu_that_shares_the_machines_memory_has_no_size_of_its_own() -> None:
    text = "0, NVIDIA GB10, GPU-d4b0c5de-52f0-7ca5-ae4c-1b8b3a3f0a7e, [N/A], 580.95.05, 12.1\n"
    assert muster_gpus.parse_gpus(text)[0]["memory_mib"] is None


def test_lines_that_are_no_gpus_are_not_taken_for_some() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        muster_gpus.parse_gpus("Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n")


FAILED_9 = Result(
    9,
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n",
    "",
)
MISMATCH = Result(18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n", "")


@pytest.mark.parametrize(
    ("result", "mend"),
    [
        (FAILED_9, "modprobe nvidia"),
        (MISMATCH, "reboot"),
        (Result(12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", ""), "user-space packages"),
        (Result(15, "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n", ""), "power-cycle"),
        (Result(6, "No devices were found\n", ""), "NVRM"),
        (Result(127, "", "nvidia-smi: not installed"), "install NVIDIA's driver"),
        (Result(124, "", "nvidia-smi: no answer within 30 s"), "Xid"),
        (Result(255, "Unknown Error\n", ""), "by hand"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem_with_a_mend_not_a_missing_gpu(result: Result, mend: str) -> None:
    problem = muster_gpus.explain(result, ["0000:3b:00.0"])
    assert problem is not None and mend in problem.partition("Mend: ")[2]


@pytest.mark.parametrize("result", [FAILED_9, Result(6, "No devices were found\n", ""), Result(127, "", "")])
def test_a_machine_without_nvidia_hardware_simply_has_no_gpu(result: Result) -> None:
    assert muster_gpus.explain(result, []) is None


def test_gpus_without_a_cdi_specification_are_a_problem() -> None:
    gpus = muster_gpus.parse_gpus(TWO_GPUS)
    assert "nvidia-ctk" in (muster_gpus.cdi_problem(gpus, []) or "")
    assert muster_gpus.cdi_problem(gpus, ["/etc/cdi/nvidia.yaml"]) is None
    assert muster_gpus.cdi_problem([], []) is None


def test_nvidia_cards_are_seen_without_any_driver_and_other_devices_are_not(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("0000:3b:00.0", "0x10de", "0x030200"),
        ("0000:3b:00.1", "0x10de", "0x040300"),  # the card's sound
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert muster_gpus.nvidia_pci_devices(tmp_path) == ["0000:3b:00.0"]


@pytest.mark.parametrize(
    ("cpu_max", "quota", "period", "cores"),
    [
        ("max 100000", None, None, None),
        ("150000 100000", None, None, 1.5),
        (None, "-1", "100000", None),
        (None, "50000", "100000", 0.5),
        (None, None, None, None),
    ],
)
def test_cpu_quotas_of_both_cgroup_versions(
    cpu_max: str | None, quota: str | None, period: str | None, cores: float | None
) -> None:
    assert muster_host.parse_cpu_quota(cpu_max, quota, period) == cores


@pytest.mark.parametrize(
    ("text", "limit"), [("max", None), ("9223372036854771712", None), ("209715200", 209715200), (None, None)]
)
def test_memory_limits_of_both_cgroup_versions(text: str | None, limit: int | None) -> None:
    assert muster_host.parse_memory_limit(text) == limit


def test_cgroup_paths_of_a_hybrid_machine() -> None:
    text = "4:memory:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/c\n0::/d\n"
    paths = muster_host.parse_cgroup_paths(text)
    assert (paths["memory"], paths["cpu"], paths["cpuacct"], paths[""]) == ("/a", "/b", "/b", "/d")


def test_this_machine_has_at_least_a_core_and_some_memory() -> None:
    assert muster_host.usable_cores() >= 1
    assert muster_host.usable_memory() > 1 << 26


def test_a_command_that_hangs_or_is_missing_gives_a_result_in_time() -> None:
    begun = time.monotonic()
    assert muster_host.run(["sleep", "30"], timeout=0.2).rc == 124
    assert muster_host.run(["no-such-command-anywhere"]).rc == 127
    assert time.monotonic() - begun < 5


def test_the_disk_of_a_folder_that_is_not_there_is_that_of_its_parent(tmp_path: Path) -> None:
    assert muster_host.disk(tmp_path / "not" / "there")[1] == muster_host.disk(tmp_path)[1]


def test_os_release_with_and_without_quotes() -> None:
    text = 'NAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
    assert muster_host.parse_os_release(text) == {"id": "ubuntu", "version": "24.04", "like": "debian"}


def test_podmans_answers_are_read_and_only_musters_own_things_are_told() -> None:
    info = {
        "version": {"Version": "4.3.1"},
        "host": {"ociRuntime": {"name": "runc"}},
        "store": {"graphDriverName": "overlay", "graphRoot": "/data/containers"},
    }
    engine, storage = muster_facts.parse_engine(Result(0, json.dumps(info), ""))
    assert engine == {"name": "podman", "version": "4.3.1", "runtime": "runc", "storage_driver": "overlay"}
    assert storage == "/data/containers"
    images = [{"Id": "ab" * 32, "Names": ["localhost/muster/train:latest", "localhost/other:1"]}, {"Id": "c" * 64}]
    assert muster_facts.parse_images(Result(0, json.dumps(images), "")) == {"localhost/muster/train:latest": "ab" * 32}
    runs = [{"Names": ["muster-x"], "State": "running", "Labels": {"muster.run": "x", "muster.owner": "ann"}}]
    assert muster_facts.parse_runs(Result(0, json.dumps(runs), "")) == [
        {"run": "x", "container": "muster-x", "state": "running", "owner": "ann"}
    ]


def test_a_host_without_podman_has_no_engine_no_images_and_no_runs() -> None:
    absent = Result(127, "", "podman: not installed")
    assert muster_facts.parse_engine(absent)[0] is None
    assert muster_facts.parse_images(absent) == {}
    assert muster_facts.parse_runs(absent) == []
