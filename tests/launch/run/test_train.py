"""Promise: a bad `make train` is refused before any SSH, in one message; changed keys are not taken for new ones."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from containers.image import Image
from keeper import PROJECT_DIR
from launch import files
from launch.cli import exits, signals
from launch.cli.refusal import Problem, Refusal, refuse
from launch.deploy import workload
from launch.health import check
from launch.hosts import clustermap, preflight, trust
from launch.hosts.inventory import Target
from launch.job import plan as plans
from launch.job import queue, readiness, resume, trainer_arguments
from launch.job.plan import Options, Plan, Ports
from launch.run import begin, origin
from launch.run import train as run
from launch.run.origin import Origin
from tests.launch import fake_hosts
from tests.launch.fake_hosts import Host, ports
from tests.launch.samples import cluster
from train.settings import parse

hosts = fake_hosts.hosts


def request(**more: Any) -> run.Request:
    return run.Request(inventory=Path("inventory/lab"), **more)


def test_arguments_are_split_as_a_shell_would() -> None:
    options = run.parse_options(request(nodes="2", args="--epochs 3 --name 'two words'"))
    assert (options.nodes, options.args) == (2, ("--epochs", "3", "--name", "two words"))


def test_an_open_quotation_is_refused() -> None:
    with pytest.raises(Refusal, match="ARGS"):
        run.parse_options(request(args="--name 'two"))


@pytest.mark.parametrize(
    ("launcher", "said"), [("mpirun", "one of torchrun, horovod"), ("horovod", "--parallel horovod")]
)
def test_a_launcher_that_is_unknown_or_of_no_use_is_refused(launcher: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        run.parse_options(request(launcher=launcher))


def test_a_horovod_script_is_refused_on_a_deployment_without_horovod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host]
) -> None:
    (tmp_path / "main.py").touch()
    monkeypatch.setattr(clustermap, "read", lambda path: cluster(1, 1))
    asked = request(launcher="horovod", workload=str(tmp_path), script="main.py")
    with pytest.raises(Refusal, match="make deploy HOROVOD=1"):
        run.train(asked, Console())


def test_a_config_file_of_this_machine_travels_in_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("epochs: 3\nlr: 0.1  # high\n")
    for args in (f"--config {file} --seed 1", f"--config={file} --seed 1"):
        parsed = run.parse_options(request(args=args)).args
        settings = parse(list(parsed))
        assert (settings.epochs, settings.lr, settings.seed) == (3, 0.1, 1)
    assert run.parse_options(request(args="--config digits")).args == ("--config", "digits")
    for bad, said in (("a: [1", "line"), ("- 1", "found list")):
        file.write_text(bad)
        with pytest.raises(Refusal, match=rf"(?s)--config.*my.yaml.*{said}"):
            run.parse_options(request(args=f"--config {file}"))


@pytest.fixture
def hosts_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host of a test is ready, and the quick check finds nothing."""
    monkeypatch.setattr(readiness, "check", lambda *arguments: ports(2))
    monkeypatch.setattr(check, "quick", lambda *arguments, **words: [])


def before_start(args: str, script: str | None = None) -> Ports:
    known = cluster(2, 2)
    options = Options(args=trainer_arguments.inline(trainer_arguments.split(args)), script=script)
    asked = begin.Asked("run", "me", "now", known, known.hosts, options, Path("inventory/lab"))
    return begin.check_before_start(asked, [])


@pytest.mark.usefixtures("hosts_are_ready")
def test_wrong_settings_of_our_trainer_are_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("model: resnet18x\n")
    for args, said in (
        ("--batch-size 3", "at least one for each of the 4 ranks"),
        ("--model resnet18x", "torchvision has no such model; did you mean resnet18"),
        (f"--config {tmp_path}/my.yaml", "torchvision has no such model"),
        ("--config no-such-config", "cannot be read"),
    ):
        with pytest.raises(Refusal, match=said) as refused:
            before_start(args)
        assert len(refused.value.problems) == 1 and refused.value.problems[0].where == "ARGS"
    for args in ("", "--epochs 3 --config digits", "--config /data/on-the-hosts.yaml --lr 0"):
        assert before_start(args) == ports(2)
    assert before_start("--model resnet18x", script="main.py") == ports(2)


@pytest.mark.slow
def test_all_that_stands_in_the_way_of_a_start_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once what two checks have found."""
    both, own = Problem("host h1", "is not ready", "wait"), Problem("host h2", "is not ready", "wait")

    def refuse_all(*arguments: object, **words: object) -> int:
        raise Refusal([both])

    def refuse_more(*arguments: object, **words: object) -> int:
        raise Refusal([both, own])

    monkeypatch.setattr(readiness, "check", refuse_all)
    monkeypatch.setattr(check, "quick", refuse_more)
    with pytest.raises(Refusal) as refused:
        before_start("--epochs 0")
    assert [problem.where for problem in refused.value.problems] == ["ARGS", "host h1", "host h2"]


def test_missing_script_workload_or_both(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("")
    (tmp_path.parent / "outside.py").write_text("")
    for bad, said in (
        ({"workload": str(tmp_path), "script": "absent.py"}, "there is no absent.py"),
        ({"workload": str(tmp_path)}, "without SCRIPT"),
        ({"script": "main.py"}, "without WORKLOAD"),
        ({"workload": str(tmp_path / "absent"), "script": "main.py"}, "is not a folder"),
        ({"workload": str(tmp_path), "script": "../outside.py"}, "there is no"),
    ):
        with pytest.raises(Refusal, match=said):
            run.parse_options(request(**bad))
    for script in ("main.py", "./main.py", str(tmp_path / "main.py")):
        assert run.parse_options(request(workload=str(tmp_path), script=script)).script == "main.py"


def test_a_project_that_is_none_or_goes_with_a_script_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").touch()
    mine = str(tmp_path)
    for bad, said in (
        ({"project": f"{mine}/absent"}, "absent is not there"),
        ({"project": f"{mine}/net.py"}, "net.py is a file, not a folder"),
        ({"project": mine, "workload": mine, "script": "net.py"}, "together with WORKLOAD or SCRIPT"),
        ({"project": mine, "script": "net.py"}, "together with WORKLOAD or SCRIPT"),
        ({"project": mine, "launcher": "horovod"}, "is for a script of your own"),
        ({"args": f"--project {mine}"}, "--project: the folder of your own code is not named there"),
        ({"project": mine, "args": f"--project={mine}"}, "PROJECT=dir, which installs its requirements.txt"),
    ):
        with pytest.raises(Refusal, match=said) as refused:
            run.parse_options(request(**bad))
        assert len(refused.value.problems) == 1
    options = run.parse_options(request(project=mine, args="--epochs 3"))
    assert (options.script, options.project, options.args) == (None, True, ("--epochs", "3"))
    assert options.max_restarts == run.parse_options(request()).max_restarts > 0


def test_a_config_in_a_project_travels_in_the_plan_too(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("epochs: 3\n")
    options = run.parse_options(request(project=str(tmp_path), args=f"--config {tmp_path}/my.yaml"))
    assert parse(options.arguments) == parse(["--project", PROJECT_DIR, "--epochs", "3"])


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "B" * 43


def test_new_known_and_changed_keys_are_distinguished() -> None:
    known = [f"10.0.0.1 {KEY}", f"10.0.0.2 {KEY}"]
    offered = {"a": f"10.0.0.1 {KEY}", "b": f"10.0.0.2 {OTHER}", "c": f"10.0.0.3 {KEY}"}
    new, changed = trust.sort_keys(known, offered)
    assert (list(new), changed) == (["c"], {"b": f"10.0.0.2 {KEY}"})


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("python=3.11\nroot=yes\n", []),
        ("python=\nroot=yes\n", ["no python3"]),
        ("python=3.6\nroot=yes\n", ["needs 3.8"]),
        ("python=3.11\nroot=sudo: a password is required\n", ["cannot become root by sudo: sudo: a password"]),
        ("python=\nroot=sudo is not installed\n", ["no python3", "sudo is not installed"]),
    ],
)
def test_what_a_host_answers_at_first_sight(answer: str, said: list[str]) -> None:
    problems = preflight.problems_in(Target("h1", "192.0.2.1", user="me"), answer)
    assert len(problems) == len(said)
    assert all(text in problem.what for text, problem in zip(said, problems, strict=True))


def test_a_python_that_the_inventory_names_wrongly_is_named() -> None:
    [problem] = preflight.problems_in(Target("h1", "192.0.2.1", python="/usr/bin/python4"), "python=\nroot=yes\n")
    assert "/usr/bin/python4 is no Python" in problem.what and "ansible_python_interpreter" in problem.fix


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: dict[str, Host], hosts_are_ready: None
) -> dict[str, Host]:
    """Hosts on which `make train` starts at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(clustermap, "read", lambda path: cluster(1, 1))
    monkeypatch.setattr(run, "machines", lambda *arguments: contextlib.nullcontext([hosts["h1"], hosts["h2"]]))
    monkeypatch.setattr(queue, "turn", lambda *arguments: contextlib.nullcontext())
    return hosts


def started_plan() -> dict[str, Any]:
    (plan,) = files.runs_dir().glob("*/plan.json")
    return files.read_json(plan)


def test_a_detached_run_is_started_and_left(started: dict[str, Host], capsys: pytest.CaptureFixture[str]) -> None:
    with signals.interrupts_as_exceptions():
        assert run.train(request(detach=True), Console()) == exits.SUCCEEDED
    plan = started_plan()
    assert [started[name].verbs() for name in ("h1", "h2")] == [["start", "go"]] * 2 and started["h1"].follows == []
    out = capsys.readouterr().out
    assert f"`make attach RUN={plan['run']} INVENTORY=inventory/lab` shows it" in out and "`make gather RUN=" in out


def test_a_secret_reaches_the_hosts_and_nothing_else(
    started: dict[str, Host], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text("TOKEN=s3cret\n")
    with signals.interrupts_as_exceptions():
        run.train(request(detach=True, secrets="tokens"), Console())
    (_, asked) = started["h2"].asked[0]
    assert asked["secrets"] == {"TOKEN": base64.b64encode(b"s3cret").decode()}
    out, err = capsys.readouterr()
    everywhere = [json.dumps(asked["plan"]), json.dumps(started_plan()), out, err, plans.describe(plan_of(asked))]
    assert all("s3cret" not in text and asked["secrets"]["TOKEN"] not in text for text in everywhere)


def test_what_a_run_was_started_from_is_noted_beside_its_plan(
    started: dict[str, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"h1": {"data": "3 files"}, "h2": {}}
    monkeypatch.setattr(run, "commit_here", lambda: "c0ffee+")
    monkeypatch.setattr(check, "quick", lambda *arguments, note, **words: note(facts) or [])
    monkeypatch.setattr(run, "built_before", lambda asked: Image("workload", "cd" * 32, 1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "main.py").touch()
    (tmp_path / "tokens").write_text("TOKEN=s3cret\n")
    with signals.interrupts_as_exceptions():
        run.train(request(detach=True, secrets="tokens", workload="mine", script="main.py"), Console())
    assert origin.read(files.runs_dir() / started_plan()["run"]) == Origin(
        "c0ffee+", "mine", ["TOKEN"], facts, None, []
    )


@pytest.fixture
def mine(started: dict[str, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose image was built before, named from where make is typed."""
    image = Image("localhost/muster/workload-mine:latest", "cd" * 32, 1)
    monkeypatch.setattr(run, "built_before", lambda asked: image)
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    (tmp_path / "mine").mkdir()
    return Path("mine")


def test_a_run_with_a_project_is_one_of_our_trainer_in_the_image_of_the_project(
    started: dict[str, Host], mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(trainer_arguments, "check", lambda *arguments: checked.append(arguments))
    with signals.interrupts_as_exceptions():
        run.train(request(detach=True, project="mine", args="--epochs 3"), Console())
    plan = plan_of(started["h2"].asked[0][1])
    assert (plan.script, plan.args, plan.image) == (None, ["--project", PROJECT_DIR, "--epochs", "3"], "cd" * 32)
    assert plan.max_restarts > 0 and "--fill" not in plan.agent
    assert checked == [(("--epochs", "3"), 2, mine)]
    begun = origin.read(files.runs_dir() / plan.run)
    assert begun and begun.workload == "mine"


def test_nothing_is_built_for_settings_that_the_trainer_refuses(
    started: dict[str, Host], mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "built_before", lambda asked: None)
    monkeypatch.setattr(workload, "bring", lambda *arguments: pytest.fail("an image was built"))
    with pytest.raises(Refusal, match="ARGS: --epochs 0: at least 1"), signals.interrupts_as_exceptions():
        run.train(request(project="mine", args="--epochs 0"), Console())


@pytest.mark.slow
def test_a_host_that_lacks_the_projects_image_is_not_blamed_for_wrong_settings(
    started: dict[str, Host], mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image would be brought there."""

    def lacking(*arguments: Any) -> Ports:
        folder = Problem("host h2", "has no folder /srv/data (data_dir)", "create it, or correct data_dir")
        raise readiness.ImageLacking(
            [Problem("host h2", "does not hold image cdcd", "run `make deploy`"), folder], [folder]
        )

    monkeypatch.setattr(readiness, "check", lacking)
    with pytest.raises(Refusal) as refused, signals.interrupts_as_exceptions():
        run.train(request(project="mine", args="--epochs 0"), Console())
    assert [problem.where for problem in refused.value.problems] == ["ARGS", "host h2"]
    assert "does not hold" not in str(refused.value) and "/srv/data" in str(refused.value)


@pytest.mark.slow
def test_a_host_that_cannot_be_used_is_named_before_an_image_is_sent_to_it(
    started: dict[str, Host], mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else is wrong."""

    def lacking(*arguments: Any) -> Ports:
        folder = Problem("host h2", "has no folder /srv/data (data_dir)", "create it, or correct data_dir")
        raise readiness.ImageLacking([Problem("host h2", "lacks image cdcd", "run `make deploy`"), folder], [folder])

    monkeypatch.setattr(readiness, "check", lacking)
    monkeypatch.setattr(begin, "_ship_workload", lambda *arguments: pytest.fail("an image was sent"))
    with pytest.raises(Refusal) as refused, signals.interrupts_as_exceptions():
        run.train(request(project="mine"), Console())
    (problem,) = refused.value.problems
    assert "/srv/data" in problem.what


@pytest.mark.slow
def test_a_dry_run_names_the_projects_image_and_shows_what_the_trainer_is_given(
    started: dict[str, Host], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train(request(dry_run=True, project="mine"), Console()) == exits.SUCCEEDED
    out = capsys.readouterr().out
    assert f"-- train --project {PROJECT_DIR}\n" in out and "localhost/muster/workload-mine:latest" in out
    assert started["h1"].verbs() == []


def earlier_run(**options: Any) -> str:
    """An earlier run of these hosts."""
    name = "20260101-000000-aaaa"
    plan = plans.make_plan(cluster(1, 1), Options(**options), name, ports(2), "me@here", "2026-01-01T00:00:00+00:00")
    files.write_json(files.runs_dir() / name / "plan.json", plans.document(plan))
    return name


def continued(started: dict[str, Host], **more: Any) -> Plan:
    started["h2"].asked.clear()
    with signals.interrupts_as_exceptions():
        run.train(request(detach=True, resume="20260101-000000-aaaa", **more), Console())
    return plan_of(started["h2"].asked[0][1])


@pytest.mark.slow
def test_a_run_with_a_project_is_continued_with_its_folder_as_it_is_now(
    started: dict[str, Host], mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = earlier_run(project=True, args=("--epochs", "3"), image="cd" * 32)
    origin.write(files.runs_dir() / name, Origin(workload="mine"))
    plan = continued(started, args="--seed 1")
    assert plan.args == ["--project", PROJECT_DIR, "--epochs", "3", "--seed", "1"]
    assert (plan.image, plan.resume) == ("cd" * 32, name) and "has changed" not in capsys.readouterr().out
    begun = origin.read(files.runs_dir() / plan.run)
    assert begun and begun.workload == "mine"  # so that this one can be continued, too
    earlier_run(project=True, image="ef" * 32)
    continued(started)
    assert "mine, or what its image is built on, has changed since then" in capsys.readouterr().out
    Path("other").mkdir()
    plan = continued(started, project="other")
    begun = origin.read(files.runs_dir() / plan.run)
    assert begun and begun.workload == "other" and plan.args == ["--project", PROJECT_DIR]


def test_a_run_without_a_project_can_go_on_with_one(started: dict[str, Host], mine: Path) -> None:
    earlier_run(args=("--epochs", "3"))
    plan = continued(started, project="mine")
    assert plan.args == ["--project", PROJECT_DIR, "--epochs", "3"] and plan.image == "cd" * 32


def test_where_the_project_of_the_earlier_run_is_not_to_be_had_it_has_to_be_named(
    started: dict[str, Host], mine: Path
) -> None:
    name = earlier_run(project=True)
    fix = rf"fix: name the folder: `make train RESUME={name} PROJECT=dir`"
    with pytest.raises(Refusal, match=rf"PROJECT: run {name} .*, and its folder is not noted here\n.*{fix}"):
        continued(started)
    origin.write(files.runs_dir() / name, Origin(workload="mine"))
    mine.rmdir()
    with pytest.raises(Refusal, match=rf"PROJECT: run {name} .*, and its folder, mine, is gone\n.*{fix}"):
        continued(started)
    assert started["h1"].verbs() == []


def plan_of(asked: dict[str, Any]) -> Plan:
    return plans.from_document(json.loads(json.dumps(asked["plan"])))


@pytest.mark.slow
def test_where_no_plan_can_be_kept_nothing_is_started(started: dict[str, Host]) -> None:
    files.runs_dir().write_text("no folder")
    with pytest.raises(Refusal, match=r"cannot be written"), signals.interrupts_as_exceptions():
        run.train(request(), Console())
    assert started["h1"].verbs() == []


@pytest.mark.slow
def test_of_a_start_that_failed_nothing_is_kept(started: dict[str, Host]) -> None:
    started["h2"].answers["start"] = fake_hosts.refusal("podman: no space left on device")
    with pytest.raises(Refusal, match="no space left"), signals.interrupts_as_exceptions():
        run.train(request(), Console())
    assert list(files.runs_dir().iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_before_the_start_says_that_nothing_was_started(
    started: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def turn(*arguments: Any) -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(queue, "turn", turn)
    with pytest.raises(KeyboardInterrupt, match="interrupted; nothing was started"):
        run.train(request(), Console())
    assert started["h1"].verbs() == [] and not files.runs_dir().exists()


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_scripts_image_is_built_or_sent_only_where_it_has_to_be(
    known: bool, wait: bool, started: dict[str, Host], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Known from before and on all hosts: it is neither. A host that lacks it: it is sent, and the start goes on.
    Whoever waits for a turn has sent it before that."""
    image, steps, lacking = Image("localhost/muster/workload-x:latest", "ab" * 32, 1), [], [False]

    def check_hosts(machines: Any, hosts: Any, asked: str, earlier: object) -> Ports:
        assert asked == image.id
        if lacking[0]:
            raise readiness.ImageLacking([Problem("host h2", "does not hold image abab", "run `make deploy`")])
        return ports(2)

    def ship(asked: begin.Asked, machines: Any, given: Image | None, console: Console) -> Image:
        assert given == (image if known else None)
        lacking[0] = False
        steps.append("shipped")
        return image

    @contextlib.contextmanager
    def turn(*arguments: Any) -> Iterator[None]:
        steps.append("turn")
        yield

    monkeypatch.setattr(queue, "turn", turn)
    monkeypatch.setattr(begin, "built_before", lambda asked: image if known else None)
    monkeypatch.setattr(run, "built_before", lambda asked: image if known else None)
    monkeypatch.setattr(begin, "_ship_workload", ship)
    monkeypatch.setattr(readiness, "check", check_hosts)
    (tmp_path / "main.py").touch()
    for lacks in (False, True):
        lacking[0] = lacks
        steps.clear()
        with signals.interrupts_as_exceptions():
            asked = request(detach=True, wait=wait, workload=str(tmp_path), script="main.py")
            assert run.train(asked, Console()) == exits.SUCCEEDED
        if known and not wait:
            assert steps == (["turn", "shipped", "turn"] if lacks else ["turn"])
        else:
            assert steps == ["shipped", "turn"]
    plans_sent = [options["plan"] for verb, options in started["h1"].asked if verb == "start"]
    assert [sent["image"] for sent in plans_sent] == [image.id] * 2


def test_what_the_quick_check_finds_comes_after_the_containers_and_before_the_ranks(
    started: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    def quick(*arguments: object, **words: object) -> int:
        assert started["h1"].verbs() == started["h2"].verbs() == ["start"]
        raise refuse("host h2", "its disk is full", "make room")

    monkeypatch.setattr(check, "quick", quick)
    with pytest.raises(Refusal, match="its disk is full"), signals.interrupts_as_exceptions():
        run.train(request(), Console())
    assert started["h1"].verbs() == started["h2"].verbs() == ["start", "drop"]
    assert list(files.runs_dir().iterdir()) == []


@pytest.mark.parametrize("wait", [False, True])
def test_whoever_waits_for_its_turn_checks_the_hosts_after_that(
    wait: bool, started: dict[str, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    @contextlib.contextmanager
    def turn(*arguments: Any) -> Iterator[None]:
        assert arguments[3] is wait
        if not wait:
            assert checked.wait(60)  # beside it
        steps.append("turn")
        yield
        steps.append("gives the place back")

    checked = threading.Event()

    def check_hosts(*arguments: Any) -> Ports:
        steps.append("checked")
        checked.set()
        return ports(2)

    monkeypatch.setattr(queue, "turn", turn)
    monkeypatch.setattr(readiness, "check", check_hosts)
    started["h1"].answers["start"] = lambda options: steps.append("started") or {}  # type: ignore[func-returns-value]
    with signals.interrupts_as_exceptions():
        run.train(request(detach=True, wait=wait), Console())
    begin = ["turn", "checked"] if wait else ["checked", "turn"]
    assert steps == [*begin, "started", "gives the place back"]


def test_a_view_and_placeholders_are_checked_before_any_host_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="VIEW=fancy"):
        run.parse_view("fancy")
    assert [run.parse_view(text) for text in ("", "live", "plain")] == [False, False, True]
    (tmp_path / "main.py").write_text("")
    with pytest.raises(Refusal, match=r"\{ranks\} is not known"):
        run.parse_options(request(workload=str(tmp_path), script="main.py", args="--rank {ranks}"))
    kept = run.parse_options(request(workload=str(tmp_path), script="main.py", args="--rank {rank}")).args
    assert kept == ("--rank", "{rank}")
