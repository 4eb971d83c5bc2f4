"""Promises of train.start.forked: to torchrun, and to whoever reads its output, a forked rank is a rank like others."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import GUARD_SECONDS, running
from train.start import forked

ROOT = Path(__file__).resolve().parents[2]

# A stand-in for the agent: some ranks of the module that is beside it.
AGENT = """
import os, sys, time
import torch.multiprocessing  # as the agent has; else each rank would load it
from train.start import forked
forked.MODULE, forked.PRELOADED = "ranked", ()
ranks = forked.fork(int(sys.argv[1]))
for number, rank in enumerate(ranks):
    environment = os.environ | {"RANK": str(number)}
    del environment["NOT_FOR_RANKS"]
    rank.start(["--lr", "a b", "\\udcff"], environment, f"{number}.out", f"{number}.err")
print([ranks[0].wait(60), *(rank.wait() for rank in ranks[1:])])  # torch 2.11 waits without a limit, too
"""


def ended(folder: Path, module: str, ranks: int) -> list[int]:
    """The exit codes of the ranks, which run this module in `folder` and leave their output there."""
    (folder / "ranked.py").write_text(f"import os, signal, sys\nrank = int(os.environ['RANK'])\n{module}\n")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NOT_FOR_RANKS": "x"}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-P", "-c", AGENT, str(ranks)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 0 and not done.stderr, done.stderr
    codes = json.loads(done.stdout)
    assert isinstance(codes, list)
    return codes


@pytest.mark.slow
def test_a_rank_finds_what_a_process_of_its_own_would_find_and_ends_as_it_would_end(tmp_path: Path) -> None:
    """Ranks 0 and 1 end by themselves; 2 and 3 are killed when they have printed something; 4 raises."""
    module = """
import atexit, threading, time
if rank in (2, 3):
    print('printed', end='')
    os.kill(os.getpid(), signal.SIGKILL if rank == 3 else signal.SIGINT)
if rank == 4:
    raise ValueError('bad')
print(__name__, sys.argv, file=sys.stdout)
print(os.getsid(0) == os.getpid(), "NOT_FOR_RANKS" in os.environ, os.popen("echo $RANK").read())
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
print(handlers == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL], signal.set_wakeup_fd(-1))
print("wrong", rank, file=sys.stderr)
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.exit(75 if rank else "why")
"""
    assert ended(tmp_path, module, 5) == [1, 75, -signal.SIGINT, -signal.SIGKILL, 1]
    for rank, last in enumerate(("why\n", "")):
        name, found, rest = (tmp_path / f"{rank}.out").read_text().split("\n", 2)
        assert name == f"__main__ {[str(tmp_path / 'ranked.py'), '--lr', 'a b', chr(0xDCFF)]}"
        assert (found, rest.lstrip()) == (f"True False {rank}", "True -1\nthread\nat the end\n")
        assert (tmp_path / f"{rank}.err").read_text() == f"wrong {rank}\n{last}"

    assert (tmp_path / "3.out").read_text() == "printed"
    shown = (tmp_path / "4.err").read_text()  # once, without the agent's lines
    assert shown.count("ValueError: bad") == 1 and 'ranked.py", line 9' in shown and '"<string>"' not in shown


@pytest.mark.slow
def test_ranks_that_wait_end_with_their_agent(tmp_path: Path) -> None:
    program = AGENT.partition("for number")[0] + "print(*(rank.pid for rank in ranks), flush=True)\ntime.sleep(600)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen([sys.executable, "-c", program, "2"], env=environment, stdout=subprocess.PIPE, text=True)
    assert agent.stdout
    pids = agent.stdout.readline().split()
    agent.kill()
    assert agent.stdout.read() == ""  # to its end: nobody else has it open
    agent.wait(GUARD_SECONDS)
    assert len(pids) == 2
    while any(running(pid) for pid in pids):  # a process ends after it has closed its files
        time.sleep(0.01)


@pytest.mark.slow
def test_torchruns_import_starts_no_thread_and_touches_no_gpu() -> None:
    """It may only be forked where that holds. OpenBLAS's threads, which it can fork with, are off here."""
    program = "import os, torch.distributed.run as run; run.parse_args(['-m', 'train'])\n"
    program += "print(len(os.listdir('/proc/self/task')), run.torch.cuda.is_initialized())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr


def options(**others: Any) -> Namespace:
    usual = {"module": True, "training_script": "train", "nproc_per_node": "2"}
    plain = {"no_python": False, "run_path": False, "numa_binding": None, "training_script_args": ["--lr", "0.1"]}
    return Namespace(**{**usual, **plain, **others})


@pytest.mark.parametrize(
    ("others", "count"),
    [
        ({}, 2),
        ({"nproc_per_node": "auto"}, 0),
        ({"module": False, "training_script": "train"}, 0),
        ({"training_script": "train.forecast.probe"}, 0),
        ({"training_script_args": ["--parallel", "horovod"]}, 0),
        ({"training_script_args": ["--spawn=2"]}, 0),
    ],
)
def test_ranks_of_our_trainer_alone_are_forked(
    others: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert forked.wanted(options(**others)) == count


def test_ranks_whose_threads_torchrun_would_settle_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert forked.wanted(options()) == 0


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks of our trainer under the agent; their lines come out of its standard output."""
    command = [sys.executable, "-P", "-m", "train.start.agent", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}", "--tee=3", "-m", "train"]
    command += ["--run-dir", str(tmp_path / "run"), "--epochs", "300", "--dataset", "fake", "--model", "squeezenet1_1"]
    command += ["--batch-size", "4", "--image-size", "64"]
    ours = {
        "PYTHONPATH": str(ROOT),
        "MUSTER_RUN_DIR": str(tmp_path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # else a pipe gets the lines of many epochs at once
    }
    process = subprocess.Popen(command, env={**os.environ, **ours}, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def until_the_first_step(training: subprocess.Popen[str]) -> list[int]:
    """The pids of the ranks, once they train. The agent's only children are ranks."""
    assert training.stdout
    assert any("first optimizer step" in line for line in training.stdout), "it ended before its first step"
    children = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
    return [int(pid) for pid in children]


@pytest.mark.slow
def test_forked_ranks_of_the_trainer_stop_with_a_checkpoint(training: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = until_the_first_step(training)
    commands = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ranks}
    assert len(ranks) == 2 and commands == {Path(f"/proc/{training.pid}/cmdline").read_bytes()}, "they were not forked"
    training.send_signal(signal.SIGTERM)
    training.communicate(timeout=GUARD_SECONDS)
    assert training.returncode == 128 + signal.SIGTERM and not (tmp_path / "failure.json").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.long
def test_a_forked_rank_of_the_trainer_that_is_killed_is_named(training: subprocess.Popen[str], tmp_path: Path) -> None:
    pid = until_the_first_step(training)[1]
    os.kill(pid, signal.SIGKILL)
    training.communicate(timeout=GUARD_SECONDS)
    failures = json.loads((tmp_path / "failure.json").read_text())["failures"]
    (first,) = (each for each in failures if each["pid"] == pid)
    assert (training.returncode, first["exception"], first["rank"]) == (1, "killed by SIGKILL", 1)
