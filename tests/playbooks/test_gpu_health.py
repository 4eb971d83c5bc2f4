"""The state of GPUs from recorded texts: throttling, processes and their owners, Xid lines of the kernel's log."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import pytest
from ansible.module_utils import muster_gpu_health
from ansible.module_utils.muster_host import Result

from launch.health.host_checks import check_host
from launch.health.verdicts import ERROR, Asked

UUID = "GPU-7fb1a0c9-0b9e-4f6e-a6d2-2f0cb44d2c01"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", []),  # idle
        ("0x0000000000000004", ["power cap"]),
        ("0x0000000000000048", ["hardware slowdown", "hardware thermal slowdown"]),
        ("0x00000000000000a0", ["software thermal slowdown", "power brake"]),
        ("[N/A]", None),
        ("Not Active", None),
        (None, None),
    ],
)
def test_reasons_for_throttling_in_words(text: str | None, words: list[str] | None) -> None:
    assert muster_gpu_health.parse_throttle(text) == words


def test_processes_are_reported_with_their_owner_whatever_their_name() -> None:
    text = f"{UUID}, 12345, python3, train, 8192\n{UUID}, 77, [Insufficient Permissions], [N/A]\nNo running processes\n"
    found = muster_gpu_health.parse_processes(text, {12345: "ann"}.get)
    assert found == {
        UUID: [
            {"pid": 12345, "user": "ann", "name": "python3, train", "memory_mib": 8192},
            {"pid": 77, "user": None, "name": "[Insufficient Permissions]", "memory_mib": None},
        ]
    }


def test_the_owner_of_a_process_is_found_and_that_of_none_is_not() -> None:
    assert muster_gpu_health.owner_of(os.getpid()) is not None
    assert muster_gpu_health.owner_of(2**22 + 1) is None


def row(**more: str) -> dict[str, str]:
    return {"index": "1", "uuid": UUID, "pci.bus_id": "00000000:5E:00.0", "temperature.gpu": "33", **more}


def test_health_of_a_gpu_by_new_and_old_names_of_fields() -> None:
    known = row(
        **{
            "clocks_throttle_reasons.active": "0x40",
            "ecc.errors.uncorrected.volatile.total": "2",
            "retired_pages.pending": "[N/A]",
            "remapped_rows.pending": "Yes",
            "remapped_rows.failure": "No",
        }
    )
    assert muster_gpu_health.gpu_health([known], {UUID: [{"pid": 1}]}) == [
        {
            "vendor": "nvidia",
            "index": 1,
            "pci_bus_id": "0000:5e:00",
            "uuid": UUID,
            "temperature_c": 33,
            "throttle": ["hardware thermal slowdown"],
            "ecc_uncorrected": 2,
            "repair_pending": True,
            "repair_failed": False,
            "processes": [{"pid": 1}],
        }
    ]


def test_what_a_gpu_does_not_tell_is_none_and_not_healthy() -> None:
    health = muster_gpu_health.gpu_health([{"index": "0", "uuid": UUID, "temperature.gpu": "[N/A]"}], {})[0]
    keys = ("temperature_c", "throttle", "ecc_uncorrected", "repair_pending", "repair_failed")
    assert [health[key] for key in keys] == [None] * 5


DMESG = """\
[    1.000000] Linux version 6.1.0-18-amd64
[  512.250000] nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing
[ 2000.500000] NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7)
[ 2005.500000] NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception: ESR 0x57c730
[ 3000.000000] NVRM: GPU at PCI:0000:b1:00: GPU-34d7319c-5b19-1e75-186d-c187099e4fe5
[ 3000.000100] NVRM: Xid (PCI:0000:b1:00): 79, pid=1234, name=python3, GPU has fallen off the bus.
[ 3000.000200] nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
"""


def test_xid_lines_are_found_in_the_kernels_log_with_gpu_number_time_and_count() -> None:
    found = muster_gpu_health.parse_xid(DMESG, booted=1_000_000.0)
    assert [(entry["pci"], entry["xid"], entry["when"], entry["count"]) for entry in found] == [
        ("0000:cb:00", 13, 1_002_005.5, 2),
        ("0000:b1:00", 79, 1_003_000.0, 1),
    ]
    assert found[1]["line"].startswith("NVRM: Xid (PCI:0000:b1:00): 79, pid=1234")


def test_an_xid_line_in_the_kernels_log_names_host_gpu_and_what_to_do() -> None:
    gpu = {"vendor": "nvidia", "index": 3, "name": "NVIDIA H100", "pci_bus_id": "0000:b1:00", "usable": True}
    found = {
        "gpus": [gpu],
        "gpu_problems": [],
        "ended": 1_003_600.0,
        "xid": muster_gpu_health.parse_xid(DMESG, 1_000_000.0),
    }
    verdict = next(v for v in check_host("h2", found, Asked()) if v.check == "xid" and v.level == ERROR)
    assert verdict.where == "host h2" and "reboot the host" in verdict.fix
    assert verdict.what == "GPU 3 (0000:b1:00): Xid 79, the GPU has fallen off the bus; 10 min ago"


@pytest.mark.parametrize(
    ("line", "when"),
    [
        ("2024-01-15T03:00:00,000000+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3", 1705287600.0),
        ("2024-01-15T04:00:00+0100 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1", 1705287600.0),
        ("1705287600.000000 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1", 1705287600.0),
        ("<4>[   10.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1", 1010.0),
        ("NVRM: Xid (0000:3b:00): 79, Channel 00000001", None),
    ],
)
def test_times_of_xid_lines_in_every_form(line: str, when: float | None) -> None:
    assert datetime(2024, 1, 15, 3, tzinfo=UTC).timestamp() == 1705287600.0
    entry = muster_gpu_health.parse_xid(line, booted=1000.0)[0]
    assert (entry["pci"], entry["xid"], entry["when"]) == ("0000:3b:00", 79, when)


def answering(dmesg: Result, journal: Result) -> Any:
    return lambda command, timeout=0.0: {"dmesg": dmesg, "journalctl": journal}[command[0]]


FORBIDDEN = Result(1, "", "dmesg: read kernel buffer failed: Operation not permitted\n")


def test_no_xid_line_is_distinguished_from_a_log_that_cannot_be_read() -> None:
    none = Result(127, "", "journalctl: not installed")
    assert muster_gpu_health.read_xid(answering(Result(0, "[    1.0] Linux\n", ""), none)) == ([], None)
    found, why = muster_gpu_health.read_xid(answering(FORBIDDEN, none))
    assert found is None and "Operation not permitted" in (why or "")
    empty = Result(0, "", "No journal files were found.\n")
    assert muster_gpu_health.read_xid(answering(FORBIDDEN, empty))[0] is None


def test_the_journal_is_read_where_dmesg_is_forbidden() -> None:
    journal = Result(0, "1705287600.000000 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 48, pid=1\n", "")
    found, why = muster_gpu_health.read_xid(answering(FORBIDDEN, journal))
    assert why is None and found is not None and found[0]["xid"] == 48


def test_the_time_of_the_boot() -> None:
    assert muster_gpu_health.boot_time("100.5 380.1", 1000.0) == 899.5
    assert muster_gpu_health.boot_time(None, 1000.0) is None
