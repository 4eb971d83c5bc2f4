"""Promise: `make check` sees on real hosts what a run would suffer from, names it, and a run is refused for errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import lab_plan
from launch.health import check
from launch.health.verdicts import ERROR, HEALTHY, Verdict
from launch.hosts import clustermap
from launch.hosts.connection import machines
from tests.lab.conftest import HOSTS, SMALL, Lab, summary_of

pytestmark = pytest.mark.lab


def checked(lab: Lab, status: int, **variables: Any) -> dict[str, Any]:
    """The document of a full check without forecast."""
    done = lab.fab("check", JSON=1, FORECAST=0, **variables)
    assert done.returncode == status, done.stdout
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def verdicts_of(document: dict[str, Any], name: str) -> list[dict[str, str]]:
    return [verdict for verdict in document["verdicts"] if verdict["check"] == name]


def quickly(lab: Lab) -> list[Verdict]:
    cluster = clustermap.read(lab.inventory)
    with machines(cluster, cluster.hosts) as opened:
        return check.quick(cluster, cluster.hosts, opened)


@pytest.fixture
def shaped(lab: Lab) -> Iterator[None]:
    """Links of one rate; they have it again afterwards, and no firewall."""
    lab.shape()
    yield
    for host in HOSTS:
        lab.nsenter(host, "iptables", "-F")
    lab.shape()


def data_nic(host: str) -> str:
    return lab_plan.nics(HOSTS.index(host)).data


def test_a_healthy_lab_then_one_slow_host(lab: Lab, shaped: None) -> None:
    healthy = checked(lab, 0)
    assert not [verdict for verdict in healthy["verdicts"] if verdict["level"] == ERROR]
    assert len(healthy["links"]) == 6
    assert all(0 < link["mbits"] < 1000 for link in healthy["links"]), healthy["links"]
    assert [link["path_mtu"] for link in healthy["links"]] == [1500] * 6
    assert all(row["bus_mbits"] > 0 for row in healthy["allreduce"]["rows"]) and healthy["allreduce"]["rows"]
    odd = {row["property"]: row["odd"] for row in healthy["sameness"]["rows"] if row["odd"]}
    assert odd == ({"engine": ["h2"]} if lab.engine("h2").name != lab.engine("h1").name else {})
    assert {row["property"] for row in healthy["sameness"]["rows"]} >= {"image", "torch", "code", "kernel"}
    assert [verdict["where"] for verdict in verdicts_of(healthy, "clock")] == [f"host {host}" for host in HOSTS]

    lab.nsenter("h3", *f"tc qdisc replace dev {data_nic('h3')} root tbf rate 50mbit burst 64kb latency 50ms".split())
    slow = checked(lab, 0)
    assert "host h3" in [
        verdict["where"] for verdict in verdicts_of(slow, "bandwidth") if verdict["level"] != HEALTHY
    ], slow
    drifted = {verdict["where"]: verdict for verdict in verdicts_of(slow, "drift") if verdict["level"] != HEALTHY}
    assert healthy["when"][:10] in drifted["host h3"]["what"], drifted
    folder = Path("build") / lab.name / "checks"
    assert "<svg" in (folder / "heatmap.svg").read_text() and "h3" in (folder / "report.html").read_text()
    assert len(list(folder.glob("*.json"))) >= 2


@pytest.mark.long
def test_a_pair_that_is_cut_off_is_named_and_no_run_starts(lab: Lab, shaped: None) -> None:
    cluster = clustermap.read(lab.inventory)
    rule = f"iptables -A INPUT -i {data_nic('h2')} -s {cluster.hosts[0].address} -p tcp --syn -j DROP"
    lab.nsenter("h2", *rule.split())
    errors = [verdict for verdict in quickly(lab) if verdict.level == ERROR]
    assert [verdict.where for verdict in errors] == ["h1 -> h2, h2 -> h1"] and "h1 does not reach h2" in errors[0].what
    done = lab.fab("train", NODES=2, ARGS="--epochs 1")
    assert done.returncode == 2 and "h1 does not reach h2" in done.stdout and "fix:" in done.stdout


def test_a_data_nic_that_is_down_is_the_one_error_with_its_fix(lab: Lab, shaped: None) -> None:
    nic = clustermap.read(lab.inventory).hosts[1].interface
    assert nic == data_nic("h2")
    lab.nsenter("h2", "ip", "link", "set", "dev", nic, "down")
    try:
        errors = [verdict for verdict in quickly(lab) if verdict.level == ERROR]
        done = lab.fab("train", NODES=2, ARGS="--epochs 1")
    finally:
        lab.nsenter("h2", "ip", "link", "set", "dev", nic, "up")
    assert [(verdict.check, verdict.where) for verdict in errors] == [("nic", "host h2")], errors
    assert done.returncode == 2 and f"ip link set dev {nic} up" in done.stdout and "firewall" not in done.stdout


def test_what_a_dead_run_has_left_is_reported_with_its_owner(lab: Lab) -> None:
    image = lab.cluster["image"]["id"]
    labels = "--label muster.run=20260101-000000-dead --label muster.owner=eve@laptop"
    engine = lab.engine("h2")
    lab.in_container("h2", f"{engine.name} run --name left {labels} {engine.image(image)} true")
    try:
        verdicts = [verdict for verdict in quickly(lab) if verdict.check == "leftovers"]
        assert [verdict.where for verdict in verdicts] == ["host h2"]
        assert "eve@laptop" in verdicts[0].what and "make stop RUN=20260101-000000-dead" in verdicts[0].fix
    finally:
        lab.on("h2", f"{engine.name} rm --force left")


def test_bad_arguments_of_a_check_are_one_message(lab: Lab) -> None:
    done = lab.fab("check", NODES=9)
    assert done.returncode == 2 and "NODES=9" in done.stdout and "Traceback" not in done.stdout


def test_the_way_to_communicate_is_chosen_from_measurements_before_the_start(lab: Lab, shaped: None) -> None:
    lab.shape("100mbit")  # so that a small model, which is measured in less time, waits for the network
    trained = f"--epochs 1 {SMALL} --communication auto --allow-approximate"
    done = lab.fab("train", NODES=2, ARGS=trained)
    assert done.returncode == 0, done.stdout
    measuring, chosen = [line for line in done.stdout.splitlines() if line.startswith("muster | communication: ")]
    assert "measuring steps and exchanges on 2 hosts" in measuring
    plan = json.loads((summary_of(done.stdout)[0] / "plan.json").read_text())
    assert "--communication" not in plan["args"] and "--allow-approximate" not in plan["args"]
    links = " ".join(plan["args"][4:])  # after --epochs and --model
    assert f"communication: {links or 'nothing is changed'}: " in chosen
