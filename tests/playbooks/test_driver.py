"""Promise: a driver of NVIDIA's comes only where none is and nothing forbids it; each reason is said with its fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import muster_driver as module
import pytest
import yaml
from ansible.module_utils import muster_driver, muster_packages, muster_ready
from ansible.module_utils.muster_driver import Seen
from ansible.module_utils.muster_host import Result

ROLE = Path(__file__).parents[2] / "playbooks" / "roles" / "engine"
DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
BRANCH = DEFAULTS["engine_driver_branch"]
WORKS = Result(0, "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n", "")
NO_MODULE = Result(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "")
BARE = Seen(
    devices=["0000:3b:00.0"],
    smi=Result(127, "", "nvidia-smi: not installed"),
    toolkit=False,
    system="debian",
    version="12",
    arch="x86_64",
    kernel="6.1.0-40-amd64",
    headers=True,
    container="",
    nouveau=False,
    secure_boot=False,
    runfile=False,
    installed="",
    free_bytes=100 << 30,
)


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({}, ["driver", "toolkit"]),
        ({"devices": []}, []),
        ({"smi": WORKS}, ["toolkit"]),
        ({"smi": WORKS, "toolkit": True}, []),
        ({"smi": NO_MODULE, "toolkit": True}, ["driver"]),
        ({"smi": Result(12, "", ""), "toolkit": True}, ["driver"]),
        ({"smi": Result(15, "", "fallen off the bus"), "toolkit": True}, []),  # it is there, and the GPU is broken
        ({"smi": Result(124, "", "no answer"), "toolkit": True}, []),
    ],
)
def test_what_is_lacking(change: dict[str, Any], lacking: list[str]) -> None:
    assert muster_driver.lacking(BARE._replace(**change)) == lacking


MISMATCH = Result(18, "Failed to initialize NVML: Driver/library version mismatch\n", "")


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"container": "podman"}, "container (podman)", "on the machine below"),
        ({"version": "13"}, "debian 13 on x86_64", "by hand"),
        ({"system": "arch", "version": ""}, "arch", "by hand"),
        ({"arch": "aarch64"}, "aarch64", "by hand"),
        ({"smi": MISMATCH}, "updated under a loaded kernel module", "reboot"),
        ({"nouveau": True}, "nouveau", "update-initramfs"),
        ({"nouveau": True, "system": "rhel", "version": "9.4"}, "nouveau", "dracut"),
        ({"secure_boot": True}, "Secure Boot", "firmware"),
        ({"runfile": True, "installed": "535.1"}, ".run file", "nvidia-uninstall"),
        ({"smi": NO_MODULE, "installed": "535.247.01-1~deb12u1"}, "another driver are there (535", "dkms autoinstall"),
        ({"free_bytes": 1 << 30}, "1.1 of 4.3 GB", "free some"),
    ],
)
def test_each_obstacle_is_said_alone_with_its_fix(change: dict[str, Any], what: str, fix: str) -> None:
    said = muster_driver.obstacles(BARE._replace(**change), BRANCH)
    assert len(said) == 1
    assert what in said[0].partition(" Fix: ")[0] and fix in said[0].partition(" Fix: ")[2]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"system": "ubuntu", "version": "24.04"},
        {"system": "rhel", "version": "9.4"},
        {"smi": NO_MODULE, "installed": f"{BRANCH}.95.05-1"},  # ours, before the reboot
        {"smi": NO_MODULE, "installed": f"3:{BRANCH}.95.05-1"},
        {"smi": WORKS, "container": "lxc", "secure_boot": True, "nouveau": True, "free_bytes": 0},  # the toolkit alone
    ],
)
def test_nothing_else_is_an_obstacle(change: dict[str, Any]) -> None:
    assert muster_driver.obstacles(BARE._replace(**change), BRANCH) == []


def test_all_obstacles_are_said_at_once() -> None:
    seen = BARE._replace(nouveau=True, secure_boot=True, free_bytes=0)
    assert len(muster_driver.obstacles(seen, BRANCH)) == 3


class Lists:
    """Package lists of a host: what they hold, and what a refresh brings. It notes the commands."""

    def __init__(self, *names: str, newer: str = "") -> None:
        self.names, self.newer, self.asked = set(names), newer, list[list[str]]()

    def run(self, words: list[str], timeout: float = 0) -> Result:
        self.asked.append(words)
        if words[:2] == ["apt-get", "update"]:
            self.names.add(self.newer)
            return Result(0, "", "")
        if words[0] == "dnf":  # prints nothing, and is content
            return Result(0, f"{words[-1]}.rpm\n" if words[-1] in self.names else "", "")
        return (
            Result(0, f"Package: {words[-1]}\n", "") if words[-1] in self.names else Result(100, "", "E: No packages")
        )


PROBES = [{"package": "nvidia-support", "fix": "add contrib"}]


@pytest.mark.parametrize(
    ("lists", "headers", "refresh", "said", "updates"),
    [
        (Lists("nvidia-support"), True, True, [], 0),
        (Lists("nvidia-support", "linux-headers-6.1.0-40-amd64"), False, True, [], 0),
        (Lists("nvidia-support", newer="linux-headers-6.1.0-40-amd64"), False, True, [], 1),
        (
            Lists("nvidia-support"),
            False,
            True,
            ["package linux-headers-6.1.0-40-amd64. Fix: reboot into the newest"],
            1,
        ),
        (Lists(), True, True, ["package nvidia-support. Fix: add contrib"], 1),
        (Lists(newer="nvidia-support"), True, False, ["package nvidia-support. Fix: add contrib"], 0),  # check mode
    ],
)
def test_packages_that_no_mirror_has_are_named(
    lists: Lists, headers: bool, refresh: bool, said: list[str], updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster_driver, "run", lists.run)
    found = muster_driver.unknown(BARE._replace(headers=headers), PROBES, refresh)
    assert len(found) == len(said) and all(words in one for words, one in zip(said, found, strict=True))
    assert lists.asked.count(["apt-get", "update"]) == updates


def test_kin_of_rhel_are_asked_in_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists("dkms")
    monkeypatch.setattr(muster_driver, "run", lists.run)
    seen = BARE._replace(system="rhel", version="9.4", kernel="5.14.0-427.el9.x86_64", headers=False)
    (said,) = muster_driver.unknown(seen, [{"package": "dkms", "fix": "EPEL"}], refresh=True)
    assert "kernel-devel-5.14.0-427.el9.x86_64" in said
    assert all(words[0] == "dnf" for words in lists.asked)


def test_secure_boot_is_the_fifth_byte(tmp_path: Path) -> None:
    file = tmp_path / "SecureBoot"
    assert not muster_driver.secure_boot(file)  # no UEFI
    for content, is_on in ((b"\x06\0\0\0\x01", True), (b"\x06\0\0\0\0", False), (b"\x01", False)):
        file.write_bytes(content)
        assert muster_driver.secure_boot(file) is is_on


@pytest.mark.parametrize(
    ("file", "content", "kind"),
    [
        ("run/.containerenv", "", "podman"),
        (".dockerenv", "", "docker"),
        ("run/systemd/container", "lxc\n", "lxc"),
        ("proc/1/environ", "PATH=/bin\0container=systemd-nspawn\0", "systemd-nspawn"),
        ("proc/1/environ", "PATH=/bin\0", ""),
    ],
)
def test_a_container_is_recognised(file: str, content: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert muster_driver.container_kind(tmp_path) == kind


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The ledgers in which an installation was noted; every package is in the lists."""
    noted: list[Path] = []
    monkeypatch.setattr(muster_packages, "note_begin", noted.append)
    monkeypatch.setattr(muster_driver, "unknown", lambda seen, probes, refresh: [])
    return noted


def test_before_says_what_to_install_and_notes_that_it_begins(
    begun: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster_driver, "look", lambda: BARE._replace(headers=False))
    wanted = {"lacking": ["driver", "toolkit"], "system": "debian", "headers": ["linux-headers-6.1.0-40-amd64"]}
    assert module.before(BRANCH, {}, check_mode=True) == wanted and not begun
    assert module.before(BRANCH, {}, check_mode=False) == wanted and begun == [muster_ready.PACKAGES]


def test_before_changes_nothing_where_it_refuses_or_nothing_is_lacking(
    begun: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster_driver, "look", lambda: BARE._replace(nouveau=True, runfile=True))
    with pytest.raises(RuntimeError, match=r"driver and toolkit cannot be installed here: .*nouveau.*; .*\.run file"):
        module.before(BRANCH, {}, check_mode=False)
    monkeypatch.setattr(muster_driver, "look", lambda: BARE._replace(smi=WORKS, toolkit=True, system="arch"))
    assert module.before(BRANCH, {}, check_mode=False)["lacking"] == []
    assert not begun


def after(monkeypatch: pytest.MonkeyPatch, lacking: list[str], **answers: Result) -> dict[str, object]:
    """What `after` returns on a host whose commands answer so."""

    def run(words: list[str], timeout: float = 0) -> Result:
        return answers.get(words[0].replace("-", "_"), Result(127, "", f"{words[0]}: not installed"))

    monkeypatch.setattr(muster_driver, "run", run)
    monkeypatch.setattr(module, "run", run)
    return module.after(lacking)


def test_a_driver_that_takes_a_reboot_ends_with_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"cannot be loaded yet: modprobe: ERROR: No such device\. Fix: reboot this host"
    with pytest.raises(RuntimeError, match=said):
        after(
            monkeypatch, ["driver"], modprobe=Result(1, "", "modprobe: ERROR: No such device\n"), nvidia_smi=NO_MODULE
        )
    assert after(monkeypatch, ["driver"], modprobe=Result(0, "", ""), nvidia_smi=WORKS) == {"restart": []}


def test_docker_starts_again_for_the_toolkit_unless_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = Result(0, "", ""), Result(0, "4f0c\n", "")
    assert after(monkeypatch, ["toolkit"], docker=idle) == {"restart": ["docker"]}
    assert after(monkeypatch, [], docker=busy) == {"restart": []}
    with pytest.raises(RuntimeError, match="systemctl restart docker"):
        after(monkeypatch, ["toolkit"], docker=busy)


def test_a_host_without_its_driver_is_not_ready_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"changed": False, "missing": [], "service": ""}
    monkeypatch.setattr(muster_ready, "ensure", lambda wanted, check_mode: found)
    monkeypatch.setattr(muster_driver, "look", lambda: BARE)
    asked = muster_ready.Wanted({})
    assert muster_ready.is_ready(asked)
    assert not muster_ready.is_ready(asked._replace(driver=True))
    assert muster_ready.is_ready(asked._replace(driver=True, gpus=False))
    monkeypatch.setattr(muster_driver, "look", lambda: BARE._replace(smi=WORKS, toolkit=True))
    assert muster_ready.is_ready(asked._replace(driver=True))


def test_sources_and_keys_go_but_those_of_a_driver_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muster_driver, "MODULE", tmp_path / "module")
    names = ("keyrings/muster-nvidia-driver.asc", "sources.list.d/muster-nvidia-driver.sources")
    toolkits = ("keyrings/muster-nvidia-toolkit.asc", "sources.list.d/muster-nvidia-toolkit.sources")
    for name in (*names, *toolkits, "keyrings/other.asc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert set(muster_driver.apt_files(tmp_path)) == {tmp_path / name for name in names + toolkits}
    (tmp_path / "module").mkdir()
    assert set(muster_driver.apt_files(tmp_path)) == {tmp_path / name for name in toolkits}


def test_the_role_has_packages_and_checked_keys_for_each_system() -> None:
    packages, repositories = DEFAULTS["engine_driver_packages"], DEFAULTS["engine_driver_repositories"]
    assert set(packages) == set(repositories) == set(DEFAULTS["engine_driver_probes"]) == set(muster_driver.SYSTEMS)
    for system in muster_driver.SYSTEMS:
        for part in (muster_driver.DRIVER, muster_driver.TOOLKIT):
            assert packages[system][part]
            source = repositories[system][part]
            if source:  # else of the system itself
                assert source["name"] == f"muster-nvidia-{part}" and source["url"].startswith("https://")
                fingerprint = source["fingerprint"].replace(
                    "{{ engine_driver_toolkit_fingerprint }}", DEFAULTS["engine_driver_toolkit_fingerprint"]
                )
                assert re.fullmatch(r"[0-9A-F]{40}", fingerprint)
