"""One attempt on this host: torchrun and its ranks, what they print and report, who stands still and who is slow."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from keeper import RUN_DIR, causes
from keeper.course import Resumable, Stepped
from keeper.decide import CAUSE_SECONDS, LAST_WORDS_SECONDS, Cause, Done, Failed, Heard, Started, StopAsked
from keeper.documents import read
from keeper.placement import OF_AN_ATTEMPT, Place
from keeper.ranks import LAUNCHER, Launcher, Memory, Outputs, Reports
from keeper.stragglers import Stragglers
from keeper.stuck import Stuck

PROGRESS = ("phase", "step", "patience")  # what the other hosts are told of a rank
LAST_LINES = 20  # of a failed rank, kept with the cause
REASON_CHARACTERS = 1000  # of a cause: it travels with each heartbeat

Words = Mapping[str, Any]
Event = Any  # of decide.py or course.py, or None


class Running:
    """The ranks of one attempt on this host, from their start on."""

    def __init__(
        self,
        on_host: str,
        place: Place,
        run_dir: Path,
        hold: Path,
        note: Callable[[str, Words], None],
        report: Callable[[Words], None],
        lost: Callable[[OSError], None],
        launch: Callable[..., Launcher] = Launcher,
    ) -> None:
        """on_host: the run's folder, as its host calls it. note: writes an event. report: takes what ranks and torchrun
        report, in a thread. lost: as in Outputs.

        Raises OSError where the ranks cannot be started.
        """
        self.on_host, self.me, self.run_dir, self._note = on_host, place.host, run_dir, note
        self.ranks: Dict[int, Dict[str, Any]] = {rank: {"state": "starting"} for rank in place.ranks}
        self.pids: Dict[int, int] = {}
        self.failures: List[Words] = []
        self.stuck = Stuck(run_dir)
        self.stragglers = Stragglers(self.me)
        self.memory = Memory()
        (run_dir / "stacks").mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (run_dir / "failure.json").unlink()  # of the attempt before
        self.reports = Reports(report)
        attempt = int(place.environment.get("MUSTER_ATTEMPT", 1))
        self.outputs = Outputs(run_dir / "output", place.ranks, lost, attempt)
        ours = {"MUSTER_KEEPER": self.reports.path, "MUSTER_PIPES": str(self.outputs.pipes), "MUSTER_HOLD": str(hold)}
        inherited = {name: value for name, value in os.environ.items() if name not in OF_AN_ATTEMPT}
        self.launcher = launch(place.agent, {**inherited, **place.environment, **ours}, self.outputs)

    # What is done to it

    def terminate(self) -> None:
        """SIGTERM to all ranks."""
        for rank in self.stuck.stopped:  # a stopped process takes no SIGTERM
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGCONT)
        self.launcher.terminate()

    def kill(self) -> List[int]:
        """SIGKILL to every process; those that do not end are returned."""
        return self.launcher.kill()

    def close(self) -> None:
        """After its end: keep the rest of what was printed, leave no file behind."""
        self.outputs.close()
        self.reports.close()

    # What is known of it

    def state(self, now: float) -> Dict[str, Any]:
        """`ranks` of state.json."""
        return {
            str(rank): {**{key: value for key, value in words.items() if key != "seen"}, "age": age(words, now)}
            for rank, words in self.ranks.items()
        }

    def progress(self, now: float) -> Dict[str, Any]:
        """What the other hosts are told of the ranks."""
        return {
            str(rank): {**{key: words[key] for key in PROGRESS if key in words}, "age": age(words, now)}
            for rank, words in self.ranks.items()
            if "seen" in words
        }

    def work(self) -> Dict[str, Any]:
        """What the other hosts are told of the ranks' work: WORK of keeper/slow.py, by rank."""
        ranks = ((rank, words) for rank, words in self.ranks.items() if words["state"] == "running")
        return {str(rank): words["work"] for rank, words in ranks if "work" in words}

    def hear(self, event: Heard) -> None:
        """How far the ranks of another host are, and what they have done."""
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            for rank, work in event.words.get("work", {}).items():
                self.stragglers.report(event.host, int(rank), work)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            for rank, words in event.words["ranks"].items():
                if event.words["status"] == "ended":
                    self.stuck.ended(int(rank))
                    self.stragglers.ended(int(rank))
                else:
                    self.stuck.report(event.now, int(rank), words, float(words["age"]))

    # What ranks and torchrun report

    def reported(self, words: Words, terminated: bool) -> Event:
        """The event that a datagram of a rank or of torchrun's agent stands for, if it is one.

        terminated: the ranks have been asked to end.
        """
        now = time.monotonic()
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if words.get("agent") == "started":
                self.pids = {int(rank): int(pid) for rank, pid in words["pids"].items()}
                for rank in self.pids:
                    self.ranks[rank]["state"] = "running"
                self._note("started", {"pids": words["pids"]})
                return Started(now)
            if words.get("agent") == "rank_ended":
                self.ranks[int(words["rank"])]["state"] = "ended"
                self.stragglers.ended(int(words["rank"]))
                if not terminated:  # else it was asked to
                    self._note("rank_ended", {"rank": words["rank"]})
                return None
            if words.get("agent") == "ended":
                for known in self.ranks.values():
                    known["state"] = "ended"
                return Done(now)
            if words.get("agent") == "failed":
                return self.failed(words["failure"], terminated)
            return self._progressed(words, now)
        return None

    def _progressed(self, words: Words, now: float) -> Event:
        rank = int(words["rank"])
        if words.get("resumable"):
            return Resumable(now)
        if work := words.get("work"):
            self.ranks[rank]["work"] = work
            self.stragglers.report(self.me, rank, work)
        if "phase" not in words:  # a script that says nothing of its progress
            return None
        known = {key: words[key] for key in words if key not in ("rank", "pid")}
        self.ranks[rank].update(known, seen=now)
        self.stuck.report(now, rank, known)
        if known.get("phase") == "training" and known.get("step") is not None:
            return Stepped(now, int(known["step"]))
        return None

    def failed(self, failure: Words, terminated: bool) -> Event:
        """A rank, or torchrun itself, has failed as the agent says; None where that is known, or it was asked to end
        and has saved a checkpoint."""
        if any(failure.get("rank") == known.get("rank") for known in self.failures):
            return None
        now, rank = time.monotonic(), failure.get("rank")
        if rank is not None and failure["exitcode"] == causes.EXIT_STOPPED:
            if terminated:
                return None
            return StopAsked(now, f"a signal to rank {rank} on {self.me}, not from Muster; it saved a checkpoint")
        stream = LAUNCHER if rank is None else f"rank-{rank}"
        if rank is not None:
            self.ranks[int(rank)]["state"] = "failed"
            self.outputs.drain()
        lines = self._last_lines(stream)
        explained = self._explained(failure, "\n".join(self.outputs.last_lines(stream, 500)))
        self.failures.append(explained)
        patience = LAST_WORDS_SECONDS
        if explained["consequence"]:
            patience = CAUSE_SECONDS
        elif failure.get("signal"):
            patience = 0.0
        here = f"{self.on_host}/"  # where people look for it
        reason = causes.described(explained).replace(f"{RUN_DIR}/", here)[:REASON_CHARACTERS]
        cause = Cause(
            kind="launcher" if rank is None else "rank",
            host=self.me,
            rank=rank,
            reason=reason,
            at=now,
            consequence=bool(explained["consequence"]),
            lines=tuple(lines),
            patience=patience,
            final=rank is not None and causes.is_final(str(explained["exception"]), int(explained["exitcode"])),
            unfit=bool(causes.UNFIT.search(reason)),
        )
        return Failed(now, cause)

    def _explained(self, failure: Words, said: str) -> Dict[str, Any]:
        """The failure, with what only this process knows: the rank's output, and what the kernel did."""
        killed = failure.get("signal") == "SIGKILL" or causes.KILLED_WORKER in str(failure.get("exception"))
        if killed and (reason := self.memory.out_of_memory()):
            return {**failure, "exception": reason, "consequence": False}
        return dict(failure) if failure.get("rank") is None else causes.completed(dict(failure), said)

    def ended(self, status: int, blamed: bool, terminated: bool) -> List[Event]:
        """What is learnt only now that torchrun has ended. blamed: something else is known to have ended it.
        terminated: as in `reported`."""
        # What the agent wrote down at its end, and has not reported before.
        found = [self.failed(one, terminated) for one in read(self.run_dir / "failure.json").get("failures", [])]
        killed = status == 128 + signal.SIGKILL and not blamed and not any(found)
        if killed and (reason := self.memory.out_of_memory()):
            now = time.monotonic()
            found.append(Failed(now, Cause("launcher", self.me, None, f"torchrun: {reason}", now)))
        for words in self.ranks.values():
            if words["state"] in ("starting", "running"):
                words["state"] = "ended"
        return found

    # Ranks that stand still

    def look_for_stuck(self, now: float, all_heard: bool) -> List[Event]:
        """Failures of ranks that stand still. all_heard: as in Stuck.look."""
        found = self.stuck.look(now, self.pids, all_heard)
        for rank in self.stuck.excused:
            self.ranks[rank]["seen"] = now  # so that the other hosts learn of it
        self.stuck.excused.clear()
        for rank, words in self.ranks.items():
            if words["state"] in ("running", "stopped"):
                words["state"] = "stopped" if rank in self.stuck.stopped else "running"
        return [Failed(now, self._hang(stuck, reason, now)) for stuck, reason in found]

    # Ranks that hold up the others

    def look_for_slow(self, now: float) -> Optional[Words]:
        """The event `slow`, where something has changed."""
        steps = [words["step"] for words in self.ranks.values() if words.get("phase") == "training" and "step" in words]
        counted = [
            int(words["work"][0]) for words in self.ranks.values() if "work" in words
        ]  # a script's, from its start
        return self.stragglers.look(now, self.pids, max(steps or counted, default=None))

    def _hang(self, rank: Optional[int], reason: str, now: float) -> Cause:
        if rank is None:
            return Cause("hang", self.me, None, reason, now)
        silent = age(self.ranks[rank], now)
        if silent is not None:
            reason = reason.replace("no progress", f"no progress for {silent:.0f} s", 1)
        return Cause("hang", self.me, rank, reason, now, lines=tuple(self._last_lines(f"rank-{rank}")))

    def _last_lines(self, stream: str) -> List[str]:
        return causes.shortened(self.outputs.last_lines(stream, LAST_LINES))


def age(words: Words, now: float) -> Optional[float]:
    """Seconds since a rank's last progress."""
    seen = words.get("seen")
    return None if seen is None else round(now - float(seen), 1)
