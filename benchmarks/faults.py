"""`make bench-faults` and `make drill FAULT=name`: faults put into a run on lab hosts, and what happens then, measured.

FAULTS is the one list of them; tests/lab/test_faults.py runs the short ones. Each has a job of `make train`, a fault
that is put into it while it trains, and what must be said of it. A figure counts from the fault until the last rank
that can be reached has ended and the line that names host and cause has been printed, whichever is later. Hosts are
containers of this machine, so ranks are watched in its /proc, past SSH and past all that is measured.

    make bench-faults REPEATS=5           medians against the bars, on a lab of three hosts of its own
    make drill                            lists the faults
    make drill FAULT=kill REPEATS=1       one of them
    make drill FAULTS=20                  many, drawn at random: drill.py

    make drill FAULT=slow_host REPEATS=20 a host's CPU quota is halved: after how many steps it is named, and its end
    make drill FAULT=healthy REPEATS=20   nothing is done: who is named as slow all the same

MUSTER_BENCH_LAB=name uses a deployed lab of three hosts that is up, and leaves it so (for slow_host and healthy of two
hosts: limits of their computing time are lifted at the end).

A run is seen by run.py; what is done to it stands in inject.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from benchmarks.common import FAB, close, environment, fab, whole_number
from benchmarks.common import lab as new_lab
from benchmarks.inject import (
    KNOWN_STEPS,
    come_back,
    cut,
    give_time,
    hold_rank,
    kill_above_ranks,
    lose_link,
    lose_power,
    press_ctrl_c,
    reap_held,
    signal_rank,
    stand_still,
    starve,
    stop_container,
)
from benchmarks.run import LIMIT_SECONDS, ROOT, Run, is_alive, read_summary

T = TypeVar("T")
HOSTS = 3
LOOK_SECONDS = 0.01  # between two looks at the ranks
SCRIPT = {"WORKLOAD": "tests/lab/test_jobs", "SCRIPT": "faults.py", "SKIP_CHECK": 1}
STEPS = {**SCRIPT, "ARGS": "steps"}
LEAVING = {**SCRIPT, "ARGS": "leave"}
TRAINER = {"ARGS": "--epochs 1000 --batch-size 8 --model shufflenet_v2_x0_5", "SKIP_CHECK": 1, "MAX_RESTARTS": 0}
SURVIVING = {**TRAINER, "ARGS": f"{TRAINER['ARGS']} --checkpoint-every 20", "MAX_RESTARTS": 3}
#: Of slow hosts: two equal ones, each on a core of its own of which it gets EVEN_CPUS, so that both get that also while
#: others use the machine: the kernel shares a core out evenly. Then one of them gets half.
EVEN = {**TRAINER, "ARGS": "--epochs 1000 --batch-size 32 --model shufflenet_v2_x0_5 --checkpoint-every 50"}
EVEN_CPUS = 0.4  # a rank, in cores
HEALTHY_STEPS = 300
SAID_SECONDS = 240.0
NAMED_STEPS = 50  # the bar
SLOW, OVER = "{} is slow: ", "{} is no longer slow"
STEPPING = re.compile(r"\| (?!> ).*(10 steps|first optimizer step)")  # but not in the last words of a rank that failed
#: Lines of the control machine that are no verdict.
NO_VERDICT = re.compile(
    r"run \S+: |.*: (no view|in view again|its keeper was gone"
    "|left by the run|could not gather|the run stops|ranks that had not ended)"
    r"|.* is (slow|no longer slow)\b"
    "|stopping the run|waiting|the ranks of the run are being ended"
)


# -- the faults --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and what must come of it."""

    what: str
    inject: Callable[[Run], float]
    said: str  # regular expression of the line after `muster | `; {rank}: the last rank of `host`
    host: str  # whose fault it is; of a pair: both. "": nobody's
    bar: float  # seconds
    rank: bool = True  # whether it is a rank's
    lost: str = ""  # the host that cannot be reached any more
    job: Mapping[str, object] = field(default_factory=lambda: STEPS)
    nodes: int = HOSTS
    status: str = "failed"
    key: str = ""  # of bench-faults' JSON, without _seconds
    short: bool = False  # in `make test`


STILL = r"rank {rank} on h2 failed: no progress.*; it stands at "
EARLY = "{}: its ranks ended with status 0 while those on h. went on"
FAULTS = {
    "kill": Fault(
        "a rank is killed (kill -9)", signal_rank("h2", signal.SIGKILL),
        "rank {rank} on h2 failed: killed by SIGKILL", "h2", 1.0, key="kill", short=True,
    ),
    "early_first": Fault(
        "the only rank of the first host returns (status 0) while the others take further steps",
        signal_rank("h1", signal.SIGUSR2), EARLY.format("h1"), "h1", 15.0, rank=False, job=LEAVING, short=True, nodes=2,
    ),
    "early_last": Fault(
        "the only rank of the last host returns (status 0) while the others take further steps",
        signal_rank("h2", signal.SIGUSR2), EARLY.format("h2"), "h2", 15.0, rank=False, job=LEAVING, short=True, nodes=2,
    ),
    "early_of_two": Fault(
        "one of the two ranks of a host returns (status 0) while the others take further steps",
        signal_rank("h3", signal.SIGUSR2), "rank {rank} on h3.*: it ended with status 0", "h3", 15.0, job=LEAVING,
        short=True,
    ),
    "torchrun": Fault(
        "torchrun itself is killed on a host", kill_above_ranks("h2", 1),
        "h2: torchrun was killed by SIGKILL", "h2", 10.0, rank=False, short=True, nodes=2,
    ),
    "keeper": Fault(
        "the keeper is killed on a host, and with it its container", kill_above_ranks("h2", 2),
        "h2: .*the container was killed by SIGKILL", "h2", 15.0, rank=False, short=True, nodes=2,
    ),
    "power_loss": Fault(
        "a host loses its power", lose_power("h2"),
        "h2: the host is lost", "h2", 15.0, rank=False, lost="h2", key="power_loss",
    ),
    "master_loss": Fault(
        "the host of rank 0 loses its power", lose_power("h1"),
        "h1: the host is lost", "h1", 15.0, rank=False, lost="h1", key="master_loss",
    ),
    "network_cut": Fault(
        "two of three hosts cannot reach each other", cut("h2", "h3"),
        "h2 and h3: do not hear each other", "h2 and h3", 15.0, rank=False, key="network_cut", short=True,
    ),
    "network_cut_master": Fault(
        "a host and the master cannot reach each other", cut("h1", "h3"),
        "h1 and h3: do not hear each other", "h1 and h3", 15.0, rank=False,
    ),
    "network_cut_two": Fault(
        "the only two hosts cannot reach each other", cut("h1", "h2"),
        "h1 and h2: do not hear each other", "h1 and h2", 15.0, rank=False, nodes=2,
    ),
    "link_down": Fault(
        "the training network's interface of a host goes down", lose_link("h2"),
        r"h2: its network interface \w+ is down", "h2", 15.0, rank=False, nodes=2, short=True,
    ),
    "hang_stopped": Fault(
        "a rank of our trainer is stopped (SIGSTOP)", signal_rank("h2", signal.SIGSTOP),
        r"rank {rank} on h2 failed: its process \d+ is stopped", "h2", 15.0, job=TRAINER, key="hang",
    ),
    "hang_held": Fault(
        "a rank of our trainer stands still, and no state says so", hold_rank("h2"),
        "rank {rank} on h2 failed: no progress", "h2", 15.0, job=TRAINER, key="hang",
    ),
    "hang_script": Fault(
        "a rank of a script that reports its progress sleeps in a step", stand_still("h2"),
        STILL + r".*faults\.py:\d+ stand_still", "h2", 15.0, job={**SCRIPT, "ARGS": "stuck"}, key="hang", short=True,
        nodes=2,
    ),
    "script_stopped": Fault(
        "a rank of a plain script is stopped (SIGSTOP)", signal_rank("h2", signal.SIGSTOP),
        r"rank {rank} on h2 failed: its process \d+ is stopped", "h2", 15.0, key="script_stopped", short=True,
    ),
    "out_of_memory": Fault(
        "a rank asks for more memory than its container has", starve("h2"),
        "rank {rank} on h2 failed: out of memory: .*limit .*GiB, peak .*GiB", "h2", 15.0,
        job={**SCRIPT, "ARGS": "eat"}, short=True, nodes=2,
    ),
    "ctrl_c": Fault(
        "Ctrl-C, and a script without handlers", press_ctrl_c,
        r"run \S+ stopped: Ctrl-C by ", "", 3.0, rank=False, status="stopped", key="ctrl_c",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Survived:
    """A fault after which the run goes on by itself, to its first step, and on which hosts."""

    what: str
    inject: Callable[[Run], float]
    hosts: tuple[str, ...]  # on which it goes on
    bar: float  # seconds
    lost: str = ""  # the host that cannot be reached any more
    nodes: int = HOSTS
    attempt: int = 2  # that goes on


SURVIVED = {
    "restart": Survived("a rank is killed (kill -9)", signal_rank("h2", signal.SIGKILL), ("h1", "h2", "h3"), 10.0),
    "shrink": Survived("a host loses its power", lose_power("h3"), ("h1", "h2"), 25.0, lost="h3"),
    "master_shrink": Survived("the host of rank 0 loses its power", lose_power("h1"), ("h2", "h3"), 30.0, lost="h1"),
    "master_of_two": Survived(
        "the host of rank 0 of two hosts loses its power while the run is in view", lose_power("h1"), ("h2",), 30.0,
        lost="h1", nodes=2,
    ),
    "container_back": Survived(
        "a container, and the keeper in it, is killed while the run is in view", kill_above_ranks("h2", 2),
        ("h1", "h2", "h3"), 15.0,
    ),
    "host_leaves": Survived(
        "the container of the host of rank 0 is stopped (`podman stop`), as when that is shut down",
        stop_container("h1"), ("h2", "h3"), 10.0,
    ),
    "host_back": Survived(
        "a rank is killed after another host was booted again", come_back("h3", "h1"), ("h1", "h2", "h3"), 15.0,
        attempt=3,
    ),
}  # fmt: skip


#: Drills of slow hosts, and which one is slowed down.
SLOW_HOSTS = {"slow_host": "h2", "healthy": ""}


@dataclass(frozen=True)
class Seen:
    """What came of a fault."""

    ranks_seconds: float  # to the end of the last rank that can be reached; infinite: never
    line_seconds: float  # to the line that names host and cause
    line: str
    wrong: list[str]  # verdicts that name somebody else
    orphans: list[str]
    problems: list[str]  # what else is not as it must be

    @property
    def seconds(self) -> float:
        return max(self.ranks_seconds, self.line_seconds)

    def __str__(self) -> str:
        figures = f"{self.seconds:.2f} s (ranks {self.ranks_seconds:.2f}, line {self.line_seconds:.2f})"
        return "; ".join([f"{figures}: {self.line or 'no line'}", *self.wrong, *self.orphans, *self.problems])


def measure(lab: str, fault: Fault) -> Seen:
    """Put a fault into a run on a deployed lab of three hosts; they are as before at the end.

    Raises SystemExit when the run does not come so far that it trains.
    """
    run = Run(lab, fault.job, fault.nodes)
    problems = []
    try:
        run.wait_for(lambda: STEPPING.search(run.output), "training")
        watched = {rank: pid for rank, (host, pid) in run.ranks.items() if host != fault.lost}
        rank = run.last_rank(fault.host) if fault.rank else None
        at = fault.inject(run)
        ended = wait_for_ends(run, watched.values(), at + LIMIT_SECONDS)
        try:
            run.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            problems.append(f"make train goes on after {LIMIT_SECONDS} s")
    finally:
        run.end()
    if fault.lost:
        gathered = subprocess.run([FAB, "gather"], env=environment(lab, RUN=run.id), cwd=ROOT, capture_output=True,
                                  text=True, check=False, timeout=LIMIT_SECONDS)  # fmt: skip
        if gathered.returncode != 0:
            problems.append(f"gather ended with {gathered.returncode}: {gathered.stdout}{gathered.stderr}")
    said = re.compile(r"muster \| " + fault.said.replace("{rank}", str(rank)))
    after = [(when, line) for when, line in run.lines if when >= at]
    when, line = next(((when, line) for when, line in after if said.match(line)), (float("inf"), ""))
    verdicts = [line for _, line in after if (text := verdict_in(line)) and fault.status == "failed" and text]
    if verdicts[:1] != [line] and fault.status == "failed":
        problems.append(f"the first verdict is not the line: {verdicts[:1]}")
    problems += wrong_ends(run, fault)
    wrong = wrong_names(run, fault, rank)
    left = run.left()
    if wrong or problems or left or not line:
        problems.append(f"output:\n{run.output}")
    return Seen(ended - at, when - at, line, wrong, left, problems)


@dataclass(frozen=True)
class SeenOn:
    """How a run went on after a fault."""

    seconds: float  # to the first step of the next attempt
    orphans: list[str]
    problems: list[str]

    def __str__(self) -> str:
        return "; ".join([f"{self.seconds:.2f} s to the next step", *self.orphans, *self.problems])


def measure_survival(lab: str, fault: Survived) -> SeenOn:
    """Put a fault into a training run on a deployed lab of three hosts, let it go on, and stop it; the hosts are as
    before at the end. Raises SystemExit when the run does not come so far, or does not go on."""
    run, problems = Run(lab, SURVIVING, fault.nodes), []
    try:
        last = run.last_rank("h2")
        run.wait_for(lambda: run.ranks and run.state("h2", last).get("step", 0) > KNOWN_STEPS, "steps")
        before = max(rank.get("step", 0) for host in run.hosts for rank in run.ranks_of(host))
        at = fault.inject(run)
        stepped = run.wait_for(
            lambda: [when for when, line in run.lines if when > at and STEPPING.search(line)], "step"
        )
        there = fault.hosts[-1]
        run.wait_for(lambda: any(rank.get("step", 0) > before for rank in run.ranks_of(there)), "step beyond the fault")
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT_SECONDS)
    finally:
        run.end()
    if fault.lost:
        subprocess.run([FAB, "gather"], env=environment(lab, RUN=run.id), cwd=ROOT, capture_output=True, check=False,
                       timeout=LIMIT_SECONDS)  # fmt: skip
    summary = read_summary(run)
    if (summary.get("status"), summary.get("restarts")) != ("stopped", fault.attempt - 1):
        problems.append(f"the summary says {summary.get('status')}, {summary.get('restarts')} restarts")
    with contextlib.suppress(OSError):
        lines = (ROOT / "runs" / run.id / "metrics.jsonl").read_text().splitlines()
        steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
        if steps != list(range(1, len(steps) + 1)) or len(steps) < before:
            problems.append(f"the metrics do not have each step once: {steps}")
    hosts = ", ".join(fault.hosts)
    if f"attempt {fault.attempt} begins, on {hosts}" not in run.output:
        problems.append(f"it does not go on on {hosts}")
    left = run.left()
    if problems or left:
        problems.append(f"output:\n{run.output}")
    return SeenOn(stepped[0] - at, left, problems)


@dataclass(frozen=True)
class Slowed:
    """What was said of slow hosts in a run of two equal hosts, of which one may have been slowed down."""

    steps: int | None  # from the fault to the line that names the host; None: it was not named
    seconds: float | None
    line: str
    false_names: list[str]  # lines that name somebody without cause
    taken: int  # steps of the whole run
    orphans: list[str]
    problems: list[str]

    def __str__(self) -> str:
        named = f"named after {self.steps} steps, {self.seconds:.1f} s" if self.seconds is not None else "nobody named"
        false = [f"without cause: {line}" for line in self.false_names]
        rest = [*false, *self.orphans, *self.problems]
        return "; ".join([f"{named} ({self.taken} steps in all){': ' if self.line else ''}{self.line}", *rest])


def measure_slow(lab: str, host: str) -> Slowed:
    """Halve a host's quota while a run of two hosts trains, lift it when the host was named, and stop the run when that
    is over. host: "" for none: then the run takes HEALTHY_STEPS. Raises SystemExit if it does not come so far."""
    run, problems = Run(lab, EVEN, 2), []
    try:
        cpus = {one["host"]: EVEN_CPUS * len(one["ranks"]) for one in run.plan["hosts"]}
        for name in cpus:
            run.undo.callback(give_time, run, name, None)
            give_time(run, name, cpus[name])
        wanted = KNOWN_STEPS if host else HEALTHY_STEPS
        run.wait_for(
            lambda: run.ranks_of("h1") and run.ranks_of("h1")[0].get("step", 0) > wanted, "steps", SAID_SECONDS
        )
        if host:  # one that is named already would not be named again
            run.wait_for(lambda: not is_named(run, host), "end of a slowness without cause", SAID_SECONDS)
        at, clock = time.monotonic(), time.time() - time.monotonic()
        if host:
            give_time(run, host, cpus[host] / 2)
            with contextlib.suppress(SystemExit):
                run.wait_for(lambda: said(run, at, SLOW.format(host)), "name", SAID_SECONDS)
                give_time(run, host, None)
                run.wait_for(lambda: said(run, at, OVER.format(host)), "end of it", SAID_SECONDS)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT_SECONDS)
    finally:
        run.end()
    lines = (ROOT / "runs" / run.id / "metrics.jsonl").read_text().splitlines()
    times = [event["time"] for event in map(json.loads, lines) if event["event"] == "step"]  # by this machine's clock
    when, line = next(iter(said(run, at, SLOW.format(host)) if host else ()), (None, ""))
    steps = None if when is None else sum(at + clock < one <= when + clock for one in times)
    cause = [one for one in said(run, at, SLOW.format(host))[:1]] if host else []
    if host and not said(run, at, OVER.format(host)):
        problems.append("its end was not said")
    false = [text for moment, text in said(run, 0.0, SLOW.format(".*")) if (moment, text) not in cause]
    kept = [(one["host"], one["rank"]) for one in read_summary(run).get("slow") or []]
    if kept != [(host, None)] * len(cause) and not false:
        problems.append(f"the summary says {kept}")
    left = run.left()
    if problems or left:
        problems.append(f"output:\n{run.output}")
    return Slowed(steps, None if when is None else when - at, line, false, len(times), left, problems)


def is_named(run: Run, host: str) -> bool:
    """Whether a host is slow by what the control machine said last of it."""
    return len(said(run, 0.0, SLOW.format(host))) > len(said(run, 0.0, OVER.format(host)))


def said(run: Run, since: float, pattern: str) -> list[tuple[float, str]]:
    """The lines of the control machine since then that begin so, each with its moment."""
    begin = re.compile(r"muster \| " + pattern)
    return [(when, line) for when, line in list(run.lines) if when >= since and begin.match(line)]


def wait_for_ends(run: Run, pids: Collection[int], deadline: float) -> float:
    """When the last of these processes of a run ended; infinite where one is there at the deadline."""
    left = set(pids)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if is_alive(pid)}
        reap_held(run)
        time.sleep(LOOK_SECONDS)
    return float("inf") if left else time.monotonic()


def verdict_in(line: str) -> str:
    """What a line of the control machine says of who failed; empty for any other line."""
    text = line.removeprefix("muster | ")
    return "" if text == line or NO_VERDICT.match(text) or ": " not in text else text


def wrong_ends(run: Run, fault: Fault) -> list[str]:
    summary = read_summary(run)
    if summary.get("status") != fault.status:
        return [f"the summary says {summary.get('status')}: {summary.get('reason')}"]
    return []


def wrong_names(run: Run, fault: Fault, rank: int | None) -> list[str]:
    """Where the summary names another host or rank than the one with the fault."""
    summary = read_summary(run)
    named, meant = (summary.get("failed_host"), summary.get("failed_rank")), (fault.host or None, rank)
    return [] if named == meant else [f"the summary names {named}, not {meant}: {summary.get('reason')}"]


@contextlib.contextmanager
def deployed_lab() -> Iterator[str]:
    """MUSTER_BENCH_LAB, or a lab of its own whose third host has two ranks."""
    if kept := os.environ.get("MUSTER_BENCH_LAB"):
        yield kept
        return
    with new_lab("bench-faults", HOSTS) as name:
        hosts = ROOT / "inventory" / name / "hosts.yml"
        hosts.write_text(hosts.read_text().replace("    h3:\n", "    h3:\n      nproc_per_node: 2\n"))
        fab(name, "deploy")
        yield name


def median_of(found: Collection[Seen]) -> float | None:
    """Seconds; None where most never ended, or were never named."""
    median = statistics.median(one.seconds for one in found)
    return None if median == float("inf") else round(median, 2)


def repeat(name: str, times: int, once: Callable[[], T]) -> list[T]:
    """What came of a fault, each time; printed."""
    found = []
    for turn in range(times):
        found.append(once())
        print(f"{name} {turn + 1} of {times}: {found[-1]}", flush=True)
    return found


def bench(times: int) -> None:
    """All faults of the bars; the last line is JSON."""
    seconds: dict[str, float | None] = {}
    bars: dict[str, float] = {}
    seen: list[Seen] = []
    with deployed_lab() as lab:
        for name, fault in FAULTS.items():
            if fault.key:
                found = repeat(name, times, partial(measure, lab, fault))
                seen += found
                key = f"{fault.key}_seconds"
                median, before = median_of(found), seconds.get(key, 0.0)
                # Of several kinds of hangs the worst.
                seconds[key] = None if median is None or before is None else max(median, before)
                bars[key] = fault.bar
        survived = []
        for name, survival in SURVIVED.items():
            found_on = repeat(name, times, partial(measure_survival, lab, survival))
            survived += found_on
            seconds[f"{name}_seconds"] = round(statistics.median(one.seconds for one in found_on), 2)
            bars[f"{name}_seconds"] = survival.bar
    close(
        {
            **seconds,
            "orphans": sum(len(one.orphans) for one in seen) + sum(len(one.orphans) for one in survived),
            "wrong_names": sum(len(one.wrong) for one in seen),
            "problems": sum(len(one.problems) for one in seen) + sum(len(one.problems) for one in survived),
            "bars": bars,
            "repeats": times,
        }
    )


def drill(name: str, times: int) -> int:
    """One fault, or their list; the exit status is 1 where something was not as it must be."""
    if name in SURVIVED:
        with deployed_lab() as lab:
            lived = repeat(name, times, partial(measure_survival, lab, SURVIVED[name]))
        seconds, bar = statistics.median(one.seconds for one in lived), SURVIVED[name].bar
        wrong = [one for one in lived if one.orphans or one.problems]
        close({"fault": name, "seconds": round(seconds, 2), "bar": bar, "repeats": times, "bad": len(wrong)})
        return int(bool(wrong) or seconds > bar)
    if name in SLOW_HOSTS:
        return drill_slow(name, times)
    if name not in FAULTS:
        if name:
            print(f"drill: there is no FAULT={name}; there are:")
        print("\n".join(f"{one:20} {fault.what} (<= {fault.bar:g} s)" for one, fault in FAULTS.items()))
        for one, survival in SURVIVED.items():
            print(f"{one:20} {survival.what}: to the first step of the next attempt (<= {survival.bar:g} s)")
        for one in SLOW_HOSTS:
            print(
                f"{one:20} {'a host gets half of its' if SLOW_HOSTS[one] else 'each host keeps its'} computing time: "
                f"{f'named within {NAMED_STEPS} steps' if SLOW_HOSTS[one] else 'nobody is named'}"
            )
        return 2 if name else 0
    with deployed_lab() as lab:
        found = repeat(name, times, partial(measure, lab, FAULTS[name]))
    bad = [one for one in found if one.wrong or one.orphans or one.problems or not one.line]
    median = median_of(found)
    close({"fault": name, "seconds": median, "bar": FAULTS[name].bar, "repeats": times, "bad": len(bad)})
    return int(bool(bad) or median is None or median > FAULTS[name].bar)


def drill_slow(name: str, times: int) -> int:
    """Runs with a slow host, or healthy ones; the last line is JSON."""
    host = SLOW_HOSTS[name]
    with even_lab() as lab:
        found = repeat(name, times, partial(measure_slow, lab, host))
    steps = [one.steps for one in found if one.steps is not None]
    named = sum(count <= NAMED_STEPS for count in steps)
    false = sum(len(one.false_names) for one in found)
    bad = sum(bool(one.orphans or one.problems) for one in found)
    close({
        "fault": name, "named": named, "steps": steps, "median_steps": statistics.median(steps) if steps else None,
        "false_names": false, "runs_with_false_names": sum(bool(one.false_names) for one in found),
        "steps_in_all": sum(one.taken for one in found), "bar": NAMED_STEPS, "repeats": times, "bad": bad,
    })  # fmt: skip
    return int(bool(false or bad) or named < (times if host else 0))


@contextlib.contextmanager
def even_lab() -> Iterator[str]:
    """MUSTER_BENCH_LAB, or a lab of its own of two equal hosts."""
    if kept := os.environ.get("MUSTER_BENCH_LAB"):
        yield kept
        return
    with new_lab("bench-slow", 2) as name:
        fab(name, "deploy")
        yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["bench", "drill"])
    command = parser.parse_args().command
    times = whole_number("REPEATS", os.environ.get("REPEATS") or ("5" if command == "bench" else "1"), 1)
    if command == "bench":
        bench(times)
        return 0
    return drill(os.environ.get("FAULT", ""), times)


if __name__ == "__main__":
    sys.exit(main())
