"""Promises about commands: none can hang Muster, an interrupt cuts no short one off, and no long one outlives us."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from containers import engine, guard
from tests.processes import running


def test_a_command_that_does_not_end_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COMMAND_SECONDS", 0.2)
    with pytest.raises(engine.CommandFailed, match=r"`sleep 300` .* 124:\nit did not end within"):
        engine.output(["sleep", "300"])


@pytest.mark.slow
def test_a_build_that_does_not_end_is_ended_and_its_last_lines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when it has printed a line."""
    printed: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: 2 * engine.BUILD_SECONDS * len(printed))
    monkeypatch.setattr(engine, "time", clock)
    with pytest.raises(engine.CommandFailed, match="step 1\nit did not end within"):
        engine.follow(["sh", "-c", "echo step 1; exec sleep 300"], printed.append)


@pytest.mark.slow
def test_a_build_ends_with_its_own_process_whatever_that_leaves_behind() -> None:
    printed: list[str] = []
    engine.follow(["sh", "-c", "sleep 500 & echo $!; printf two"], printed.append)
    child, last = printed
    assert last == "two"
    assert running(int(child))  # so nobody waited for it
    os.kill(int(child), signal.SIGKILL)


def test_a_failed_build_reports_its_status_and_last_lines() -> None:
    with pytest.raises(engine.CommandFailed) as caught:
        engine.follow(["sh", "-c", "echo why; exit 3"])
    assert (caught.value.status, caught.value.tail) == (3, "why")


@pytest.mark.slow
def test_ctrl_c_lets_the_command_under_way_end(tmp_path: Path) -> None:
    under_way, interrupted, ended = (tmp_path / name for name in ("under-way", "interrupted", "ended"))
    script = f"touch {under_way}; while [ ! -e {interrupted} ]; do sleep 0.05; done; touch {ended}"
    program = f"from containers import engine; engine.output(['sh', '-c', {script!r}])"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, process_group=0)
    while not under_way.exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the process group
    interrupted.touch()
    process.wait(300)
    assert process.returncode != 0
    assert ended.exists()


def wait_until_gone(pids: list[int]) -> None:
    """The test's own limit of time ends this if it never happens."""
    while any(map(running, pids)):
        time.sleep(0.01)


# A long command with a child of its own, both deaf to the SIGINT that a terminal sends. It prints their process ids.
BUILD = ["sh", "-c", "trap '' INT; sleep 500 & echo $! $$; wait"]
STUBBORN = ["sh", "-c", "trap '' TERM INT; sleep 500 & echo $! $$; while :; do sleep 0.1; done"]


def pids_of(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def test_abort_ends_a_build_of_another_thread_with_its_children() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with ThreadPoolExecutor() as pool:
        build = pool.submit(engine.follow, BUILD, lines.put)
        pids = pids_of(lines.get())
        engine.abort()
        with pytest.raises(engine.CommandFailed):
            build.result()
    wait_until_gone(pids)
    engine.abort()  # nothing is left to end


def test_a_stubborn_command_is_killed_with_its_children() -> None:
    with subprocess.Popen(STUBBORN, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = pids_of(process.stdout.readline())
        guard.end(process, seconds=0.5)
    assert process.returncode == -signal.SIGKILL
    wait_until_gone(pids)


def follower(command: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that follows `command`, and the processes of that."""
    program = f"from containers import engine; engine.follow({command!r}, lambda line: print(line, flush=True))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    )
    assert process.stdout is not None
    return process, pids_of(process.stdout.readline())


def test_ctrl_c_ends_a_build_with_its_children() -> None:
    process, pids = follower(BUILD)
    with process:
        os.killpg(process.pid, signal.SIGINT)
    assert process.returncode != 0
    wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_does_not_outlive_the_process_that_follows_it(number: signal.Signals) -> None:
    process, pids = follower(BUILD)
    with process:
        process.send_signal(number)
    assert process.returncode == -number
    wait_until_gone(pids)


@pytest.mark.slow
def test_a_process_ends_while_a_background_build_waits_for_a_lock(tmp_path: Path) -> None:
    """As after a deploy that failed: another deploy may hold the lock for half an hour."""
    program = (
        "import fcntl, pathlib, sys\nfrom containers import files, image\n"
        "path = pathlib.Path(sys.argv[1])\nother = path.open('a')\nfcntl.flock(other, fcntl.LOCK_EX)\n"
        "image._in_background(lambda: files.locked(path).__enter__())"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "build.lock"], check=True, timeout=300)
