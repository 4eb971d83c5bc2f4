"""GPUs from what nvidia-smi, amd-smi and rocm-smi print: healthy, broken, cut into MIG slices, of several makers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils import muster_gpu_health, muster_gpus
from ansible.module_utils.muster_engines import engine
from ansible.module_utils.muster_host import Result

HEALTHY = """\
0, NVIDIA GeForce RTX 4090, GPU-1d1b6bd1-7a34-26b2-3b5c-0a5f5a0f3b11, 24564, 550.54.15, 8.9, 00000000:3B:00.0, [N/A], \
[N/A], 41, 0x0000000000000001, [N/A], [N/A], [N/A]
1, NVIDIA H100 80GB HBM3, GPU-7fb1a0c9-0b9e-4f6e-a6d2-2f0cb44d2c01, 81559, 550.54.15, 9.0, 00000000:5E:00.0, \
Disabled, 0, 33, 0x0000000000000000, [N/A], No, No
"""
A100_MIG = """\
0, NVIDIA A100-SXM4-40GB, GPU-838f60d9-651f-9166-ea42-f9da674a6947, 40960, 550.54.15, 8.0, 00000000:07:00.0, \
Enabled, 0, 30, [N/A], [N/A], No, No
"""
MIG_LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-838f60d9-651f-9166-ea42-f9da674a6947)
  MIG 3g.20gb     Device  0: (UUID: MIG-e07a497d-1bb6-5a42-b670-1c33bf55ab6e)
  MIG 1g.5gb      Device  1: (UUID: MIG-fe9bc608-60f5-5479-8cc4-1827021d27a9)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-950792bf-a01c-3f1a-e122-3473e67f54b2)
"""
ABSENT = Result(127, "", "not installed")


def machine(answers: dict[str, Result]) -> Callable[[list[str]], Result]:
    """A machine on which a command answers by the first of these words that it holds."""

    def run(command: list[str]) -> Result:
        line = " ".join(command)
        return next((result for words, result in answers.items() if words in line), ABSENT)

    return run


def nvidia(out: str, rc: int = 0, err: str = "", listed: str = "", devices: tuple[str, ...] = ("0000:3b:00.0",)) -> Any:
    command = machine({"--query-gpu": Result(rc, out, err), "nvidia-smi -L": Result(0, listed, "")})
    return muster_gpus._find_nvidia(list(devices), command)


def row(out: str) -> list[dict[str, str]]:
    return muster_gpus.parse_table(out, muster_gpus.FIELDS)[0]


def test_gpus_are_read_from_nvidia_smi_and_models_kept_apart() -> None:
    gpus = muster_gpus.nvidia_gpus(row(HEALTHY), {})
    assert gpus[1] == {
        "vendor": "nvidia",
        "index": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-7fb1a0c9-0b9e-4f6e-a6d2-2f0cb44d2c01",
        "memory_mib": 81559,
        "driver": "550.54.15",
        "compute_capability": "9.0",
        "pci_bus_id": "0000:5e:00",
        "ecc_uncorrected": 0,
        "mig": False,
        "mig_instances": [],
        "usable": True,
        "unusable_reason": None,
    }
    assert (gpus[0]["name"], gpus[0]["ecc_uncorrected"]) == ("NVIDIA GeForce RTX 4090", None)


def test_a_gpu_that_shares_the_machines_memory_has_no_size_of_its_own() -> None:
    text = "0, NVIDIA GB10, GPU-d4b0c5de-52f0-7ca5-ae4c-1b8b3a3f0a7e, [N/A], 580.95.05, 12.1\n"
    rows, _ = muster_gpus.parse_table(text, muster_gpus.BASE_FIELDS)
    assert muster_gpus.nvidia_gpus(rows, {})[0]["memory_mib"] is None


def test_mig_slices_are_listed_under_their_gpu_which_no_rank_can_use() -> None:
    gpus, problems, _ = nvidia(A100_MIG, listed=MIG_LIST)
    assert [instance["name"] for instance in gpus[0]["mig_instances"]] == ["3g.20gb", "1g.5gb"]
    assert gpus[0]["mig_instances"][0]["uuid"] == "MIG-e07a497d-1bb6-5a42-b670-1c33bf55ab6e"
    assert gpus[0]["mig"] and not gpus[0]["usable"] and "NCCL" in gpus[0]["unusable_reason"]
    assert problems == []


FAILED_9 = Result(
    9,
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n",
    "",
)
MISMATCH = Result(18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n", "")


@pytest.mark.parametrize(
    ("result", "fix"),
    [
        (FAILED_9, "modprobe nvidia"),
        (MISMATCH, "reboot"),
        (Result(255, MISMATCH.out, ""), "reboot"),
        (Result(12, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", ""), "user-space packages"),
        (Result(15, "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n", ""), "power-cycle"),
        (Result(6, "No devices were found\n", ""), "NVRM"),
        (Result(127, "", "nvidia-smi: not installed"), "install NVIDIA's driver"),
        (Result(124, "", "nvidia-smi: no answer within 30 s"), "Xid"),
        (Result(16, "", "GPU requires a reset\n"), "--gpu-reset"),
        (Result(255, "Unknown Error\n", ""), "by hand"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_problem_with_a_fix_not_a_missing_gpu(result: Result, fix: str) -> None:
    gpus, problems, _ = nvidia(result.out, result.rc, result.err)
    assert gpus == [] and len(problems) == 1
    assert problems[0]["gpu"] is None and fix in problems[0]["fix"]
    assert fix in (muster_gpus.in_words(problems) or "").partition("Fix: ")[2]


@pytest.mark.parametrize(
    ("result", "named"), [(FAILED_9, True), (Result(12, "", ""), True), (Result(127, "", ""), True), (MISMATCH, False)]
)
def test_a_missing_driver_may_be_installed_by_the_deploy(result: Result, named: bool) -> None:
    _, problems, _ = nvidia(result.out, result.rc, result.err)
    assert ("install_driver: true" in problems[0]["fix"]) is named


@pytest.mark.parametrize(
    "result", [FAILED_9, Result(6, "No devices were found\n", ""), Result(127, "", ""), Result(0, "", "")]
)
def test_a_machine_without_nvidia_hardware_simply_has_no_gpu(result: Result) -> None:
    assert nvidia(result.out, result.rc, result.err, devices=()) == ([], [], [])


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("Unable to determine the device handle for GPU 0000:65:00.0: Unknown Error", "0000:65:00"),
        ("Unable to determine the device handle for GPU0000:65:00.0: Unknown Error", "0000:65:00"),
        ("Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error", "0000:34:00"),
        ("Unable to determine the device handle for GPU1: Unknown Error", "GPU 1"),
        ("WARNING: infoROM is corrupted at gpu 0000:0B:00.0", "0000:0b:00"),
        ("1, [GPU is lost], " + ", ".join(["[GPU is lost]"] * 12), "GPU 1"),
    ],
)
def test_one_broken_gpu_is_named_and_the_others_stay(line: str, gpu: str) -> None:
    gpus, problems, _ = nvidia(f"{line}\n{HEALTHY}", rc=15)
    assert [gpu["index"] for gpu in gpus] == [0, 1]
    broken = [problem for problem in problems if problem["gpu"]]
    assert [problem["gpu"] for problem in broken] == [gpu] and gpu in broken[0]["what"]
    assert broken[0]["fatal"] == ("infoROM" not in line)


def test_what_the_dynamic_linker_prints_is_no_broken_gpu() -> None:
    noise = "ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded: ignored.\n"
    assert [p for p in nvidia(HEALTHY, err=noise)[1] if "CDI" not in p["what"]] == []


def test_a_field_that_a_driver_does_not_know_costs_that_field_alone() -> None:
    """535 renamed the reasons for throttling; older drivers know the old name, and no remapped rows."""
    unknown = ("clocks_event_reasons.active", "remapped_rows.pending", "remapped_rows.failure")
    asked: list[str] = []

    def driver(command: list[str]) -> Result:
        asked.append(command[1])
        for field in command[1].partition("=")[2].split(","):
            if field in unknown:
                return Result(2, f'Field "{field}" is not a valid field to query.\n\n', "")
        return Result(0, "", "")

    _, fields = muster_gpus.ask_nvidia(muster_gpus.FIELDS, driver)
    assert len(asked) == 4
    assert "clocks_throttle_reasons.active" in fields and not set(unknown) & set(fields)
    assert fields[: len(muster_gpus.BASE_FIELDS)] == muster_gpus.BASE_FIELDS


def test_a_driver_without_even_the_basic_fields_is_not_asked_for_ever() -> None:
    result = Result(2, 'Field "compute_cap" is not a valid field to query.\n', "")
    assert muster_gpus.ask_nvidia(muster_gpus.FIELDS, lambda command: result)[0] is result


def test_gpus_without_a_cdi_specification_are_a_problem() -> None:
    gpus = muster_gpus.nvidia_gpus(row(HEALTHY), {})
    missing = muster_gpus.container_problem(gpus, engine("podman"), [])
    assert missing is not None and "/etc/cdi" in missing[0]
    assert muster_gpus.container_problem(gpus, engine("podman"), ["/etc/cdi/nvidia.yaml"]) is None
    assert muster_gpus.container_problem([], engine("podman"), []) is None
    missing = muster_gpus.container_problem(gpus, engine("docker"), [])
    assert missing is not None and "nvidia-container-runtime-hook for docker" in missing[0]
    assert "install_driver: true" in missing[1]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("PCI:0000:cb:00", "0000:cb:00"),
        ("0000:83:00.0", "0000:83:00"),
        ("00010000:01:00.0", "10000:01:00"),
    ],
)
def test_a_pci_address_has_one_form_whoever_writes_it(text: str, short: str) -> None:
    assert muster_gpus.pci_id(text) == short


def pci(folder: Path, *devices: tuple[str, str, str]) -> Path:
    for name, vendor, kind in devices:
        (folder / name).mkdir()
        (folder / name / "vendor").write_text(vendor + "\n")
        (folder / name / "class").write_text(kind + "\n")
    return folder


def test_cards_are_seen_without_any_driver_and_other_devices_are_not(tmp_path: Path) -> None:
    tree = pci(
        tmp_path,
        ("0000:3b:00.0", "0x10de", "0x030200"),
        ("0000:3b:00.1", "0x10de", "0x040300"),  # the card's sound
        ("0000:00:02.0", "0x8086", "0x030000"),
        ("0000:83:00.0", "0x1002", "0x120000"),  # an accelerator
        ("0000:c3:00.0", "0x1002", "0x038000"),
        ("0000:0c:00.0", "0x1002", "0x030000"),  # the processor's own graphics, or an old server's
    )
    assert muster_gpus.nvidia_devices(tree) == ["0000:3b:00.0"]
    assert muster_gpus.amd_devices(tree, tmp_path / "no-kfd") == ["0000:83:00.0", "0000:c3:00.0"]
    assert "0000:0c:00.0" in muster_gpus.amd_devices(tree, tmp_path)


#: Of a host's group `render`, which differs from host to host.
RENDER_GROUP = 992 if os.getuid() == 0 else os.getgid()


def amd_machine(folder: Path) -> None:
    """What the kernel shows of a MI210 with KFD: sysfs and /dev, cut down to what is read."""
    device, node = folder / "pci" / "0000:83:00.0", folder / "kfd" / "topology" / "nodes"
    files = {
        device / "vendor": "0x1002",
        device / "class": "0x038000",
        device / "drm" / "card1" / "dev": "226:1",
        device / "drm" / "renderD128" / "dev": "226:128",
        device / "unique_id": "719d230578348e8c",
        device / "mem_info_vram_total": "68702699520",
        device / "hwmon" / "hwmon3" / "temp1_input": "41000",
        device / "ras" / "umc_err_count": "ue: 2\nce: 5",
        device / "ras" / "gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P",
        node / "0" / "properties": "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0",
        node / "0" / "gpu_id": "0",
        node / "1" / "properties": "cpu_cores_count 0\nsimd_count 416\nlocation_id 33536\ndrm_render_minor 128",
        node / "1" / "gpu_id": "51557",
        folder / "kfd" / "proc" / "4711" / "vram_51557": "8589934592",
        folder / "kfd" / "proc" / "4712" / "vram_51557": "0",
        folder / "proc" / "4711" / "comm": "python3",
        folder / "dev" / "kfd": "",
        folder / "dev" / "dri" / "renderD128": "",
    }
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    for file in (folder / "dev" / "kfd", folder / "dev" / "dri" / "renderD128"):
        file.chmod(0o660)
        if os.getuid() == 0:
            os.chown(file, -1, RENDER_GROUP)


def found_amd(folder: Path, answers: dict[str, Result]) -> Any:
    if not (folder / "pci").exists():
        amd_machine(folder)
    return muster_gpus.find_amd(["0000:83:00.0"], machine(answers), folder / "pci", folder / "dev", folder / "kfd")


def test_an_amd_gpu_without_amds_tools_is_known_by_the_kernel(tmp_path: Path) -> None:
    (gpu,), problem = found_amd(tmp_path, {})
    assert problem is None and gpu["usable"] and gpu["devices"][1].endswith("/dri/renderD128")
    about = (gpu["index"], gpu["name"], gpu["memory_mib"], gpu["uuid"], gpu["pci_bus_id"])
    assert about == (0, "AMD GPU", 65520, "719d230578348e8c", "0000:83:00")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "pci" / "0000:83:00.0" / "drm"), "no render node"),
        (lambda folder: (folder / "dev" / "kfd").unlink(), "no .*/dev/kfd"),
        (lambda folder: (folder / "kfd" / "topology" / "nodes" / "1" / "gpu_id").write_text("0\n"), "KFD"),
        (lambda folder: (folder / "dev" / "kfd").chmod(0o600), "root alone may use .*/dev/kfd"),
        (
            lambda folder: (folder / "pci" / "0000:83:00.0" / "current_compute_partition").write_text("CPX\n"),
            r"partitions \(CPX\)",
        ),
    ],
)
def test_why_no_rank_gets_an_amd_gpu_is_said(broken: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    amd_machine(tmp_path)
    broken(tmp_path)
    (gpu,), _ = found_amd(tmp_path, {"static": Result(0, json.dumps([mi210()]), "")})
    assert not gpu["usable"] and re.search(said, gpu["unusable_reason"])
    assert gpu["devices"] == gpu["groups"] == []


def test_a_device_that_everybody_may_use_needs_no_group(tmp_path: Path) -> None:
    amd_machine(tmp_path)
    (tmp_path / "dev" / "kfd").chmod(0o666)
    (tmp_path / "dev" / "dri" / "renderD128").chmod(0o666)
    assert found_amd(tmp_path, {})[0][0]["groups"] == [] and found_amd(tmp_path, {})[0][0]["usable"]


def test_a_container_never_gets_roots_group() -> None:
    device: Any = SimpleNamespace(stat=lambda: SimpleNamespace(st_mode=0o20660, st_gid=0))
    assert muster_gpus.owning_groups([device]) == ([], [str(device)])


def test_the_health_of_an_amd_gpu_is_what_the_kernel_says(tmp_path: Path) -> None:
    gpus, _ = found_amd(tmp_path, {})
    folders = (tmp_path / "pci", tmp_path / "kfd", tmp_path / "proc")
    (found,) = muster_gpu_health.amd_health([{"vendor": "nvidia"}, *gpus], *folders)
    keys = ("vendor", "index", "temperature_c", "throttle", "ecc_uncorrected", "repair_pending", "repair_failed")
    assert tuple(found[key] for key in keys) == ("amd", 0, 41, None, 2, True, False)
    (process,) = found["processes"]
    assert (process["pid"], process["name"], process["memory_mib"]) == (4711, "python3", 8192)
    for name in ("ras", "hwmon"):
        shutil.rmtree(tmp_path / "pci" / "0000:83:00.0" / name)
    (found,) = muster_gpu_health.amd_health(gpus, *folders)
    assert {found[key] for key in keys[2:]} == {None}


def mi210(gpu: int = 0) -> dict[str, Any]:
    """One GPU of `amd-smi static --asic --bus --vram --driver --json`."""
    return {
        "gpu": gpu,
        "asic": {
            "market_name": "AMD Instinct MI210",
            "vendor_id": "0x1002",
            "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
            "asic_serial": "0x6F1F0A2B3C4D5E6F",
            "target_graphics_version": "gfx90a",
        },
        "bus": {"bdf": "0000:83:00.0", "max_pcie_width": 16, "slot_type": "OAM"},
        "vram": {"type": "HBM", "vendor": "HYNIX", "size": {"value": 65520, "unit": "MB"}, "bit_width": 4096},
        "driver": {"name": "amdgpu", "version": "6.12.12"},
    }


AMD_LIST = json.dumps([{"gpu": 0, "bdf": "0000:83:00.0", "uuid": "ecff740f-0000-1000-80a2-8eb1a1f4f2d7"}])


@pytest.mark.parametrize("static", [json.dumps([mi210()]), json.dumps({"gpu_data": [mi210()]}), json.dumps(mi210())])
def test_amd_gpus_are_read_from_amd_smi(static: str, tmp_path: Path) -> None:
    answers = {"static": Result(0, static, ""), "list": Result(0, AMD_LIST, "")}
    gpus, problem = found_amd(tmp_path, answers)
    assert problem is None
    wanted = ("amd", 0, "AMD Instinct MI210", "ecff740f-0000-1000-80a2-8eb1a1f4f2d7", 65520, "6.12.12", "0000:83:00")
    keys = ("vendor", "index", "name", "uuid", "memory_mib", "driver", "pci_bus_id")
    assert tuple(gpus[0][key] for key in keys) == wanted
    assert gpus[0]["devices"] == [f"{tmp_path}/dev/kfd", f"{tmp_path}/dev/dri/renderD128"]
    assert gpus[0]["groups"] == [RENDER_GROUP] and gpus[0]["usable"]


def test_what_amd_smi_cannot_read_is_missing_and_no_crash() -> None:
    entry = mi210() | {"vram": "N/A", "driver": {"name": "N/A", "version": "N/A"}, "asic": {"market_name": "N/A"}}
    gpu = muster_gpus.parse_amd_smi(json.dumps([entry]), "")[0]
    assert (gpu["name"], gpu["memory_mib"], gpu["uuid"]) == ("AMD GPU", None, "")


ROCM_SMI = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card1": {"Unique ID": "0x9f8e7d6c5b4a", "VRAM Total Memory (B)": "25753026560", "Card series": "Radeon RX 7900 XTX",
 "PCI Bus": "0000:C3:00.0"},
 "card0": {"Unique ID": "0x719d230578348e8c", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "0",
 "PCI Bus": "0000:83:00.0", "Card Series": "AMD Instinct MI210"}, "system": {"Driver version": "6.8.5"}}
"""


def test_rocm_smi_answers_where_amd_smi_does_not(tmp_path: Path) -> None:
    gpus, problem = found_amd(tmp_path, {"rocm-smi": Result(0, ROCM_SMI, "")})
    assert problem is None
    assert [(gpu["index"], gpu["name"], gpu["memory_mib"]) for gpu in gpus] == [
        (0, "AMD Instinct MI210", 65520),
        (1, "Radeon RX 7900 XTX", 24560),
    ]
    assert (gpus[0]["uuid"], gpus[0]["driver"]) == ("0x719d230578348e8c", "6.8.5")
    assert [(gpu["pci_bus_id"], gpu["usable"]) for gpu in gpus] == [("0000:83:00", True), ("0000:c3:00", False)]


@pytest.mark.parametrize(
    ("answers", "loaded", "fix"),
    [
        ({}, False, "modprobe amdgpu"),
        ({}, True, "install amd-smi-lib"),
        ({"amd-smi": Result(1, "", "AMDSMI_STATUS_DRIVER_NOT_LOADED\n")}, True, "by hand"),
        ({"amd-smi": Result(0, "no JSON here", "")}, True, "by hand"),
    ],
)
def test_amd_gpus_that_cannot_be_distinguished_are_a_problem_of_their_own(
    answers: dict[str, Result], loaded: bool, fix: str
) -> None:
    gpus, problem = muster_gpus._ask_amd(["0000:83:00.0"], loaded, machine(answers))
    assert gpus == [] and problem is not None and problem["fatal"]
    assert fix in problem["fix"] and "0000:83:00.0" in problem["what"]
