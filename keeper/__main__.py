"""The first process of a run's container on each host.  python3 -P -m keeper NODE_RANK

Takes the lease, starts torchrun, tells the other keepers how things stand, and does what decide.py says until the run
has ended. Documents that it reads and writes: keeper/__init__.py. Exit status: 0 succeeded, 75 stopped, 1 failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from keeper import (
    HELD_SECONDS,
    HOST_RUNS_DIR,
    LEASE_DIR,
    PRIVATE_DIR,
    PROJECT_DIR,
    RUN_DIR,
    WORKLOAD_DIR,
    causes,
    lease,
)
from keeper import decide as deciding
from keeper.beats import Beats
from keeper.decide import LOST_SECONDS, Cause, Done, Ended, Failed, Heard, Refused, Started, StopAsked, Tick
from keeper.documents import Documents, read
from keeper.ranks import LAUNCHER, Launcher, Memory, Outputs, Reports
from keeper.stuck import Stuck

PAUSE_SECONDS = 0.05  # between two looks at children and at what became due
STATE_SECONDS = 1.0  # between two state.json
KEPT_SECONDS = HELD_SECONDS + 30.0  # the door takes the start back before that
WAITING_SECONDS = {"ending": 5.0, "ended": 60.0}  # between two events that say what is waited for
PROGRESS = ("phase", "step", "patience")  # what the other hosts are told of a rank
LAST_LINES = 20  # of a failed rank, kept with the cause
REASON_CHARACTERS = 1000  # of a cause: it travels with each heartbeat
STATUSES = {"succeeded": 0, "failed": 1, "stopped": causes.EXIT_STOPPED}

Words = Mapping[str, Any]


class Keeper:
    """One host's part of a run, from its lease to its exit."""

    def __init__(
        self,
        plan: Words,
        node_rank: int,
        run_dir: Path = Path(RUN_DIR),
        lease_dir: Path = Path(LEASE_DIR),
        private_dir: Path = Path(PRIVATE_DIR),
    ) -> None:
        self.plan, self.run_dir, self.lease_dir, self.private_dir = plan, run_dir, lease_dir, private_dir
        self.documents = Documents(run_dir)
        self.hold = private_dir / "hold"
        self.host: Words = plan["hosts"][node_rank]
        self.me = str(self.host["host"])
        self.began = time.monotonic()
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        others = [host for host in plan["hosts"] if host["host"] != self.me]
        peers = {str(host["host"]): deciding.Peer() for host in others}
        self.state = deciding.State(self.me, peers, self.began, float(plan["grace"]))
        self.addresses = {str(host["host"]): (str(host["address"]), int(host["keeper_port"])) for host in others}
        self.ranks: Dict[int, Dict[str, Any]] = {int(rank): {"state": "starting"} for rank in self.host["ranks"]}
        self.pids: Dict[int, int] = {}
        self.stuck = Stuck(run_dir)
        self.failures: List[Words] = []
        self.memory = Memory()
        self.beats: Optional[Beats] = None
        self.launcher: Optional[Launcher] = None
        self.outputs: Optional[Outputs] = None
        self.reports: Optional[Reports] = None
        self._looked: Dict[str, float] = {}  # when something was last due

    # Documents

    def note(self, name: str, words: Words) -> None:
        """Write an event."""
        after = round(time.monotonic() - self.began, 3)
        self.documents.note(
            {"time": time.time(), "after": after, "attempt": self.state.attempt, "event": name, **words}
        )

    def write_state(self, now: float) -> None:
        """state.json, as it is now."""
        ranks = {
            str(rank): {**{key: value for key, value in words.items() if key != "seen"}, "age": self._age(words, now)}
            for rank, words in self.ranks.items()
        }
        peers = {host: round(now - peer.last, 1) for host, peer in self.state.peers.items() if peer.last is not None}
        waiting = deciding.waited_for(self.state, now)
        document = {"status": self.state.status, "attempt": self.state.attempt, "ranks": ranks, "peers": peers}
        self.documents.write("state.json", {**document, "waiting": waiting, "time": time.time()})

    @staticmethod
    def _age(words: Words, now: float) -> Optional[float]:
        seen = words.get("seen")
        return None if seen is None else round(now - float(seen), 1)

    # From the start

    def run(self) -> int:
        """Keep the run until its end; returns the exit status."""
        if reason := causes.interface_problem(str(self.host["interface"])):
            return self._never_started("start", reason)
        try:
            held = lease.take(str(self.lease_dir), self._lease_words())
        except lease.Busy as busy:
            holder = busy.holder
            what = f"run {holder.get('run', '?')} of {holder.get('owner', '?')} is in progress there"
            return self._never_started("lease", what)
        try:
            self.beats = self._listen()  # first: who looks for free ports from now on finds this one taken
        except OSError as error:
            return self._never_started("start", f"the run could not start: {error}")
        self.note("lease", {})
        self._tell()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        try:
            self.documents.reserve()
            self._copy_project()
            self._start()
        except (OSError, subprocess.CalledProcessError) as error:
            return self._never_started("start", f"the run could not start: {error}")
        while not self.state.left:
            self._turn()
        status = self._leave()
        held.release()
        return status

    def _lease_words(self) -> Dict[str, Any]:
        return {"run": self.plan["run"], "owner": self.plan["owner"], "host": self.me, "time": time.time()}

    def _never_started(self, kind: str, reason: str) -> int:
        cause = Cause(kind, self.me, None, reason, self.began)
        self.state, _ = deciding.decide(self.state, Failed(time.monotonic(), cause))
        self.note("failed", cause.words(time.monotonic()))
        self._write_exit()
        return STATUSES["failed"]

    def _copy_project(self) -> None:
        """A script works in a folder of the host: what it writes outlives the container."""
        if self.plan["script"] and Path(PROJECT_DIR).is_dir():
            words = ["cp", "-a", f"{PROJECT_DIR}/.", WORKLOAD_DIR]
            copying = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while copying.poll() is None:
                time.sleep(PAUSE_SECONDS)
                if self._due("beat", 1.0, time.monotonic()):
                    self._tell()
            if copying.returncode != 0:
                raise subprocess.CalledProcessError(copying.returncode, words)
            (self.run_dir / "workload.copied").touch()

    def _start(self) -> None:
        (self.run_dir / "stacks").mkdir(exist_ok=True)
        self.reports = reports = Reports(self.events.put)
        self.outputs = Outputs(self.run_dir / "output", list(self.ranks), self._output_failed)
        ours = {"MUSTER_KEEPER": reports.path, "MUSTER_PIPES": str(self.outputs.pipes), "MUSTER_HOLD": str(self.hold)}
        self.launcher = Launcher(self.host["agent"], {**os.environ, **ours}, self.outputs)
        self._tell()

    def _listen(self) -> Beats:
        key = (self.private_dir / "key").read_bytes().strip()
        own = (str(self.host["address"]), int(self.host["keeper_port"]))
        return Beats(
            str(self.plan["run"]), self.me, key, own, self.addresses,
            lambda host, words: self.events.put(Heard(time.monotonic(), host, words)),
            lambda host: self.events.put(Refused(time.monotonic(), host)),
        )  # fmt: skip

    def _output_failed(self, error: OSError) -> None:
        self.note("output_failed", {"reason": f"output is lost from here on: {error.strerror or error}"})

    def _signalled(self, number: int, frame: Any) -> None:
        by = f"{signal.Signals(number).name} to the container on {self.me}"
        self.events.put(StopAsked(time.monotonic(), by))

    # One turn after the other

    def _turn(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self.events.get(timeout=PAUSE_SECONDS))
        self._reap()
        self._look(time.monotonic())
        now = time.monotonic()
        self._take_all()  # a disk may have held this up: what came until now is heard before silence is judged
        self._handle(Tick(now))

    def _take(self, event: Any) -> None:
        self._handle(self._reported(event) if isinstance(event, dict) else event)

    def _take_all(self) -> None:
        """Everything that waits in the queue."""
        for _ in range(self.events.qsize()):
            self._take(self.events.get())

    def _handle(self, event: Any) -> None:
        if event is None:
            return
        if isinstance(event, Heard):
            self._hear(event)
        self.state, actions = deciding.decide(self.state, event)
        for action in actions:
            self._do(action)

    def _do(self, action: Any) -> None:
        if isinstance(action, deciding.Note):
            self.note(action.name, action.words)
            if action.words.get("kind") in ("host_lost", "cut"):
                self._note_interface()
        elif isinstance(action, deciding.Tell):
            self._tell()
        elif isinstance(action, deciding.Terminate) and self.launcher:
            self._wake_stopped()
            self.launcher.terminate()
        elif isinstance(action, deciding.Kill) and self.launcher:
            if left := self.launcher.kill():
                self.note("left", {"pids": left})
            self._reap()

    def _note_interface(self) -> None:
        """Where this host's own network is the reason for a silence, that is what must be said of it."""
        reason = causes.interface_problem(str(self.host["interface"]))
        if reason and self._due("interface", LOST_SECONDS, time.monotonic()):
            self.note("interface", {"reason": reason})

    def _wake_stopped(self) -> None:
        """A stopped process takes no SIGTERM."""
        for rank in self.stuck.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGCONT)

    def _reap(self) -> None:
        status = self.launcher.reap() if self.launcher else None
        if status is None:
            return
        self._take_all()  # what the agent reported before it ended comes first
        self._learn_the_rest()
        killed = status == 128 + signal.SIGKILL and not self.state.causes and self.state.kill_at is None
        if killed and (reason := self.memory.out_of_memory()):
            now = time.monotonic()
            self._handle(Failed(now, Cause("launcher", self.me, None, f"torchrun: {reason}", now)))
        for words in self.ranks.values():
            if words["state"] in ("starting", "running"):
                words["state"] = "ended"
        self._handle(Ended(time.monotonic(), status))

    def _look(self, now: float) -> None:
        """What is to be seen from time to time."""
        if self._due("stop", 0.2, now) and self.state.stop is None and (asked := read(self.private_dir / "stop.json")):
            self._handle(StopAsked(now, str(asked["by"]), asked.get("grace")))
        waiting = self.state.status == "starting" and now - self.began > KEPT_SECONDS
        if waiting and self._due("hold", 1.0, now) and self.hold.exists():
            reason = f"the control machine did not let the run go within {HELD_SECONDS} s"
            self._handle(Failed(now, Cause("start", self.me, None, reason, now)))
        if self._due("processes", 1.0, now) and self.state.status == "running":
            self._look_for_stuck(now)
        if self._due("beat", 1.0, now):
            self._tell()
        if self._due("state", STATE_SECONDS, now):
            self.write_state(now)
        often = WAITING_SECONDS.get("ended" if self.state.done else self.state.status)
        if often and self._due("waiting", often, now) and (waited := deciding.waited_for(self.state, now)):
            self.note("waiting", {"for": waited})

    def _due(self, what: str, seconds: float, now: float) -> bool:
        """Whether `what` was last due `seconds` ago or more; then it counts from now."""
        if now - self._looked.get(what, 0.0) < seconds:
            return False
        self._looked[what] = now
        return True

    # What ranks and torchrun report

    def _reported(self, words: Words) -> Any:
        """The event that a datagram of a rank or of torchrun's agent stands for, if it is one."""
        now = time.monotonic()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if words.get("agent") == "started":
                self.pids = {int(rank): int(pid) for rank, pid in words["pids"].items()}
                for rank in self.pids:
                    self.ranks[rank]["state"] = "running"
                self.note("started", {"pids": words["pids"]})
                return Started(now)
            if words.get("agent") == "rank_ended":
                self.ranks[int(words["rank"])]["state"] = "ended"
                if not self.state.terminated:  # else it was asked to
                    self.note("rank_ended", {"rank": words["rank"]})
                return None
            if words.get("agent") == "ended":
                for known in self.ranks.values():
                    known["state"] = "ended"
                return Done(now)
            if words.get("agent") == "failed":
                return self._failed(words["failure"], now)
            rank = int(words["rank"])
            known = {key: words[key] for key in words if key not in ("rank", "pid")}
            self.ranks[rank].update(known, seen=now)
            self.stuck.report(now, rank, known)
        return None

    def _failed(self, failure: Words, now: float) -> Any:
        """A rank, or torchrun itself, has failed as the agent says."""
        if any(failure.get("rank") == known.get("rank") for known in self.failures):
            return None
        rank = failure.get("rank")
        if rank is not None and failure["exitcode"] == causes.EXIT_STOPPED:
            return StopAsked(now, f"a signal to rank {rank} on {self.me}, not from Muster; it saved a checkpoint")
        assert self.outputs is not None
        stream = LAUNCHER if rank is None else f"rank-{rank}"
        if rank is not None:
            self.ranks[int(rank)]["state"] = "failed"
            self.outputs.drain()
        lines = self._last_lines(stream)
        explained = self._explained(failure, "\n".join(self.outputs.last_lines(stream, 500)))
        self.failures.append(explained)
        patience = deciding.LAST_WORDS_SECONDS
        if explained["consequence"]:
            patience = deciding.CAUSE_SECONDS
        elif failure.get("signal"):
            patience = 0.0
        kind = "launcher" if rank is None else "rank"
        here = f"{HOST_RUNS_DIR}/{self.plan['run']}/"  # where people look for it
        reason = causes.described(explained).replace(f"{RUN_DIR}/", here)[:REASON_CHARACTERS]
        cause = Cause(kind, self.me, rank, reason, now, bool(explained["consequence"]), "", tuple(lines), patience)
        return Failed(now, cause)

    def _explained(self, failure: Words, said: str) -> Dict[str, Any]:
        """The failure, with what only this process knows: the rank's output, and what the kernel did."""
        killed = failure.get("signal") == "SIGKILL" or causes.KILLED_WORKER in str(failure.get("exception"))
        if killed and (reason := self.memory.out_of_memory()):
            return {**failure, "exception": reason, "consequence": False}
        return dict(failure) if failure.get("rank") is None else causes.completed(dict(failure), said)

    def _learn_the_rest(self) -> None:
        """What the agent wrote down at its end, and has not reported before."""
        for failure in self.documents.read("failure.json").get("failures", []):
            self._handle(self._failed(failure, time.monotonic()))

    def _look_for_stuck(self, now: float) -> None:
        """Ranks that stand still end the run."""
        found = self.stuck.look(now, self.pids, all(peer.is_fresh(now) for peer in self.state.peers.values()))
        for rank in self.stuck.excused:
            self.ranks[rank]["seen"] = now  # so that the other hosts learn of it
        self.stuck.excused.clear()
        for rank, words in self.ranks.items():
            if words["state"] in ("running", "stopped"):
                words["state"] = "stopped" if rank in self.stuck.stopped else "running"
        for stuck, reason in found:
            self._handle(Failed(now, self._hang(stuck, reason, now)))

    def _hang(self, rank: Optional[int], reason: str, now: float) -> Cause:
        if rank is None:
            return Cause("hang", self.me, None, reason, now)
        age = self._age(self.ranks[rank], now)
        if age is not None:
            reason = reason.replace("no progress", f"no progress for {age:.0f} s", 1)
        return Cause("hang", self.me, rank, reason, now, lines=tuple(self._last_lines(f"rank-{rank}")))

    def _last_lines(self, stream: str) -> List[str]:
        return causes.shortened(self.outputs.last_lines(stream, LAST_LINES)) if self.outputs else []

    def _hear(self, event: Heard) -> None:
        """How far the ranks of another host are."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            for rank, words in event.words["ranks"].items():
                if event.words["status"] == "ended":
                    self.stuck.ended(int(rank))
                else:
                    self.stuck.report(event.now, int(rank), words, float(words["age"]))

    def _tell(self) -> None:
        """Tell the other keepers how things stand here."""
        if self.beats is None:
            return
        now = time.monotonic()
        ranks = {
            str(rank): {**{key: words[key] for key in PROGRESS if key in words}, "age": self._age(words, now)}
            for rank, words in self.ranks.items()
            if "seen" in words
        }
        self.beats.tell({**deciding.beat(self.state, now), "ranks": ranks})

    # The end

    def _leave(self) -> int:
        if self.outputs:
            self.outputs.close()
        if self.reports:
            self.reports.close()
        status = STATUSES[deciding.verdict(self.state)]
        self.write_state(time.monotonic())
        self._write_exit()
        if self.beats:
            self.beats.close()
        return status

    def _write_exit(self) -> None:
        now = time.monotonic()
        cause, stop = deciding.root(self.state), self.state.stop
        document = {
            "status": deciding.verdict(self.state),
            "exit_status": self.state.exit_status,
            "cause": cause.words(now) | {"after": round(cause.at - self.began, 3)} if cause else None,
            "causes": [one.words(now) for one in self.state.causes],
            "stop": {"by": stop.by, "killed": self.state.killed} if stop else None,
            "failures": self.failures,
            "seconds": round(now - self.began, 3),
            "time": time.time(),
        }
        self.documents.release()
        self.note("exit", document)
        self.documents.write("exit.json", document)  # last: who follows the run has then seen all


def main() -> int:
    plan = json.loads((Path(RUN_DIR) / "plan.json").read_text())
    return Keeper(plan, int(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
