"""Why a rank or host is slower than the others, as far as its keeper can see it. Pure, but for `look` and `ask_gpus`.

What is seen in a run's container, which has the host's /proc/stat and the host's network:

- How long each thread of a rank was ready to run and did not (/proc/<pid>/task/<tid>/schedstat): a quota of any level
  around it holds it back, or other processes have its processors. For how long a quota did so, also one of a group
  around the container, whose own counters cannot be seen from inside, is in the container's cpu.stat.local (Linux 6.7);
  of older kernels the cpu.stat of the container itself is known. And a thread that does not run although its processors
  are idle is held back by a quota, wherever that is.
- What other processes and other virtual machines (steal) take of the processors that the ranks may use: /proc/stat,
  without what this container used itself.
- How often the processors slowed down for heat or power (thermal_throttle of sysfs), where the kernel counts it.
- What nvidia-smi says, where there are GPUs (canned output of its documentation: not verified on a machine with one).
- How long ranks waited for data: they say so themselves (keeper/slow.py).

A slow network is not among it: it makes every rank wait in the all-reduce equally long, and no rank's computing longer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from keeper.slow import Took

PART = 0.5  # of what a step takes longer, at least, must be explained by a reason
TAKEN_PART = 0.1  # of the processors' time: so much taken by other processes is a reason
IDLE_PART = 0.15  # of the processors' time: so much idle, and others do not take them
STEAL_PART = 0.1  # of the processors' time
THROTTLED_PART = 0.2  # of the periods of a quota
STOPPED_PART = 0.4  # of the time in which a rank was ready and did not run: what a quota must account for
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds
ROOT = Path("/")
NVIDIA_SMI_SECONDS = 10.0
#: Bits of nvmlClocksEventReasons (nvml.h) that mean heat or power, in words.
GPU_BITS = (
    (0x4, "power cap"),
    (0x8, "hardware slowdown"),
    (0x20, "software thermal slowdown"),
    (0x40, "hardware thermal slowdown"),
    (0x80, "power brake"),
)
#: Counters of thermal_throttle in sysfs, and what they count.
HEAT = {"core_throttle_count": "heat", "package_throttle_count": "heat", "core_power_limit_count": "power",
        "package_power_limit_count": "power"}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Counters of the host and of the ranks at one moment."""

    at: float = 0.0  # seconds
    waits: Mapping[int, Mapping[int, float]] = field(
        default_factory=dict
    )  # rank -> thread -> seconds ready, not running
    busy: float = 0.0  # seconds of all processors that the ranks may use: computing of anybody
    idle: float = 0.0
    steal: float = 0.0
    own: float = 0.0  # seconds of computing of this container
    periods: int = 0  # of the container's own quota
    throttled: int = 0  # of these, how many ended before their time
    stopped: float = 0.0  # seconds in which a quota of this or an outer group let nothing run, added up over processors
    hot: Mapping[str, int] = field(default_factory=dict)  # "heat" or "power": how often processors slowed down


@dataclass(frozen=True)
class Span:
    """What changed between two moments."""

    seconds: float
    steps: int
    held: Mapping[int, float]  # rank -> seconds in which the thread that was held back most was ready, and did not run
    busy: float
    idle: float
    steal: float
    own: float
    periods: int
    throttled: int
    stopped: float
    hot: Mapping[str, int]


def between(first: Seen, last: Seen, steps: int) -> Span:
    """steps: that were taken in that time."""
    held = {
        rank: max((seconds - first.waits.get(rank, {}).get(thread, seconds) for thread, seconds in threads.items()),
                  default=0.0)
        for rank, threads in last.waits.items()
    }  # fmt: skip
    hot = {name: count - first.hot.get(name, count) for name, count in last.hot.items()}
    names = ("busy", "idle", "steal", "own", "periods", "throttled", "stopped")
    changed = {name: getattr(last, name) - getattr(first, name) for name in names}
    return Span(last.at - first.at, max(1, steps), held, hot=hot, **changed)


def why(own: Took, others: Took, during: Span, before: Optional[Span], ranks: Iterable[int], gpus: str = "") -> str:
    """The reason in words; empty where none is seen that explains the larger part of it.

    own, others: a step of the slow one, and of the others. during: while it was slow. before: when it was not; None: it
    is slow from the start. ranks: the slow ones. gpus: what `gpu_reason` said.
    """
    longer = own.seconds - others.seconds
    if own.data - others.data >= PART * longer:
        return f"each step waits {_ms(own.data)} for data, on the others {_ms(others.data)}"
    if gpus:
        return gpus
    there = [rank for rank in ranks if rank in during.held]
    held = max((during.held[rank] / during.steps - _held(before, rank) for rank in there), default=0.0)
    if held >= PART * longer:
        return _why_held(during, before, held, own.seconds)
    for name, words in (("heat", "too hot"), ("power", "at their power limit")):
        if during.hot.get(name):
            return f"its processors are {words}: they slowed down {during.hot[name]} times in {during.seconds:.0f} s"
    return ""


def _held(before: Optional[Span], rank: int) -> float:
    """Seconds of each step."""
    return before.held.get(rank, 0.0) / before.steps if before else 0.0


def _why_held(during: Span, before: Optional[Span], held: float, step: float) -> str:
    """held: seconds of each step in which it was ready and did not run, more than before. step: seconds."""
    stopped = during.stopped / during.steps - (before.stopped / before.steps if before else 0.0)
    if stopped >= STOPPED_PART * held:
        return f"a CPU quota holds its ranks back for {_ms(held)} of each step, of {_ms(step)}"
    if during.throttled > THROTTLED_PART * during.periods:
        part = during.throttled / during.periods
        return f"its container's CPU quota is used up in {part:.0%} of its periods"
    whole = during.busy + during.idle + during.steal
    if whole <= 0:
        return "its ranks get too little of the processor"
    if during.idle >= IDLE_PART * whole:
        return f"a CPU quota holds its ranks back: they are ready to run, and {during.idle / whole:.0%} of their " \
               "processors' time is idle"  # fmt: skip
    if during.steal >= STEAL_PART * whole:
        return f"other virtual machines take {during.steal / whole:.0%} of its processors' time"
    taken = max(0.0, during.busy - during.own)
    if taken < TAKEN_PART * whole:
        return "its ranks, and their threads, have too few processors: they wait for each other"
    return f"other processes take {taken / whole:.0%} of its processors' time"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


# -- parsers -----------------------------------------------------------------------------------------------------------


def cpu_times(stat: str, cpus: Sequence[int]) -> Tuple[float, float, float]:
    """(busy, idle, steal) seconds of these processors in /proc/stat; of all of them where none is known."""
    names = {f"cpu{cpu}" for cpu in cpus} or {"cpu"}
    busy = idle = steal = 0.0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name in names:
            user, nice, system, idling, waiting, irq, softirq, stolen = (int(number) * TICK for number in numbers[:8])
            busy += user + nice + system + irq + softirq
            idle += idling + waiting
            steal += stolen
    return busy, idle, steal


def cpu_list(text: str) -> List[int]:
    """The processors in a list such as 0-3,8."""
    found: List[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def counters(text: str) -> Dict[str, int]:
    """The lines `name number` of a cgroup's cpu.stat."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def run_delay(schedstat: str) -> Optional[float]:
    """Seconds in which a thread was ready and did not run, of its schedstat; None where the kernel does not count."""
    words = schedstat.split()
    return int(words[1]) / 1e9 if len(words) == 3 else None


def gpu_reason(text: str) -> str:
    """Of nvidia-smi's index and clocks_event_reasons.active (csv, no header), as "0, 0x0000000000000040"."""
    found = []
    for line in text.splitlines():
        index, _, active = line.partition(",")
        with contextlib.suppress(ValueError):
            bits = int(active.strip(), 16)
            words = [words for bit, words in GPU_BITS if bits & bit]
            found += [f"GPU {index.strip()} runs slower: {', '.join(words)}"] if words else []
    return "; ".join(found)


# -- readers -----------------------------------------------------------------------------------------------------------


def look(pids: Mapping[int, int], root: Path = ROOT) -> Seen:
    """Counters as they are now. pids: of this host's ranks."""
    waits = {rank: dict(_delays(root / f"proc/{pid}/task")) for rank, pid in pids.items()}
    allowed = {cpu for pid in pids.values() for cpu in _allowed(root / f"proc/{pid}/status")}
    busy, idle, steal = cpu_times(_text(root / "proc/stat"), sorted(allowed))
    periods, throttled, stopped, own = _group(root / "sys/fs/cgroup")
    return Seen(time.monotonic(), waits, busy, idle, steal, own, periods, throttled, stopped, _hot(root))


def _delays(threads: Path) -> Iterable[Tuple[int, float]]:
    with contextlib.suppress(OSError):
        for name in os.listdir(threads):
            if (delay := run_delay(_text(threads / name / "schedstat"))) is not None:
                yield int(name), delay


def _allowed(status: Path) -> List[int]:
    for line in _text(status).splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return cpu_list(line.partition(":")[2])
    return []


def _group(folder: Path) -> Tuple[int, int, float, float]:
    """(periods of this container's quota, those in which it was used up, seconds in which any quota stopped it, seconds
    of computing), of cgroup 2, or 1."""
    two = counters(_text(folder / "cpu.stat"))
    if two:
        stopped = counters(_text(folder / "cpu.stat.local")).get("throttled_usec", 0) / 1e6
        return two.get("nr_periods", 0), two.get("nr_throttled", 0), stopped, two.get("usage_usec", 0) / 1e6
    one = counters(_text(folder / "cpu" / "cpu.stat"))
    stopped = counters(_text(folder / "cpu" / "cpu.stat.local")).get("throttled_time", 0) / 1e9
    used = _text(folder / "cpuacct" / "cpuacct.usage").strip()
    computed = int(used) / 1e9 if used.isdigit() else 0.0
    return one.get("nr_periods", 0), one.get("nr_throttled", 0), stopped, computed


def _hot(root: Path) -> Dict[str, int]:
    """How often processors slowed down, summed up: each counts for itself, and for its package."""
    found: Dict[str, int] = {}
    for folder in root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle"):
        for name, what in HEAT.items():
            if (text := _text(folder / name).strip()).isdigit():
                found[what] = found.get(what, 0) + int(text)
    return found


def ask_gpus() -> str:
    """What `gpu_reason` reads; empty without NVIDIA GPUs. Takes a second; raises nothing."""
    fields = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the second is the older name
    if not Path("/dev/nvidiactl").exists():
        return ""
    for name in fields:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["nvidia-smi", f"--query-gpu=index,{name}", "--format=csv,noheader"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
            if done.returncode == 0:
                return done.stdout
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
