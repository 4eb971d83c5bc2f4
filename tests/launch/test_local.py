"""Promises of `make local`: it trains, and whatever happens it leaves a summary that says so."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import write_jpegs
from launch import files, local
from launch.cli import exits
from launch.cli.refusal import Refusal
from tests.wheels import write_wheel

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--dataset", "fake", "--image-size", "16", "--model", "shufflenet_v2_x0_5", "--epochs", "1"]
Run = tuple[int, str, Path, dict[str, Any]]


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.local", "--runs", str(runs), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], runs: Path) -> Run:
    """(exit status, output, the run's folder, its summary). The time is a guard, not a measurement."""
    try:
        output, _ = process.communicate(timeout=300)
    except BaseException:  # nothing that a test started may go on and slow down the next ones
        stop(process)
        raise
    (folder,) = runs.iterdir()
    return process.returncode, output, folder, json.loads((folder / "summary.json").read_text())


def stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, so that it ends its ranks, then by force."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def processes_of(run: str) -> list[str]:
    label = f"MUSTER_RUN_ID={run}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [path.parent.name] if label in path.read_bytes().split(b"\0") else []
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With a loss of the user's own."""
    runs = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROJECT", "examples/own_parts")
        return finish(start(runs, "--nproc", "2", *TINY, "--loss", "parts:loss"), runs)


@pytest.mark.slow
def test_a_run_succeeds_and_says_so(trained: Run) -> None:
    status, output, folder, summary = trained
    assert status == exits.SUCCEEDED, output
    assert summary["run"] == folder.name
    assert (summary["status"], summary["exit_status"], summary["failed_rank"]) == ("succeeded", 0, None)
    assert (summary["nodes"], summary["world_size"], summary["reason"]) == (1, 2, None)
    assert 0 <= summary["test_accuracy"] <= 1
    assert summary["images_per_second"] > 0 and 0 < summary["train_seconds"] < summary["run_seconds"]
    assert "first optimizer step after" in output
    assert "curves.png" in output.splitlines()[-2] and "report.html" in output.splitlines()[-1]


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(trained: Run) -> None:
    folder = trained[2]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", *["step"] * 5, "checkpoint", "epoch", "end"]
    assert [event["images"] for event in events if event["event"] == "step"] == [120, 120, 120, 120, 35]
    assert [len(event["computing"]) for event in events if "computing" in event] == [2] * 4  # by rank; step 1: no news
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-5.pt", "step-5.json"}
    result = json.loads((folder / "result.json").read_text())
    assert (result["steps"], result["world_size"], result["model"]) == (5, 2, "shufflenet_v2_x0_5")
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["project"], settings["loss"]) == (str(ROOT / "examples" / "own_parts"), "parts:loss")
    assert {p.name for p in (folder / "logs").iterdir()} == {"rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err"}
    assert "shufflenet_v2_x0_5 on fake" in (folder / "report.html").read_text()
    assert not list(folder.glob(".*"))


OWN = ["--model", "parts:net", "--dataset", "parts:digits", "--loss", "parts:loss"]


@pytest.mark.slow
@pytest.mark.parametrize("data", [pytest.param("own", marks=pytest.mark.long), "files"])
def test_ctrl_c_amid_an_epoch_stops_all_ranks_and_keeps_their_work_also_where_processes_read_the_data(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal is sent to the whole process group, as a terminal does with Ctrl-C."""
    write_jpegs(tmp_path / "images", 600, distinct=10)
    words = [*TINY[2:6], "--dataset", "imagefolder", "--data-dir", f"{tmp_path}/images"]
    if data == "own":
        words = OWN
        monkeypatch.setenv("PROJECT", "examples/own_parts")
    runs = tmp_path / "runs"
    process = start(runs, "--nproc", "2", *words, "--workers", "1", "--batch-size", "4", "--epochs", "1000")
    assert process.stdout
    while "first optimizer step" not in (line := process.stdout.readline()):
        assert line, "it ended early"
    os.killpg(process.pid, signal.SIGINT)
    status, output, folder, summary = finish(process, runs)
    assert status == exits.INTERRUPTED, output
    assert (summary["status"], summary["exit_status"], summary["test_accuracy"]) == ("stopped", 130, None)
    assert "Traceback" not in output and list((folder / "checkpoints").glob("step-*.json")), output
    assert processes_of(folder.name) == []


def test_wrong_settings_are_refused_in_one_message_before_a_rank_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert local.main(["--runs", str(tmp_path), "--nproc", "2", "--epochs", "0"]) == exits.REFUSED
    assert list(tmp_path.iterdir()) == []
    assert "ARGS: --epochs 0: at least 1\n" in capfd.readouterr().err


@pytest.mark.slow
def test_a_wrong_project_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs, mine = tmp_path / "runs", tmp_path / "mine"
    mine.mkdir()
    (mine / "requirements.txt").write_text("no-such-package-of-muster\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    for given, words, status, said in (
        (tmp_path / "absent", (), exits.REFUSED, "absent is not there"),
        ("", ("--project", str(mine)), exits.REFUSED, "PROJECT=dir"),
        (mine, ("--epochs", "0"), exits.REFUSED, "--epochs 0: at least 1"),
        (mine, (), exits.DEPLOY_FAILED, "No matching distribution found for no-such-package-of-muster"),
    ):
        monkeypatch.setenv("PROJECT", str(given))
        assert local.main(["--runs", str(runs), "--nproc=1", *words]) == status
        err = capfd.readouterr().err
        assert said in err and err.count("fix: ") == 1
    assert not runs.exists()


@pytest.mark.slow
def test_ranks_are_given_the_project_and_what_it_requires_and_their_failure_is_reported_with_rank_and_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The project is named from where make is typed."""
    mine, runs = ROOT / "build" / f"test-project-{os.getpid()}", tmp_path / "runs"
    mine.mkdir(parents=True)
    try:
        write_wheel(tmp_path / "index", "tiny")
        (mine / "requirements.txt").write_text(f"--no-index\n--find-links {tmp_path}/index\ntiny\n")
        (mine / "parts.py").write_text(
            "from importlib.metadata import version\nfrom torch import nn\nprint('tiny', version('tiny'))\n"
            "def net(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))\n"
        )
        monkeypatch.setenv("PROJECT", str(mine.relative_to(ROOT)))
        words = ("--model", "parts:net", "--dataset", "digits", "--image-size", "8", "--epochs", "1", "--lr", "1e38")
        status, output, folder, summary = finish(start(runs, "--nproc", "1", *words), runs)
        assert "tiny 1" in output
        assert json.loads((folder / "settings.json").read_text())["project"] == str(mine)
        assert status == exits.FAILED, output
        assert (summary["status"], summary["exit_status"], summary["failed_rank"]) == ("failed", 1, 0)
        assert "on rank 0 at epoch 1, step" in summary["reason"]
        assert "rank 0 failed: " in output.splitlines()[-1] and "Why it failed" in (folder / "report.html").read_text()
        assert not (folder / "result.json").exists()
    finally:
        for made in (mine, *(ROOT / "build" / "projects").glob(f"{mine.name}-*")):
            shutil.rmtree(made)


@pytest.mark.slow
def test_what_only_the_ranks_can_know_is_refused_by_them(tmp_path: Path) -> None:
    status, output, _, summary = finish(start(tmp_path, "--nproc", "1", "--dataset", "imagefolder"), tmp_path)
    assert status == summary["exit_status"] == exits.REFUSED, output
    assert summary["failed_rank"] is not None


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", "²"])
def test_a_wrong_nproc_starts_nothing(wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert local.main(["--runs", str(tmp_path), f"--nproc={wrong}"]) == exits.REFUSED
    assert list(tmp_path.iterdir()) == []
    assert f"NPROC: NPROC={wrong} is no number of processes" in capfd.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-1", "soon"])
def test_a_wrong_grace_starts_nothing(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRACE", wrong)
    assert local.main(["--runs", str(tmp_path), "--nproc=1"]) == exits.REFUSED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "fix"), [("RESUME", "--resume runs/<id>"), ("SCRIPT", "torchrun")])
def test_what_is_for_make_train_alone_starts_nothing(
    name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "last")
    with pytest.raises(Refusal, match=f"{name}=last is for make train") as refused:
        local.train(["--runs", str(tmp_path), *TINY])
    assert fix in str(refused.value) and not list(tmp_path.iterdir())


def test_ranks_that_stopped_by_themselves_have_not_failed(tmp_path: Path) -> None:
    summary = local.summarise(tmp_path, 2, exits.STOPPED, stopped=False)
    assert (summary["status"], summary["exit_status"]) == ("stopped", exits.INTERRUPTED)
    assert summary["reason"] == "stopped by a signal to a rank"


def test_run_dir_is_not_the_users_to_choose(tmp_path: Path) -> None:
    assert local.main(["--runs", str(tmp_path), "--run-dir=x"]) == exits.REFUSED


def test_ranks_are_one_per_gpu_else_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    assert [local.number_of_ranks(None, gpus) for gpus in (0, 1, 8)] == [2, 1, 8]
    monkeypatch.setenv("NPROC", "3")
    assert local.number_of_ranks(None, 0) == 3
    with pytest.raises(Refusal, match="2 GPU"):
        local.number_of_ranks(None, 2)


def test_two_runs_of_one_second_have_two_ids(tmp_path: Path) -> None:
    names = {local.make_run_folder(tmp_path / str(number)).name for number in range(2)}
    assert len(names) == 2 and all(name.endswith("-local") for name in names)


RUN = "20261121-143005-3fa2-local"


def sleeper(run_dir: Path, user: int | None = None) -> subprocess.Popen[bytes]:
    """A process that looks like a rank of a run."""
    environment = {"MUSTER_RUN_ID": RUN, "MUSTER_RUN_DIR": str(run_dir)}
    return subprocess.Popen(["/bin/sleep", "600"], env=environment, user=user)


def test_only_processes_of_this_run_are_killed(tmp_path: Path) -> None:
    """Another clone's run can have the same id; with root, another user's processes can be seen."""
    other, ours = sleeper(tmp_path / "other"), sleeper(tmp_path / "ours")
    foreign = sleeper(tmp_path / "ours", user=65534) if os.getuid() == 0 else None
    try:
        while len(processes_of(RUN)) < (2 if foreign is None else 3):  # until exec has put the environment in place
            time.sleep(0.02)
        local.kill_what_is_left(tmp_path / "ours")
        assert ours.wait(300) == -signal.SIGKILL
        assert other.poll() is None and (foreign is None or foreign.poll() is None)
    finally:
        for process in filter(None, (other, ours, foreign)):
            process.kill()
            process.wait()


SLOW_AGENT = "import pathlib, sys, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_ends_the_run(number: signal.Signals, tmp_path: Path) -> None:
    """The agent imports torch for seconds; here it never comes to its end."""
    (tmp_path / "torch.py").write_text(SLOW_AGENT)
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.local", "--runs", str(tmp_path / "runs")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(300) == exits.INTERRUPTED
        (folder,) = (tmp_path / "runs").iterdir()
        assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
        assert processes_of(folder.name) == []
    finally:
        process.kill()
        process.communicate()


def test_launch_local_does_not_import_torch() -> None:
    program = "import sys, launch.local; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.long
def test_the_default_training_reaches_97_percent_in_5_of_its_9_epochs(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    command = [sys.executable, "-m", "launch.local", "--runs", str(tmp_path), "--epochs", "5"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=540)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["test_accuracy"] >= 0.97


def test_an_open_quotation_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ARGS", "--seed 1'2")
    assert local.main([]) == exits.REFUSED
    assert "ARGS=--seed 1'2: No closing quotation" in capfd.readouterr().err
