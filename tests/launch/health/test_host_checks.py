"""Promise: each check names a fault of a host with figures and a fix, and a fact that is missing crashes none."""

from __future__ import annotations

from typing import Any

import pytest

from launch.health.host_checks import GIB, MIB, check_host
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, LEVELS, WARNING, Asked, worst
from launch.hosts import hostcall
from tests.launch.health.host_facts import ASKED, NOW, about, gpu, health, host, nic, one


def test_a_healthy_host_has_one_line_with_figures_for_each_check_and_nothing_to_fix() -> None:
    verdicts = check_host("h2", host(), ASKED)
    assert {verdict.level for verdict in verdicts} == {HEALTHY}
    checks = [
        "clock",
        "runs",
        "gpus",
        "gpu health",
        "gpu use",
        "xid",
        "data",
        "disk",
        "memory",
        "limits",
        "load",
    ]
    assert [verdict.check for verdict in verdicts] == checks
    assert all(verdict.where == "host h2" and verdict.what and not verdict.fix for verdict in verdicts)


def test_whoever_is_not_healthy_has_a_fix() -> None:
    sick = host(
        gpus=[gpu(0, usable=False, unusable_reason="MIG mode is on"), gpu(1, name="NVIDIA L4")],
        gpu_health=[health(0), health(1, ecc_uncorrected=3, throttle=["power brake"])],
        xid=[{"pci": "0000:01:00", "xid": 79, "when": NOW - 60, "count": 1, "line": ""}],
        muster_disk_free_bytes=100,
        memory_free_bytes=100,
        busy=1.0,
        data={"path": "/srv/data", "present": False},
        limits={"nofile": 1024, "nofile_hard": 1024},
        runs=[{"run": "r1", "container": "c", "state": "exited", "owner": "ann", "age_seconds": 100.0}],
    )
    verdicts = check_host("h2", sick, Asked(ranks=2, data_dir="/srv/data"))
    assert all(verdict.fix for verdict in verdicts if verdict.level != HEALTHY)
    assert worst(verdicts) == ERROR


@pytest.mark.parametrize("key", sorted(set(host()) - {"xid_problem", "busy"}))
@pytest.mark.parametrize("form", ["missing", "null"])
def test_a_fact_that_is_missing_makes_its_checks_incomplete_and_crashes_none(key: str, form: str) -> None:
    found = host(xid=[{"pci": "0000:00:00", "xid": 13, "when": NOW - 60, "count": 1, "line": ""}])
    if form == "missing":
        del found[key]
    else:
        found[key] = None
    before, after = check_host("h2", host(), ASKED), check_host("h2", found, ASKED)
    assert any(verdict.level == INCOMPLETE for verdict in after)
    assert {verdict.check for verdict in after} >= {verdict.check for verdict in before} - {"data"}


@pytest.mark.parametrize(
    ("offset", "uncertainty", "level"),
    [
        (0.0, 0.01, HEALTHY),
        (-1.9, 0.01, HEALTHY),
        (2.5, 0.01, WARNING),
        (-20.0, 0.2, WARNING),
        (2.5, 1.0, INCOMPLETE),
        (61.0, 0.5, ERROR),
        (60.2, 0.5, WARNING),
        (None, 0.0, INCOMPLETE),
    ],
)
def test_clock(offset: float | None, uncertainty: float, level: str) -> None:
    verdict = one("clock", host(), Asked(clock_offset=offset, clock_uncertainty=uncertainty))
    assert verdict.level == level
    if offset == -20.0:
        assert "20.00 s" in verdict.what and "behind" in verdict.what


def test_a_clock_that_is_not_known_to_differ_is_said_to_be_near() -> None:
    verdict = one("clock", host(), Asked(clock_offset=0.99, clock_uncertainty=1.41))
    assert (verdict.level, verdict.what) == (HEALTHY, "clock within 2.40 s of this machine's")


@pytest.mark.parametrize(
    ("nics", "what", "fix"),
    [
        ([nic(up=False, carrier=False)], "is down", "`ip link set dev eno2 up`"),
        ([nic(carrier=False)], "has no link", "cable"),
        ([nic(address="")], "lacks the training address 10.78.0.12", "give it the address again"),
        ([nic(address=""), nic("eno3")], "10.78.0.12 is now on eno3, no longer on eno2", "make deploy"),
        ([nic("eno3", "10.77.0.12")], "eno2, the NIC of the training network, is gone", "make deploy"),
    ],
)
def test_a_training_nic_that_cannot_carry_a_run_is_an_error(nics: list[Any], what: str, fix: str) -> None:
    verdict = one("nic", host(nics=nics))
    assert verdict.level == ERROR and what in verdict.what and fix in verdict.fix


def test_a_training_nic_in_order_is_not_mentioned() -> None:
    assert about("nic", host()) == [] and about("nic", host(nics=[nic(up=False)]), Asked()) == []


@pytest.mark.parametrize(
    ("there", "back", "ahead", "works"),
    [(0.05, 0.05, 20.0, 0.3), (0.2, 0.01, -3.0, 0.0), (0.0, 0.4, 0.0, 1.0)],
)
def test_the_offset_of_a_clock_lies_within_its_uncertainty(
    there: float, back: float, ahead: float, works: float
) -> None:
    sent = 1000.0
    began = sent + there + ahead
    offset, uncertainty = hostcall.clock_offset(sent, began, began + works, sent + there + works + back)
    assert abs(offset - ahead) <= uncertainty + 1e-9
    assert uncertainty == pytest.approx((there + back) / 2)


@pytest.mark.parametrize(
    ("found", "checkpoint", "levels"),
    [
        ({}, GIB, [HEALTHY]),
        ({}, None, [HEALTHY]),
        ({}, 101 * GIB, [ERROR]),
        ({}, 99 * GIB, [HEALTHY]),
        ({"muster_disk_free_bytes": 4 * GIB}, None, [WARNING]),
        ({"muster_disk_free_bytes": GIB // 2}, 1, [ERROR]),
        ({"disk_free_bytes": 3 * GIB}, GIB, [HEALTHY, WARNING]),
        ({"disk_free_bytes": 100, "muster_disk_free_bytes": 100}, 1, [ERROR]),
    ],
)
def test_disk_has_room_for_two_checkpoints(found: dict[str, Any], checkpoint: int | None, levels: list[str]) -> None:
    verdicts = about("disk", host(**found), Asked(checkpoint_bytes=checkpoint))
    assert [verdict.level for verdict in verdicts] == levels
    if checkpoint == 101 * GIB:
        assert "200.0 GiB free" in verdicts[0].what and "202.0 GiB" in verdicts[0].what


@pytest.mark.parametrize(
    ("check", "found", "ranks", "level"),
    [
        ("memory", {"memory_free_bytes": 4 * GIB}, 4, HEALTHY),
        ("memory", {"memory_free_bytes": 4 * GIB}, 5, WARNING),
        ("memory", {"memory_free_bytes": 200 * MIB}, 1, ERROR),
        ("load", {"busy": 0.5}, 1, WARNING),
        ("load", {"busy": 0.49}, 1, HEALTHY),
        ("load", {"busy": 0.0}, 1, HEALTHY),
    ],
)
def test_what_is_free(check: str, found: dict[str, Any], ranks: int, level: str) -> None:
    assert one(check, host(**found), Asked(ranks=ranks)).level == level


def test_a_run_of_ours_is_no_surprise_to_the_load() -> None:
    runs = [{"run": "r1", "container": "c", "state": "running", "owner": "ann", "age_seconds": 5.0}]
    assert one("load", host(busy=1.0, runs=runs)).level == HEALTHY


def test_the_load_is_reported_with_its_share_and_only_where_it_was_sampled() -> None:
    verdict = one("load", host(busy=0.874))
    assert verdict.level == WARNING and "87% of the processor time of 16 cores is in use now" in verdict.what
    bare = host()
    del bare["busy"]
    for found in (host(busy=None), bare):
        assert about("load", found) == [] and {v.level for v in check_host("h2", found, ASKED)} == {HEALTHY}


@pytest.mark.parametrize(
    ("limits", "asked", "level"),
    [
        ({"nofile": 1024, "nofile_hard": 1048576}, Asked(), HEALTHY),
        ({"nofile": 1024, "nofile_hard": -1}, Asked(ranks=8), HEALTHY),
        ({"nofile": 4096, "nofile_hard": 4096}, Asked(ranks=2), WARNING),
        ({"nofile": 1024}, Asked(), INCOMPLETE),
    ],
)
def test_limits_matter_where_the_run_needs_them(limits: dict[str, int], asked: Asked, level: str) -> None:
    assert one("limits", host(limits=limits), asked).level == level


# -- what else is on the host ------------------------------------------------------------------------------------------


def container(run: str, state: str, **more: Any) -> dict[str, Any]:
    return {"run": run, "container": f"muster-{run}-0", "state": state, "owner": "ann", "age_seconds": 7200.0, **more}


def test_another_run_in_progress_is_an_error_with_owner_run_and_age() -> None:
    verdict = one("runs", host(runs=[container("r1", "exited"), container("r1", "running")]))
    assert verdict.level == ERROR
    assert all(word in verdict.what for word in ("r1", "ann", "2.0 h")) and "make stop RUN=r1" in verdict.fix


@pytest.mark.parametrize("state", ["exited", "created", "stopped", "dead", "initialized", "unknown"])
def test_leftovers_of_a_dead_run_are_reported_with_owner_and_age(state: str) -> None:
    verdict = one("leftovers", host(runs=[container("r1", state)]))
    assert verdict.level == WARNING
    assert all(word in verdict.what for word in ("r1", "ann", "2.0 h", state)) and "make gather RUN=r1" in verdict.fix


def test_each_run_is_reported_once() -> None:
    entries = [container("r1", "exited"), container("r2", "exited", owner="", age_seconds=None)]
    verdicts = check_host("h2", host(runs=entries), ASKED)
    assert [verdict.what for verdict in verdicts if verdict.check == "leftovers"] == [
        "a container is left of run r1 of ann, 2.0 h old (muster-r1-0, exited)",
        "a container is left of run r2 of an unknown user, of unknown age (muster-r2-0, exited)",
    ]
    assert not [verdict for verdict in verdicts if verdict.check == "runs"]


BROUGHT = {"name": "stl10", "version": "ab12", "files": 3, "bytes": 10, "fingerprint": "ab", "at": 1.0}


@pytest.mark.parametrize(
    ("data", "level"),
    [
        ({"present": True}, HEALTHY),
        ({"present": False}, ERROR),
        ({"present": True, "complete": True, "files": 3, "bytes": 10, "sha256": "ab"}, HEALTHY),
        ({"present": True, "complete": True, "files": 0, "bytes": 0, "sha256": "ab"}, ERROR),
        ({"present": True, "complete": False, "files": 3, "bytes": 10, "seconds": 8.0}, INCOMPLETE),
        ({"present": True, "complete": True, "files": 3, "bytes": 10, "sha256": "ab", "brought": BROUGHT}, HEALTHY),
        ({"present": True, "complete": True, "files": 3, "bytes": 10, "sha256": "cd", "brought": BROUGHT}, ERROR),
        ({"present": True, "complete": False, "files": 2, "bytes": 9, "seconds": 8.0, "brought": BROUGHT}, HEALTHY),
        (None, INCOMPLETE),
    ],
)
def test_data(data: dict[str, Any] | None, level: str) -> None:
    verdict = one("data", host(data=data))
    assert verdict.level == level
    assert about("data", host(data=data), Asked()) == []


def test_a_host_without_the_dataset_that_make_data_brought_is_told_what_brings_it() -> None:
    [verdict] = about(
        "data", host(data={"present": False}), Asked(data_dir="/var/lib/muster/data/stl10/ab12ab12ab12ab12")
    )
    assert verdict.level == ERROR and "NAME=stl10" in verdict.fix


def port(state: str, soft: bool = False) -> dict[str, Any]:
    return {
        "device": "mlx5_0",
        "port": 1,
        "state": state,
        "rate_gbits": 100.0,
        "link_layer": "InfiniBand",
        "nics": [],
        "soft": soft,
    }


@pytest.mark.parametrize(
    ("ports", "level"),
    [
        ([port("ACTIVE")], HEALTHY),
        ([port("DOWN")], HEALTHY),
        ([port("INIT")], WARNING),
        ([port("INIT", soft=True)], None),
        ([], None),
    ],
)
def test_rdma(ports: list[Any], level: str | None) -> None:
    assert [verdict.level for verdict in about("rdma", host(rdma=ports))] == ([level] if level else [])


def test_levels_are_the_words_that_all_checks_share() -> None:
    assert {verdict.level for verdict in check_host("h2", host(), ASKED)} <= set(LEVELS)
