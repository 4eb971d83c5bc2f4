"""Promise: however a run ends, it ends on every host; the last line and the summary say who failed, where and how."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.conftest import WORKLOAD, Lab, summary_of, wait_for

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    ("fault", "rank", "host", "said"),
    [
        pytest.param("exit", 0, "h1", "exit status 7", marks=pytest.mark.long),
        ("silent-raise", 1, "h2", "RuntimeError: the fault that was asked for"),
    ],
)
def test_a_failed_rank_ends_the_run_everywhere_and_is_named(
    lab: Lab, fault: str, rank: int, host: str, said: str
) -> None:
    done = lab.train("faults.py", f"{fault} --rank {rank}", NODES=2)
    assert done.returncode == 1, done.stdout
    folder, summary = summary_of(done.stdout)
    assert (summary["status"], summary["failed_rank"], summary["failed_host"]) == ("failed", rank, host), done.stdout
    assert said in summary["reason"]
    last = done.stdout.strip().splitlines()[-1]
    assert f"FAILED: rank {rank} on {host}: " in last and said in last
    assert all((folder / "logs" / other / "exit.json").is_file() for other in ("h1", "h2"))
    assert said in (folder / "logs" / host / f"rank-{rank}.log").read_text() or fault == "exit"
    assert (folder / "logs" / host / "failure.json").is_file()


def in_progress(lab: Lab, count: int) -> bool:
    """Whether as many hosts have a container of a run."""
    return len(lab.keepers()) == count


def test_ctrl_c_stops_a_job_that_prints_nothing_also_when_it_comes_twice(lab: Lab) -> None:
    process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="idle.py")
    wait_for(lambda: in_progress(lab, 3), "three containers")
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)  # again: a terminal interrupts the group, and make hands on what it got
    out, _ = process.communicate(timeout=300)  # the job itself would go on for ten minutes
    assert process.returncode == 130, out
    _, summary = summary_of(out)
    assert (summary["status"], summary["exit_status"]) == ("stopped", 130)
    assert lab.containers() == []


def doors(lab: Lab) -> int:
    """How many control machines look at h1 now."""
    is_door = "grep -qs keeper.door $process/cmdline && grep -qs ^python $process/comm"
    return len(lab.on("h1", f"for process in /proc/[0-9]*; do {is_door} && echo x; done; true").split())


def processes_naming(text: str) -> list[str]:
    """Command lines of this machine's processes that hold `text`, but for the tests' own."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line and "-m pytest" not in line:
            lines.append(line)
    return lines


def read_until(process: subprocess.Popen[str], word: str | None = None) -> str:
    """What a command prints, up to the line that holds `word`; without one to its end."""
    assert process.stdout is not None
    lines: list[str] = []
    while (line := process.stdout.readline()) and (word is None or word not in line):
        lines.append(line)
    assert word is None or line, f"it ended without {word}: {''.join(lines)}"
    return "".join([*lines, line])


def test_an_interrupted_deploy_ends_at_once_and_the_next_one_converges(lab: Lab) -> None:
    lab.on("h2", "chown root /var/lib/muster/runs")  # something to do for Ansible, there alone
    process = lab.start("deploy")
    assert "Provisioning h2 (Ansible)" in read_until(process, "TASK [")
    process.send_signal(signal.SIGTERM)
    out = read_until(process)
    assert process.wait(300) == 130, out
    assert not any("ansible-playbook" in line for line in processes_naming(str(lab.inventory)))
    again = lab.fab("deploy")
    assert again.returncode == 0, again.stdout
    assert lab.on("h2", "stat --format %U /var/lib/muster/runs") == "muster"


def test_status_logs_and_stop_go_by_the_runs_label(lab: Lab) -> None:
    process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="idle.py", NODES=2)
    try:
        wait_for(lambda: in_progress(lab, 2), "two containers")
        shown = lab.fab("status")
        assert shown.returncode == 0, shown.stdout
        run = re.findall(r"\d{8}-\d{6}-[0-9a-f]{4}", shown.stdout)[0]
        view = lab.start("logs", RUN=run)
        begun = read_until(view, f"run {run} of")  # from here on Ctrl-C only leaves the view
        wait_for(lambda: doors(lab) == 2, "both views of the run")  # make train's own, and this one
        os.killpg(view.pid, signal.SIGINT)
        view.send_signal(signal.SIGINT)
        said = begun + view.communicate(timeout=300)[0]
        assert view.returncode == 130 and f"run {run} goes on" in said, said
        wait_for(lambda: doors(lab) == 1, "the end of the reading that was left")
        assert len(lab.containers()) == 2
        second = lab.train("idle.py", NODES=1)
        assert second.returncode == 2 and f"run {run} of " in second.stdout and "in progress" in second.stdout
        assert len(lab.containers()) == 2
        stopped = lab.fab("stop", RUN=run)
        assert stopped.returncode == 0 and "h1, h2" in stopped.stdout, stopped.stdout
        out, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, out
    _, summary = summary_of(out)
    assert summary["status"] == "stopped" and summary["reason"].startswith("make stop by")
    logs = lab.fab("logs", RUN=run)
    assert logs.returncode == 0, logs.stdout
    again = lab.fab("stop", RUN=run)
    assert again.returncode == 2 and "no host runs" in again.stdout


def test_one_host_that_cannot_start_its_container_keeps_all_from_running(lab: Lab) -> None:
    lab.on("h2", "mv /var/lib/muster/runs /var/lib/muster/aside && touch /var/lib/muster/runs")  # no room for a run
    try:
        done = lab.train("idle.py", NODES=2)
    finally:
        lab.on("h2", "rm /var/lib/muster/runs && mv /var/lib/muster/aside /var/lib/muster/runs")
    assert done.returncode == 1 and "host h2: its container did not start" in done.stdout, done.stdout
    assert lab.containers() == []


def test_a_dropped_ssh_connection_costs_neither_the_run_nor_a_line(lab: Lab) -> None:
    process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="ticks.py", NODES=2)
    begun = read_until(process, "tick 5")  # so that there are lines on both sides of the drop
    sessions = "grep -l '^sshd: muster' /proc/[0-9]*/cmdline | cut -d/ -f3"
    dropped = lab.on("h2", f"for pid in $({sessions}); do kill $pid && echo $pid; done; true")
    out = begun + read_until(process)
    assert dropped and process.wait(300) == 0, out
    for rank, host in enumerate(("h1", "h2")):
        assert re.findall(rf"{host} rank {rank} \| tick (\d+)", out) == [str(number) for number in range(50)], out


RUNS = "/var/lib/muster/runs"


@contextmanager
def small_disk(lab: Lab, host: str, mebibytes: int) -> Iterator[None]:
    """The runs of a host lie on a disk of their own."""
    lab.on(host, f"mount -t tmpfs -o size={mebibytes}m,mode=755 tmpfs {RUNS}")
    try:
        yield
    finally:
        lab.on(host, f"umount {RUNS}")


@pytest.mark.long
def test_a_full_disk_costs_output_but_neither_the_run_nor_the_word_of_how_it_ended(lab: Lab) -> None:
    with small_disk(lab, "h2", 32):
        process = lab.start("train", WORKLOAD=WORKLOAD, SCRIPT="faults.py", ARGS="chatty", NODES=2)
        out = read_until(process, "10 steps")
        lab.on("h2", f"dd if=/dev/zero of={RUNS}/filler bs=64k 2>&1 | grep 'No space'")
        out += read_until(process, "h2: output is lost from here on: No space left on device")
        run = out.split("muster | run ")[1].split(":")[0]
        stopped = lab.fab("stop", RUN=run)
        out += process.communicate(timeout=120)[0]
    assert stopped.returncode == 0 and process.returncode == 130, stopped.stdout + out
    folder, summary = summary_of(out)
    assert summary["status"] == "stopped" and summary["missing_hosts"] == [], summary
    assert json.loads((folder / "logs" / "h2" / "exit.json").read_text())["status"] == "stopped"


def test_a_disk_with_room_for_one_checkpoint_keeps_that_one_and_is_named(lab: Lab) -> None:
    """A checkpoint of this model takes 19 MB; each host writes its own."""
    with small_disk(lab, "h2", 28):
        settings = "--model mobilenet_v3_small --batch-size 4 --epochs 99 --checkpoint-every 5"
        # With restarts it would go on without this host.
        done = lab.fab("train", NODES=2, ARGS=settings, MAX_RESTARTS=0)
        folder, summary = summary_of(done.stdout)
        there = f"cd {RUNS}/{folder.name}/checkpoints &&"
        names = lab.on("h2", f"{there} ls -A").split()
        manifest = json.loads(lab.on("h2", f"{there} cat step-5.json"))
        assert lab.on("h2", f"{there} sha256sum step-5.pt").split()[0] == manifest["sha256"]
    assert names == ["step-5.json", "step-5.pt"], done.stdout  # and no temporary file
    assert (done.returncode, summary["status"]) == (1, "failed"), done.stdout
    assert (summary["failed_host"], summary["missing_hosts"]) == ("h2", []), done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert "rank 1 on h2" in last and "checkpoints/step-10.pt (No space left on device)" in last, done.stdout


def test_a_wrong_setting_of_the_trainer_is_refused_before_any_container_starts(lab: Lab) -> None:
    before = lab.runs()
    done = lab.fab("train", NODES=2, ARGS="--model no-such-model")
    assert done.returncode == 2 and "no-such-model" in done.stdout and "rank" not in done.stdout, done.stdout
    assert lab.runs() == before
