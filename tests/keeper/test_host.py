"""Promises: of a run that had GPUs, what it left on them is named: by the process that held it, or as lost.

nvidia-smi is a script that prints what the real one prints for --query-compute-apps; processes are real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from keeper import host

UUID = "GPU-4d8f2c51-0a53-7d1e-9a4b-2f6f0c7f3a11"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> host.Run:
    """A run that is over, whose container had a GPU; what nvidia-smi prints is in the file `apps`."""
    made = host.Run(host.Host({"root": str(tmp_path)}), f"gpu{os.getpid()}")
    made.folder.mkdir(parents=True)
    command = ["podman", "run", "--device", "nvidia.com/gpu=0", "image"]
    (made.folder / "plan.json").write_text(json.dumps({"hosts": [{"command": ["podman"]}, {"command": command}]}))
    (made.folder / "host.json").write_text('{"node_rank": 1}')
    tool(tmp_path, f"echo asked >> {tmp_path}/asked; cat {tmp_path}/apps")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host, "END_SECONDS", 0.3)
    monkeypatch.setattr(host, "ALL_PROCESSES", os.readlink("/proc/self/ns/pid"))
    return made


def tool(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def apps(folder: Path, *lines: str) -> None:
    (folder / "apps").write_text("".join(f"{line}\n" for line in lines))


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_process_is_named_with_the_gpu_memory_that_it_held(run: host.Run, tmp_path: Path) -> None:
    left = subprocess.Popen(["sleep", "500"], env={"MUSTER_RUN_ID": run.name})
    threading.Thread(target=left.wait, daemon=True).start()
    try:
        apps(tmp_path, f"{UUID}, {left.pid}, 812 MiB", f"GPU-2, {left.pid}, 4 MiB", f"{UUID}, {os.getpid()}, 70 MiB")
        words = f"{left.pid} sleep 500 (812 MiB of {UUID}, 4 MiB of GPU-2)"
        # It stays in the file, as a driver at fault has it.
        lost = f"812 MiB of {UUID}, 4 MiB of GPU-2, of process {left.pid}, which has ended"
        assert host.end_processes(run) == ([words], [lost])
    finally:
        left.kill()


def test_memory_that_no_process_holds_is_named(run: host.Run, tmp_path: Path) -> None:
    pid = ended()
    apps(tmp_path, f"{UUID}, {pid}, 812 MiB", f"{UUID}, {os.getpid()}, [N/A]")
    assert host.end_processes(run) == ([], [f"812 MiB of {UUID}, of process {pid}, which has ended"])


def test_memory_that_the_driver_frees_a_moment_later_is_not_named(run: host.Run, tmp_path: Path) -> None:
    apps(tmp_path, f"{UUID}, {ended()}, 812 MiB")
    tool(tmp_path, f"cat {tmp_path}/apps; echo >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) = 2 ] && "
         f": > {tmp_path}/apps; true")  # fmt: skip
    assert host.end_processes(run) == ([], [])
    assert len((tmp_path / "asked").read_text()) == 3  # before, after, and once more


def test_a_neighbours_process_is_not_taken_for_one_that_has_ended(
    run: host.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host that is a container itself."""
    monkeypatch.setattr(host, "ALL_PROCESSES", "pid:[1]")
    apps(tmp_path, f"{UUID}, {ended()}, 812 MiB")
    assert host.end_processes(run) == ([], [])


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo NVML: Unknown Error; exit 255", "Unknown Error"),
        ("sleep 60", "did not end within"),
        (None, "No such file"),
    ],
)
def test_a_gpu_that_does_not_answer_is_named(
    run: host.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    monkeypatch.setattr(host, "GPU_SECONDS", 0.2)
    if script is None:
        (tmp_path / "nvidia-smi").unlink()
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        tool(tmp_path, script)
    (words,) = host.end_processes(run)[1]
    assert words.startswith("not known: ") and said in words


def test_memory_of_amd_gpus_is_read_from_their_driver(
    run: host.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = ended()
    monkeypatch.setattr(host, "KFD_FOLDER", tmp_path / "kfd")
    for process, gpu, held in ((pid, "51557", 8192 << 20), (pid, "13746", 0), (os.getpid(), "51557", 1 << 20)):
        file = tmp_path / "kfd" / "proc" / str(process) / f"vram_{gpu}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{held}\n")
    command = ["docker", "run", "--device", "/dev/kfd", "--device", "/dev/dri/renderD128", "image"]
    (run.folder / "plan.json").write_text(json.dumps({"hosts": [{}, {"command": command}]}))
    assert host.end_processes(run) == ([], [f"8192 MiB of GPU 51557, of process {pid}, which has ended"])
    assert not (tmp_path / "asked").exists()  # nvidia-smi


@pytest.mark.parametrize("plan", [{"hosts": [{"command": []}, {"command": ["podman", "image"]}]}, {"hosts": 5}, None])
def test_a_run_without_gpus_asks_none(run: host.Run, tmp_path: Path, plan: Any) -> None:
    (run.folder / "plan.json").write_text(json.dumps(plan))
    assert host.end_processes(run) == ([], []) and not (tmp_path / "asked").exists()
