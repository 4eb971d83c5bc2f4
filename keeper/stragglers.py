"""Whether this host, or a rank of it, holds up the others, and why: slow.py finds out who, slow_reasons.py why, both
pure. This one looks at the host's counters at the end of each window of steps, and words what is to be said.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Deque, Dict, Mapping, NamedTuple, Optional, Sequence

from keeper import slow_reasons
from keeper.slow import Slow, SlowWatch, work_of
from keeper.slow_reasons import Seen

KEPT_WINDOWS = 60  # the latest; those before it was slow are what it is compared with


class _Window(NamedTuple):
    """The counters at its end, and the steps that were taken in it."""

    seen: Seen
    steps: int


class Stragglers:
    """One attempt's, for the keeper of one host."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._watch = SlowWatch(me)
        self._windows: Deque[_Window] = deque(maxlen=KEPT_WINDOWS)
        self._gpus: Optional[str] = None  # what nvidia-smi said while it was slow
        self.slow: Optional[Dict[str, Any]] = None  # who is slow now, as in the event

    def report(self, host: str, rank: int, work: Sequence[float]) -> None:
        """WORK of a rank, of this host or of another one. Raises TypeError or ValueError for anything else."""
        self._watch.report(host, rank, work_of(work))

    def ended(self, rank: int) -> None:
        """This rank has ended."""
        self._watch.ended(rank)

    def look(self, now: float, pids: Mapping[int, int], step: Optional[int]) -> Optional[Dict[str, Any]]:
        """The event `slow` (keeper/__init__.py), where something has changed. pids: of this host's ranks. step: the
        run's latest one."""
        window = self._watch.look(now)
        if window is None:
            return None
        self._windows.append(_Window(slow_reasons.look(pids), window.steps))
        if not window.suspected:
            self._gpus = None
        elif self._gpus is None:
            self._gpus = ""
            threading.Thread(target=self._ask_gpus, daemon=True, name="gpus").start()  # a broken driver may not answer
        if window.slow is None:
            return None
        words = self._words(window.slow, pids, step)
        self.slow = None if window.slow.over else words
        return words

    def _words(self, slow: Slow, pids: Mapping[int, int], step: Optional[int]) -> Dict[str, Any]:
        return {
            "host": self._me,
            "rank": slow.rank,
            "step": step,
            "times": round(slow.times, 2),
            "seconds": round(slow.own.seconds, 4),
            "others_seconds": round(slow.others.seconds, 4),
            "reason": "" if slow.over else self._why(slow, pids),
            "over": slow.over,
        }

    def _why(self, slow: Slow, pids: Mapping[int, int]) -> str:
        known = list(self._windows)
        first = max(0, len(known) - 1 - slow.windows)  # its end is the beginning of the slow ones
        during = slow_reasons.between(known[first].seen, known[-1].seen, sum(one.steps for one in known[first + 1 :]))
        before = None
        if first > 0:
            before = slow_reasons.between(
                known[0].seen, known[first].seen, sum(one.steps for one in known[1 : first + 1])
            )
        ranks = list(pids) if slow.rank is None else [slow.rank]
        return slow_reasons.why(slow.own, slow.others, during, before, ranks, slow_reasons.gpu_reason(self._gpus or ""))

    def _ask_gpus(self) -> None:
        self._gpus = slow_reasons.ask_gpus()
