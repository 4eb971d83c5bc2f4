"""Promise: deploy goes on only when every host has answered and no fact forbids training; a refusal names each host."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.deploy import detect
from launch.hosts import hostcall
from launch.hosts.hostcall import Answer
from launch.hosts.inventory import Host, Inventory, Target
from launch.network import choose, measure
from launch.network.links import Link
from tests.launch.samples import facts, full_reach, nic


def host(name: str) -> Host:
    return Host(Target(name, f"192.0.2.{name[1:]}"), {})


def test_every_host_that_did_not_answer_is_named_with_its_reason() -> None:
    answer = Answer({}, None, None, None, 0.0, 0.0)
    assert detect._all_answers({"h1": answer}) == {"h1": answer}
    lost = {"h2": TimeoutError("no answer within 60 s"), "h3": RuntimeError("`ip -j -d addr show` failed")}
    with pytest.raises(Refusal) as caught:
        detect._all_answers({"h1": answer, **lost})
    said = str(caught.value)
    assert "h2" in said and "no answer within 60 s" in said and "h3" in said and "`ip -j -d addr show` failed" in said
    assert caught.value.status == exits.DEPLOY_FAILED and "h1" not in said


def test_a_host_that_lacks_packages_although_it_was_provisioned_is_named() -> None:
    inv = Inventory(Path("hosts.yml"), (host("h1"), host("h2")), "")
    answers: detect.Answers = {
        name: Answer({"ready": False, "engine_change": []}, None, None, None, 0.0, 0.0) for name in ("h1", "h2")
    }
    with pytest.raises(Refusal, match=r"h2: lacks packages .*\n.*make deploy") as caught:
        detect.facts_of(inv, answers, Console(file=io.StringIO()))
    assert caught.value.status == exits.DEPLOY_FAILED


def test_a_host_that_stores_images_slowly_is_told_how_not_to() -> None:
    answers: detect.Answers = {
        name: Answer({"engine": {"name": "podman", "storage_driver": driver}}, None, None, None, 0.0, 0.0)
        for name, driver in (("h1", "overlay"), ("h2", "vfs"))
    }
    said = io.StringIO()
    detect._facts(answers, Console(file=said, width=200))
    [line] = said.getvalue().splitlines()
    assert line.strip().startswith("h2: ") and "vfs" in line and "/var/lib/containers" in line


def test_a_change_of_engine_is_said_of_hosts_that_answer() -> None:
    def said(change: list[str]) -> Answer:
        return Answer({"ready": not change, "engine_change": change}, None, None, None, 0.0, 0.0)

    answers: detect.Answers = {"h1": said([]), "h2": said(["podman", "docker"]), "h3": TimeoutError("no answer")}
    found = detect.changes_of_engine(answers)
    assert found == ["h2: from podman to docker; what Muster had in podman is removed"]


def test_a_machine_under_two_names_and_a_broken_gpu_are_refused_at_once() -> None:
    hosts = [host("h1"), host("h2"), host("h3")]
    known = {
        "h1": facts(nic("eno1", "10.0.0.1/24", mac="02:00:00:00:00:01")),
        "h2": facts(nic("eth0", "10.0.0.1/24", mac="02:00:00:00:00:01")),
        "h3": facts(nic("eth0", "10.0.0.3/24", mac="02:00:00:00:00:03"), problem="driver mismatch"),
    }
    with pytest.raises(Refusal) as caught:
        detect.check_facts(hosts, known)
    assert "h2: is the same machine as h1" in str(caught.value) and "driver mismatch" in str(caught.value)


def works(known: dict[str, Any]) -> list[choose.Working]:
    return choose.working(known, {host: {} for host in known}, full_reach(known)).working


def test_nothing_is_measured_beside_a_run(tmp_path: Path) -> None:
    entry = {"run": "20260101-000000-abcd", "owner": "ann@desk", "state": "running"}
    ended = {"run": "20250101-000000-abcd", "owner": "ann@desk", "state": "exited"}
    runs = detect.runs_in_progress({"h1": {"runs": [entry, ended]}, "h2": {"runs": [entry]}, "h3": {"runs": None}})
    assert runs == {"20260101-000000-abcd": "ann@desk"}
    inv = Inventory(Path("hosts.yml"), tuple(map(host, LAB)), "")
    said = "run 20260101-000000-abcd of ann@desk is in progress, and measuring the links would disturb it"
    with pytest.raises(Refusal, match=said):
        detect.measure_links(inv, [], works(LAB), tmp_path / "none.json", Console(), runs)


def measured(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Any], *speeds: Mapping[str, float | None]
) -> tuple[detect.Measured, str]:
    """What is measured and said where each round finds these Mbit/s by CIDR, None for links that fail."""

    left = list(speeds)

    def links(
        machines: Any, networks: Sequence[measure.NetworkAddresses], *options: Any
    ) -> tuple[dict[str, list[Link]], list[str]]:
        one = left.pop(0)
        assert {network.name.split()[0] for network in networks} == set(one)
        mbits = {network.name: one[network.name.split()[0]] for network in networks}
        return {n: [Link("h1", "h2", m, 0.1, 1500, None if m else "stalls")] for n, m in mbits.items()}, []

    monkeypatch.setattr(measure, "measure", links)
    console = Console(file=io.StringIO(), width=200)
    inv = Inventory(Path("hosts.yml"), tuple(map(host, known)), "")
    result = detect.measure_links(inv, [], works(known), None, console)
    assert not left
    return result, console.file.getvalue()  # type: ignore[attr-defined]


LAB = {
    "h1": facts(nic("m", "10.77.0.1/24"), nic("d", "10.78.0.1/24"), nic("x", "10.79.0.1/24")),
    "h2": facts(nic("m", "10.77.0.2/24"), nic("d", "10.78.0.2/24"), nic("x", "10.79.0.2/24")),
}
M, D, X = "10.77.0.0/24", "10.78.0.0/24", "10.79.0.0/24"


def test_every_round_of_measuring_says_what_it_measures_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    once = {M: 400.0, D: 700.0, X: 94.0}
    _, said = measured(monkeypatch, LAB, once, {M: 410.0, D: 650.0})
    first, second = said.splitlines()
    every, two = (f"about {measure.expected_seconds(2, n, measure.BANDWIDTH_SECONDS):.0f} s" for n in (3, 2))
    assert first.endswith(every) and "2 ordered pairs of hosts" in first and every != two
    assert "again" in second and f"{M} (m), {D} (d)" in second and second.endswith(two) and X not in second


def test_links_that_all_fail_are_measured_once_more_before_a_deploy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dict.fromkeys((M, D, X))
    result, _ = measured(monkeypatch, LAB, nothing, {M: None, D: 940.0, X: None})
    assert result.measurements.failures[f"{D} (d)"] == ["stalls"]
    measured(monkeypatch, LAB, nothing, nothing)


def test_an_earlier_choice_is_found_again_among_two_nics_of_a_host_in_one_subnet(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    known = {
        "h1": facts(nic("eno2", "10.0.0.1/24")),
        "h2": facts(nic("ens3", "10.0.0.2/24")),
        "h3": facts(nic("eno2", "10.0.0.3/24"), nic("ens3", "10.0.0.13/24")),
    }

    def kept(known: dict[str, Any], **nics: str) -> str:
        hosts = [{"name": name, "interface": interface} for name, interface in nics.items()]
        path.write_text(json.dumps({"network": {"name": "10.0.0.0/24"}, "hosts": hosts}))
        return detect._chosen_before(path, works(known))

    for interface in ("eno2", "ens3"):
        label = f"10.0.0.0/24 (eno2, ens3; h3: {interface})"
        assert kept(known, h1="eno2", h2="ens3", h3=interface) == label
        assert kept(known, h2="ens3", h3=interface) == label  # h1 is new
    assert kept(known, h1="another", h2="ens3", h3="ens3") == ""
    assert kept(known | {"h3": facts(nic("ens3", "10.0.0.13/24"))}, h3="ens3") == "10.0.0.0/24 (eno2, ens3)"
    path.unlink()
    assert detect._chosen_before(path, works(known)) == ""


def test_figures_of_machines_that_had_the_same_addresses_are_not_used(tmp_path: Path) -> None:
    known = {"h1": facts(nic("d", "10.78.0.1/24"))}
    inv = Inventory(tmp_path / "hosts.yml", (host("h1"),), "")

    def key() -> str:
        return detect.measure_links(inv, [], works(known), None, Console()).key

    (tmp_path / "known_hosts").write_text("h1 ssh-ed25519 AAAA\nh2 ssh-ed25519 BBBB\n")
    before = key()
    (tmp_path / "known_hosts").write_text("h2 ssh-ed25519 BBBB\nh1 ssh-ed25519 AAAA\n")
    assert key() == before
    (tmp_path / "known_hosts").write_text("h2 ssh-ed25519 BBBB\nh1 ssh-ed25519 CCCC\n")
    assert key() != before


def test_a_host_is_asked_for_a_driver_where_its_inventory_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(hostcall, "call_hosts", lambda machines, options, *rest: asked.update(options) or {})
    wants = dataclasses.replace(host("h1"), settings={"install_driver": True, "gpus": [0]})
    inv = Inventory(Path("hosts.yml"), (wants, host("h2")), "")
    machines: Any = [SimpleNamespace(name=one.name) for one in inv.hosts]
    detect.ask(inv, machines, Console(file=io.StringIO()))
    wanted = {name: options["survey"]["wanted"] for name, options in asked.items()}
    assert (wanted["h1"]["driver"], wanted["h1"]["gpus"], wanted["h2"]["driver"]) == (True, True, False)
