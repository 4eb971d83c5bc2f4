"""What hosts have in common: the odd one is marked and named, with what it differs in and what that does."""

from __future__ import annotations

from typing import Any

import pytest

from launch.health import sameness
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict

IMAGE = "ce36c1b3f6945ce6046ccbae613557919c642b2a47bdf64d58186aef1d00a464"
OTHER = "0" * 64


def gpu(name: str = "NVIDIA H100 80GB HBM3", driver: str = "550.54.15", index: int = 0) -> dict[str, Any]:
    return {"vendor": "nvidia", "index": index, "name": name, "driver": driver}


def facts(**more: Any) -> dict[str, Any]:
    return {
        "arch": "x86_64",
        "kernel": "6.1.0-18-amd64",
        "python": "3.11.2",
        "cpu_model": "AMD EPYC 7B13",
        "cpu_flags": ["avx", "avx2", "fma"],
        "engine": {"name": "podman", "version": "4.3.1"},
        "gpus": [gpu()],
        "data": {"path": "/srv/data", "present": True, "complete": True, "files": 3, "bytes": 12, "sha256": "ab" * 32},
        **more,
    }


def image(**more: str | None) -> dict[str, str | None]:
    known = {"image": IMAGE, "code": "c0" * 32, "torch": "2.13.0", "torchvision": "0.28.0", "nccl": "2.29.7"}
    return {**known, "cuda": "13.0", **more}


def cluster(
    odd: dict[str, Any] | None = None, inside: dict[str, str | None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Three hosts of which h3 may differ, in its facts or in its image."""
    hosts = {"h1": facts(), "h2": facts(), "h3": facts(**(odd or {}))}
    return hosts, {"h1": image(), "h2": image(), "h3": image(**(inside or {}))}


def verdicts_of(odd: dict[str, Any] | None = None, inside: dict[str, str | None] | None = None) -> list[Verdict]:
    return [v for v in sameness.verdicts(sameness.compare(*cluster(odd, inside))) if v.check != "sameness"]


def test_equal_hosts_have_one_healthy_line() -> None:
    verdicts = sameness.verdicts(sameness.compare(*cluster()))
    assert [(verdict.level, verdict.where) for verdict in verdicts] == [(HEALTHY, "cluster")]
    assert "3 hosts" in verdicts[0].what and "torch" in verdicts[0].what and "data" in verdicts[0].what


BROUGHT = {"name": "x", "version": "1", "files": 4, "bytes": 12, "fingerprint": "ef" * 32, "at": 1.0}
OTHER_DATA = {"path": "/d", "present": True, "complete": True, "files": 3, "bytes": 12, "sha256": "cd" * 32}


@pytest.mark.parametrize(
    ("odd", "inside", "check", "level", "value"),
    [
        ({}, {"image": OTHER}, "image", ERROR, OTHER[:12]),
        ({}, {"code": OTHER}, "code", ERROR, OTHER[:12]),
        ({}, {"torch": "2.12.1"}, "torch", ERROR, "2.12.1"),
        ({}, {"nccl": "2.28.0"}, "nccl", ERROR, "2.28.0"),
        ({}, {"cuda": "none"}, "cuda", ERROR, "none"),
        ({"data": OTHER_DATA}, {}, "data", ERROR, "cdcdcd"),
        ({"data": {"path": "/d", "present": False}}, {}, "data", ERROR, "missing"),
        ({"data": {**OTHER_DATA, "complete": False, "sha256": None, "brought": BROUGHT}}, {}, "data", ERROR, "efefef"),
        ({"data": None}, {}, "data", ERROR, "none"),
        ({"arch": "aarch64"}, {}, "arch", ERROR, "aarch64"),
        ({"gpus": [gpu(driver="535.183.01")]}, {}, "driver", WARNING, "535.183.01"),
        ({"gpus": [gpu(name="NVIDIA L4")]}, {}, "gpus", WARNING, "NVIDIA L4"),
        ({"gpus": []}, {}, "gpus", WARNING, "none"),
        ({"cpu_flags": ["avx"]}, {}, "cpu_flags", WARNING, "avx"),
        ({"cpu_model": "Intel Xeon"}, {}, "cpu_model", HEALTHY, "Intel Xeon"),
        ({"kernel": "6.8.0-45-generic"}, {}, "kernel", HEALTHY, "6.8"),
        ({"python": "3.12.3"}, {}, "python", HEALTHY, "3.12.3"),
        ({"engine": {"name": "podman", "version": "5.4.0"}}, {}, "engine", HEALTHY, "5.4.0"),
    ],
)
def test_the_odd_host_is_named_with_its_value_and_that_of_the_others(
    odd: dict[str, Any], inside: dict[str, str | None], check: str, level: str, value: str
) -> None:
    (verdict,) = verdicts_of(odd, inside)
    assert (verdict.check, verdict.where, verdict.level) == (check, "host h3", level)
    assert value in verdict.what and "h1, h2 have" in verdict.what
    assert bool(verdict.fix) == (level != HEALTHY)


@pytest.mark.parametrize(
    "odd",
    [
        {"kernel": "6.1.0-21-amd64"},
        {"gpus": [gpu(), gpu(index=1)]},
        {"data": {**facts()["data"], "path": "/elsewhere"}},
        {"gpus": [gpu(), {"vendor": "amd", "index": 0, "name": "AMD Instinct MI210", "driver": "6.12"}]},
    ],
)
def test_what_does_no_harm_is_no_difference(odd: dict[str, Any]) -> None:
    assert verdicts_of(odd) == []


def test_gpus_that_the_inventory_leaves_out_are_not_compared() -> None:
    hosts, inside = cluster({"gpus": [gpu(), gpu("NVIDIA L4", index=1)]})
    assert [row.odd for row in sameness.compare(hosts, inside) if row.property.key == "gpus"] == [("h3",)]
    assert [row.odd for row in sameness.compare(hosts, inside, {"h3": [0]}) if row.property.key == "gpus"] == [()]


def test_features_of_the_cpu_do_no_harm_to_ranks_on_gpus() -> None:
    rows = sameness.compare(*cluster({"cpu_flags": ["avx"]}))
    assert [v.level for v in sameness.verdicts(rows, on_gpus=True) if v.check == "cpu_flags"] == [HEALTHY]


def test_of_two_hosts_that_differ_the_second_is_odd() -> None:
    rows = sameness.compare({"h1": facts(), "h2": facts()}, {"h1": image(), "h2": image(torch="2.12.1")})
    (verdict,) = [v for v in sameness.verdicts(rows) if v.level == ERROR]
    assert verdict.where == "host h2" and "h1 has 2.13.0" in verdict.what


def test_the_majority_decides_even_against_the_first_host() -> None:
    hosts = {name: facts() for name in ("h1", "h2", "h3", "h4", "h5")}
    inside = {name: image(image=OTHER if name == "h1" else IMAGE) for name in hosts}
    (verdict,) = [v for v in sameness.verdicts(sameness.compare(hosts, inside)) if v.level == ERROR]
    assert verdict.where == "host h1" and "4 others have" in verdict.what


@pytest.mark.parametrize("silent", [{"h3": None}, {"h3": {}}, {"h3": {"torch": None}}])
def test_what_a_host_does_not_report_is_incomplete_and_not_different(silent: dict[str, Any]) -> None:
    hosts, inside = cluster()
    verdicts = sameness.verdicts(sameness.compare(hosts, {**inside, **silent}))
    assert {verdict.level for verdict in verdicts} == {HEALTHY, INCOMPLETE}
    assert any(v.check == "torch" and v.level == INCOMPLETE and "h3" in v.what for v in verdicts)


def test_a_host_that_did_not_answer_crashes_nothing() -> None:
    hosts, inside = cluster()
    hosts["h2"] = None
    assert {v.level for v in sameness.verdicts(sameness.compare(hosts, inside))} == {HEALTHY, INCOMPLETE}
    assert sameness.compare({"h1": None}, {}) == [] and sameness.verdicts([]) == []


@pytest.mark.parametrize("key", sorted(facts()))
def test_any_fact_may_be_missing(key: str) -> None:
    hosts, inside = cluster()
    for broken in ({k: v for k, v in facts().items() if k != key}, {**facts(), key: None}):
        hosts["h3"] = broken
        assert all(v.level != ERROR or v.check == "data" for v in sameness.verdicts(sameness.compare(hosts, inside)))


def test_data_that_could_not_be_read_in_time_is_unknown_and_not_equal() -> None:
    slow = {"path": "/d", "present": True, "complete": False, "files": 3, "bytes": 12, "sha256": None}
    (verdict,) = verdicts_of({"data": slow})
    assert (verdict.check, verdict.level) == ("data", INCOMPLETE) and "h3" in verdict.what


def test_properties_that_no_host_has_are_left_out() -> None:
    bare = facts(gpus=[], data=None)
    labels = [row.property.key for row in sameness.compare({"h1": bare, "h2": bare}, {"h1": None, "h2": None})]
    assert not {"gpus", "driver", "data", "torch"} & set(labels) and "kernel" in labels


@pytest.mark.parametrize(
    ("driver", "cuda", "level"),
    [
        ("550.54.15", "12.8", None),
        ("550.54.15", "13.0", ERROR),
        ("580.65.06", "13.0", None),
        ("470.82.01", "12.8", ERROR),
        ("550.54.15", "none", None),
        ("550.54.15", None, None),
    ],
)
def test_a_driver_too_old_for_the_images_cuda(driver: str, cuda: str | None, level: str | None) -> None:
    found = sameness.old_drivers({"h1": facts(gpus=[gpu(driver=driver)])}, {"h1": image(cuda=cuda)})
    assert [verdict.level for verdict in found] == ([level] if level else [])


def test_the_document_names_the_odd_host_and_shortens_hashes() -> None:
    rows = sameness.compare(*cluster({}, {"image": OTHER, "torch": None}))
    matrix = sameness.document(["h1", "h2", "h3"], rows)
    found = {row["property"]: row for row in matrix["rows"]}
    assert found["image"]["values"] == [IMAGE[:12], IMAGE[:12], "0" * 12] and found["image"]["odd"] == ["h3"]
    assert found["torch"]["values"] == ["2.13.0", "2.13.0", "?"] and found["torch"]["odd"] == []


def test_of_a_host_itself_counts_what_changes_results_and_is_known() -> None:
    assert sameness.own(facts(kernel="9.9")) == {
        "data": "3 files, 12 bytes, abababababab",
        "architecture": "x86_64",
        "GPU driver": "550.54.15",
        "GPUs": "NVIDIA H100 80GB HBM3",
        "CPU features": "avx avx2 fma",
    }
    assert "GPU driver" not in sameness.own(facts(), wanted=[])  # it computes on none
    unread = {"path": "/srv/data", "present": True, "complete": False, "files": 3, "bytes": 12, "sha256": None}
    assert "data" not in sameness.own(facts(data=unread))
