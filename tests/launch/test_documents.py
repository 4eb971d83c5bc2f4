"""Promise: a cluster map that is missing, torn, of another version or older than its inventory is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch import files
from launch.cli.refusal import Refusal
from launch.deploy import deploy, detect
from launch.hosts import clustermap, inventory
from launch.hosts.inventory import Host, Target
from launch.job import readiness
from tests.launch.samples import cluster, facts, nic


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory with a fresh cluster map, in an empty folder that stands for the project."""
    monkeypatch.chdir(tmp_path)
    for module in (files, clustermap, inventory):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    path = Path("inventory/lab")
    path.mkdir(parents=True)
    (path / "hosts.yml").write_text("all: {hosts: {h1: {ansible_host: 192.0.2.1}}}\n")
    clustermap.write(clustermap.path_of(path), replace(cluster(1), inventory_sha256=inventory.digest(path)))
    return path


def test_a_map_reads_back_as_written(deployed: Path) -> None:
    assert clustermap.read(deployed) == replace(cluster(1), inventory_sha256=inventory.digest(deployed))


def test_missing_map(deployed: Path) -> None:
    clustermap.path_of(deployed).unlink()
    with pytest.raises(Refusal, match="make deploy INVENTORY=inventory/lab"):
        clustermap.read(deployed)


def test_who_has_deployed_another_inventory_is_shown_its_name(deployed: Path) -> None:
    assert clustermap.path_of(deployed) == files.ROOT / "build" / "lab" / "cluster.json"
    Path("inventory/hosts.yml").write_text("all: {hosts: {h1: {ansible_host: 192.0.2.1}}}\n")
    with pytest.raises(Refusal, match="or name one that is deployed: INVENTORY=inventory/lab"):
        clustermap.read(Path("inventory/hosts.yml"))


def test_inventory_changed_since(deployed: Path) -> None:
    (deployed / "hosts.yml").write_text("all: {hosts: {h2: {ansible_host: 192.0.2.2}}}\n")
    with pytest.raises(Refusal, match="older than inventory/lab"):
        clustermap.read(deployed)
    assert [host.name for host in clustermap.read(deployed, current=False).hosts] == ["h1"]  # to stop what runs there


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "muster.cluster/1"}'])
def test_torn_map(deployed: Path, content: str) -> None:
    clustermap.path_of(deployed).write_text(content)
    with pytest.raises(Refusal, match="make deploy"):
        clustermap.read(deployed)


def test_another_version(deployed: Path) -> None:
    path = clustermap.path_of(deployed)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "muster.cluster/0"}))
    with pytest.raises(Refusal, match=r"version muster\.cluster/0"):
        clustermap.read(deployed)


def test_no_password_gets_into_the_map() -> None:
    target = Target("h1", "192.0.2.1", user="me", sudo_password="secret")
    fields = clustermap.ssh_fields(target)
    assert "secret" not in json.dumps(fields) and fields["needs_sudo_password"] is True
    assert "secret" not in repr(target)


def host(name: str, **settings: object) -> Host:
    return Host(Target(name, f"192.0.2.{name[1:]}"), dict(settings))


def test_one_machine_under_two_names_is_found_by_its_nics() -> None:
    same = facts(nic("e0", "10.0.0.1/24", mac="02:00:00:00:00:01"))
    with pytest.raises(Refusal, match="same machine as h1"):
        detect.check_facts([host("h1"), host("h2")], {"h1": same, "h2": same})


def test_gpus_that_are_not_there_and_broken_drivers_are_refused_together() -> None:
    known = {"h1": facts(gpus=1), "h2": facts(problem="nvidia-smi ended with status 9: no driver")}
    with pytest.raises(Refusal) as caught:
        detect.check_facts([host("h1", gpus=[0, 2]), host("h2")], known)
    assert "has no GPU [2]" in str(caught.value) and "no driver" in str(caught.value)
    detect.check_facts([host("h1"), host("h2", gpus=[])], known)


def test_ranks_follow_gpus_unless_their_number_is_set() -> None:
    assert deploy.ranks_and_gpus(host("h1"), facts()) == (1, [])
    assert deploy.ranks_and_gpus(host("h1"), facts(gpus=4)) == (4, [0, 1, 2, 3])
    assert deploy.ranks_and_gpus(host("h1", gpus=[1, 3]), facts(gpus=4)) == (2, [1, 3])
    assert deploy.ranks_and_gpus(host("h1", nproc_per_node=3), facts()) == (3, [])


def test_mig_slices_are_refused_and_gpus_of_another_maker_are_no_ranks() -> None:
    known = facts(gpus=2)
    known["gpus"][0] |= {"usable": False, "unusable_reason": "MIG mode is on", "mig_instances": [{"name": "1g.10gb"}]}
    with pytest.raises(Refusal, match=r"GPU 0 .*1g\.10gb.*MIG mode is on"):
        detect.check_facts([host("h1")], {"h1": known})
    detect.check_facts([host("h1", gpus=[1])], {"h1": known})
    assert deploy.ranks_and_gpus(host("h1", gpus=[1]), known) == (1, [1])
    amd = {"vendor": "amd", "index": 0, "name": "AMD Instinct MI210", "usable": True}
    assert deploy.ranks_and_gpus(host("h1"), facts() | {"gpus": [amd]}) == (1, [])
    assert deploy.ranks_and_gpus(host("h1"), facts(gpus=2) | {"gpus": [amd]}, "amd") == (1, [0])


def test_gpus_that_the_image_cannot_use_are_said_and_those_of_two_makers_refused_in_one_message() -> None:
    amd = facts() | {"gpus": [{"vendor": "amd", "index": 0, "name": "AMD Instinct MI210", "usable": True}]}
    alone, both = {"h1": amd}, {"h1": amd, "h2": facts(gpus=1)}
    hosts = [host("h1"), host("h2")]
    detect.check_facts(hosts[:1], alone, "nvidia")
    (said,) = detect.unused_gpus(hosts[:1], alone, "nvidia")
    assert "host h1" in said and "MI210" in said and "base_image" in said
    assert detect.unused_gpus([host("h1", gpus=[])], alone, "nvidia") == []
    for vendor in ("nvidia", "amd"):
        with pytest.raises(Refusal, match="NCCL and RCCL") as caught:
            detect.check_facts(hosts, both, vendor)
        assert len(caught.value.problems) == 1
        detect.check_facts(hosts, both, None)  # the image is not known yet
    detect.check_facts([hosts[0], host("h2", gpus=[])], both, "amd")
    with pytest.raises(Refusal, match=r"host h2: 1 x NVIDIA H200: not used.*ROCm.*\n?.*gpus: \[\]"):
        detect.check_facts(hosts[1:], both, "amd")


def test_a_host_is_not_ready_for_each_reason() -> None:
    host, image = cluster(1).hosts[0], "ab" * 32
    problems = "\n".join(
        map(str, readiness.problems_of(host, readiness.parse("master=29500\n"), image, is_master=True))
    )
    assert "does not hold image" in problems and "/srv/data" in problems
    assert "29400 to 29415 fewer than two are free" in problems and "29500 to 29599 fewer than two are free" in problems
    held = readiness.parse('keeper=\nkeeper_held="nc",pid=4711\nmaster=\nmaster_held="sshd",pid=42\n')
    problems = "\n".join(map(str, readiness.problems_of(host, held, image, is_master=True)))
    assert '29415 fewer than two are free; they are held by "nc",pid=4711' in problems
    assert '29599 fewer than two are free; they are held by "sshd",pid=42' in problems
    one = readiness.parse("image=yes\ndata=yes\nkeeper=29401\nmaster=29511 29502\n")
    assert len(readiness.problems_of(host, one, image, is_master=True)) == 1  # the quick check needs one, too
    ready = readiness.parse("image=yes\ndata=yes\nkeeper=29401 29402\nmaster=29511 29502\n")
    assert readiness.problems_of(host, ready, image, is_master=True) == [] and ready.master_ports == [29511, 29502]


def test_a_document_is_indented_for_people_but_one_with_the_links_of_hundreds_of_hosts(tmp_path: Path) -> None:
    for links, lines in ((10, True), (60_000, False)):
        document = {"links": [{"source": "h1", "target": f"h{number}"} for number in range(links)]}
        files.write_json(tmp_path / "x.json", document)
        assert files.read_json(tmp_path / "x.json") == document
        assert ((tmp_path / "x.json").read_text().count("\n") > links) is lines
