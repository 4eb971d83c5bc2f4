"""When the silence of ranks is a hang, and which rank it is that all others wait for. Pure.

In data-parallel training every rank waits for every other one, so that one rank that stands still silences all of them
within a step, and a rank alone that is silent may only wait for a slow one. A hang is therefore: all ranks that report
their progress are silent for longer than their phase and their own steps allow. Who never reports is never judged.

What a rank is doing is read from the stacks that Python's faulthandler writes: the main thread of a rank that waits for
others stands in a collective. A rank that writes no stack at all is stopped, or stuck in the kernel.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

#: Seconds of silence that a phase is always allowed. Of these, training and evaluation allow more to slow steps.
PATIENCE = {"starting": 1800.0, "compiling": 1800.0, "fetching": 3600.0, "saving": 600.0, "evaluating": 60.0}
TRAINING_SECONDS = 10.0  # the same for training; with stacks and the ranks' end it is over within 15
FIRST_STEPS_SECONDS = 120.0  # while fewer than FIRST_STEPS are known
FIRST_STEPS = 5
#: By so many times a silence must exceed the 99th percentile of the latest steps' times, and the longest of them.
TIMES_P99, TIMES_LONGEST = 3.5, 1.5
KNOWN_STEPS = 200  # of a rank and phase: the latest
AWAY_SECONDS = 5.0  # between two looks: this process, or the whole machine, was itself asleep
EXCUSED_SECONDS = 3600.0  # of silence, at most, for a rank that says nothing but whose stack moves


def limit(durations: Sequence[float], phase: str, patience: Optional[float] = None) -> float:
    """Seconds of silence after which a rank in this phase hangs.

    durations: seconds of its latest steps in this phase. patience: what the rank asks for, at least, in training and
    evaluation.
    """
    if phase not in ("training", "evaluating"):
        return PATIENCE.get(phase, PATIENCE["starting"])
    least = TRAINING_SECONDS if patience is None else patience
    if phase == "evaluating":
        least = max(least, PATIENCE[phase])
    if len(durations) < FIRST_STEPS:
        least = max(FIRST_STEPS_SECONDS, FIRST_STEPS * least)
    if not durations:
        return least
    ordered = sorted(durations)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return max(least, TIMES_P99 * p99, TIMES_LONGEST * ordered[-1])


class _Rank:
    """What one rank has reported last, and how long its steps take, by phase."""

    def __init__(self, seen: float) -> None:
        self.seen = seen
        self.phase = ""
        self.step: Optional[int] = None
        self.patience: Optional[float] = None
        self.durations: Dict[str, Deque[float]] = {}

    def report(self, seen: float, message: Mapping[str, Any]) -> None:
        phase, step, patience = str(message["phase"]), message.get("step"), message.get("patience")
        self.patience = None if patience is None else float(patience)
        if phase == self.phase and step != self.step:
            self.durations.setdefault(phase, deque(maxlen=KNOWN_STEPS)).append(max(0.0, seen - self.seen))
        self.phase, self.step = phase, step
        self.seen = max(self.seen, seen)

    def known(self, phase: str) -> Sequence[float]:
        """Seconds of its latest steps in a phase."""
        return self.durations.get(phase, ())


class HangWatch:
    """Is told what ranks report, and says whether they hang. All times are seconds of one monotonic clock.

    Ask at least each other second: a longer gap between two calls counts as time in which everything slept.
    """

    def __init__(self) -> None:
        self._ranks: Dict[int, _Rank] = {}
        self._looked: Optional[float] = None
        self._excused: Dict[int, float] = {}  # rank -> when it last reported, before excuses

    def report(self, now: float, rank: int, message: Mapping[str, Any], age: float = 0.0) -> None:
        """`message`: its phase, step and patience as in the rank's datagram. age: of that progress in seconds; also for
        what other hosts say of their ranks, again and again. Raises KeyError, TypeError or ValueError for others."""
        self._look(now)
        if rank not in self._ranks:
            self._ranks[rank] = _Rank(now - age)
        self._ranks[rank].report(now - age, message)
        self._excused.pop(rank, None)

    def ended(self, rank: int) -> None:
        """This rank has ended; it is not waited for."""
        self._ranks.pop(rank, None)

    def hung(self, now: float) -> List[int]:
        """All ranks that report, if every one of them is silent for too long; else nothing."""
        self._look(now)
        if not self._ranks or not all(self._is_silent(rank, now) for rank in self._ranks.values()):
            return []
        return sorted(self._ranks)

    def _is_silent(self, rank: _Rank, now: float) -> bool:
        silence = now - rank.seen
        if silence <= TRAINING_SECONDS and rank.patience is None:  # the usual case costs nothing
            return False
        durations = rank.known(rank.phase)
        if len(durations) < FIRST_STEPS:  # of other hosts' ranks little is heard; all take their steps together
            durations = max((one.known(rank.phase) for one in self._ranks.values()), key=len)
        return silence > limit(durations, rank.phase, rank.patience)

    def excuse(self, now: float, rank: int) -> bool:
        """The stack of a silent rank moves (see `moves`): it counts as if it had reported now. False when it was silent
        for EXCUSED_SECONDS nevertheless: then it is not excused any more."""
        found = self._ranks[rank]
        since = self._excused.setdefault(rank, found.seen)
        if now - since > EXCUSED_SECONDS:
            return False
        found.seen = now
        return True

    def _look(self, now: float) -> None:
        if self._looked is not None and now - self._looked > AWAY_SECONDS:
            away = now - self._looked
            for rank in self._ranks.values():
                rank.seen = min(now, rank.seen + away)
        self._looked = now


Frame = Tuple[str, int, str]  # file, line, function

FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+\b.*:$")

#: Frames in which a rank waits for others: (part of the file's path, function or None for any). The path of the
#: innermost frame counts; those of TRANSPARENT are passed over.
WAITS: Sequence[Tuple[str, Optional[str]]] = (
    ("/torch/distributed/", None),  # collectives, barriers, FSDP, the rendezvous
    ("/torch/nn/parallel/distributed.py", None),  # DDP's own broadcasts
    ("/torch/autograd/graph.py", "_engine_run_backward"),  # DDP sums gradients below it
    ("/torch/cuda/", "synchronize"),  # the GPU waits in NCCL's kernel
    ("/horovod/", None),
    ("/train/reporting/step_stats.py", "_read"),  # our sum of a step's figures
    ("/train/start/rendezvous.py", None),
)
#: torchrun's own decorators and launchers surround every rank: they are no waiting.
NOT_WAITS = ("/torch/distributed/elastic/", "/torch/distributed/run.py")
TRANSPARENT = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/contextlib.py")
STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen ")
TORCH = re.compile(r"/(?:site|dist)-packages/torch/")


def dumps(text: str) -> List[List[Frame]]:
    """The main thread's frames, innermost first, of each dump that faulthandler has appended to a file.

    A dump lists its threads with blank lines between them, the main thread last; the next dump follows without one.
    """
    found: List[List[Frame]] = []
    blank = False
    for line in text.splitlines():
        if THREAD.match(line):
            if blank and found:
                found[-1] = []
            else:
                found.append([])
        elif found and (match := FRAME.match(line)):
            found[-1].append((match.group(1), int(match.group(2)), match.group(3)))
        blank = not line
    return found


def main_thread(text: str) -> List[Frame]:
    """The same of the last dump; empty where there is none."""
    found = dumps(text)
    return found[-1] if found else []


def waits(frames: Sequence[Frame]) -> bool:
    """Whether this main thread waits for other ranks."""
    inner = [frame for frame in frames if not any(part in frame[0] for part in TRANSPARENT)]
    if not inner:
        return False
    file, _, function = inner[0]
    if any(part in file for part in NOT_WAITS):
        return False
    return any(part in file and name in (None, function) for part, name in WAITS)


def moves(text: str) -> bool:
    """Whether the main thread stood at different places in the dumps of this text, that is, whether it works."""
    return len({tuple(frames) for frames in dumps(text)}) > 1


def culprits(stacks: Mapping[int, str]) -> List[int]:
    """The ranks that the others wait for: those that wrote no stack, or whose main thread is in no collective.

    stacks: of every rank that has a stack file, what it wrote when it was asked, "" for nothing. Where that names all
    of them (GPUs wait in any call), those that stand elsewhere than most others. Empty where all wait for each other:
    they are not in the same collective, or the network between them is gone.
    """
    frames = {rank: main_thread(text) for rank, text in stacks.items()}
    found = [rank for rank in sorted(frames) if not waits(frames[rank])]
    if len(found) < len(frames) or any(not frames[rank] for rank in found):
        return [rank for rank in found if not frames[rank]] or found
    places = Counter(frames[rank][0] for rank in found)
    place, count = places.most_common(1)[0] if places else (None, 0)
    odd = [rank for rank in found if frames[rank][0] != place]
    return odd if odd and 2 * count > len(found) else found


def describe(stack: str) -> str:
    """Where a rank stands: "main.py:12 load" with the file's whole path, of the innermost frame that is neither torch's
    nor the standard library's; empty for no stack."""
    frames = main_thread(stack)
    own = [frame for frame in frames if not (TORCH.search(frame[0]) or STANDARD_LIBRARY.search(frame[0]))]
    if not frames:
        return ""
    file, line, function = (own or frames)[0]
    return f"{file}:{line} {function}"
