"""Promises: ranks tell their keeper where they are cheaply; a script does it in two lines, and stops whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keeper.hang import HangWatch, culprits, describe
from tests.processes import GUARD_SECONDS, Forked
from tests.train.fake_keeper import FakeKeeper
from tests.train.test_group import free_port
from train import settings
from train.start import muster_run

ROOT = Path(__file__).resolve().parent.parent.parent
HELPER = ROOT / "train" / "start" / "muster_run.py"
MOST_SECONDS = 20e-6  # of computing, for a message that is not sent
TRAINER = [
    "train", "--dataset=fake", "--image-size=32", "--model=shufflenet_v2_x0_5", "--batch-size=64", "--download",
    "--loggers=none",
]  # fmt: skip


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[FakeKeeper]:
    made = FakeKeeper(tmp_path)
    yield made
    made.close()


def teller(keeper: FakeKeeper) -> muster_run.Teller:
    return muster_run.Teller({"MUSTER_KEEPER": str(keeper.path), "RANK": "3"})


def torchrun(keeper: FakeKeeper, folder: Path, *command: str, path: str = "", **variables: str) -> Forked:
    """Two ranks on this machine, in `folder`, which is also the run's."""
    words = ["--nproc-per-node=2", "--standalone", "--local-addr=127.0.0.1", *command]
    environment = {**keeper.environment(folder), "PYTHONPATH": path or str(ROOT), **variables}
    return Forked("train.start.agent", words, folder, environment)


@pytest.mark.slow
def test_phases_come_at_once_and_steps_ten_a_second(keeper: FakeKeeper) -> None:
    mine = teller(keeper)
    mine.tell("training", {"step": 1, "loss": None})
    mine.tell("training", {"step": 2})
    mine.tell("saving", {})
    keeper.wait(lambda: len(keeper.messages) == 2)
    assert [(said["phase"], said.get("step")) for _, said in keeper.messages] == [("training", 1), ("saving", None)]
    assert keeper.messages[0][1] == {"rank": 3, "phase": "training", "step": 1, "pid": os.getpid()}
    begun = time.monotonic()
    while time.monotonic() - begun < 1.0:
        mine.tell("training", {"step": 3})
    assert 2 <= len(keeper.of(3, phase="training")) - 1 <= 11


def test_what_was_said_last_is_said_again(keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = teller(keeper)
    monkeypatch.setattr(muster_run, "_teller", mine)
    muster_run.still_alive()  # nothing was said
    mine.tell("training", {"step": 1, "loss": None})
    mine.tell("training", {"step": 2})  # too soon to be sent
    muster_run.still_alive()
    keeper.wait(lambda: len(keeper.messages) == 2)
    assert keeper.messages[0][1] == keeper.messages[1][1] and keeper.messages[1][1]["step"] == 1


def test_nothing_holds_up_a_rank(tmp_path: Path) -> None:
    """A keeper that does not read, one that has gone, a figure that is none, and none at all."""
    full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    full.bind(str(tmp_path / "full"))
    for path in (str(tmp_path / "full"), str(tmp_path / "gone"), ""):
        mine = muster_run.Teller({"MUSTER_KEEPER": path})
        begun = time.monotonic()
        for step in range(1000):
            mine.tell(f"phase {step}", {"step": step, "loss": "x" * 100})
        mine.tell("training", {"loss": object()})
        assert time.monotonic() - begun < 10.0, path
    full.close()


def test_a_message_that_could_not_be_sent_is_repeated(tmp_path: Path) -> None:
    mine = muster_run.Teller({"MUSTER_KEEPER": str(tmp_path / "late")})
    mine.tell("training", {"step": 1})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
        late.bind(str(tmp_path / "late"))
        mine.tell("training", {"step": 2})
        assert json.loads(late.recv(4096))["step"] == 2


def test_telling_costs_microseconds(keeper: FakeKeeper) -> None:
    mine = teller(keeper)
    begun = time.process_time()
    for step in range(10_000):
        mine.tell("training", {"step": step, "steps": 10_000, "loss": 0.5})
    assert (time.process_time() - begun) / 10_000 < MOST_SECONDS


@pytest.mark.slow
def test_the_trainer_tells_all_its_phases_and_its_silence_is_found(keeper: FakeKeeper, tmp_path: Path) -> None:
    """An epoch on two ranks; then a second, in which rank 1 is stopped: rank 0's stack says that it waits."""
    process = torchrun(keeper, tmp_path, "-m", *TRAINER, "--epochs=400", "--run-dir=run", "--checkpoint-every=5")
    try:
        keeper.wait(lambda: all(keeper.of(rank, phase="training", epoch=2) for rank in (0, 1)))
        pid = {rank: keeper.of(rank)[0]["pid"] for rank in (0, 1)}
        os.kill(pid[1], signal.SIGSTOP)
        watch = HangWatch()
        for when, said in keeper.messages:
            assert watch.hung(when) == []
            watch.report(when, said["rank"], said)
        later = keeper.messages[-1][0]
        assert next(second for second in range(10_000) if watch.hung(later + second)) > 5
        stacks = {0: "", 1: ""}
        deadline = time.monotonic() + GUARD_SECONDS
        while culprits(stacks) != [1] and time.monotonic() < deadline:  # until rank 0 has come to where it waits
            for rank in (0, 1):
                os.kill(pid[rank], signal.SIGUSR1)
            time.sleep(0.5)  # a stack that does not come cannot be waited for
            stacks = {rank: (tmp_path / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)}
        assert culprits(stacks) == [1] and stacks[1] == ""
        assert describe(stacks[0])  # of our own code, or of the model's
        for rank in (0, 1):
            phases = [said["phase"] for said in keeper.of(rank)]
            assert phases[:2] == ["starting", "fetching"]
            assert {"starting", "fetching", "training", "evaluating"} <= set(phases)
        assert keeper.of(0, phase="saving") and not keeper.of(1, phase="saving")  # only who waits for it
        (last, *_) = reversed(keeper.of(0, phase="training", epoch=2))
        assert (last["epochs"], last["steps"]) == (400, keeper.of(1, phase="training")[-1]["steps"])
        figures = [said for said in keeper.of(0, phase="training") if {"rate", "loss"} <= said.keys()]
        assert figures and all(said["rate"] > 0 and 0 <= said["loss"] < 100 for said in figures)
        assert keeper.of(0, phase="evaluating")[0]["step"] == 0
    finally:
        end(process, keeper)


def test_a_script_says_that_it_can_go_on_and_learns_which_attempt_it_is(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = muster_run.Teller({"MUSTER_KEEPER": str(keeper.path), "RANK": "3"})
    monkeypatch.setattr(muster_run, "_teller", told)
    assert muster_run.can_resume() == 1
    monkeypatch.setenv("MUSTER_ATTEMPT", "2")
    assert muster_run.can_resume() == 2
    keeper.wait(lambda: len(keeper.of(3, resumable=True)) == 2)


@pytest.mark.slow
def test_a_script_reports_and_stops_on_all_ranks_at_the_same_step(keeper: FakeKeeper, tmp_path: Path) -> None:
    (tmp_path / "muster_run.py").symlink_to(HELPER)  # as in the image
    example = str(ROOT / "examples" / "own_script.py")
    process = torchrun(keeper, tmp_path, example, "--steps=1000000", path=str(tmp_path))
    try:
        keeper.wait(lambda: all(len(keeper.of(rank)) >= 3 for rank in (0, 1)))
        assert (tmp_path / "stacks" / "rank-1.txt").exists()
        said = keeper.of(1)[-1]
        assert said["phase"] == "training" and said["steps"] == 1_000_000 and said["loss"] > 0
        assert said["patience"] == muster_run.SCRIPT_PATIENCE_SECONDS
        os.kill(said["pid"], signal.SIGTERM)  # rank 0 learns of it from rank 1
        assert process.wait() == settings.EXIT_STOPPED, process.errors()
        assert "stopped after step" in process.out() and (tmp_path / "checkpoint.pt").exists()
        saved = torch.load(tmp_path / "checkpoint.pt")["step"]
        (tmp_path / "next").mkdir()
        command = [sys.executable, example, f"--steps={saved + 3}"]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(tmp_path), "MUSTER_RESUME_DIR": str(tmp_path)}
        done = subprocess.run(
            command, env=keeper.environment(tmp_path / "next") | place, capture_output=True, text=True,
            timeout=GUARD_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0 and f"goes on after step {saved}" in done.stdout.splitlines(), done
    finally:
        end(process, keeper)


@pytest.mark.slow
def test_a_script_that_stops_leaves_the_process_group_before_the_interpreter_ends(
    keeper: FakeKeeper, tmp_path: Path
) -> None:
    """Threads of gloo that let go of a tensor later abort the process. Also where the script has destroyed its group
    and the helper has another reference; a script that does not leave its group keeps it."""
    (tmp_path / "muster_run.py").symlink_to(HELPER)
    script = (
        "import atexit, os, signal, sys\nimport torch.distributed as dist\nfrom torch.nn import parallel\n"
        "import torch._dynamo\n"  # which DDP loads: once instead of in each case
        "for case in sys.argv[1:]:\n"  # each in a process of its own, which ends as an interpreter ends
        "    if os.fork() == 0:\n        break\n"
        "    print(case, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)\n"
        "else:\n    sys.exit()\n"
        "held = lambda: bool(muster_run._left) or muster_run._flag.group is not None\n"
        "atexit.register(lambda: print('held', dist.is_initialized(), held()))\n"  # runs after others
        "import muster_run\nstore = dist.HashStore()\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "model = __import__('torch').nn.parallel.DistributedDataParallel(__import__('torch').nn.Linear(1, 1))\n"
        "assert muster_run.stopping() is False\n"
        "if case == 'stopped':\n    signal.raise_signal(signal.SIGTERM)\n    assert muster_run.stopping()\n"
        "    assert muster_run.stopping()\n    sys.exit(muster_run.EXIT_STOPPED)\n"
        "if case == 'destroys':\n    dist.destroy_process_group()\n"
    )
    environment = {**os.environ, **keeper.environment(tmp_path), "PYTHONPATH": str(tmp_path), "RANK": "0"}
    command = [sys.executable, "-c", script, "stopped", "destroys", "ends"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GUARD_SECONDS)
    expected = "held False False\nstopped 75\nheld False False\ndestroys 0\nheld True False\nends 0\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_outside_of_muster_a_script_runs_as_without_the_helper(tmp_path: Path) -> None:
    """SIGTERM ends it, SIGUSR1 is its own, and there is no folder for stacks."""
    (tmp_path / "muster_run.py").symlink_to(HELPER)
    script = (
        "import muster_run, signal\nmuster_run.progress(1)\nassert muster_run.stopping() is False\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\nimport sys\nassert 'torch' not in sys.modules\n"
        "print('ready', flush=True)\nsignal.pause()\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=clean, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(GUARD_SECONDS) == -signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["muster_run.py"]


def test_without_a_process_group_a_rank_stops_alone_and_its_own_handler_is_kept(
    keeper: FakeKeeper, tmp_path: Path
) -> None:
    (tmp_path / "muster_run.py").symlink_to(HELPER)
    script = (
        "import muster_run, os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('own', flush=True))\n"
        "assert not muster_run.stopping()\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "raise SystemExit(muster_run.EXIT_STOPPED if muster_run.stopping() else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=keeper.environment(tmp_path), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (settings.EXIT_STOPPED, b"own\n"), done.stderr


def test_the_helper_imports_nothing_else_of_muster() -> None:
    """It lies alone in the image, where a script's own train.py may hide the trainer."""
    lines = HELPER.read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= {*sys.stdlib_module_names, "__future__"}
    assert muster_run.EXIT_STOPPED == settings.EXIT_STOPPED


def end(process: Forked, keeper: FakeKeeper) -> None:
    """torchrun and its ranks, stopped ones too."""
    process.send_signal(signal.SIGTERM)
    for pid in {said["pid"] for _, said in keeper.messages}:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    process.wait()
