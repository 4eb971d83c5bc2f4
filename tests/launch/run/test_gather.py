"""Promise: an ended run comes here whole, in as many attempts as it takes, and only then goes from its hosts; what
comes from a host replaces no file of ours and leads to none of the user's."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keeper import OWN_NAMES
from keeper.output import Writer
from launch import files
from launch.cli.refusal import Problem
from launch.hosts import openssh, ssh
from launch.job.plan import Plan
from launch.run import closing, gather, origin
from launch.run.origin import Origin
from tests.conftest import cannot_run
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, cause, exit_words, plan

hosts = fake_hosts.hosts

#: Takes ssh's place for rsync: drops the options and the host, and runs the command here as sshd would.
HERE = 'while [ "$1" != rsync ]; do shift; done; exec sh -c "$*"'

Gather = Callable[[], gather.Gathered]


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host]) -> Path:
    """The run's folder on the first host, a folder of this machine."""
    if shutil.which("rsync") is None:  # `make deploy` and the lab install it
        cannot_run("this machine has no rsync")
    monkeypatch.setattr(files, "ROOT", tmp_path / "here")
    monkeypatch.setattr(gather, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(openssh, "rsync_shell", lambda *arguments: shlex.join(["sh", "-c", HERE, "ssh"]))
    folder = tmp_path / "on host"
    folder.mkdir()

    def offer(options: dict[str, Any]) -> dict[str, Any]:
        script = [path for path in (folder / "workload").rglob("*") if path.is_file() or path.is_symlink()]
        written = [str(path.relative_to(folder / "workload")) for path in script if path.name != "main.py"]
        return {"exit": None, "container": {"ExitCode": 0}, "node_rank": 0, "written": written}

    hosts["h1"].answers["offer"] = offer
    return folder


@pytest.fixture
def run(on_host: Path) -> Plan:
    """A plan whose first host has its folder there."""
    made = plan(1, script="main.py")
    files.write_json(files.runs_dir() / made.run / "plan.json", {"run": made.run})
    return replace(made, hosts=[replace(made.hosts[0], run_dir=str(on_host))])


@pytest.fixture
def fetch(run: Plan, hosts: dict[str, Host]) -> Gather:
    machine: Any = hosts["h1"]
    return lambda: gather.gather_host(machine, run, run.hosts[0], 20)


@pytest.fixture
def here(run: Plan) -> Path:
    return files.runs_dir() / run.run


def test_what_there_is_comes_each_streams_output_in_one_file(on_host: Path, here: Path, fetch: Gather) -> None:
    for stream, data in (("rank-0", b"0123456789" * 10), ("torchrun", b"says\n")):
        writer = Writer(on_host / "output", stream, head_bytes=10, segment_bytes=10, limit_bytes=200)
        writer.append(data)
        writer.close()
    (on_host / "events.jsonl").write_text('{"event": "lease"}\n')
    files.write_json(on_host / "exit.json", exit_words())
    (on_host / "stacks").mkdir()
    (on_host / "stacks" / "rank-0.txt").write_text("where it stood")
    (on_host / "metrics.jsonl").write_text("{}")
    (on_host / "workload" / "out").mkdir(parents=True)
    (on_host / "workload" / "main.py").write_text("the project, which is here already")
    (on_host / "workload" / "out" / "epoch 3.pt").write_text("weights")
    fetch()
    logs = here / "logs" / "h1"
    assert (logs / "rank-0.log").read_bytes() == b"0123456789" * 10
    assert sorted(path.name for path in logs.iterdir()) == [
        *("container.json", "events.jsonl", "exit.json", "rank-0.log", "stacks", "torchrun.log")
    ]
    assert (here / "metrics.jsonl").exists() and (here / "workload" / "out" / "epoch 3.pt").read_text() == "weights"
    assert sorted(path.name for path in here.iterdir()) == ["logs", "metrics.jsonl", "plan.json", "workload"]
    assert [path.name for path in (here / "workload").iterdir()] == ["out"]


@pytest.mark.slow
def test_of_other_hosts_comes_what_the_first_has_not_or_has_otherwise(
    tmp_path: Path, on_host: Path, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of the first host's files need not come again; a file of another rank must not be lost."""
    second, made = tmp_path / "on the second host", plan(1, 1, script="main.py")
    folders = {"h1": on_host, "h2": second}
    made = replace(made, hosts=[replace(one, run_dir=str(folders[one.host])) for one in made.hosts])
    for folder, rank in ((on_host, "0"), (second, "1")):
        (folder / "workload" / "out").mkdir(parents=True)
        for name, text in (("model.pt", "weights"), ("log.txt", f"rank {rank}"), (f"out/rank-{rank}.txt", rank)):
            (folder / "workload" / name).write_text(text)
        (folder / "replica.pt").write_text("weights")
        (folder / f"trace-{rank}.json").write_text("{}")
    for replica in (second / "replica.pt", second / "workload" / "model.pt"):
        os.utime(replica, (0, 0))  # hosts do not write at the same time
    written = ["model.pt", "log.txt", "out/rank-1.txt"]
    hosts["h2"].answers["offer"] = lambda options: {"written": written, "more": ["replica.pt", "trace-1.json"]}
    copied: list[str] = []
    copy = gather._copy

    def slowly(machine: Any, *arguments: Any) -> None:
        if machine.name == "h1":
            time.sleep(0.2)  # the other one waits for it
        copied.append(machine.name)
        copy(machine, *arguments)

    monkeypatch.setattr(gather, "_copy", slowly)
    machines: Any = {"h1": hosts["h1"], "h2": hosts["h2"]}
    for _ in range(2):  # it may be repeated
        assert gather.gather_run(made, machines, 20, print) == []
        here = files.runs_dir() / made.run
        there = here / "hosts" / "h2"
        came = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
        assert came == {"workload/log.txt": "rank 1", "workload/out/rank-1.txt": "1", "trace-1.json": "{}"}
        assert (here / "workload" / "log.txt").read_text() == "rank 0" and not (here / "hosts" / "h1").exists()


def test_a_second_host_without_files_of_its_own_leaves_no_folder_and_waits_for_nobody(
    tmp_path: Path, on_host: Path, hosts: dict[str, Host]
) -> None:
    made = plan(1, 1, script="main.py")
    second = tmp_path / "on the second host"
    (second / "workload").mkdir(parents=True)
    (second / "workload" / "model.pt").write_text("weights")
    made = replace(made, hosts=[replace(one, run_dir=str(second)) for one in made.hosts])
    here, machine = files.runs_dir() / made.run, hosts["h2"]
    made_of: Any = machine
    gather.gather_host(made_of, made, made.hosts[1], 20, lambda: pytest.fail("it waits"))
    (here / "workload").mkdir()
    (here / "workload" / "model.pt").write_text("weights")
    machine.answers["offer"] = lambda options: {"written": ["model.pt"], "more": []}
    gather.gather_host(made_of, made, made.hosts[1], 20)
    assert sorted(path.name for path in here.iterdir()) == ["logs", "workload"]
    # Where the first host cannot be reached, all of the second one's comes.
    (here / "workload" / "model.pt").unlink()
    assert gather.gather_run(made, {"h2": made_of}, 20, print) == ["h1"]
    assert (here / "hosts" / "h2" / "workload" / "model.pt").read_text() == "weights"


def test_a_host_is_cleared_only_after_all_of_it_is_here(
    on_host: Path, here: Path, fetch: Gather, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    (on_host / "metrics.jsonl").write_text("{}")
    copy = gather._copy
    monkeypatch.setattr(gather, "_copy", lambda *arguments: broken(1))

    def broken(status: int) -> None:
        raise RuntimeError("rsync ended with 23: No space left on device")

    with pytest.raises(RuntimeError, match="No space left"):
        fetch()
    assert hosts["h1"].verbs() == ["offer"]
    monkeypatch.setattr(gather, "_copy", copy)
    assert fetch() == gather.Gathered({}, ())
    assert hosts["h1"].asked[-1][0] == "seal" and hosts["h1"].asked[-1][1]["keep"] == 20
    fetch()  # it may be repeated
    assert (here / "metrics.jsonl").exists()


def test_a_file_that_cannot_be_read_is_an_error_and_what_is_not_there_is_none(
    on_host: Path, fetch: Gather, hosts: dict[str, Host]
) -> None:
    fetch()  # a host that died early has next to nothing
    offer = hosts["h1"].answers["offer"]
    assert callable(offer)
    (on_host / "workload").mkdir()
    hosts["h1"].answers["offer"] = lambda options: {**offer(options), "written": ["gone.pt"]}
    with pytest.raises(RuntimeError, match="rsync ended with 23"):
        fetch()


def test_what_somebody_else_has_fetched_meanwhile_is_no_error(
    on_host: Path, here: Path, fetch: Gather, hosts: dict[str, Host]
) -> None:
    (on_host / "workload").mkdir()
    (on_host / "workload" / "out.pt").write_text("weights")
    gathered_by = {"by": "ann@desk", "time": 0}
    hosts["h1"].answers["runs"] = lambda options: {"runs": [{"run": "some-run", "gathered": gathered_by}]}
    assert fetch().elsewhere == ""
    offer = hosts["h1"].answers["offer"]
    assert callable(offer)
    there = offer({})
    hosts["h1"].answers["offer"] = lambda options: there
    (on_host / "workload" / "out.pt").unlink()
    assert fetch().elsewhere == ""  # it is here
    (here / "workload" / "out.pt").unlink()
    assert fetch().elsewhere == "ann@desk"


def test_a_connection_that_breaks_while_gathering_is_opened_again(
    on_host: Path, here: Path, fetch: Gather, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    (on_host / "metrics.jsonl").write_text("{}")
    copy, seal = gather._copy_once, hosts["h1"].answers["seal"]
    breaks: list[Exception] = [gather.BrokenCopy("rsync ended with 255"), EOFError("h1: the SSH connection was lost")]

    def first_broken(*arguments: Any) -> None:
        if breaks and isinstance(breaks[0], gather.BrokenCopy):
            raise breaks.pop(0)
        copy(*arguments)

    def then_sealed(options: dict[str, Any]) -> dict[str, Any]:
        if breaks:
            raise breaks.pop()
        assert callable(seal)
        return seal(options)

    monkeypatch.setattr(gather, "_copy_once", first_broken)
    hosts["h1"].answers["seal"] = then_sealed
    fetch()
    assert breaks == [] and (here / "metrics.jsonl").exists() and hosts["h1"].closed == 2


def test_a_machine_without_rsync_says_so_at_once(
    on_host: Path, fetch: Gather, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="this machine has no rsync: apt-get install rsync"):
        fetch()
    assert hosts["h1"].verbs() == ["offer"]


def test_a_host_that_stays_away_is_given_up_after_a_while(
    fetch: Gather, hosts: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(target: Any, known_hosts: Path) -> None:
        raise ssh.Unreachable(Problem("host h1", "no route to host", "see whether it is up"))

    monkeypatch.setattr(gather, "LINK_SECONDS", 0.05)
    monkeypatch.setattr(ssh, "connect", connect)
    hosts["h1"].answers["offer"] = EOFError("the SSH connection was lost")
    with pytest.raises(RuntimeError, match="the SSH connection was lost"):
        fetch()
    assert len(hosts["h1"].asked) > 1


def test_what_fails_over_every_connection_is_given_up_soon(fetch: Gather, hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["offer"] = gather.BrokenCopy("rsync ended with 12: rsync: command not found")
    with pytest.raises(RuntimeError, match="command not found"):
        fetch()
    assert len(hosts["h1"].asked) == gather.ATTEMPTS


def test_a_run_that_goes_on_is_not_touched(fetch: Gather, hosts: dict[str, Host]) -> None:
    hosts["h1"].answers["offer"] = lambda options: {"running": True}
    with pytest.raises(RuntimeError, match="has not ended there"):
        fetch()
    assert hosts["h1"].verbs() == ["offer"]


def test_links_that_lead_outside_stay_on_the_host(on_host: Path, here: Path, fetch: Gather, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("precious")
    for folder in ("output", "stacks", "workload"):
        (on_host / folder).mkdir()
    for name in ("rank-0.log", "torchrun.log"):
        (on_host / "output" / name).symlink_to(mine / "precious")
    (on_host / "stacks" / "rank-0.txt").symlink_to(mine / "precious")
    for name in ("summary.json", "plan.json", "curves.png", "exit.json", "events.jsonl"):
        (on_host / name).symlink_to(mine / "precious")
    (on_host / "checkpoints").symlink_to(mine)
    (on_host / "workload" / "epoch-3.pt").write_text("weights")
    (on_host / "workload" / "newest.pt").symlink_to("epoch-3.pt")
    (on_host / "workload" / "up").symlink_to("../../../mine/precious")
    fetch()
    files.write_json(here / "summary.json", {"status": "succeeded"})
    assert (mine / "precious").read_text() == "precious" and [file.name for file in mine.iterdir()] == ["precious"]
    assert files.read_json(here / "plan.json") == {"run": "some-run"}
    links = [path for path in here.rglob("*") if path.is_symlink()]
    assert links == [here / "workload" / "newest.pt"] and links[0].read_text() == "weights"
    assert not any(path.read_bytes() == b"precious" for path in here.rglob("*") if path.is_file())


def test_paths_that_a_host_names_stay_below_their_folder(
    on_host: Path, fetch: Gather, hosts: dict[str, Host], tmp_path: Path
) -> None:
    (on_host / "workload").mkdir()
    (tmp_path / "secret").write_text("of this machine")
    names = ["/etc/passwd", "../../secret", "../secret", "a/../../../secret", ""]
    hosts["h1"].answers["offer"] = lambda options: {"written": names}
    fetch()
    assert not list(files.runs_dir().rglob("secret")) and not list(files.runs_dir().rglob("passwd"))


def test_a_scripts_files_with_names_of_ours_do_not_come(on_host: Path, here: Path, fetch: Gather) -> None:
    for name in ("plan.json", "summary.json", "metrics.jsonl", "gathered.json", "host.json"):
        (on_host / name).write_text("{}")
    fetch()
    assert files.read_json(here / "plan.json") == {"run": "some-run"}
    assert sorted(path.name for path in here.iterdir()) == ["logs", "metrics.jsonl", "plan.json"]


def test_a_scripts_files_that_do_not_come_are_named(
    on_host: Path, run: Plan, here: Path, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    (on_host / "logs").mkdir()
    for name in ("summary.json", "logs/mine.txt", "metrics.jsonl"):
        (on_host / name).write_text("{}")
    offer = hosts["h1"].answers["offer"]
    assert callable(offer)
    there = {**offer({}), "more": ["logs", "metrics.jsonl", "summary.json"]}
    hosts["h1"].answers["offer"] = lambda options: there
    machines: Any = {"h1": hosts["h1"]}
    assert gather.gather_run(run, machines, 20, print) == []
    assert capsys.readouterr().out == (
        f"h1: left in {run.hosts[0].run_dir} there, as these names are Muster's here: summary.json, logs\n"
    )
    assert not list(here.rglob("mine.txt")) and (here / "metrics.jsonl").exists()


def test_what_a_script_puts_beside_the_output_comes_with_the_logs_and_stays(
    on_host: Path, here: Path, fetch: Gather
) -> None:
    (on_host / "output" / "best").mkdir(parents=True)
    (on_host / "stacks").mkdir()
    for name in ("output/rank-0.log", "output/model.pt", "output/best/model.pt", "output/.log", "stacks/mine.txt"):
        (on_host / name).write_text(name)
    for _ in range(2):  # it may be repeated
        fetch()
        logs = here / "logs" / "h1"
        came = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*") if path.is_file()}
        came.pop("container.json")
        beside = ("output/model.pt", "output/best/model.pt", "output/.log", "stacks/mine.txt")
        assert came == {"rank-0.log": "output/rank-0.log", **{name: name for name in beside}}


def test_the_readme_names_all_that_is_musters_in_a_runs_folder() -> None:
    text = (files.ROOT / "README.md").read_text()
    assert [name for name in (*OWN_NAMES, *gather.OURS) if f"`{name}`" not in text] == []


def test_a_large_copy_has_no_limit_but_silence(on_host: Path, fetch: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    run = subprocess.run

    def note(words: list[str], **more: Any) -> Any:
        asked.append((words, more))
        return run(words, **more)

    monkeypatch.setattr(subprocess, "run", note)
    fetch()
    assert asked and all("--timeout=60" in words and "timeout" not in more for words, more in asked)


def gathered(host: str, name: str, document: Any) -> None:
    files.write_json(files.runs_dir() / "some-run" / "logs" / host / name, document)


def test_a_summary_made_later_is_that_of_a_watched_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    two = plan(1, 1)
    lost = cause("h2", "host_lost", reason="no word from it for 10 s")
    gathered("h1", "exit.json", exit_words("failed", lost))
    first = closing.write_summary(two, ["h2"])
    assert (first["failed_host"], first["missing_hosts"]) == ("h2", ["h2"])
    gathered("h2", gather.CONTAINER, {"ExitCode": 0})  # it was started anew, and says nothing of use
    second = closing.write_summary(two, [])
    assert second == {**first, "missing_hosts": []}
    assert json.loads((files.runs_dir() / "some-run" / "summary.json").read_text()) == second


@pytest.mark.slow
def test_a_run_that_repeats_another_is_compared_with_it_once_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    origin.write(files.runs_dir() / "some-run", Origin(reproduces="first-run"))
    (files.runs_dir() / "first-run").mkdir()
    for name in ("some-run", "first-run"):
        step = {
            "event": "step",
            "time": 1.0,
            "step": 1,
            "epoch": 1,
            "loss": 2.5,
            "lr": 0.1,
            "images": 8,
            "seconds": 1.0,
        }
        (files.runs_dir() / name / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    gathered("h1", "exit.json", exit_words())
    summary = closing.write_summary(plan(1), [])
    said = [
        "the same as run first-run to the bit: the loss of 1 step",
        "weights are not compared: the two runs have no checkpoint of the same step here",
    ]
    assert summary["reproduces"] == {"run": "first-run", "same": True, "said": said}
    closing.close(plan(1), summary, print)
    out = capsys.readouterr().out
    assert all(line in out for line in said)
    origin.write(files.runs_dir() / "some-run", Origin())
    assert "reproduces" not in closing.write_summary(plan(1), [])


@pytest.mark.slow
def test_the_newest_checkpoint_comes_from_whichever_host_has_it(
    tmp_path: Path, on_host: Path, hosts: dict[str, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last attempt's master had not written one when the run was stopped."""
    second, made = tmp_path / "on the second host", plan(1, 1)
    folders = {"h1": on_host, "h2": second}
    made = replace(made, hosts=[replace(one, run_dir=str(folders[one.host])) for one in made.hosts])
    for folder, steps in ((on_host, [20]), (second, [20, 40])):
        (folder / "checkpoints").mkdir(parents=True)
        for step in steps:
            for name in (f"step-{step}.pt", f"step-{step}.json"):
                (folder / "checkpoints" / name).write_text(folder.name)
    machines: Any = {"h1": hosts["h1"], "h2": hosts["h2"]}
    for steps, said in (([20, 40], "came from h2"), ([20, 40], ""), ([20, 60], "h2: its checkpoint of step 60 could")):
        offered: dict[str, Any] = {"written": [], "checkpoints": steps}
        hosts["h2"].answers["offer"] = lambda options, offered=offered: offered  # type: ignore[misc]
        assert gather.gather_run(made, machines, 20, print) == []
        out = capsys.readouterr().out
        assert said in out and ("checkpoint" in out) is bool(said)
        here = files.runs_dir() / made.run / "checkpoints"
        came = {path.name: path.read_text() for path in here.iterdir()}
        older = dict.fromkeys(("step-20.pt", "step-20.json"), "on host")
        assert came == {**older, **dict.fromkeys(("step-40.pt", "step-40.json"), "on the second host")}


def test_a_verdict_that_lacked_a_host_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    missing = closing.write_summary(plan(1, 1), ["h1", "h2"])
    assert (missing["status"], missing["missing_hosts"]) == ("failed", ["h1", "h2"])
    gathered("h2", "exit.json", exit_words())
    partly = closing.write_summary(plan(1, 1), ["h1"])
    assert (partly["status"], partly["missing_hosts"]) == ("succeeded", ["h1"])
    gathered("h1", "exit.json", exit_words())
    assert closing.write_summary(plan(1, 1), [])["missing_hosts"] == []


RESULT = {"test_accuracy": 0.93, "images_per_second": 500.0, "train_seconds": 30}


@pytest.mark.parametrize(
    ("script", "result", "said"),
    [
        (None, RESULT, "test accuracy 93.00%, 500 images/s, 30.0 s of training"),
        ("main.py", RESULT, None),
        ("main.py", {"test_accuracy": 0.93}, None),
        (None, {"test_accuracy": 0.93}, None),
        (None, {**RESULT, "images_per_second": "many"}, None),
        (None, {**RESULT, "train_seconds": [1]}, None),
    ],
)
def test_a_result_counts_where_our_trainer_wrote_it(
    script: str | None, result: dict[str, Any], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    made = plan(1, script=script)
    gathered("h1", "exit.json", exit_words())
    files.write_json(files.runs_dir() / "some-run" / "result.json", result)
    summary, lines = closing.write_summary(made, []), list[str]()
    closing.close(made, summary, lines.append)
    assert [line for line in lines if "accuracy" in line] == ([said] if said else [])
    assert summary["test_accuracy"] == (None if script else 0.93)


def test_after_a_restart_the_seconds_of_the_last_attempt_and_of_the_whole_run_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    gathered("h1", "exit.json", exit_words(attempt=2, hosts=["h1"], seconds=75.0))
    files.write_json(files.runs_dir() / "some-run" / "result.json", RESULT)
    summary, lines = closing.write_summary(plan(1), []), list[str]()
    assert (summary["train_seconds"], summary["run_seconds"]) == (30, 75.0)
    closing.close(plan(1), summary, lines.append)
    figures = "test accuracy 93.00%, 500 images/s, 30.0 s of training in the last attempt"
    assert f"{figures}, 75.0 s from the run's start to its end" in lines


def test_half_a_line_of_events_is_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    gathered("h1", "exit.json", exit_words())
    path = files.runs_dir() / "some-run" / "logs" / "h1" / "events.jsonl"
    path.write_text('{"event": "lease"}\n{"eve')
    assert [event["event"] for event in closing.end_of(plan(1), "h1", True).events] == ["lease"]
    assert os.path.exists(path)


def test_the_last_lines_say_where_the_report_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    gathered("h1", "exit.json", exit_words())
    summary, lines = closing.write_summary(plan(1), []), list[str]()
    closing.close(plan(1), summary, lines.append)
    page = files.runs_dir() / "some-run" / "report.html"
    assert f"report: {files.shown(page)}" in lines and "some-run" in page.read_text()


def test_a_report_that_cannot_be_written_is_said_and_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ROOT", tmp_path)
    gathered("h1", "exit.json", exit_words())
    (files.runs_dir() / "some-run" / "report.html").mkdir()
    summary, lines = closing.write_summary(plan(1), []), list[str]()
    closing.close(plan(1), summary, lines.append)
    assert [line.split(":")[0] for line in lines[:1]] == ["no report"] and not any(
        line.startswith("report") for line in lines
    )
    assert lines[-1] == "run some-run succeeded" and summary["exit_status"] == 0
