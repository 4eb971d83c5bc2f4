"""The first process of a run's container on each host.  python3 -P -m keeper NODE_RANK

Takes the lease, starts torchrun, tells the other keepers how things stand, and does what decide.py says until the run
has ended. Documents that it reads and writes: keeper/__init__.py. Exit status: 0 succeeded, 75 stopped, 1 failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from keeper import (
    FONTS_DIR,
    HELD_SECONDS,
    LEASE_DIR,
    MASTER_PORTS,
    PRIVATE_DIR,
    PROJECT_DIR,
    PROMISES,
    RUN_DIR,
    WITNESSES,
    WORKLOAD_DIR,
    causes,
    lease,
)
from keeper import course as courses
from keeper import decide as deciding
from keeper.beats import Beats
from keeper.course import LeaveAsked, Ports, Start
from keeper.decide import LOST_SECONDS, Cause, Ended, Failed, Heard, Refused, StopAsked, Tick
from keeper.documents import Documents, read
from keeper.known import WITNESS, Attempt
from keeper.next_attempt import ends_of
from keeper.placement import placed
from keeper.ports import free_ports
from keeper.running import Running

PAUSE_SECONDS = 0.05  # between two looks at children and at what became due
STATE_SECONDS = 1.0  # between two state.json
SLOW_SECONDS = 0.25  # between two looks who is slow
WITNESS_SECONDS = 0.2  # between two looks at what witnesses say
KEPT_SECONDS = HELD_SECONDS + 30.0  # the door takes the start back before that
WAITING_SECONDS = {"ending": 5.0, "ended": 60.0, "waiting": 60.0}  # between two events that say what is waited for
UNSAID = "the script has not said that it can go on (muster_run.can_resume(), or MAX_RESTARTS=3)"
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
        kept = self.documents.read(PROMISES)  # where this is not the first start of this host's keeper in the run
        now = time.monotonic()
        self.starts, self.first_start = int(kept.get("starts", 0)) + 1, float(kept.get("began", time.time()))
        self.began = now - max(0.0, time.time() - self.first_start)
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.course = courses.of_plan(plan, self.me, now)
        if kept:
            self.course = courses.come_back(self.course, kept, now)
        self._kept: Any = None  # the promises that are on the disk
        self.addresses = {
            str(host["host"]): (str(host["address"]), int(host["keeper_port"]))
            for host in plan["hosts"]
            if host["host"] != self.me
        }
        self.beats: Optional[Beats] = None
        self.running: Optional[Running] = None  # in the newest attempt that this host takes part in
        self._looked: Dict[str, float] = {}  # when something was last due
        self._heard: Dict[str, int] = {}  # of each witness the number of its last message

    # Documents

    def note(self, name: str, words: Words, attempt: Optional[int] = None) -> None:
        """Write an event. attempt: which it is about; None: this host's last one."""
        after = round(time.monotonic() - self.began, 3)
        if attempt is None:
            newest, own = self.course.attempt.number, self.course.own
            attempt = newest if name == "attempt" or own is None else own.attempt
        self.documents.note({"time": time.time(), "after": after, "attempt": attempt, "event": name, **words})

    def write_state(self, now: float) -> None:
        """state.json, as it is now."""
        course = self.course
        running = self.running if course.takes_part else None
        ranks, slow = (running.state(now), running.stragglers.slow) if running else ({}, None)
        known = ((host, course.known.get(host)) for host in course.all_hosts)
        peers = {host: round(now - one.at, 1) for host, one in known if one}
        document = {"status": course.status, "attempt": course.attempt.number, "hosts": list(course.attempt.hosts)}
        more = {"waiting": courses.waited_for(course, now), "beat": courses.beat(course, now), "time": time.time()}
        self.documents.write("state.json", {**document, "ranks": ranks, "slow": slow, "peers": peers, **more})

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
        self.note("lease" if self.starts == 1 else "returned", {})
        self._keep_promises()
        self._tell()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)
        try:
            self.documents.reserve()
            self._copy_fonts()
            self._copy_project()
            if self.course.status == "starting":
                self._start(self.course.attempt)
        except (OSError, subprocess.CalledProcessError) as error:
            return self._never_started("start", f"the run could not start: {error}")
        self._find_ports()
        while not self.course.left:
            self._turn()
        status = self._leave()
        held.release()
        return status

    def _lease_words(self) -> Dict[str, Any]:
        return {"run": self.plan["run"], "owner": self.plan["owner"], "host": self.me, "time": time.time()}

    def _never_started(self, kind: str, reason: str) -> int:
        now = time.monotonic()
        if self.starts > 1:  # the run goes on without it, and its end is for those to say who see it
            print(reason, file=sys.stderr)
            return STATUSES["failed"]
        cause = Cause(kind, self.me, None, reason, self.began)
        self.note("failed", cause.words(now))
        self._write_exit("failed", (cause,))
        return STATUSES["failed"]

    def _copy_fonts(self) -> None:
        """matplotlib writes where its list of fonts is, and the image, which has one, is read-only."""
        folder = os.environ.get("MPLCONFIGDIR", "")
        if folder and Path(FONTS_DIR).is_dir() and not os.path.exists(folder):
            shutil.copytree(FONTS_DIR, folder)

    def _copy_project(self) -> None:
        """A script works in a folder of the host: what it writes outlives the container."""
        if self.plan["script"] and Path(PROJECT_DIR).is_dir() and self.starts == 1:
            words = ["cp", "-a", f"{PROJECT_DIR}/.", WORKLOAD_DIR]
            copying = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while copying.poll() is None:
                time.sleep(PAUSE_SECONDS)
                if self._due("beat", 1.0, time.monotonic()):
                    self._tell()
            if copying.returncode != 0:
                raise subprocess.CalledProcessError(copying.returncode, words)
            (self.run_dir / "workload.copied").touch()

    def _start(self, attempt: Attempt) -> None:
        """Start this host's ranks of an attempt. Raises OSError."""
        if self.running:
            self.running.close()
        where = placed(self.plan, attempt.hosts, *attempt.ports, attempt.number)
        place = next(one for one in where if one.host == self.me)
        self.running = Running(
            str(self.host["run_dir"]), place, self.run_dir, self.hold, self.note,
            lambda words: self.events.put((attempt.identity, words)), self._output_failed,
        )  # fmt: skip
        self._tell()

    def _start_again(self, attempt: Attempt) -> None:
        try:
            self._start(attempt)
        except OSError as error:
            now = time.monotonic()
            self._handle(Failed(now, Cause("start", self.me, None, f"its ranks could not be started: {error}", now)))
            self._handle(Ended(now, 1))

    def _find_ports(self) -> None:
        """Have free ports ready, in case that this host becomes the master."""
        if self.course.rules.max_restarts and len(found := free_ports("", *MASTER_PORTS, 2)) == 2:
            self._handle(Ports(time.monotonic(), (found[0], found[1])))

    def _listen(self) -> Beats:
        key = (self.private_dir / "key").read_bytes().strip()
        own = (str(self.host["address"]), int(self.host["keeper_port"]))
        return Beats(
            str(self.plan["run"]), self.me, key, own, self.addresses,
            lambda host, words: self.events.put(Heard(time.monotonic(), host, words)),
            lambda host: self.events.put(Refused(time.monotonic(), host)),
            self.starts,
        )  # fmt: skip

    def _output_failed(self, error: OSError) -> None:
        self.note("output_failed", {"reason": f"output is lost from here on: {error.strerror or error}"})

    def _signalled(self, number: int, frame: Any) -> None:
        by = f"{signal.Signals(number).name} to the container on {self.me}"
        self.events.put(LeaveAsked(time.monotonic(), by))

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
        if not isinstance(event, tuple):
            self._handle(event)
        elif self.running and event[0] == self.course.own_attempt:  # else it is of an attempt that is over
            terminated = self.course.own is not None and self.course.own.terminated
            self._handle(self.running.reported(event[1], terminated))

    def _take_all(self) -> None:
        """Everything that waits in the queue."""
        for _ in range(self.events.qsize()):
            self._take(self.events.get())

    def _handle(self, event: Any) -> None:
        if event is None:
            return
        if isinstance(event, Heard) and self.running and event.words.get("about") == self.course.own_attempt:
            self.running.hear(event)
        self.course, actions = courses.decide(self.course, event)
        self._keep_promises()
        for action in actions:
            self._do(action)

    def _keep_promises(self) -> None:
        """Have on the disk what others are about to hear, where there may be another attempt."""
        promised = (self.course.attempt, self.course.votes, self.course.rules.max_restarts)
        if self.course.rules.max_restarts and promised != self._kept:
            self._kept = promised
            more = {"starts": self.starts, "began": self.first_start}
            self.documents.keep(PROMISES, {**courses.promises(self.course), **more})

    def _do(self, action: Any) -> None:
        if isinstance(action, deciding.Note):
            self.note(action.name, action.words, action.attempt)
            if action.words.get("kind") in ("host_lost", "cut"):
                self._note_interface()
        elif isinstance(action, deciding.Tell):
            self._tell()
        elif isinstance(action, Start):
            self._start_again(action.attempt)
        elif isinstance(action, deciding.Terminate) and self.running:
            self.running.terminate()
        elif isinstance(action, deciding.Kill) and self.running:
            if left := self.running.kill():
                self.note("left", {"pids": left})
            self._reap()

    def _note_interface(self) -> None:
        """Where this host's own network is the reason for a silence, that is what must be said of it."""
        reason = causes.interface_problem(str(self.host["interface"]))
        if reason and self._due("interface", LOST_SECONDS, time.monotonic()):
            self.note("interface", {"reason": reason})

    def _reap(self) -> None:
        status = self.running.launcher.reap() if self.running else None
        if status is None or self.running is None or self.course.own is None:
            return
        self._take_all()  # what the agent reported before it ended comes first
        own = self.course.own
        for event in self.running.ended(status, bool(own.causes) or own.kill_at is not None, own.terminated):
            self._handle(event)
        self._handle(Ended(time.monotonic(), status))
        self._find_ports()

    def _look(self, now: float) -> None:
        """What is to be seen from time to time."""
        course = self.course
        if self._due("stop", 0.2, now) and course.stop is None and (asked := read(self.private_dir / "stop.json")):
            self._handle(StopAsked(now, str(asked["by"]), asked.get("grace")))
        if self._due("witnesses", WITNESS_SECONDS, now):
            self._hear_witnesses(now)
        waiting = course.status == "starting" and now - self.began > KEPT_SECONDS
        if waiting and self._due("hold", 1.0, now) and self.hold.exists():
            reason = f"the control machine did not let the run go within {HELD_SECONDS} s"
            self._handle(Failed(now, Cause("start", self.me, None, reason, now, final=True)))
        if self._due("processes", 1.0, now) and course.status == "running" and self.running and course.own:
            all_heard = all(peer.is_fresh(now) for peer in course.own.peers.values())
            for event in self.running.look_for_stuck(now, all_heard):
                self._handle(event)
        runs = self.running if course.status == "running" else None
        if runs and self._due("slow", SLOW_SECONDS, now) and (slow := runs.look_for_slow(now)):
            self.note("slow", slow)
        if self._due("beat", 1.0, now):
            self._tell()
        if self._due("state", STATE_SECONDS, now):
            self.write_state(now)
        often = WAITING_SECONDS.get("ended" if course.own and course.own.done else course.status)
        if often and self._due("waiting", often, now) and (waited := courses.waited_for(self.course, now)):
            self.note("waiting", {"for": waited})

    def _hear_witnesses(self, now: float) -> None:
        """What control machines that have the run in view have written here since the last look."""
        for file in (self.private_dir / WITNESSES).glob("*.json"):
            if (said := read(file)) and said["number"] != self._heard.get(file.stem):
                self._heard[file.stem] = said["number"]
                self._handle(Heard(now, WITNESS + file.stem, said["words"]))

    def _due(self, what: str, seconds: float, now: float) -> bool:
        """Whether `what` was last due `seconds` ago or more; then it counts from now."""
        if now - self._looked.get(what, 0.0) < seconds:
            return False
        self._looked[what] = now
        return True

    def _tell(self) -> None:
        """Tell the other keepers how things stand here."""
        if self.beats is None:
            return
        now = time.monotonic()
        running = self.running if self.course.takes_part else None
        ranks, work = (running.progress(now), running.work()) if running else ({}, {})
        if self.course.votes:  # a witness reads them there
            self.write_state(now)
        self.beats.tell({**courses.beat(self.course, now), "ranks": ranks, "work": work})

    # The end

    def _leave(self) -> int:
        if self.running:
            self.running.close()
        status = courses.verdict(self.course)
        self.write_state(time.monotonic())
        own = self.course.own
        self._write_exit(status, own.causes if own and self.course.takes_part else ())
        if self.beats:
            self.beats.close()
        return STATUSES[status]

    def _write_exit(self, status: str, found: Tuple[Cause, ...]) -> None:
        now, course = time.monotonic(), self.course
        cause, own = deciding.first(found), course.own
        unsaid = status == "failed" and course.rules.max_restarts < 0 and own is not None and own.status == "ended"
        document = {
            "status": status,
            "exit_status": own.exit_status if own else None,
            "cause": cause.words(now) | {"after": round(cause.at - self.began, 3)} if cause else None,
            "causes": [one.words(now) for one in found],
            "stop": {"by": course.stop.by, "killed": bool(own and own.killed)} if course.stop else None,
            "failures": self.running.failures if self.running else [],
            "attempt": course.attempt.number,
            "hosts": list(course.attempt.hosts),
            "attempts": ends_of(course),
            "given_up": course.over.reason if course.over else UNSAID if unsaid else "",
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
