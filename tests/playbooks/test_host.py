"""What the modules read of a machine, from recorded texts: cgroups, os-release; and commands with a time limit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ansible.module_utils import muster_host


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
    assert muster_host.run(["sleep", "600"], timeout=0.2).rc == 124
    assert muster_host.run(["no-such-command-anywhere"]).rc == 127
    assert time.monotonic() - begun < 300


def test_the_disk_of_a_folder_that_is_not_there_is_that_of_its_parent(tmp_path: Path) -> None:
    assert muster_host.disk(tmp_path / "not" / "there")[1] == muster_host.disk(tmp_path)[1]


def test_os_release_with_and_without_quotes() -> None:
    text = 'NAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
    assert muster_host.parse_os_release(text) == {"id": "ubuntu", "version": "24.04", "like": "debian"}
