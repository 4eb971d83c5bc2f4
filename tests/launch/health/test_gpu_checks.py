"""Promise: each fault of a GPU is named with its fix, and GPUs that are left out are not asked about."""

from __future__ import annotations

from typing import Any

import pytest

from launch.health import gpu_checks
from launch.health.host_checks import check_host
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Asked
from tests.launch.health.host_facts import ASKED, NOW, about, gpu, health, host, one

MIG = gpu(
    1,
    mig=True,
    usable=False,
    unusable_reason="MIG mode is on: NCCL cannot",
    mig_instances=[{"name": "1g.5gb", "uuid": ""}],
)
LOST = {
    "vendor": "nvidia",
    "gpu": "0000:65:00",
    "fatal": True,
    "what": "GPU 0000:65:00 does not answer",
    "fix": "reboot",
}
BROKEN = {"vendor": "nvidia", "gpu": None, "fatal": True, "what": "the module is not loaded", "fix": "modprobe nvidia"}
INFOROM = {"vendor": "nvidia", "gpu": "0000:01:00", "fatal": False, "what": "infoROM", "fix": "reboot"}
RADEON = gpu(0, vendor="amd", name="AMD Instinct MI210", driver="6.12.12", pci_bus_id="0000:83:00")
CLOSED = {**RADEON, "index": 1, "usable": False, "unusable_reason": "root alone may use /dev/kfd"}
UNLOADED = {"vendor": "amd", "gpu": None, "fatal": True, "what": "no /dev/kfd", "fix": "modprobe amdgpu"}


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ({}, None, []),
        ({}, [0, 2], ["no GPU [2]"]),
        ({"gpus": [gpu(0), MIG]}, None, ["NCCL"]),
        ({"gpus": [gpu(0), MIG]}, [0], []),
        ({"gpus": [gpu(0), MIG]}, [1], ["NCCL"]),
        ({"gpus": [gpu(0), MIG]}, [], []),
        ({"gpu_problems": [LOST]}, None, ["0000:65:00"]),
        ({"gpu_problems": [LOST]}, [0, 1], []),
        ({"gpu_problems": [{**LOST, "gpu": "GPU 1"}]}, [1], ["0000:65:00"]),
        ({"gpu_problems": [{**LOST, "gpu": "GPU 7"}]}, [1], []),
        ({"gpus": [], "gpu_problems": [BROKEN]}, None, ["not loaded"]),
        ({"gpus": [], "gpu_problems": [BROKEN]}, [], []),
        ({"gpus": [], "gpu_problems": [BROKEN]}, [0], ["no GPU [0]", "not loaded"]),
        ({"gpu_problems": [INFOROM]}, None, []),
        ({"gpus": [RADEON]}, None, []),
        ({"gpus": [RADEON]}, [0], ["no GPU [0]"]),  # `gpus` names NVIDIA's
        ({"gpus": [], "gpu_problems": [UNLOADED]}, None, []),
    ],
)
def test_what_keeps_a_host_from_its_gpus(found: dict[str, Any], wanted: list[int] | None, words: list[str]) -> None:
    obstacles = gpu_checks.gpu_obstacles(host(**found), wanted)
    assert len(obstacles) == len(words)
    assert all(word in what and fix for (what, fix), word in zip(obstacles, words, strict=True))
    errors = [verdict for verdict in about("gpus", host(**found), Asked(gpus=wanted)) if verdict.level == ERROR]
    assert len(errors) == len(words)


def test_the_fix_for_mig_names_the_command_and_the_gpus_that_stay() -> None:
    ((what, fix),) = gpu_checks.gpu_obstacles(host(gpus=[gpu(0), MIG, gpu(2)]), None)
    assert "1g.5gb" in what and "nvidia-smi -i 1 -mig 0" in fix and "gpus: [0, 2]" in fix


@pytest.mark.parametrize(
    ("gpus", "wanted", "used"),
    [
        ([gpu(0), gpu(1)], None, [0, 1]),
        ([gpu(0), gpu(1), gpu(2)], [0, 2], [0, 2]),
        ([gpu(0), MIG], None, [0]),
        ([RADEON, gpu(1)], None, [1]),
        ([{"index": 0, "name": "NVIDIA L4"}], None, [0]),  # facts of an older deploy
        ([gpu(0)], [], []),
    ],
)
def test_the_gpus_that_ranks_get(gpus: list[Any], wanted: list[int] | None, used: list[int]) -> None:
    assert gpu_checks.usable_gpus({"gpus": gpus}, wanted) == used


@pytest.mark.parametrize(
    ("found", "asked", "level", "word"),
    [
        ({"gpus": []}, Asked(), HEALTHY, "CPU"),
        ({}, Asked(gpus=[]), HEALTHY, "CPU"),
        ({}, Asked(), HEALTHY, "2 x NVIDIA H100"),
        ({"gpus": [RADEON]}, Asked(), WARNING, "AMD Instinct MI210"),
        ({"gpus": [RADEON]}, Asked(gpus=[]), HEALTHY, "CPU"),
        ({"gpus": [gpu(0), gpu(1), RADEON]}, Asked(), HEALTHY, "H100"),
        ({"gpus": [], "gpu_problems": [UNLOADED]}, Asked(), WARNING, "CUDA"),
        ({"gpus": [gpu(0), gpu(1, name="NVIDIA L4")]}, Asked(), WARNING, "1 x NVIDIA L4"),
        ({"gpus": [gpu(0), gpu(1, name="NVIDIA L4")]}, Asked(gpus=[0]), HEALTHY, "H100"),
        ({"gpu_problems": [INFOROM]}, Asked(), WARNING, "infoROM"),
        ({"gpu_problems": [INFOROM]}, Asked(gpus=[0]), HEALTHY, "H100"),
    ],
)
def test_gpus_of_other_makers_and_models(found: dict[str, Any], asked: Asked, level: str, word: str) -> None:
    verdict = one("gpus", host(**found), asked)
    assert verdict.level == level and word in verdict.what


@pytest.mark.parametrize(
    ("found", "wanted", "words"),
    [
        ({"gpus": [RADEON]}, None, []),
        ({"gpus": [RADEON]}, [0, 1], ["no GPU [1] for ROCm"]),
        ({"gpus": [RADEON, CLOSED]}, None, ["root alone"]),
        ({"gpus": [RADEON, CLOSED]}, [0], []),
        ({"gpus": [], "gpu_problems": [UNLOADED]}, None, ["no /dev/kfd"]),
        ({"gpus": [], "gpu_problems": [UNLOADED]}, [], []),
        ({"gpus": [gpu(0), gpu(1)]}, None, ["2 x NVIDIA H100 80GB HBM3: not used"]),
        ({"gpus": [gpu(0)]}, [0], ["not used", "no GPU [0] for ROCm"]),
        ({"gpus": [], "gpu_problems": [BROKEN]}, None, ["the module is not loaded: not used"]),
        ({"gpus": [gpu(0)]}, [], []),
        ({"gpus": [gpu(0), RADEON], "gpu_problems": [INFOROM]}, None, []),
        ({"gpus": []}, None, []),
    ],
)
def test_what_keeps_a_host_from_its_gpus_with_an_image_for_rocm(
    found: dict[str, Any], wanted: list[int] | None, words: list[str]
) -> None:
    obstacles = gpu_checks.gpu_obstacles(host(**found), wanted, "amd")
    assert len(obstacles) == len(words)
    assert all(word in what and fix for (what, fix), word in zip(obstacles, words, strict=True))
    asked = Asked(gpus=wanted, gpu_vendor="amd")
    errors = [verdict for verdict in about("gpus", host(**found), asked) if verdict.level == ERROR]
    assert len(errors) == len(words)
    assert gpu_checks.usable_gpus(host(gpus=[gpu(5), RADEON, CLOSED]), None, "amd") == [0]


def test_amd_gpus_are_judged_by_what_the_kernel_says_of_them() -> None:
    sick = health(0, vendor="amd", ecc_uncorrected=3, throttle=None, temperature_c=None, repair_pending=None)
    found, asked = host(gpus=[gpu(0), RADEON], gpu_health=[health(0), sick]), Asked(gpu_vendor="amd")
    assert one("gpus", found, asked).what == "1 x AMD Instinct MI210, driver 6.12.12"
    verdict = one("gpu health", found, asked)
    assert verdict.level == WARNING and "3 uncorrected" in verdict.what and "amd-smi reset" in verdict.fix
    assert "dcgmi" not in verdict.fix and about("xid", host(**found | {"xid": [line(79)]}), asked) == []
    assert one("gpu health", host(gpus=[RADEON], gpu_health=[health(0)]), asked).level == INCOMPLETE  # NVIDIA's


def test_devices_that_have_other_numbers_since_a_reboot_are_an_error() -> None:
    def with_devices(render: str, group: int) -> dict[str, Any]:
        return host(gpus=[{**RADEON, "devices": ["/dev/kfd", f"/dev/dri/{render}"], "groups": [group]}])

    then = with_devices("renderD128", 992)
    asked = Asked(gpus=[0], gpu_vendor="amd", gpu_access=gpu_checks.access(then, [0], "amd"))
    assert one("gpus", then, asked).level == HEALTHY
    for now in (with_devices("renderD129", 992), with_devices("renderD128", 44)):
        verdict = one("gpus", now, asked)
        assert verdict.level == ERROR and "renderD128" in verdict.what and "make deploy" in verdict.fix
    assert one("gpus", host(), Asked(gpus=[0, 1], gpu_access=[])).level == HEALTHY  # NVIDIA's have no such names


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_hosts_of_two_makers_are_refused_unless_those_of_one_have_no_gpus_to_use(vendor: str) -> None:
    hosts = {"h1": host(), "h2": host(gpus=[RADEON]), "h3": host(gpus=[]), "h4": host(gpus=[gpu(0), RADEON])}
    what, fix = gpu_checks.mixed(hosts, {}, vendor) or ("", "")
    other, right = ("h2", "h1, h4") if vendor == "nvidia" else ("h1", "h2, h4")
    assert f"({right})" in what and f"({other})" in what and "gpus: []" in fix
    assert gpu_checks.mixed(hosts, {other: []}, vendor) is None
    assert gpu_checks.mixed({name: hosts[name] for name in ("h3", "h4")}, {}, vendor) is None
    assert gpu_checks.mixed({other: hosts[other], "h3": hosts["h3"]}, {}, vendor) is None  # nobody has the right ones


@pytest.mark.parametrize(
    ("sick", "level"),
    [
        ({}, HEALTHY),
        ({"ecc_uncorrected": None, "throttle": None, "temperature_c": None, "repair_pending": None}, HEALTHY),
        ({"throttle": ["power cap"]}, HEALTHY),  # what a busy GPU always says
        ({"ecc_uncorrected": 2}, WARNING),
        ({"repair_pending": True}, ERROR),
        ({"repair_failed": True}, ERROR),
        ({"throttle": ["hardware thermal slowdown"], "temperature_c": 88}, WARNING),
        ({"temperature_c": 93}, WARNING),
    ],
)
def test_health_of_a_gpu(sick: dict[str, Any], level: str) -> None:
    verdict = one("gpu health", host(gpu_health=[health(0), health(1, **sick)]))
    assert verdict.level == level
    if level != HEALTHY:
        assert "GPU 1" in verdict.what
        left_out = one("gpu health", host(gpu_health=[health(0), health(1, **sick)]), Asked(gpus=[0]))
        assert left_out.level == HEALTHY


def test_programs_on_a_gpu_are_reported_with_their_owner_unless_the_gpu_is_left_out() -> None:
    process = {"pid": 4711, "user": "bob", "name": "python3", "memory_mib": 8192}
    found = host(gpu_health=[health(0), health(1, processes=[process])])
    verdict = one("gpu use", found)
    assert verdict.level == WARNING
    assert all(word in verdict.what for word in ("GPU 1", "bob", "4711", "8192 MiB"))
    assert one("gpu use", found, Asked(gpus=[0])).level == HEALTHY


def line(xid: int, pci: str = "0000:01:00", when: float | None = NOW - 600, count: int = 1) -> dict[str, Any]:
    return {"pci": pci, "xid": xid, "when": when, "count": count, "line": f"NVRM: Xid (PCI:{pci}): {xid}, pid=1"}


@pytest.mark.parametrize(
    ("entry", "level", "word"),
    [
        (line(79), ERROR, "fallen off the bus"),
        (line(79, when=None), ERROR, "unknown time"),
        (line(79, pci="0000:65:00"), ERROR, "GPU 0000:65:00"),  # it no longer answers
        (line(48, when=NOW - 3 * 86400), WARNING, "3 days ago"),
        (line(95), ERROR, "uncontained"),
        (line(119), ERROR, "does not answer"),
        (line(13, count=7), WARNING, "7 times"),
        (line(31, when=NOW - 3 * 86400), HEALTHY, "1 old"),
        (line(9999), WARNING, "not in our list"),
    ],
)
def test_xid_lines_name_gpu_meaning_and_age(entry: dict[str, Any], level: str, word: str) -> None:
    verdict = one("xid", host(xid=[entry]))
    assert verdict.level == level and word in verdict.what
    if level == ERROR and entry["pci"] == "0000:01:00":
        assert "GPU 1 " in verdict.what and "{" not in verdict.fix


def test_xid_lines_of_gpus_that_are_left_out_are_not_judged() -> None:
    assert one("xid", host(xid=[line(79)]), Asked(gpus=[0])).level == HEALTHY
    assert about("xid", host(xid=[line(79)]), Asked(gpus=[])) == []


def test_a_kernel_log_that_cannot_be_read_matters_only_where_there_are_gpus() -> None:
    unread = {"xid": None, "xid_problem": "dmesg: Operation not permitted"}
    verdict = one("xid", host(**unread))
    assert verdict.level == INCOMPLETE and "not permitted" in verdict.what
    assert about("xid", host(**unread, gpus=[], gpu_health=[])) == []


def test_a_host_without_gpus_is_not_asked_about_their_health() -> None:
    checks = {verdict.check for verdict in check_host("h2", host(gpus=[], gpu_health=[]), ASKED)}
    assert not checks & {"gpu health", "gpu use", "xid"}


def test_every_xid_has_words_and_a_fix() -> None:
    for number, (what, _, fix) in gpu_checks.XIDS.items():
        assert what and fix.format(gpu=number)
