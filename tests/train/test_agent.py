"""Promises of train.start.agent, with real torchrun: who failed, with what, in a document."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from keeper import causes
from tests.processes import GUARD_SECONDS, Forked
from train.settings import EXIT_STOPPED
from train.start import agent, failures

pytestmark = pytest.mark.slow  # nearly every test starts torchrun

ROOT = Path(__file__).resolve().parents[2]
RANK = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
WAIT = "time.sleep(600)\n"  # longer than that: who waits so has to be ended


def start(folder: Path, script: str, arguments: Sequence[str] = (), flag: str = "", **environment: str) -> Forked:
    (folder / "train.py").write_text(RANK + script)  # a user's file of that name must not stand in our way
    command = [*flag.split(), "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--log-dir={folder / 'logs'}", "--tee=3"] if "MUSTER_PIPES" not in environment else []
    command += ["--nproc-per-node=2", "--", "train.py", *arguments]
    ours = {"PYTHONPATH": str(ROOT), "MUSTER_RUN_DIR": str(folder), "MUSTER_HOST": "h7", "OMP_NUM_THREADS": "1"}
    ours |= {"PYTHONUNBUFFERED": "1"}  # torchrun flushes no line of the ranks
    return Forked("train.start.agent", command, folder, {**os.environ, **ours, **environment})


def run(folder: Path, script: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """(exit status, stderr, failure.json or {})"""
    process = start(folder, script, **environment)
    status, document = process.wait(), folder / "failure.json"
    return status, process.errors(), json.loads(document.read_text()) if document.exists() else {}


class Keeper:
    """Stands in for the keeper of a host with two ranks: their FIFOs, and the datagrams that it is sent."""

    def __init__(self, folder: Path) -> None:
        self.variables = {"MUSTER_PIPES": str(folder / "pipes"), "MUSTER_KEEPER": str(folder / "keeper")}
        (folder / "pipes").mkdir()
        self.pipes = []
        for rank in range(2):
            os.mkfifo(folder / "pipes" / f"rank-{rank}")
            self.pipes.append(os.open(folder / "pipes" / f"rank-{rank}", os.O_RDWR | os.O_NONBLOCK))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.variables["MUSTER_KEEPER"])
        self.socket.settimeout(GUARD_SECONDS)

    def told(self) -> dict[str, Any]:
        """The next datagram."""
        words = json.loads(self.socket.recv(1 << 20))
        assert isinstance(words, dict)
        return words

    def output(self, rank: int) -> str:
        """What has come through this rank's FIFO, at most what fits in it."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.pipes[rank], 1 << 20).decode()
        return ""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path)
    yield made
    for descriptor in made.pipes:
        os.close(descriptor)
    made.socket.close()


def test_ranks_start_once_they_may_get_their_arguments_and_print_to_the_keeper_which_knows_their_pids(
    keeper: Keeper, tmp_path: Path
) -> None:
    """None starts while the run is held. Arguments arrive as they were given: placeholders without the flag are words
    like others. The keeper gets what ranks print in their order. Success leaves no document."""
    given = ["$HOME", "$$", "${local_rank}", "a b", "100%", "{rank}", "{{x}}"]
    hold = tmp_path / "hold"
    hold.touch()
    script = f"assert not os.path.exists({str(hold)!r})\nassert sys.argv[1:] == {given}\n"
    script += "for n in range(3):\n    print(n)\n    print(-n, os.getpid(), file=sys.stderr)\n"
    process = start(tmp_path, script, given, **keeper.variables, MUSTER_HOLD=str(hold))
    assert not process.has_ended(within=2)  # more than it takes to start ranks
    hold.unlink()
    assert (process.wait(), process.out()) == (0, ""), process.errors()
    started = keeper.told()
    assert started["agent"] == "started"
    for rank in range(2):
        pid = started["pids"][str(rank)]
        assert keeper.output(rank).split("\n") == ["0", f"0 {pid}", "1", f"-1 {pid}", "2", f"-2 {pid}", ""]
    assert not (tmp_path / "failure.json").exists()


def test_the_keeper_learns_of_a_failure_before_the_other_ranks_end(keeper: Keeper, tmp_path: Path) -> None:
    """Rank 1 ends only when the keeper has been told, at a time that no grace would reach."""
    script = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "w").close()
    time.sleep(600)
while not os.path.exists("ready"):
    time.sleep(0.01)
raise ValueError("long" * 5000)
"""
    process = start(tmp_path, script, **keeper.variables)
    pids = keeper.told()["pids"]
    words = keeper.told()
    told = words["failure"]
    assert words["agent"] == "failed" and not process.has_ended()
    assert (told["rank"], told["pid"], told["exitcode"], told["signal"]) == (0, pids["0"], 1, None)
    assert (told["exception"], told["consequence"]) == ("exit status 1", False)  # no @record: the keeper has the output
    assert causes.completed(told, keeper.output(0))["exception"].startswith("ValueError: longlong")
    os.kill(pids["1"], signal.SIGKILL)
    assert process.wait() == 1, process.errors()
    document = json.loads((tmp_path / "failure.json").read_text())
    assert document["failures"][0]["exception"] == "exit status 1"
    assert told["time"] == document["failures"][0]["time"]


def test_an_exception_of_a_recorded_script_whose_long_texts_fit_in_a_datagram(keeper: Keeper, tmp_path: Path) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n"
        "    if rank == 1: raise ValueError('bad batch ' + '\u00fc' * 9000 + 'end')\n    time.sleep(600)\nmain()\n"
    )
    began = time.time()
    status, _, document = run(tmp_path, script, **keeper.variables)
    told = next(words["failure"] for words in iter(keeper.told, None) if words["agent"] == "failed")
    first = document["failures"][0]
    for failure in (told, first):
        assert failure["exception"].startswith("ValueError: bad batch \u00fc\u00fc")
        assert failure["traceback"].endswith("\u00fcend\n")
    assert status == 1
    assert (document["node_rank"], document["host"]) == (0, "h7")
    assert (first["rank"], first["local_rank"], first["exitcode"], first["signal"]) == (1, 1, 1, None)
    assert "in main" in first["traceback"]
    assert began - 1 <= first["time"] <= time.time()  # torch writes down whole seconds


def test_placeholders_reach_each_rank_filled_in_and_a_store_opened_at_the_free_port_meets(tmp_path: Path) -> None:
    """As the posts of 2018 to 2020 teach. torch would take torchrun's store to be at that address, too. Fails where
    another torch no longer lets ranks have arguments of their own."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        port = str(made.getsockname()[1])
    given = ["{rank}/{local_rank}/{world_size}/{node_rank}", "tcp://{master_addr}:{free_port}", '{"a": 1}', "${rank}"]
    script = f"""
expected = [f"{{rank}}/{{rank}}/2/0", f"tcp://{{os.environ['MASTER_ADDR']}}:{port}", '{{"a": 1}}', f"${{rank}}"]
if sys.argv[1:] != expected:
    sys.exit(f"{{sys.argv[1:]}}, not {{expected}}")
import torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
dist.barrier()
"""
    process = start(tmp_path, script, given, flag="--fill", MUSTER_FREE_PORT=port, GLOO_SOCKET_IFNAME="lo")
    assert process.wait() == 0, process.errors()


@pytest.mark.long
def test_an_exception_of_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    script = "if rank == 1: raise RuntimeError('no such\\nfile')\n" + WAIT
    first = run(tmp_path, script)[2]["failures"][0]
    assert (first["rank"], first["exception"]) == (1, "RuntimeError: no such")
    assert first["traceback"].startswith("Traceback (most recent call last):")


@pytest.mark.long
def test_a_killed_rank(tmp_path: Path) -> None:
    script = "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n" + WAIT
    status, _, document = run(tmp_path, script)
    first = document["failures"][0]
    assert (status, first["rank"], first["exitcode"], first["signal"]) == (1, 0, -9, "SIGKILL")
    assert first["exception"] == "killed by SIGKILL"


def test_a_rank_that_leaves_with_a_status(tmp_path: Path) -> None:
    script = "if rank == 1:\n    print('no data', file=sys.stderr)\n    sys.exit(3)\n" + WAIT
    first = run(tmp_path, script)[2]["failures"][0]
    assert (first["rank"], first["exitcode"], first["exception"]) == (1, 3, "exit status 3; its last line: no data")


# A script that uses our modules: its own name would hide them.
OURS = "sys.path.remove(os.path.dirname(os.path.abspath(__file__)))\n"
PENDING = """
import torch
import torch.distributed as dist
from train.start.group import Place, process_group
with process_group(Place.from_environment(), torch.device("cpu"), 120):
    dist.barrier()
    if rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        open("raised", "w").write(str(time.time()))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    time.sleep(600)
"""
STEP = """
import pathlib
from torch.distributed.elastic.multiprocessing.errors import record
from unittest import mock
import torch
from train import run, trainer
from train.settings import Settings
made = trainer.optimizer_step
def step(*arguments):
    if rank == 1 and calls:
        open("raised", "w").write(str(time.time()))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    calls.append(1)
    return made(*arguments)
calls = []
mock.patch.object(trainer, "optimizer_step", step).start()
where = {"loggers": "none", "run_dir": pathlib.Path("run")}
record(run.run)(Settings(model="squeezenet1_1", dataset="fake", image_size=32, **where))
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(PENDING, id="while a collective waits"),
        pytest.param(STEP, id="in a step", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_raises_is_named_at_once_though_others_wait_for_it(tmp_path: Path, script: str) -> None:
    """The others are in a collective, or stand still; none of them ends by itself in the time that is allowed."""
    status, errors, document = run(tmp_path, OURS + script, GLOO_SOCKET_IFNAME="lo")
    first = document["failures"][0]
    assert (status, first["rank"], first["consequence"]) == (1, 1, False), errors
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" in first["exception"]
    assert first["time"] - float((tmp_path / "raised").read_text()) < 5


def test_sigterm_ends_all_ranks_even_stubborn_ones(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('pid', os.getpid(), flush=True)\n" + WAIT
    process = start(tmp_path, script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    pids = [int(line.rpartition("pid ")[2]) for line in process.lines(2)]
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


SAVES = """
def stop(*_):
    time.sleep(0.2 * rank)
    open(f'saved-{rank}', 'w').close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.long
def test_ranks_have_time_to_save_when_the_agent_is_asked_to_stop(tmp_path: Path) -> None:
    process = start(tmp_path, SAVES + "print('ready', flush=True)\n" + WAIT)
    assert all(line.endswith("ready\n") for line in process.lines(2))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM, process.errors()
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert not (tmp_path / "failure.json").exists()


def test_ranks_that_stop_on_request_have_not_failed(tmp_path: Path) -> None:
    """As on a host whose agent got no signal: a rank of another host did, and all ranks agreed to stop."""
    script = SAVES + "if rank == 1: sys.exit(75)\n" + WAIT
    status, errors, document = run(tmp_path, script)
    assert (status, document) == (causes.EXIT_STOPPED, {}), errors


def test_who_fails_while_others_stop_is_named_alone_at_first(tmp_path: Path) -> None:
    script = SAVES + "if rank == 1: raise OSError('disk full')\n" + WAIT
    status, errors, document = run(tmp_path, script)
    assert status == 1 and document["failures"][0]["exception"] == "OSError: disk full"
    assert "rank 1 on h7 failed: OSError: disk full" in errors
    assert [failure["consequence"] for failure in document["failures"]] == [False, True][: len(document["failures"])]


@pytest.mark.parametrize(
    ("codes", "stopped"), [([75, 75], True), ([75, -15], True), ([75, 1], False), ([-15], False), ([75, -9], False)]
)
def test_which_exit_codes_are_a_stop(codes: list[int], stopped: bool) -> None:
    assert failures.only_stopped(codes) == stopped


def test_the_status_is_the_trainers() -> None:
    assert causes.EXIT_STOPPED == EXIT_STOPPED


def test_an_agent_that_waits_for_other_hosts_ends_when_asked(tmp_path: Path) -> None:
    """Its main thread is in torch's C++, where no Python handler runs."""
    (tmp_path / "train.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process = one_of_two_hosts(tmp_path, 0, port, {})
    while True:  # until its store listens, which is where it waits
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert not process.has_ended(), process.errors()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def one_of_two_hosts(folder: Path, node: int, port: int, variables: Mapping[str, str]) -> Forked:
    """The agent of a host with one rank."""
    command = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    ours = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables}
    words = [*command, f"--master-port={port}", "train.py"]
    return Forked("train.start.agent", words, folder, {**os.environ, **ours})


def test_an_agent_whose_ranks_have_ended_says_so_and_ends_when_asked(tmp_path: Path) -> None:
    """It waits in torch's C++ for the ranks of the other host, which use its store."""
    (tmp_path / "train.py").write_text("import os, time\ntime.sleep(600 * int(os.environ['RANK']))\n")
    keeper = Keeper(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [one_of_two_hosts(tmp_path, node, port, told) for node, told in enumerate((keeper.variables, {}))]
    try:
        assert keeper.told()["agent"] == "started"
        assert [keeper.told() for _ in range(2)] == [{"agent": "rank_ended", "rank": 0}, {"agent": "ended"}]
        time.sleep(1.0)  # until it waits
        agents[0].send_signal(signal.SIGTERM)
        assert agents[0].wait() == 128 + signal.SIGTERM
    finally:
        for process in agents:
            process.send_signal(signal.SIGTERM)
            process.wait()
        keeper.socket.close()


def test_no_word_of_a_script_is_taken_for_torchruns() -> None:
    """In Python 3.11 `--log` would be an abbreviation of two of its options."""
    from torch.distributed import run as torchrun

    words = ["--log", "out", "--r", "0", "--", "x"]
    for before, script in (([], "main.py"), (["-m"], "train")):
        options = torchrun.parse_args(["--nnodes=1", *before, "--", script, *words])
        assert (options.module, options.training_script) == (bool(before), script)
        assert options.training_script_args == words


def test_an_agent_hands_over_to_torchrun_once_the_master_can_be_reached() -> None:
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))
        place = {"master_addr": "127.0.0.1", "master_port": master.getsockname()[1]}
        agent.wait_for_master(Namespace(node_rank=0, **place))  # its store is this agent's own
        threading.Timer(0.3, master.listen).start()
        agent.wait_for_master(Namespace(node_rank=1, **place))
        master.settimeout(0)
        master.accept()[0].close()


def test_no_name_server_is_asked() -> None:
    """A host whose name server does not answer would lose seconds for each rank, at its start and when it fails."""
    program = "import socket\nsocket.gethostbyaddr = None\nfrom train.start import hooks\nhooks.install(0)\n"
    program += "from torch.distributed.elastic.agent.server.api import _get_fq_hostname\nprint(_get_fq_hostname())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{socket.gethostname()}\n", done.stderr


def failure(rank: int, exception: str, when: float) -> dict[str, Any]:
    return {"rank": rank, "time": when, "consequence": bool(causes.PEER_LOST.search(exception))}


def direct(folder: Path, module: str, *arguments: str, ranks: int = 2) -> list[tuple[int, dict[str, Any]]]:
    """(exit status, failure.json or {}) of each of some hosts with one rank each, on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = folder / str(rank)
        own.mkdir()
        command = ["--direct", str(rank), str(ranks), "127.0.0.1", str(port), module, *arguments]
        ours = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "MUSTER_RUN_DIR": str(own), "MUSTER_HOST": f"h{rank}"}
        ours |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(Forked("train.start.agent", command, Path.cwd(), {**os.environ, **ours}))
    found = []
    for rank, process in enumerate(processes):
        status, document = process.wait(), folder / str(rank) / "failure.json"
        found.append((status, json.loads(document.read_text()) if document.exists() else {}))
    return found


def test_a_rank_without_torchrun_says_why_it_failed(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\nprint(sys.argv)\n"
    )
    good, bad = direct(tmp_path, "failing", "--epochs", "1")
    assert good == (0, {})
    assert bad[0] == 1
    (failure,) = bad[1]["failures"]
    assert failure["exception"] == "ValueError: bad batch" and "failing.py" in failure["traceback"]
    assert (failure["rank"], bad[1]["host"], failure["consequence"]) == (1, "h1", False)


@pytest.mark.long
def test_wrong_settings_are_reported_without_torchrun_too(tmp_path: Path) -> None:
    ((status, document),) = direct(tmp_path, "train.forecast.probe", "--forecast", "--lr", "fast", ranks=1)
    assert status == 1
    assert "--lr" in document["failures"][0]["exception"] and document["failures"][0]["exitcode"] == 2


@pytest.mark.parametrize(
    "echo",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:5321",
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    ],
)
def test_who_only_lost_a_peer_is_not_the_cause(echo: str) -> None:
    """The clocks of two hosts differ, and a killed rank is noticed late."""
    ordered = causes.in_order([failure(0, echo, 10.0), failure(1, "killed by SIGKILL", 11.0)])
    assert [each["rank"] for each in ordered] == [1, 0]


def test_the_last_traceback_is_taken() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 'x'\n\nDuring handling ...\n\n"
        "Traceback (most recent call last):\n  File 'b', line 2\n    f()\n    ^^^\nOSError: [Errno 28] full\nnoise\n"
    )
    assert causes.exception_line(causes.last_traceback(text)) == "OSError: [Errno 28] full"
    assert causes.last_traceback("no trace here") == ""
