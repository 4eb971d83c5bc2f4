"""Promises of the keeper as a process: real keepers on loopback addresses, with real ranks of a stand-in for torchrun.

Here they are ordinary processes; that they are the first of a container is tests/lab's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from keeper import HELD_SECONDS
from keeper.__main__ import KEPT_SECONDS, Keeper
from keeper.causes import EXIT_STOPPED
from keeper.course import beat
from keeper.decide import LEAVES, LOST_SECONDS, Heard, Tick
from keeper.placement import Place
from keeper.running import Running
from keeper.stuck import STOPPED_SECONDS
from tests.processes import running

START = """
import json, sys, time
from pathlib import Path
clock, skew = time.time, float(sys.argv[3])
time.time = lambda: clock() + skew
from keeper import decide, stuck
decide.LOST_SECONDS, stuck.STOPPED_SECONDS = map(float, sys.argv[4:])
from keeper.__main__ import Keeper
folder = Path(sys.argv[1])
sys.exit(Keeper(json.loads((folder / "run/plan.json").read_text()), int(sys.argv[2]), folder / "run", folder / "lease",
                folder / "private").run())
"""
WAIT = "import time; print('begun'); time.sleep(600)"
AGENT = str(Path(__file__).with_name("fake_agent.py"))


@dataclass
class Run:
    """A run of keepers h1, h2, ...; each has a folder of its own, as if on its own host."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        count: int,
        program: Callable[[int], list[str]],
        ranks: int = 1,
        grace: float = 3.0,
        skew: float = 0.0,
        interface: str = "lo",
        restarts: int = 0,
        spares: int = 0,
        lost: float = LOST_SECONDS,
        stopped: float = STOPPED_SECONDS,
    ) -> None:
        """`program`: the arguments of Python that a host's ranks run, by node rank. `skew`: seconds by which the clock
        of the last host is ahead. `lost`, `stopped`: the keepers' LOST_SECONDS and STOPPED_SECONDS."""
        ports = [free_port(f"127.0.0.{node + 1}") for node in range(count)]
        plan: dict[str, Any] = {"run": "20260101-000000-abcd", "owner": "me@here", "grace": grace, "script": None}
        plan |= {"master_port": 1, "free_port": 2, "direct": False, "agent": [sys.executable, AGENT]}
        plan |= {"max_restarts": restarts, "min_nodes": 1, "max_host_failures": 2}
        plan["hosts"] = [
            {
                "host": f"h{node + 1}",
                "ranks": list(range(node * ranks, node * ranks + ranks)) if node < count - spares else [],
                "address": f"127.0.0.{node + 1}",
                "interface": interface,
                "run_dir": "/var/lib/muster/runs/20260101-000000-abcd",
                "keeper_port": ports[node],
                "nproc_per_node": ranks,
                "rdma": {"infiniband": [], "roce": [], "any": []},
            }
            for node in range(count)
        ]
        for node in range(count):
            for name in ("run", "lease", "private"):
                (self.of(node) / name).mkdir(parents=True, exist_ok=True)
            own = {**plan, "ranks_command": ["--", *program(node)]}
            (self.of(node) / "run" / "plan.json").write_text(json.dumps(own))
            (self.of(node) / "private" / "key").write_text("the run's own key")
            ahead = skew if node == count - 1 else 0.0
            command = [sys.executable, "-c", START, str(self.of(node)), str(node), str(ahead), str(lost), str(stopped)]
            self.processes.append(subprocess.Popen(command, text=True, start_new_session=True))

    def lose(self, node: int) -> None:
        """Kill a keeper, and with it, as with its container, its ranks."""
        self.processes[node].kill()
        self.processes[node].wait()
        for pid in self.events(node, "started")[-1]["pids"].values():
            os.kill(pid, signal.SIGKILL)

    def start_again(self, node: int) -> None:
        """Start the keeper of a host that has lost it."""
        command = self.processes[node].args
        self.processes[node] = subprocess.Popen(cast(Any, command), text=True, start_new_session=True)

    def of(self, node: int) -> Path:
        return self.folder / f"h{node + 1}"

    def document(self, node: int, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.of(node) / "run" / name).read_text())
        except (OSError, ValueError):
            return {}
        return found

    def events(self, node: int, name: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            lines = (self.of(node) / "run" / "events.jsonl").read_text().splitlines()
            return [event for event in map(json.loads, lines) if event["event"] == name]
        return []

    def pids(self, node: int) -> dict[str, int]:
        """Of the ranks, once they run."""
        wait_for(lambda: self.events(node, "started"))
        pids: dict[str, int] = self.events(node, "started")[0]["pids"]
        return pids

    def output(self, node: int, rank: int) -> str:
        file = self.of(node) / "run" / "output" / f"rank-{rank}.log"
        return file.read_text() if file.exists() else ""

    def statuses(self, seconds: float = 60) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def causes(self) -> list[tuple[str, str, int | None]]:
        exits = [self.document(node, "exit.json") for node in range(len(self.processes))]
        return [(found["cause"]["kind"], found["cause"]["host"], found["cause"]["rank"]) for found in exits]


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as made:
        port: int = made.getsockname()[1]
        return port


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    made = Run(tmp_path)
    with tempfile.TemporaryDirectory() as kept:  # a keeper that is killed leaves its socket there; a short path
        monkeypatch.setenv("TMPDIR", kept)
        yield made
        for process in made.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_run_succeeds_on_all_hosts_and_keeps_what_ranks_printed(run: Run) -> None:
    run.start(3, lambda node: ["-c", f"import os; print('node {node} rank', os.environ['RANK'])"], ranks=2)
    assert run.statuses() == [0, 0, 0]
    assert [run.document(node, "exit.json")["status"] for node in range(3)] == ["succeeded"] * 3
    assert run.output(1, 3) == "node 1 rank 3\n"
    assert (run.of(0) / "run" / "output" / "torchrun.log").read_text() == "the launcher runs\n"
    assert [event["event"] for event in run.events(0, "lease")] == ["lease"]


def test_a_killed_rank_ends_all_ranks_everywhere_and_all_hosts_name_it(run: Run) -> None:
    run.start(3, lambda node: ["-c", WAIT], ranks=2)
    pids = {**run.pids(0), **run.pids(1), **run.pids(2)}
    wait_for(lambda: run.output(1, 3))
    os.kill(pids["3"], signal.SIGKILL)
    assert run.statuses() == [1, 1, 1]
    assert run.causes() == [("rank", "h2", 3)] * 3
    assert run.document(0, "exit.json")["cause"]["reason"] == "killed by SIGKILL"
    assert run.document(0, "exit.json")["cause"]["lines"] == ["begun"]
    assert not any(running(pid) for pid in pids.values())


@pytest.mark.slow
def test_an_exception_is_named_with_the_ranks_last_lines(run: Run) -> None:
    run.start(2, lambda node: ["-c", "import time; time.sleep(1); raise ValueError('bad data')" if node else WAIT])
    assert run.statuses() == [1, 1]
    cause = run.document(0, "exit.json")["cause"]
    assert cause["reason"] == "ValueError: bad data (exit 1)" and cause["lines"][-1] == "ValueError: bad data"


@pytest.mark.slow
def test_a_rank_that_printed_long_lines_is_named_on_every_host(run: Run) -> None:
    """Its last lines travel with the heartbeats, however long they are."""
    program = "import time; time.sleep(1); [print('\u00fc' * 60000) for _ in range(30)]; raise ValueError('x' * 60000)"
    run.start(2, lambda node: ["-c", program if node else WAIT])
    assert run.statuses() == [1, 1]
    assert run.causes() == [("rank", "h2", 1)] * 2
    cause = run.document(0, "exit.json")["cause"]
    assert cause["reason"].startswith("ValueError: xxx") and sum(map(len, cause["lines"])) < 5000


@pytest.mark.slow
def test_a_host_whose_ranks_have_ended_waits_for_the_others_and_is_stopped_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_OTHERS", str(tmp_path / "never"))
    run.start(2, lambda node: ["-c", WAIT if node else ""], grace=60.0)
    wait_for(lambda: run.events(0, "ranks_ended"))
    assert [event["rank"] for event in run.events(0, "rank_ended")] == [0]
    wait_for(lambda: run.document(0, "state.json").get("waiting") == "the ranks of h2")
    state = run.document(0, "state.json")
    assert state["status"] == "running" and state["ranks"]["0"]["state"] == "ended"
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.statuses(30) == [75, 75] and not run.document(0, "exit.json")["stop"]["killed"]


@pytest.mark.slow
def test_a_dead_torchrun_leaves_no_process(run: Run) -> None:
    run.start(2, lambda node: ["-c", WAIT])
    pids = {**run.pids(0), **run.pids(1)}
    launcher = int(Path(f"/proc/{pids['1']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGKILL)
    assert run.statuses() == [1, 1]
    assert run.causes() == [("launcher", "h2", None)] * 2
    assert not any(running(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_silent_keeper_is_a_lost_host_and_ends_the_others(run: Run) -> None:
    run.start(3, lambda node: ["-c", WAIT], lost=5.0)
    pids = {**run.pids(0), **run.pids(1), **run.pids(2)}
    wait_for(lambda: len(run.events(0, "heard")) == 2 and len(run.events(2, "heard")) == 2)
    run.processes[1].send_signal(signal.SIGSTOP)  # a frozen host: its kernel still takes what is sent
    begun = time.monotonic()
    assert [run.processes[node].wait(60) for node in (0, 2)] == [1, 1]
    assert time.monotonic() - begun > 4.0
    assert run.document(0, "exit.json")["cause"]["host"] == run.document(2, "exit.json")["cause"]["host"] == "h2"
    run.processes[1].send_signal(signal.SIGCONT)  # the host is back: it finds itself alone
    assert run.processes[1].wait(60) == 1
    assert not any(running(pid) for pid in pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("skew", [pytest.param(-20.0, marks=pytest.mark.long), 20.0])
def test_clocks_that_differ_change_neither_the_run_nor_who_is_named(run: Run, skew: float) -> None:
    run.start(3, lambda node: ["-c", WAIT], skew=skew)
    pids = {node: run.pids(node) for node in range(3)}
    os.kill(pids[1]["1"], signal.SIGKILL)
    assert run.statuses() == [1, 1, 1]
    assert run.causes() == [("rank", "h2", 1)] * 3
    ends = [run.document(node, "exit.json") for node in range(3)]
    assert abs(ends[2]["time"] - ends[0]["time"] - skew) < 10  # its clock was another one indeed
    assert all(0 <= end["cause"]["after"] <= end["seconds"] for end in ends)


@pytest.mark.slow
def test_nothing_starts_on_a_host_whose_training_network_is_down(run: Run) -> None:
    run.start(1, lambda node: ["-c", WAIT], interface="gone0")
    assert run.statuses() == [1] and run.causes() == [("start", "h1", None)]
    assert run.document(0, "exit.json")["cause"]["reason"] == "its network interface gone0 is gone"
    assert run.events(0, "lease") == []  # so that the door says it, and no other host starts


def keeper_here(folder: Path, port: int, *others: str) -> Keeper:
    """A keeper in this process, with folders of its own."""
    host = {"host": "h1", "ranks": [0], "address": "127.0.0.1", "keeper_port": port, "interface": "lo", "run_dir": ""}
    for name in ("run", "lease", "private"):
        (folder / name).mkdir()
    (folder / "private" / "key").write_text("the run's own key")
    plan: dict[str, Any] = {"run": "some-run", "owner": "me@here", "grace": 3.0, "script": None, "max_restarts": 0}
    plan |= {"min_nodes": 1, "max_host_failures": 2, "master_port": 1, "free_port": 2}
    plan["hosts"] = [host, *({**host, "host": other, "ranks": [1]} for other in others)]
    return Keeper(plan, 0, folder / "run", folder / "lease", folder / "private")


def test_a_keeper_whose_port_is_taken_has_not_begun(tmp_path: Path) -> None:
    """So that the door says it, and no rank starts on any host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert keeper_here(tmp_path, taken.getsockname()[1]).run() == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["failed", "exit"]
    assert "could not start" in events[0]["reason"] and "in use" in events[0]["reason"]


def test_a_keeper_that_its_disk_held_up_hears_what_came_meanwhile_before_it_judges(tmp_path: Path) -> None:
    keeper = keeper_here(tmp_path, 1, "h2", "h3")
    now = time.monotonic()
    words = {**beat(keeper.course, now), "status": "running", "ranks": {}}
    keeper.running = running_here(tmp_path)
    for host in ("h2", "h3"):
        keeper._handle(Heard(now - LOST_SECONDS - 5.0, host, words))
    keeper.events.put((1, {"agent": "started", "pids": {"0": os.getpid()}}))
    for host in ("h2", "h3"):
        keeper.events.put(Heard(now, host, words))
    keeper._turn()
    assert keeper.course.own and not keeper.course.own.causes and keeper.course.status == "running"
    keeper._handle(Tick(now + LOST_SECONDS + 1.0))
    assert {cause.kind for cause in keeper.course.own.causes} == {"host_lost"}
    keeper.running.close()


def running_here(folder: Path, status: int = 0) -> Running:
    """Rank 0 of an attempt on h1, without a process. status: with which torchrun has ended; 0: it runs."""
    place = Place("h1", [0], [], {})
    made = Running(
        "/var/lib/muster/runs/some-run", place, folder / "run", folder / "hold", lambda name, words: None,
        lambda words: None, lambda error: None, cast(Any, lambda *_: Ends(status)),
    )  # fmt: skip
    made.memory = Full()  # type: ignore[assignment]
    return made


def test_what_ranks_here_and_elsewhere_have_done_names_this_host_once(tmp_path: Path) -> None:
    """A script's rank says nothing but its work: hangs are not looked for. Other hosts' ranks come in their beats."""
    (tmp_path / "run").mkdir()
    running = running_here(tmp_path)
    running.reported({"agent": "started", "pids": {"0": os.getpid()}}, False)
    said = []
    for step in range(1, 100):
        assert running.reported({"rank": 0, "work": [step, step, 0.4 * step, 0.0]}, False) is None
        there = {"ranks": {}, "status": "running", "work": {"1": [step, step, 0.2 * step, 0.0]}}
        running.hear(Heard(0.4 * step, "h2", there))
        if words := running.look_for_slow(0.4 * step):
            said.append(words)
    [words] = said
    assert (words["host"], words["rank"], words["times"], words["over"]) == ("h1", None, 2.0, False)
    assert 10 < words["step"] < 60 and running.stragglers.slow == words
    assert running.work() == {"0": [99, 99, pytest.approx(39.6), 0.0]} and running.progress(0.0) == {}
    running.close()


class Full:
    """Memory of a container in which the kernel has killed a process."""

    def out_of_memory(self) -> str:
        return "out of memory: killed by the kernel"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"signal": "SIGKILL", "exitcode": -9, "exception": "killed"}, "out of memory: killed by the kernel"),
        (
            {"signal": None, "exitcode": 1, "exception": "RuntimeError: DataLoader worker (pid 9) is killed by signal: "
             "Killed. "}, "out of memory: killed by the kernel (exit 1)",
        ),
        ({"signal": None, "exitcode": 1, "exception": "ValueError: bad"}, "ValueError: bad (exit 1)"),
        (
            {"signal": None, "exitcode": 1, "exception": "OSError: /muster/run/checkpoints/step-5.pt (No space left)"},
            "OSError: /var/lib/muster/runs/some-run/checkpoints/step-5.pt (No space left) (exit 1)",
        ),
    ],
)  # fmt: skip
def test_a_failure_is_said_in_words_that_help_on_the_host(tmp_path: Path, failure: dict[str, Any], reason: str) -> None:
    (tmp_path / "run").mkdir()
    running = running_here(tmp_path)
    event = running.failed({"rank": 0, "traceback": "", "consequence": False, **failure}, terminated=False)
    assert event.cause.reason == reason
    running.close()


def test_a_rank_that_has_saved_stops_the_run_unless_its_keeper_asked_it_to_end(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    running = running_here(tmp_path)
    saved = {"rank": 0, "traceback": "", "consequence": False, "exitcode": EXIT_STOPPED, "signal": None}
    assert running.failed(saved, terminated=True) is None
    assert "not from Muster" in running.failed(saved, terminated=False).by
    running.close()


def test_a_torchrun_that_the_kernel_killed_for_want_of_memory_is_said_to_be_that(tmp_path: Path) -> None:
    keeper = keeper_here(tmp_path, 1)
    keeper.running = running_here(tmp_path, 128 + signal.SIGKILL)
    keeper._reap()
    assert keeper.course.own is not None
    (cause,) = keeper.course.own.causes
    assert (cause.kind, cause.reason) == ("launcher", "torchrun: out of memory: killed by the kernel")
    keeper.running.close()


class Ends:
    """A torchrun that has ended with a status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def reap(self) -> int | None:
        found, self.status = self.status, 0
        return found or None

    def kill(self) -> list[int]:
        return []

    def terminate(self) -> None:
        pass


@pytest.mark.parametrize("held", [True, False])
def test_a_run_that_nobody_lets_go_ends(tmp_path: Path, held: bool) -> None:
    """The door takes it back before that, if it lives."""
    keeper = keeper_here(tmp_path, 1)
    if held:
        (tmp_path / "private" / "hold").touch()
    for seconds, causes in ((HELD_SECONDS, []), (KEPT_SECONDS + 1, ["start"] if held else [])):
        keeper._look(keeper.began + seconds)
        assert keeper.course.own is not None
        assert [cause.kind for cause in keeper.course.own.causes] == causes


@pytest.mark.slow
def test_a_stop_on_one_host_stops_all_within_their_grace(run: Run) -> None:
    run.start(2, lambda node: ["-c", WAIT])
    run.pids(0), run.pids(1)
    (run.of(1) / "private" / "stop.json").write_text(json.dumps({"by": "make stop by me", "grace": None, "time": 0}))
    assert run.statuses() == [75, 75]
    found = run.document(0, "exit.json")
    assert found["status"] == "stopped" and found["stop"] == {"by": "make stop by me", "killed": False}


@pytest.mark.slow
def test_ranks_that_do_not_stop_in_their_grace_are_killed_and_that_is_said(run: Run) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun'); time.sleep(600)"
    run.start(2, lambda node: ["-c", deaf], grace=1.0)
    pids = {**run.pids(0), **run.pids(1)}
    wait_for(lambda: run.output(0, 0) and run.output(1, 1))
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.statuses() == [75, 75]
    assert run.document(1, "exit.json")["stop"]["killed"] and not any(running(pid) for pid in pids.values())


@pytest.mark.slow
def test_a_stopped_rank_is_named(run: Run) -> None:
    run.start(2, lambda node: ["-c", WAIT], stopped=2.0)
    run.pids(0)
    os.kill(run.pids(1)["1"], signal.SIGSTOP)
    assert run.statuses() == [1, 1]
    assert run.causes() == [("hang", "h2", 1)] * 2
    assert "is stopped (SIGSTOP)" in run.document(0, "exit.json")["cause"]["reason"]


@pytest.mark.slow
def test_a_second_run_on_a_host_is_refused_and_the_first_goes_on(run: Run, tmp_path: Path) -> None:
    run.start(1, lambda node: ["-c", WAIT])
    run.pids(0)
    second = subprocess.run(
        [sys.executable, "-c", START, str(run.of(0)), "0", "0", "1", "1"], text=True, timeout=300, check=False
    )
    assert second.returncode == 1
    assert run.events(0, "failed")[0]["kind"] == "lease" and "me@here" in run.events(0, "failed")[0]["reason"]
    assert run.processes[0].poll() is None


FAILS_ONCE = """
import os, sys, time
from pathlib import Path
mark = Path(sys.argv[1])
print("attempt", os.environ["MUSTER_ATTEMPT"], flush=True)
if os.environ["MUSTER_ATTEMPT"] == "1":
    mark.touch()
    time.sleep(600)
"""
SAVES_ONCE = f"""
import signal
def save(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit({EXIT_STOPPED})
{FAILS_ONCE.replace("    mark.touch()", "    signal.signal(signal.SIGTERM, save); mark.touch()")}
"""
FAILS_TWICE = FAILS_ONCE.replace('== "1"', '< "3"')


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_on_all_hosts(run: Run, tmp_path: Path) -> None:
    run.start(3, lambda node: ["-c", FAILS_ONCE, str(tmp_path / f"begun{node}")], ranks=2, restarts=3)
    before = {**run.pids(0), **run.pids(1), **run.pids(2)}
    wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(3)))
    wait_for(lambda: run.output(1, 2).endswith("\n"))
    os.kill(before["3"], signal.SIGKILL)
    assert run.statuses() == [0, 0, 0]
    assert not any(running(pid) for pid in before.values())
    found = run.document(0, "exit.json")
    assert (found["status"], found["attempt"], found["hosts"]) == ("succeeded", 2, ["h1", "h2", "h3"])
    assert [(end["number"], end["cause"]["rank"]) for end in found["attempts"][:1]] == [(1, 3)]
    assert found["cause"] is None and found["failures"] == []
    assert run.output(1, 2) == "attempt 1\n-- attempt 2 --\nattempt 2\n"
    (event,) = run.events(2, "attempt")
    assert event["attempt"] == 2 and event["because"]["reason"] == "killed by SIGKILL" and event["left_out"] == {}


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_host_whose_keeper_is_gone(run: Run, tmp_path: Path) -> None:
    run.start(4, lambda node: ["-c", FAILS_ONCE, str(tmp_path / f"begun{node}")], restarts=3, spares=1)
    wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(3)))
    wait_for(lambda: run.document(3, "state.json").get("status") == "waiting")
    # One that was never heard may still be starting: it is lost only after a minute.
    wait_for(lambda: all("h1" in [event["host"] for event in run.events(node, "heard")] for node in (1, 2)))
    run.processes[0].kill()  # with its container go all of its processes
    os.kill(run.pids(0)["0"], signal.SIGKILL)
    assert run.statuses()[1:] == [0, 0, 0]
    assert (
        run.document(3, "exit.json")["hosts"] == ["h2", "h3", "h4"]
        and run.output(3, 2) == "-- attempt 2 --\nattempt 2\n"
    )
    assert "its container has ended" in run.events(3, "attempt")[0]["left_out"]["h1"]


def hears(run: Run, node: int, host: str) -> bool:
    """Whether a keeper has heard another one lately."""
    return run.document(node, "state.json").get("peers", {}).get(host, 60.0) < 2.0


@pytest.mark.slow
def test_a_keeper_that_is_started_again_waits_and_joins_at_the_next_attempt(run: Run, tmp_path: Path) -> None:
    run.start(3, lambda node: ["-c", FAILS_TWICE, str(tmp_path / f"begun{node}")], restarts=3)
    wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(3)))
    wait_for(lambda: all(hears(run, node, f"h{other + 1}") for node in range(3) for other in {0, 1, 2} - {node}))
    run.lose(0)  # the master
    wait_for(lambda: all(len(run.events(node, "started")) == 2 for node in (1, 2)))
    assert run.events(1, "attempt")[0]["hosts"] == ["h2", "h3"]
    run.start_again(0)
    wait_for(lambda: run.events(0, "returned") and all(hears(run, node, "h1") for node in (1, 2)))
    wait_for(lambda: run.document(0, "state.json")["status"] == "waiting")
    assert len(run.events(0, "started")) == 1
    os.kill(run.events(2, "started")[1]["pids"]["1"], signal.SIGKILL)
    assert run.statuses() == [0, 0, 0]
    for node in range(3):
        found = run.document(node, "exit.json")
        assert (found["status"], found["attempt"], found["hosts"]) == ("succeeded", 3, ["h1", "h2", "h3"])
    after = [event["after"] for name in ("lease", "returned", "started") for event in run.events(0, name)[-1:]]
    assert after == sorted(after)


@pytest.mark.slow
@pytest.mark.long  # of a keeper that is started again there is the test above
def test_a_keeper_that_is_started_again_at_once_joins_the_attempt_that_follows(run: Run, tmp_path: Path) -> None:
    run.start(2, lambda node: ["-c", FAILS_ONCE, str(tmp_path / f"begun{node}")], restarts=3)
    wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(2)))
    wait_for(lambda: hears(run, 0, "h2") and hears(run, 1, "h1"))
    run.lose(0)
    run.start_again(0)
    assert run.statuses() == [0, 0]
    found = run.document(1, "exit.json")
    assert (found["attempt"], found["hosts"]) == (2, ["h1", "h2"])
    assert (found["attempts"][0]["cause"]["kind"], found["attempts"][0]["cause"]["host"]) == ("host_lost", "h1")


@pytest.mark.slow
def test_a_keeper_that_is_asked_to_end_lets_its_ranks_save_and_leaves_the_run_to_the_others(
    run: Run, tmp_path: Path
) -> None:
    """As `podman stop` asks it, or the shutdown of its host: here of the master, one of two."""
    run.start(2, lambda node: ["-c", SAVES_ONCE, str(tmp_path / f"begun{node}")], restarts=3)
    wait_for(lambda: all((tmp_path / f"begun{node}").exists() for node in range(2)))
    wait_for(lambda: hears(run, 0, "h2") and hears(run, 1, "h1"))
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.statuses() == [1, 0]
    assert [run.output(node, node).count("saved\n") for node in range(2)] == [1, 1]
    own, found = run.document(0, "exit.json"), run.document(1, "exit.json")
    assert (own["status"], own["given_up"], own["stop"]) == ("failed", LEAVES, None)
    assert (found["status"], found["attempt"], found["hosts"], found["stop"]) == ("succeeded", 2, ["h2"], None)
    cause = found["attempts"][0]["cause"]
    assert (cause["kind"], cause["host"], cause["reason"]) == ("leaves", "h1", LEAVES)
    assert run.events(1, "attempt")[0]["left_out"] == {"h1": LEAVES}


@pytest.mark.slow
def test_a_keeper_that_cannot_be_started_again_leaves_no_word_of_the_run_s_end(run: Run) -> None:
    run.start(2, lambda node: ["-c", WAIT], restarts=3)
    wait_for(lambda: run.events(0, "started"))
    second = subprocess.run(
        cast(Any, run.processes[0].args), text=True, timeout=300, check=False, stderr=subprocess.PIPE
    )
    assert second.returncode == 1 and "is in progress there" in second.stderr
    assert not run.document(0, "exit.json") and run.processes[0].poll() is None


@pytest.mark.slow
@pytest.mark.long  # without processes: test_course.py
def test_half_of_the_hosts_without_the_master_end_and_say_why(run: Run) -> None:
    run.start(2, lambda node: ["-c", WAIT], restarts=3)
    pids = {**run.pids(0), **run.pids(1)}
    wait_for(lambda: run.events(1, "heard"))
    run.processes[0].kill()
    os.kill(pids["0"], signal.SIGKILL)
    assert run.processes[1].wait(90) == 1 and not running(pids["1"])
    found = run.document(1, "exit.json")
    assert found["given_up"] == (
        "h2 cannot know whether h1 goes on: less than half of its hosts are left, or half without the master"
    )
    assert (found["cause"]["kind"], found["cause"]["host"]) == ("host_lost", "h1")


@pytest.mark.slow
def test_ranks_that_are_given_up_are_not_started_again(run: Run) -> None:
    run.start(2, lambda node: ["-c", "import sys; sys.exit(2)" if node else WAIT], restarts=3)
    assert run.statuses() == [1, 1]
    found = run.document(0, "exit.json")
    assert found["given_up"] == "it would end the same way again" and found["attempt"] == 1
    assert (found["cause"]["host"], found["cause"]["rank"]) == ("h2", 1)
