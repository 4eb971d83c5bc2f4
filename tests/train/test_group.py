"""Promises of the process group: ranks find each other however they are started, or report why not."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import GUARD_SECONDS, running
from tests.train.group_rank import join
from tests.train.parallel_ranks import ROOT, environment
from train.settings import SettingsError
from train.start.group import Place, backend_for, device_of
from train.start.rendezvous import checked, meet

CPU = torch.device("cpu")
HELPER = [sys.executable, "-m", "tests.train.group_rank"]


def joined(
    folder: Path, init: str, ranks: range, world_size: int, die: bool = False, timeout: float = 120
) -> list[Any]:
    """(exit status, what it printed) of ranks that are forked from this process, which has torch loaded."""
    context = multiprocessing.get_context("fork")
    outputs = [folder / f"output-{rank}" for rank in ranks]
    started = [
        context.Process(target=one_rank, args=(output, rank, world_size, init, timeout, die))
        for output, rank in zip(outputs, ranks, strict=True)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(GUARD_SECONDS)
        process.kill()  # no-op for one that has ended
        process.join()
    return [(process.exitcode, output.read_text().strip()) for process, output in zip(started, outputs, strict=True)]


def one_rank(output: Path, rank: int, world_size: int, *arguments: Any) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    with output.open("w") as file, contextlib.redirect_stdout(file):
        status = join(*arguments)
    sys.exit(status)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_place_is_read_from_whoever_started_the_rank() -> None:
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    mpirun = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    assert Place.from_environment(torchrun) == Place(3, 1, 4, 2)
    assert Place.from_environment(mpirun) == Place(1, 0, 2, 1)
    assert Place.from_environment({}) == Place()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK is set but not LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "RANK=x.*whole numbers"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "ranks count from 0"),
    ],
)
def test_a_wrong_place_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Place.from_environment(variables)


SLICE = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


@pytest.mark.parametrize(
    ("names", "visible", "message"),
    [
        (["NVIDIA A100-SXM4-40GB"], None, r"2 ranks on a host with 1 GPU\(s\): start at most one rank per GPU"),
        (["NVIDIA A100-SXM4-40GB"], "3", r"1 GPU\(s\) \(CUDA_VISIBLE_DEVICES=3 hides the others\)"),
        (
            [SLICE],
            None,
            f"divided into slices.*here {SLICE}, however many.*Start one rank on this host, or turn MIG off",
        ),
        ([SLICE], "MIG-4f32, MIG-8a11", f"shows a process one slice at most, here {SLICE}"),
    ],
)
def test_more_ranks_than_gpus_are_refused_with_the_reason(
    names: list[str], visible: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SettingsError, match=message):
        device_of(Place(1, 1, 2, 2))
    assert device_of(Place()) == torch.device("cuda", 0)


def test_backends_that_cannot_be_are_refused() -> None:
    assert backend_for(CPU) == "gloo"
    with pytest.raises(SettingsError, match="nccl: it needs a GPU"):
        backend_for(CPU, "nccl")


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_mpi_is_refused_where_torch_lacks_it() -> None:
    with pytest.raises(SettingsError, match=r"built without MPI.*--backend gloo"):
        backend_for(CPU, "mpi")


@pytest.mark.parametrize(
    "init",
    ["", "env", "tcp://host", "tcp://:2000", "tcp://host:x", "tcp://h:99999", "file://", "file://name", "nfs:///a"],
)
def test_a_wrong_init_is_refused(init: str) -> None:
    with pytest.raises(SettingsError, match=f"--init {init}.*take env://, tcp://HOST:PORT"):
        checked(init)


def test_what_cannot_be_listened_at_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match="take another port"):
            meet(f"tcp://127.0.0.1:{port}", 0, 2, 5)
    with pytest.raises(SettingsError, match=r"no address of its host: give one of rank 0's host"):
        meet("tcp://192.0.2.1:2000", 0, 2, 5)


def test_a_folder_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a folder that all ranks can write to"):
        meet(f"file://{tmp_path}/none/store", 1, 2, 5)


def test_env_without_a_master_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "2000")
    with pytest.raises(SettingsError, match="MASTER_ADDR not set: start the ranks with torchrun or --spawn"):
        meet("env://", 0, 2, 5)


@pytest.mark.slow
def test_ranks_meet_at_an_address(tmp_path: Path) -> None:
    assert joined(tmp_path, f"tcp://127.0.0.1:{free_port()}", range(3), 3) == [(0, "sum 3")] * 3


@pytest.mark.slow
def test_files_of_a_crashed_run_do_no_harm(tmp_path: Path) -> None:
    """A run that crashed leaves its store, and a rank that was killed before it met anyone leaves its word."""
    init, folder = f"file://{tmp_path}/stores/store", tmp_path / "stores"
    folder.mkdir()
    assert joined(tmp_path, init, range(2), 2, die=True) == [(9, "sum 1")] * 2
    assert list(folder.iterdir())
    (folder / "store.rank-1").write_text("0123456789abcdef")
    (folder / "store.meeting").write_text('{"store": "/nowhere", "words": {"1": "0123456789abcdef"}}')
    assert joined(tmp_path, init, range(2), 2) == [(0, "sum 1")] * 2
    assert not list(folder.glob("store.rank-*")) and not (folder / "store.meeting").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_rank_that_waits_in_vain_says_so(tmp_path: Path, scheme: str) -> None:
    init = f"file://{tmp_path}/store" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    [(status, out)] = joined(tmp_path, init, range(1), 2, timeout=1)
    assert status == 2
    assert f"rank 0 waited 1 s at --init {init} for the 2 ranks to meet" in out


def spawn(count: int, what: str = "", out: Path | None = None) -> subprocess.Popen[str]:
    env = environment() | {"OUT": str(out)}
    command = [*HELPER, "spawn", str(count), what]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.long
def test_spawned_ranks_meet() -> None:
    process = spawn(2)
    out, _ = process.communicate(timeout=300)
    assert (process.returncode, out.split()) == (0, ["sum", "1"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "status"), [pytest.param("fails", 7, marks=pytest.mark.long), ("killed", 128 + signal.SIGKILL)]
)
def test_the_first_failing_ranks_status_is_the_parents(what: str, status: int) -> None:
    process = spawn(2, what)
    _, err = process.communicate(timeout=300)
    assert process.returncode == status and "Traceback" not in err


@pytest.mark.slow
def test_the_cause_is_the_last_word_of_spawned_ranks() -> None:
    """Rank 0 loses its peer in a collective, in a traceback of its own."""
    process = spawn(2, "raises in a group")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err.rstrip().endswith("ValueError: a fault") and err.count("Traceback") == 1
    assert "rank 1 failed: Traceback" in err
    assert "rank 0 failed after another rank: " in err.split("rank 1 failed")[0]


@pytest.mark.long
def test_spawned_ranks_that_stop_give_the_writer_its_time(tmp_path: Path) -> None:
    """Rank 1, which writes nothing, is done 4 s before rank 0: with a grace of 1 s rank 0 would be killed."""
    process = spawn(2, "stops", tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert "stopped as asked after step 4" in out
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
def test_no_process_outlives_the_parent(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM is passed on, and the ranks' own status comes back; SIGKILL of the parent ends them, too."""
    process = spawn(2, "waits", tmp_path)
    assert process.stdout is not None
    waiting = [process.stdout.readline() for _ in range(2)]
    pids = [int(pid) for file in tmp_path.glob("rank-*") for pid in file.read_text().split()]
    process.send_signal(number)
    process.communicate(timeout=300)  # until the last of them has closed its output
    assert waiting == ["waiting\n"] * 2 and len(pids) == 4
    assert process.returncode == (5 if number == signal.SIGTERM else -signal.SIGKILL)
    assert not [pid for pid in pids if running(pid)]


LEAVES = """
import atexit, os, sys
# The first in is the last to run; in one piece, as both ranks print.
atexit.register(lambda: os.write(1, b"%d\\n" % len(os.listdir("/proc/self/task"))))
import torch._dynamo  # which DDP loads
from train.start.group import Place, first_complaint, process_group

# Two ranks, which end as an interpreter ends.
for rank in "01":
    if os.fork() == 0:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        break
else:
    print(sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(2)))
    os._exit(sys.stdout.flush() or 0)

place = Place.from_environment()
with process_group(place, torch.device("cpu"), 60):
    first_complaint("", place)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.itself = [model]
    model(torch.ones(1, 2)).sum().backward()
del model
"""


@pytest.mark.slow
def test_gloos_threads_end_before_the_interpreter() -> None:
    """One that still had a tensor to drop aborted its rank: seen in 1 of 50 that ended right after a collective."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = environment() | place | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.stdout.splitlines() == ["1", "1", "[0, 0]"], done.stderr
