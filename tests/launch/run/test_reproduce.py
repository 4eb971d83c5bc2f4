"""Promises: a run is repeated from its plan as it was; each thing that would not be the same is named before it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from containers.image import Image
from keeper import PROJECT_DIR
from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Refusal
from launch.health import check
from launch.hosts import clustermap
from launch.hosts.clustermap import ClusterMap, MapImage
from launch.job import plan as plans
from launch.job import queue, readiness, trainer_arguments
from launch.job.plan import Options, Plan
from launch.job.readiness import Readiness
from launch.run import origin, reproduce
from launch.run.origin import Origin
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, ports
from tests.launch.samples import cluster

hosts = fake_hosts.hosts

RUN = "20260101-000000-aaaa"
NOW = "ab" * 32  # the image that is deployed in samples.cluster


def made(known: ClusterMap, **options: Any) -> Plan:
    return plans.make_plan(known, Options(**options), RUN, ports(3), "me@here", "2026-01-01T00:00:00+00:00")


def once_more(plan: Plan, known: ClusterMap) -> Plan:
    """The plan of the same run on these hosts."""
    now = reproduce.hosts_again(plan, known)
    return reproduce.again(plan, now, reproduce.options_of(plan, now))


def changed(known: ClusterMap, number: int, **values: Any) -> ClusterMap:
    """The same hosts, but for one of them."""
    return replace(known, hosts=[replace(one, **values) if i == number else one for i, one in enumerate(known.hosts)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 2, "args": ("--epochs", "3"), "max_restarts": 3, "min_nodes": 2, "grace": 7, "max_host_failures": 5},
        {"script": "main.py", "args": ("--rank", "{rank}"), "image": "cd" * 32, "max_restarts": -3},
        {"script": "main.py", "launcher": "horovod", "image": "cd" * 32},
        {"resume": "20251231-000000-bbbb", "args": ("--epochs", "9")},
        {"project": True, "args": ("--model", "mine:net"), "image": "cd" * 32, "max_restarts": 3},
    ],
)
@pytest.mark.parametrize("gpus", [False, True])
def test_the_plan_made_once_more_is_the_plan(options: dict[str, Any], gpus: bool) -> None:
    """All that was asked for is in a plan: nothing gets lost on the way back to options."""
    known = changed(cluster(2, 1, 4, gpus=gpus), 2, spare=bool(options.get("nodes")))
    plan = made(known, **options)
    assert once_more(plan, known) == plan
    assert reproduce.plan_differences(plan, once_more(plan, known)) == []


def test_hosts_are_taken_by_name_in_the_order_of_the_run() -> None:
    known = cluster(2, 1, 4)
    plan = made(known, nodes=2)
    other = replace(known, hosts=[known.hosts[2], known.hosts[1], known.hosts[0]])
    assert once_more(plan, other) == plan


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"address": "10.78.0.99"}, ["address: 10.78.0.12 then, 10.78.0.99 now"]),
        ({"interface": "ens9"}, ["interface: eno1 then, ens9 now"]),
        ({"cpus": 64}, ["variable OMP_NUM_THREADS: 4 then, 64 now"]),
        ({"data_dir": "/srv/other"}, ["data_dir: none then, /srv/other now"]),
        ({"gpus": [3]}, ["GPUs: nvidia.com/gpu=0 then, nvidia.com/gpu=3 now"]),
        ({"nproc_per_node": 2}, ["number of ranks: 1 then, 2 now", "3 ranks then, 4 now"]),
    ],
)
def test_what_is_another_of_a_host_is_named_with_both_values(values: dict[str, Any], said: list[str]) -> None:
    known = cluster(2, 1, gpus=True)
    plan = made(known)
    found = [one.what for one in reproduce.plan_differences(plan, once_more(plan, changed(known, 1, **values)))]
    assert [one for one in found if "OMP_NUM" not in one or "cpus" in values] == said


def test_a_host_that_is_gone_is_named_and_the_others_are_not_blamed_for_it() -> None:
    known = cluster(2, 1, 1)
    plan = made(known)
    less = replace(known, hosts=known.hosts[1:])
    found = [(one.where, one.what) for one in reproduce.plan_differences(plan, once_more(plan, less))]
    assert found == [("host h1", "is not in the inventory any more"), ("the run", "4 ranks then, 2 now")]
    assert once_more(plan, less).master_host == "h2"
    with pytest.raises(Refusal, match="has none of h1, h2, h3 any more"):
        reproduce.hosts_again(plan, replace(known, hosts=[]))


def test_what_another_version_of_muster_does_otherwise_is_named() -> None:
    known = cluster(2, 1)
    plan = made(known)
    command = [word for word in plan.hosts[1].command if word != "--read-only"]
    other = replace(plan, agent=["python2"], hosts=[plan.hosts[0], replace(plan.hosts[1], command=command)])
    found = [(one.where, one.what) for one in reproduce.plan_differences(other, once_more(plan, known))]
    agent = "it started the ranks by `python2` then, and does by `python3 -P -m train.start.agent` now"
    started = "its container is started otherwise: nothing then, --read-only now"
    assert found == [("host h2", started), ("Muster", agent)]


def test_facts_that_are_not_known_of_both_times_are_no_difference() -> None:
    then = {"h1": {"data": "3 files", "GPU driver": "535"}, "h2": {"data": "3 files"}}
    now = {"h1": {"data": "4 files", "CPU features": "avx2"}, "h2": {}, "h3": {"data": "5 files"}}
    found = [(one.where, one.what) for one in reproduce.fact_differences(then, now)]
    assert found == [("host h1", "data: 3 files then, 4 files now")]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host]) -> Callable[..., dict[str, Host]]:
    """A run that is here, and its hosts, on which another one starts at once."""
    monkeypatch.chdir(tmp_path)
    for module in (files, reproduce):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[dependency-groups]\ntrain = ["torch==2.13.0"]\n')
    facts = {"h1": {"data": "3 files"}, "h2": {"data": "3 files"}}
    monkeypatch.setattr(clustermap, "read", lambda path: cluster(1, 1))
    monkeypatch.setattr(reproduce, "machines", lambda *arguments: contextlib.nullcontext([hosts["h1"], hosts["h2"]]))
    monkeypatch.setattr(queue, "turn", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(readiness, "check", lambda *arguments: ports(2))
    monkeypatch.setattr(readiness, "ask", lambda machine, image: Readiness(image == NOW, "readable", [], []))
    monkeypatch.setattr(check, "own_facts", lambda *arguments: facts)
    monkeypatch.setattr(check, "quick", lambda *arguments, note, **words: note(facts) or [])

    def make(begun: Origin | None = None, **options: Any) -> dict[str, Host]:
        plan = made(cluster(1, 1), **options)
        files.write_json(files.runs_dir() / RUN / "plan.json", plans.document(plan))
        origin.write(files.runs_dir() / RUN, begun or Origin(hosts=facts))
        return hosts

    return make


def again(**more: Any) -> int:
    asked = {"inventory": Path("inventory/lab"), "run": RUN, "given": {}, "detach": True, **more}
    with signals.interrupts_as_exceptions():
        return reproduce.reproduce(reproduce.Request(**asked), Console())


def started(hosts: dict[str, Host]) -> dict[str, Any]:
    """The plan that was sent to h2."""
    ((_, asked),) = [one for one in hosts["h2"].asked if one[0] == "start"]
    return dict(asked["plan"])


def test_the_same_run_starts_with_another_id_and_knows_which_one_it_repeats(
    ran: Callable[..., dict[str, Host]], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ran(args=("--epochs", "3"), grace=9)
    assert again() == exits.SUCCEEDED
    sent = started(hosts)
    assert (sent["args"], sent["grace"], sent["image"]) == (["--epochs", "3"], 9, NOW)
    assert sent["run"] != RUN
    begun = origin.read(files.runs_dir() / sent["run"])
    assert begun and (begun.reproduces, begun.differences) == (RUN, [])
    assert begun.hosts == {"h1": {"data": "3 files"}, "h2": {"data": "3 files"}}
    assert f"this is run {RUN} once more" in capsys.readouterr().out


def test_every_difference_is_in_one_refusal_before_anything_starts(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ran(Origin("c0ffee" + "0" * 34, hosts={"h1": {"data": "2 files"}}, secrets=["TOKEN"]), image="cd" * 32)
    monkeypatch.setattr(clustermap, "read", lambda path: changed(cluster(1, 1), 1, address="10.78.0.99"))
    with pytest.raises(Refusal) as refused:
        again()
    assert [problem.where for problem in refused.value.problems] == ["host h2", "SECRETS", "image", "host h1", "RUN"]
    text = str(refused.value)
    assert "h1, h2 do not have the run's image, cdcdcdcdcdcd, but abababababab" in text
    assert "it was of commit c0ffee000000" in text and "`git checkout c0ffee000000`" in text
    assert "data: 2 files then, 3 files now" in text and "TOKEN then, none now" in text
    assert "4 differences" in text and "ANYWAY=1" in text
    assert hosts["h1"].verbs() == hosts["h2"].verbs() == []


def test_a_host_that_lost_the_deployed_image_is_to_be_deployed_again(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran()
    monkeypatch.setattr(readiness, "ask", lambda machine, image: Readiness(machine.name == "h1", "readable", [], []))
    with pytest.raises(Refusal, match=r"image: h2 does not have .*which is the deployed one\n.*run `make deploy`"):
        again(anyway=True)


def test_what_the_hosts_were_is_not_always_known(
    ran: Callable[..., dict[str, Host]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran(Origin())
    assert again(dry_run=True) == exits.SUCCEEDED
    assert "are not compared: what they were at its start is not noted here" in capsys.readouterr().out
    assert again(dry_run=True, skip_check=True) == exits.SUCCEEDED
    assert "are not compared: SKIP_CHECK=1" in capsys.readouterr().out


@pytest.mark.slow
def test_anyway_starts_it_with_what_is_there_and_keeps_what_differs(
    ran: Callable[..., dict[str, Host]], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ran(image="cd" * 32)
    assert again(anyway=True, dry_run=True) == exits.SUCCEEDED
    assert hosts["h1"].verbs() == []
    assert again(anyway=True) == exits.SUCCEEDED
    sent = started(hosts)
    begun = origin.read(files.runs_dir() / sent["run"])
    assert sent["image"] == NOW and begun and len(begun.differences) == 1
    assert f"muster | not as in run {RUN}: image: h1, h2 do not have" in capsys.readouterr().out


def test_a_scripts_image_is_brought_to_its_hosts_where_its_folder_is_as_it_was(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    built = Image("localhost/muster/workload-mine:latest", "cd" * 32, 1)
    found = [built]
    monkeypatch.setattr(reproduce, "built_before", lambda asked: found[0] if asked.workload.endswith("mine") else None)
    hosts = ran(Origin(workload="mine"), image=built.id, script="main.py")
    assert again() == exits.SUCCEEDED
    assert (started(hosts)["image"], started(hosts)["script"]) == (built.id, "main.py")
    found[0] = replace(built, id="ef" * 32)
    with pytest.raises(
        Refusal, match=r"WORKLOAD: h1, h2 do not have .*mine, or what its image is built on, has changed"
    ):
        again()
    (tmp_path / "mine").rmdir()
    monkeypatch.setattr(clustermap, "read", lambda path: changed(cluster(1, 1), 1, address="10.78.0.99"))
    with pytest.raises(Refusal, match=r"(?s)10.78.0.12 then, 10.78.0.99 now.*its folder, mine, is gone"):
        again(anyway=True)


@pytest.mark.slow
def test_a_project_is_brought_to_its_hosts_as_a_script_is(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    built = Image("localhost/muster/workload-mine:latest", "cd" * 32, 1)
    monkeypatch.setattr(reproduce, "built_before", lambda asked: built)
    hosts = ran(Origin(workload="mine"), image=built.id, project=True, args=("--epochs", "3"))
    assert again() == exits.SUCCEEDED
    sent = started(hosts)
    assert (sent["image"], sent["args"]) == (built.id, ["--project", PROJECT_DIR, "--epochs", "3"])
    begun = origin.read(files.runs_dir() / sent["run"])
    assert begun and begun.workload == "mine"
    monkeypatch.setattr(reproduce, "built_before", lambda asked: replace(built, id="ef" * 32))
    with pytest.raises(Refusal, match=r"PROJECT: h1, h2 do not .*; mine, or what its image is built on, has changed"):
        again()
    (tmp_path / "mine").rmdir()
    with pytest.raises(Refusal, match=r"PROJECT: .*its folder, mine, is gone\n.*`make train PROJECT=\.\.\. ARGS"):
        again(anyway=True)


def test_a_project_whose_image_the_hosts_have_needs_no_folder(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its arguments name is in the image, and ran with them."""
    monkeypatch.setattr(trainer_arguments, "check", lambda *arguments: pytest.fail("what is not here was checked"))
    hosts = ran(Origin(workload="gone"), project=True, args=("--model", "mine:net"))
    assert again() == exits.SUCCEEDED
    assert started(hosts)["args"] == ["--project", PROJECT_DIR, "--model", "mine:net"]


def test_what_is_the_runs_own_is_not_to_be_given(ran: Callable[..., dict[str, Host]]) -> None:
    ran()
    with pytest.raises(Refusal) as refused:
        again(given={"NODES": "1", "ARGS": "--epochs 9", "GRACE": ""}, anyway=True)
    assert [problem.where for problem in refused.value.problems] == ["NODES", "ARGS"]
    assert "make train NODES=1 'ARGS=--epochs 9'" in str(refused.value)


def test_a_run_that_cannot_be_repeated_here_is_refused(ran: Callable[..., dict[str, Host]]) -> None:
    ran()
    with pytest.raises(Refusal, match=rf"which run.*\n.*{RUN}"):
        again(run="")
    with pytest.raises(Refusal, match=r"there is no run 20260101-000000-bbbb"):
        again(run="20260101-000000-bbbb")
    with pytest.raises(Refusal, match=r"was on another inventory, inventory/lab.*\n.*INVENTORY=inventory/lab"):
        again(inventory=Path("inventory/hosts.yml"))
    folder = files.runs_dir() / RUN
    files.write_json(folder / "plan.json", {**files.read_json(folder / "plan.json"), "schema": "muster.plan/1"})
    with pytest.raises(Refusal, match=r"another version of Muster made it"):
        again()
    (folder / "plan.json").unlink()
    (folder / "summary.json").write_text("{}")
    with pytest.raises(Refusal, match=r"make local"):
        again()


def test_hosts_that_do_not_answer_are_named(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(machine: Host, image: str) -> Readiness:
        if machine.name == "h2":
            raise TimeoutError("no answer for 30 s")
        return Readiness(True, "readable", [], [])

    monkeypatch.setattr(readiness, "ask", ask)
    ran()
    with pytest.raises(Refusal, match="host h2: did not answer: no answer for 30 s") as refused:
        again(anyway=True)
    assert refused.value.status == exits.UNREACHABLE


def test_another_torch_is_named(ran: Callable[..., dict[str, Host]]) -> None:
    ran(image="cd" * 32)
    start = '{"event": "start", "time": 1.0, "versions": {"torch": "2.12.1+cpu"}}\n'
    (files.runs_dir() / RUN / "metrics.jsonl").write_text(start)
    with pytest.raises(Refusal, match=r"torch: 2.12.1\+cpu then, 2.13.0 now"):
        again()


def test_the_origin_of_a_run_started_by_another_version_is_none(tmp_path: Path) -> None:
    assert origin.read(tmp_path) is None
    origin.write(tmp_path, Origin("c0ffee", "mine", ["TOKEN"]))
    assert origin.read(tmp_path) == Origin("c0ffee", "mine", ["TOKEN"], {}, None, [])
    for bad in ({"schema": "muster.origin/0"}, {"schema": origin.SCHEMA, "more": 1}):
        files.write_json(tmp_path / origin.NAME, bad)
        assert origin.read(tmp_path) is None


def test_the_image_of_a_map_is_no_difference_as_long_as_the_hosts_have_the_runs_own(
    ran: Callable[..., dict[str, Host]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another deploy has come since, and the old image is still there."""
    hosts = ran()
    since = replace(cluster(1, 1), image=MapImage("localhost/muster/train:latest", "99" * 32, 1))
    monkeypatch.setattr(clustermap, "read", lambda path: since)
    assert again() == exits.SUCCEEDED
    assert started(hosts)["image"] == NOW


def test_the_commit_and_what_changed_since_are_gits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert origin.commit_here() == "" and origin.changed_since("c0ffee") == []

    def git(*words: str) -> str:
        who = ("-c", "user.name=me", "-c", "user.email=me@here")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300
        ).stdout.strip()

    git("init", "--quiet")
    for name in ("train", "keeper", "containers", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("then")
    git("add", ".")
    git("commit", "--quiet", "--message", "then")
    commit = git("rev-parse", "HEAD")
    assert origin.commit_here() == commit
    (tmp_path / "docs" / "file.py").write_text("now")  # it computes nothing
    assert origin.commit_here() == commit
    (tmp_path / "train" / "file.py").write_text("now")
    assert origin.commit_here() == commit + origin.CHANGED
    git("commit", "--quiet", "--all", "--message", "now")
    assert origin.changed_since(commit + origin.CHANGED) == ["train/file.py"]
