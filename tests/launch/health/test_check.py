"""What a check makes of the hosts' answers: verdicts, what stops a run, what is left out and why."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from containers.image import Image
from keeper import PROJECT_DIR
from launch.cli.refusal import Refusal
from launch.health import check, rank_measurements, run_probe, survey
from launch.health.report import page as pages
from launch.health.survey import Survey, images_of
from launch.health.verdicts import ERROR, HEALTHY, INCOMPLETE, WARNING, Verdict
from launch.hosts import clustermap, hostcall
from launch.hosts.clustermap import MapHost
from launch.hosts.hostcall import Answer
from launch.network.links import Link
from launch.network.measure import EVERY_PAIR_HOSTS
from tests.launch.health.test_link_checks import links, names, of
from tests.launch.samples import cluster

IMAGE = "ab" * 32


def answer(**facts: Any) -> Answer:
    known: dict[str, Any] = {"images": {"localhost/muster/train:latest": IMAGE}, "runs": []}
    return Answer(known | facts, None, [], None, 0.01, 0.05)


def seen(*answers: Answer | BaseException, links: list[Link] | None = None) -> Survey:
    return Survey({f"h{number}": one for number, one in enumerate(answers, 1)}, links or [])


def link(mbits: float) -> Link:
    return Link("h1", "h2", mbits, 0.1, 1500, None)


def test_errors_refuse_a_run_all_at_once_and_warnings_are_lines() -> None:
    warning = Verdict("load", "host h1", WARNING, "busy", "end it")
    unknown = Verdict("xid", "host h1", INCOMPLETE, "log not readable")
    assert check.refuse_errors([warning, unknown, Verdict("disk", "host h1", HEALTHY, "fine")]) == [
        "warning: host h1: busy; fix: end it",
        "incomplete: host h1: log not readable",
    ]
    many = [Verdict("clock", f"host h{n}", WARNING, f"{n} s ahead", "set it") for n in range(1, 12)]
    assert check.refuse_errors([unknown, *many]) == [
        "incomplete: host h1: log not readable",
        "warning: host h1: 1 s ahead; fix: set it",
        "warning: host h2: 2 s ahead; fix: set it",
        "warning: clock of 9 more: h3, h4, h5, h6, h7, h8 and 3 more; `make check` says all",
    ]
    errors = [
        Verdict("reach", "h1 -> h2", ERROR, "cut off", "plug it in"),
        Verdict("gpus", "host h3", ERROR, "MIG", "x"),
    ]
    with pytest.raises(Refusal) as caught:
        check.refuse_errors([warning, *errors])
    assert [problem.where for problem in caught.value.problems] == ["h1 -> h2", "host h3"]
    assert check.refuse_errors(errors, leave_out=("reach", "gpus")) == []


@pytest.mark.parametrize(
    ("first", "second", "verdicts", "wanted"),
    [
        (answer(), answer(), [], None),
        (answer(runs=[{"run": "r", "state": "exited"}]), answer(), [], None),
        (answer(), answer(runs=[{"run": "r", "state": "running"}]), [], "a run is in progress on h2"),
        (answer(), TimeoutError("late"), [], "fix the errors first"),
        (answer(), answer(), [Verdict("reach", "h1 -> h2", ERROR, "cut", "")], "fix the errors first"),
        (answer(), answer(images={}), [], "h2 lack the training image"),
    ],
)
def test_ranks_are_started_only_where_they_can_run(
    first: Answer, second: Answer | BaseException, verdicts: list[Verdict], wanted: str | None
) -> None:
    known = cluster(1, 1)
    said = check.obstacle_to_ranks(known, known.hosts, seen(first, second), verdicts)
    assert (said is None) if wanted is None else wanted in str(said)


@pytest.mark.parametrize(
    ("seconds", "slowest", "level"),
    [
        (1.6, 940.0, HEALTHY),  # a bus bandwidth of 895 Mbit/s
        (4.0, 940.0, WARNING),  # 358 Mbit/s
        (4.0, 20_000.0, HEALTHY),  # the processors are the limit there
        (4.0, 0.0, HEALTHY),  # nothing was measured to compare it with
    ],
)
def test_an_all_reduce_is_compared_with_the_slowest_link(seconds: float, slowest: float, level: str) -> None:
    size = 128 * 2**20
    sizes = [{"bytes": 2**20, "seconds": 9.0, "bus_bytes_per_second": 1.0}]
    sizes.append({"bytes": size, "seconds": seconds, "bus_bytes_per_second": size / seconds * 4 / 3})
    verdict = rank_measurements.all_reduce_verdict(sizes, [link(slowest)] if slowest else [])
    assert verdict.level == level and "128 MiB" in verdict.what and "Gbit/s" in verdict.what
    assert rank_measurements.all_reduce_verdict([], []).level == INCOMPLETE


def test_slow_links_make_the_expected_times_longer() -> None:
    slow, fast = [link(20.0)], [link(940.0)]
    assert rank_measurements.all_reduce_seconds(2, slow) > rank_measurements.all_reduce_seconds(2, fast)
    assert rank_measurements.forecast_seconds(2, slow) > 3 * rank_measurements.RESNET18_BYTES * 8 / 20e6
    assert rank_measurements.forecast_seconds(2, fast) < rank_measurements.forecast_seconds(3, fast)
    assert rank_measurements.forecast_seconds(1, []) > 0 and rank_measurements.all_reduce_seconds(2, []) > 0


def test_gpus_that_the_user_ruled_out_are_not_asked_for() -> None:
    (host,) = cluster(1).hosts
    broken = {"gpus": [], "gpu_problem": "driver mismatch"}
    assert check.asked_of(host, answer(), None).gpus is None  # a host without GPUs: whatever it has by now
    assert check.asked_of(replace(host, facts=broken), answer(), None).gpus == []  # `gpus: []` past a broken driver
    assert check.asked_of(replace(host, gpus=[1]), answer(), 5).gpus == [1]
    amd = {"gpus": [{"vendor": "amd", "index": 1, "devices": ["/dev/kfd"], "groups": [992]}]}
    asked = check.asked_of(replace(host, gpus=[1], gpu_vendor="amd", facts=amd), answer(), 5)
    assert (asked.gpu_vendor, asked.gpu_access) == ("amd", ["/dev/kfd", "group 992"])
    asked = check.asked_of(host, answer(), 5)
    assert asked.interface == host.interface and check.asked_of(host, answer(), 5, alone=True).interface is None
    assert (asked.clock_offset, asked.clock_uncertainty, asked.checkpoint_bytes) == (0.01, 0.05, 5)


def test_a_host_that_did_not_answer_is_incomplete() -> None:
    known = cluster(1, 1)
    (verdict,) = check.host_verdicts(known.hosts[1:], seen(answer(), TimeoutError("no answer within 30 s")), None)
    assert (verdict.where, verdict.level) == ("host h2", INCOMPLETE) and "no answer within 30 s" in verdict.what


def test_the_odd_image_is_named() -> None:
    known = cluster(1, 1, 1)
    images = {"localhost/muster/train:latest": "cd" * 32}
    hosts = seen(answer(), answer(images=images), answer())
    inside = images_of(known, hosts)
    assert [one and one["image"] for one in inside.values()] == [IMAGE, "cd" * 32, IMAGE]


def nics(host: MapHost, up: bool) -> list[dict[str, Any]]:
    addresses = [{"address": host.address, "prefix": 24}]
    return [{"name": host.interface, "up": up, "carrier": up, "mtu": 1300, "addresses": addresses}]


def test_a_nic_that_is_down_is_the_one_error_and_its_pairs_are_not_repeated() -> None:
    known = cluster(1, 1, 1)
    down = known.hosts[1].name
    survey = Survey(
        {host.name: answer(nics=nics(host, host.name != down)) for host in known.hosts},
        links(names(3), error=dict.fromkeys(of(down, 3, 0), "timed out")),
    )
    kept = check.usable_links(known.hosts, survey)
    assert {(one.source, one.target) for one in kept} == {("h1", "h3"), ("h3", "h1")}
    verdicts = [*check.host_verdicts(known.hosts, survey, None), *check.link_verdicts(known.hosts, survey, kept)]
    (error,) = [verdict for verdict in verdicts if verdict.level == ERROR]
    assert (error.check, error.where) == ("nic", "host h2") and "ip link set dev eno1 up" in error.fix
    assert "fix the errors" in str(check.obstacle_to_ranks(known, known.hosts, survey, []))


def test_links_are_compared_with_what_the_nics_are_now() -> None:
    known = cluster(1, 1)
    old = [replace(host, facts={"nics": [{"name": host.interface, "mtu": 1500}]}) for host in known.hosts]
    survey = seen(answer(nics=nics(old[0], True)), answer(), links=[replace(link(940.0), path_mtu=1300)])
    (verdict,) = [v for v in check.link_verdicts(old, survey, survey.links) if v.check == "mtu"]
    assert verdict.what == "the NICs' MTUs differ: 1500 bytes on h2; 1300 bytes on h1"


@pytest.mark.parametrize("count", [EVERY_PAIR_HOSTS, 64])
def test_before_a_run_of_many_hosts_a_sample_of_pairs_is_checked_and_what_is_said_of_them_says_so(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """h7 exchanges no data with anybody, h3's paths are smaller than its NIC says."""
    known = cluster(*[1] * count)
    asked: dict[str, Any] = {}

    def call_hosts(machines: Any, options: dict[str, Any], limit: float, say: Any) -> dict[str, Answer]:
        asked.update(options)
        answers = {}
        for host, one in options.items():
            bad = [
                {"peer": p, "address": "a", "ok": "h7" not in (p, host), "error": "no"} for p in one.get("reach", ())
            ]
            ways = [
                way
                for pair in one["links"]["pairs"]
                if pair["calls"]
                for way in ((host, pair["peer"]), (pair["peer"], host))
            ]
            found = [
                {"network": 0, "source": a, "target": b, "mbits": None, "rtt_ms": 0.1}
                | {"path_mtu": 1300 if "h3" in (a, b) else 1500, "error": "no" if "h7" in (a, b) else None}
                for a, b in ways
            ]
            answers[host] = replace(answer(), reach=bad, links=found)
        return answers

    monkeypatch.setattr(hostcall, "call_hosts", call_hosts)
    found = check.quick(known, known.hosts, [])
    of_links = {verdict.where: verdict for verdict in found if verdict.check in ("reach", "mtu", "links", "latency")}
    reach, mtu, healthy = of_links["host h7"], of_links["host h3"], of_links["cluster"]
    assert (reach.level, mtu.level, healthy.level) == (ERROR, WARNING, HEALTHY)
    assert len(of_links) == 3 and not any(verdict.check == "links" and verdict.level != HEALTHY for verdict in found)
    pairs = sum(len(one["links"]["pairs"]) for one in asked.values())
    sampled = [verdict for verdict in of_links.values() if "(a sample: " in verdict.what]
    if count == EVERY_PAIR_HOSTS:
        assert pairs == count * (count - 1) and not sampled
    else:
        assert pairs == 4 * count and len(sampled) == 3
        assert f"of {count * (count - 1)} ordered pairs were checked; `make check` checks all)" in reach.what
        survey_of_all = survey.ask_hosts(known.hosts, [], 0, True, print)
        assert len(survey_of_all.links) == count * (count - 1) and not survey_of_all.sampled


def no_project(*arguments: Any) -> Any:
    pytest.fail("there is no project to bring")


class Host:
    """A machine of which Podman says what runs there."""

    def __init__(self, name: str, containers: str | OSError) -> None:
        self.name, self.containers = name, containers

    def answer(self, command: str) -> str:
        if isinstance(self.containers, OSError):
            raise self.containers
        assert "--filter label=muster.run" in command
        return self.containers


@pytest.mark.parametrize("containers", ["4f1d\n", ""])
def test_links_are_not_loaded_while_a_run_is_in_progress(monkeypatch: pytest.MonkeyPatch, containers: str) -> None:
    asked = []

    def ask_hosts(hosts: Any, machines: Any, bandwidth_seconds: int, full: bool, say: Any) -> Survey:
        asked.append(bandwidth_seconds)
        busy = [{"run": "r", "state": "running", "owner": "ann", "age_seconds": 5, "container": "c"}] * bool(containers)
        return seen(answer(), answer(runs=busy), links=[link(940.0)])

    known = cluster(1, 1)
    monkeypatch.setattr(check, "ask_hosts", ask_hosts)
    monkeypatch.setattr(rank_measurements, "all_reduce", lambda *rest: rank_measurements.Measured([]))
    machines: Any = [Host("h1", OSError("gone")), Host("h2", containers)]
    found = check.examine(known, known.hosts, machines, None, Console(quiet=True))
    said = [verdict["what"] for verdict in found["verdicts"] if verdict["check"] == "bandwidth"]
    assert bool(asked[0]) is not bool(containers)
    assert any("a run is in progress on h2" in what for what in said) is bool(containers)
    assert "</html>" in pages.page(found)


def test_a_fix_names_the_inventory() -> None:
    (verdict,) = check.with_inventory([Verdict("runs", "host h1", ERROR, "x", "`make stop RUN=r` ends it")], cluster(1))
    assert verdict.fix == f"`make stop RUN=r INVENTORY={cluster(1).inventory}` ends it"


def test_forecast_is_yes_or_no() -> None:
    assert check.wants_forecast("1") and not check.wants_forecast("0")
    with pytest.raises(Refusal, match="FORECAST=maybe"):
        check.wants_forecast("maybe")


def test_wrong_arguments_of_the_trainer_are_refused_before_any_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustermap, "read", lambda path: cluster(2, 2))
    monkeypatch.setattr(check, "machines", lambda *arguments: pytest.fail("a host was asked"))
    for args, said in (("--batch-size 3", "each of the 4 ranks"), ("--seed 1'2", "No closing quotation")):
        with pytest.raises(Refusal, match=said):
            check.check(check.Request(Path("inventory/lab"), args=args), Console(), no_project)


@pytest.mark.slow
def test_the_forecast_with_a_project_is_measured_in_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def probed(known: Any, hosts: Any, machines: Any, arguments: list[str]) -> Any:
        asked.append((known.image.id, arguments))
        raise Refusal([])  # what it measures is of no matter here

    def bring(folder: Path, known: Any, machines: Any, console: Console) -> Image:
        assert (folder, machines) == (tmp_path, [])
        print("PLAY [all]")
        return Image("localhost/muster/workload-mine:latest", "cd" * 32, 5)

    monkeypatch.setattr(clustermap, "read", lambda path: cluster(1, 1))
    monkeypatch.setattr(clustermap, "path_of", lambda path: tmp_path / "build" / "cluster.json")
    monkeypatch.setattr(check, "machines", lambda *arguments: contextlib.nullcontext([]))
    monkeypatch.setattr(check, "hosts_with_a_run", lambda machines: [])
    monkeypatch.setattr(check, "ask_hosts", lambda *arguments: seen(answer(), answer(), links=[link(940.0)]))
    monkeypatch.setattr(check, "obstacle_to_ranks", lambda *arguments: None)
    monkeypatch.setattr(run_probe, "run", probed)
    for project in ("", str(tmp_path)):
        words = check.Request(Path("inventory/lab"), args="--epochs 1", project=project, as_json=True)
        check.check(words, Console(), bring)
    ours, own = [one for one in asked if "--forecast" in one[1]]
    assert ours == ("ab" * 32, ["--forecast", "--", "--epochs", "1"])
    assert own == ("cd" * 32, ["--forecast", "--", "--project", PROJECT_DIR, "--epochs", "1"])
    assert {image for image, words in asked if "--forecast" not in words} == {"ab" * 32}
    out, err = capfd.readouterr()
    assert "PLAY" in err and [json.loads(line)["schema"] for line in out.splitlines()]
    for bad, said in ((f"{tmp_path}/absent", "absent is not there"), ("", "--project: the folder of your own code")):
        words = check.Request(Path("inventory/lab"), args="" if bad else "--project x", project=bad)
        with pytest.raises(Refusal, match=said):
            check.check(words, Console(), bring)


def test_the_quick_form_hands_on_what_the_hosts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not answer is there, with nothing."""
    found: list[check.OwnFacts] = []
    survey = seen(answer(arch="x86_64"), TimeoutError("no answer"))
    monkeypatch.setattr(check, "ask_hosts", lambda *arguments, **words: survey)
    known = cluster(1, 1)
    check.quick(known, known.hosts, [], note=found.append)
    assert found == [{"h1": {"architecture": "x86_64"}, "h2": {}}] == [check.own_facts(known.hosts, [])]


def test_before_a_run_hosts_that_are_busy_are_not_taken_for_a_slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start containers meanwhile: a round trip is then no shorter than a processor's turn."""
    late = [Link("h1", "h2", None, 7.0, 1500, None), Link("h2", "h1", None, 9.0, 1500, None)]
    monkeypatch.setattr(check, "ask_hosts", lambda *arguments, **words: seen(answer(), answer(), links=late))
    known = cluster(1, 1)

    def said(rtt_ms: float | None) -> list[str]:
        before = [asdict(replace(link, rtt_ms=rtt_ms)) for link in late]
        found = replace(known, measured={"links": {f"{known.network.name} (eth0)": before, "10.9.9.0/24": []}})
        return [verdict.what for verdict in check.quick(found, found.hosts, []) if verdict.check == "latency"]

    assert said(0.1) == [] and "round trips of 7.0 ms" in said(None)[0] and "round trips of 6.0 ms" in said(6.0)[0]
