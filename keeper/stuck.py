"""Ranks of this host that stand still: stopped processes, and ranks that make no progress. What to say: hang.py, pure.

A rank that reports its progress is judged when all ranks of the run that do so are silent for too long: it is asked
twice where it stands (SIGUSR1: faulthandler writes its stack). One that moves is excused. One that stands outside of a
collective is what the others wait for; where all wait for each other, no single rank is to blame.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from keeper.hang import HangWatch, culprits, describe, moves
from keeper.ranks import process_state

STOPPED_SECONDS = 8.0  # that a rank's process may be stopped (SIGSTOP) before the run ends
STACK_SECONDS = 1.0  # for ranks to write where they stand, and between the two times
OTHERS_SECONDS = 2.0  # for another host to name its rank, where all ranks of this one wait in a collective

Found = Tuple[Optional[int], str]  # (rank, or None where none is to blame; why the run has to end)


@dataclass
class _Asked:
    """When ranks were asked where they stand, and how long their files were before."""

    at: float
    sizes: Dict[int, int]
    times: int = 1


class Stuck:
    """Is told what ranks report, and looks at their processes once a second."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "stacks"
        self._watch = HangWatch()
        self._stopped_since: Dict[int, float] = {}
        self._asked: Optional[_Asked] = None
        self._reporting: Set[int] = set()  # who reports has a handler for SIGUSR1
        self.excused: Set[int] = set()  # ranks that were silent, and move

    @property
    def stopped(self) -> List[int]:
        """Ranks whose process is stopped now."""
        return sorted(self._stopped_since)

    def report(self, now: float, rank: int, words: Mapping[str, Any], age: float = 0.0) -> None:
        """A rank of this host, or of another one, has said how far it is, `age` seconds ago."""
        self._watch.report(now, rank, words, age)
        self._reporting.add(rank)

    def ended(self, rank: int) -> None:
        """This rank's process has ended."""
        self._watch.ended(rank)

    def look(self, now: float, pids: Mapping[int, int], all_heard: bool = True) -> List[Found]:
        """Why the run has to end, if it has to. `pids`: this host's ranks. all_heard: no other host is silent, whose
        ranks would seem to hang."""
        return self._look_for_stopped(now, pids) or (self._look_for_hangs(now, pids) if all_heard else [])

    def _look_for_stopped(self, now: float, pids: Mapping[int, int]) -> List[Found]:
        found: List[Found] = []
        for rank, pid in pids.items():
            state = process_state(pid)
            if state is None or state[0] != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > STOPPED_SECONDS:
                found.append((rank, f"its process {pid} is stopped (SIGSTOP) for {STOPPED_SECONDS:.0f} s"))
            if state is None or state[0] in "ZX":
                self._watch.ended(rank)
        return found

    def _look_for_hangs(self, now: float, pids: Mapping[int, int]) -> List[Found]:
        hung = self._watch.hung(now)
        if not hung:
            self._asked = None
            return []
        if self._asked is None:
            self._asked = _Asked(now, {rank: self._size(rank) for rank in self._reporting & set(pids)})
            self._ask(pids)
        elif self._asked.times == 1 and now - self._asked.at >= STACK_SECONDS:
            self._asked.times = 2
            self._ask(pids)
        elif now - self._asked.at >= 2 * STACK_SECONDS:
            return self._judge(now, self._asked)
        return []

    def _judge(self, now: float, asked: _Asked) -> List[Found]:
        said = {rank: self._said(rank, size) for rank, size in asked.sizes.items()}
        for rank, text in said.items():
            if moves(text) and self._watch.excuse(now, rank):
                self.excused.add(rank)
        if self.excused & set(said):
            self._asked = None
            return []
        guilty = culprits(said)
        if guilty:
            return [(rank, f"no progress; it stands at {describe(said[rank]) or 'no place that it can tell'}")
                    for rank in guilty]  # fmt: skip
        if now - asked.at < 2 * STACK_SECONDS + OTHERS_SECONDS:
            return []
        return [(None, "no progress: all ranks wait for each other in collectives (see stacks/)")]

    def _ask(self, pids: Mapping[int, int]) -> None:
        assert self._asked is not None
        for rank in self._asked.sizes:  # the signal would end the others
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(pids[rank], signal.SIGUSR1)
            _ask_nccl(rank)

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"

    def _size(self, rank: int) -> int:
        try:
            return self._file(rank).stat().st_size
        except OSError:
            return 0

    def _said(self, rank: int, size: int) -> str:
        """What a rank has written since its file had this size."""
        try:
            with self._file(rank).open("rb") as file:
                file.seek(size)
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _ask_nccl(rank: int) -> None:
    """Have NCCL's flight recorder, where there is one, write its last collectives beside the stacks.

    torch's watchdog does so when something comes through this pipe. Where it writes them, launch/job/plan.py says.
    """
    prefix = os.environ.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if prefix:
        with contextlib.suppress(OSError):  # nobody reads it: no NCCL in this rank
            pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)
