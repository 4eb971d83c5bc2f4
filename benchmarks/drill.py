"""`make drill FAULTS=20 [SEED=]`: many faults at random moments in runs on lab hosts, and whether anything is lost.

The runs are one training, done again and again: first without faults, which gives what the others are held against,
then with up to five faults each, until as many as FAULTS were injected. Which ones and when, drill_draw.py draws from
SEED; on which host, it says too, among those of the attempt on which the run survives it: a drill never takes the
majority of an attempt's hosts away. Most faults come 15 to 30 s after the first step that follows the one before, some
in the start-up of an attempt, some at the moment in which a host writes a checkpoint. A fault that its run can bear no
more, or that had no time left, comes in another run of the same settings.

The last line is JSON. The status is 1 unless hand_fixes, orphans and unreadable are 0, the others true or null, and all
faults were injected.

    faults         injected; asked: FAULTS; by_fault: of each kind; restarts: attempts after the first ones
    hand_fixes     what a person would have had to do: each run that did not end as succeeded by itself, each command
                   but `make attach`, which the fault of the killed control machine includes (attached: how often)
    orphans        processes and containers of a run that are there after its end
    unreadable     checkpoints that a host keeps and that cannot be read then, of `checkpoints`
    samples_ok     whether each run's metrics.jsonl has each planned step once, in order, with its number of samples.
                   Which samples a step has is a pure function of seed and step (train/order.py); that they were those,
                   the weights show where they are equal
    final_equal    whether in all runs (equal_runs) that kept all hosts in all attempts that made steps, the final
                   weights, buffers, optimizer state and test accuracy are those of the run without faults, to the bit;
                   null where there is no such run
    final_close    whether in all others (shrunk_runs), whose sums and batch statistics other numbers of ranks round
                   otherwise, the test accuracy is within CLOSE of it; null where there is none
    not_needed     restarts after faults that ranks must survive (a host that is slow for a while, ...)

MUSTER_BENCH_LAB=name uses a deployed lab of three hosts that is up, and leaves it so.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import drill_judge as judge
from benchmarks.common import FAB, close, environment, whole_number
from benchmarks.drill_draw import KINDS, Drawn, bearable, draw
from benchmarks.faults import HOSTS, deployed_lab, verdict_in
from benchmarks.inject import cut, exhaust, give_time, hold, kill, lose_link, lose_power, parent, reap_held
from benchmarks.run import LIMIT_SECONDS, ROOT, Run, is_alive, read_summary
from train.checkpoints import CheckpointError, saved_steps
from train.datasets.small import digits
from train.reporting.metrics import read_metrics

EPOCHS, BATCH_SIZE, CHECKPOINT_STEPS = 60, 120, 5
CLOSE = 0.03  # of the test accuracy, from 0 to 1
MANY = 10_000  # restarts, and failures of a host
FRESH_SECONDS = 5.0  # for which state.json says how things stand
NEXT_STEP_SECONDS = 180.0  # from a fault to a step, before a run counts as stuck
END_SECONDS = 900.0  # from the last fault to the end of a run
DRAFT_SECONDS = 30.0  # for a checkpoint to be written
PACE_SECONDS = 10.0  # of steps from which their pace is known; state.json comes once a second
RESERVE_SECONDS = {False: 15.0, True: 60.0}  # of training that a fault must find left; of one that takes a host away
ENDED_SECONDS = 20.0  # for the ranks of a host to end
TRIES = 4  # runs in which a fault may find its place
DISK_MEBIBYTES = 400  # of the host whose disk gets full
RUNS_ON_HOST = "/var/lib/muster/runs"
SSH_PORT = 22


def job(seed: int) -> dict[str, object]:
    """The run, as `make train` takes it."""
    settings = f"--model shufflenet_v2_x0_5 --epochs {EPOCHS} --batch-size {BATCH_SIZE}"
    arguments = f"{settings} --checkpoint-every {CHECKPOINT_STEPS} --seed {seed}"
    return {"ARGS": arguments, "SKIP_CHECK": 1, "MAX_RESTARTS": MANY, "MAX_HOST_FAILURES": MANY}


@dataclass(frozen=True)
class Now:
    """How a run stands, as its keepers have written down within FRESH_SECONDS."""

    attempt: int = 0  # the newest one; 0: nobody says anything
    hosts: tuple[str, ...] = ()  # its hosts
    training: bool = False  # whether its ranks run
    step: int = 0  # its last one; 0: it has not begun to train
    steps: int = 0  # planned
    keepers: tuple[str, ...] = ()  # the hosts that say so


@dataclass(frozen=True)
class Reference:
    """What the run without faults has made."""

    weights: dict[str, Any]  # of its last checkpoint: drill_judge.STATES
    accuracy: float


@dataclass
class Outcome:
    """What came of one run."""

    injected: list[Drawn] = field(default_factory=list)
    left: list[Drawn] = field(default_factory=list)  # faults that it did not get
    hand_fixes: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    checkpoints: int = 0
    unreadable: list[str] = field(default_factory=list)
    wrong_samples: list[str] = field(default_factory=list)
    differing: list[str] | None = None  # None: it lost hosts, or there is nothing to compare it with
    distance: float | None = None  # of the test accuracy; None: it kept all hosts
    not_needed: list[str] = field(default_factory=list)
    restarts: int = 0
    attached: int = 0
    folder: Path = ROOT
    accuracy: float = 0.0

    @property
    def problems(self) -> list[str]:
        found = {"hand fix": self.hand_fixes, "orphan": self.orphans, "unreadable": self.unreadable,
                 "samples": self.wrong_samples, "differs": self.differing or [],
                 "restart that was not needed": self.not_needed}  # fmt: skip
        far = self.distance is not None and self.distance > CLOSE
        lines = [f"{name}: {one}" for name, many in found.items() for one in many[: judge.SHOWN]]
        return [*lines, *([f"test accuracy {self.distance:.1%} from the run without faults"] if far else [])]


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


class Drill:
    """One run, and the faults that are put into it. Nothing happens but in `pause`: what is held by ptrace belongs to
    the thread that holds it."""

    def __init__(self, lab: str, settings: dict[str, object], outcome: Outcome, small_disk: str) -> None:
        self.run = Run(lab, settings, HOSTS)
        self.outcome, self.small_disk = outcome, small_disk
        self.heals: list[tuple[float, ExitStack]] = []  # (when, what makes it right again)
        self.heads: list[tuple[float, int]] = []  # (time.monotonic(), step) lately, of the pace
        self.best = 0  # the last step that was seen

    # -- how it stands -------------------------------------------------------------------------------------------------

    def now(self) -> Now:
        found: dict[str, dict[str, Any]] = {}
        for host in self.run.hosts:
            with contextlib.suppress(OSError, ValueError):
                words = json.loads(self.run.file(host, "state.json").read_text())
                if time.time() - words["time"] < FRESH_SECONDS:
                    found[host] = words
        if not found:
            return Now()
        attempt = max(words["attempt"] for words in found.values())
        newest = {host: words for host, words in found.items() if words["attempt"] == attempt}
        hosts = tuple(next(iter(newest.values()))["hosts"])
        ranks = [rank for host in hosts if host in newest for rank in newest[host]["ranks"].values()]
        step = max((rank.get("step") or 0 for rank in ranks if rank.get("phase") != "starting"), default=0)
        self.best = max(self.best, step)
        return Now(
            attempt, hosts,
            training=all(host in newest and newest[host]["status"] == "running" for host in hosts),
            step=step,
            steps=max((rank.get("steps") or 0 for rank in ranks), default=0),
            keepers=tuple(newest),
        )  # fmt: skip

    def ended(self) -> bool:
        return self.run.process.poll() is not None

    def pause(self, seconds: float = 0.1) -> None:
        """Let time pass; what is due is made right again."""
        for due, stack in list(self.heals):
            if time.monotonic() >= due:
                self.heals.remove((due, stack))
                stack.close()
        reap_held(self.run)
        time.sleep(seconds)

    def wait(self, condition: Callable[[], Any], seconds: float) -> Any:
        """The first true value, or None after so many seconds or when the run's command has ended."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline or self.ended():
                return None
            self.pause()
        return value

    def seconds_left(self, now: Now) -> float:
        """Of training, by the pace of the latest steps; as many as one likes while that is not known."""
        self.heads = [*self.heads[-200:], (time.monotonic(), now.step)]
        (begun, first), (last, step) = self.heads[0], self.heads[-1]
        if last - begun < PACE_SECONDS or step <= first:
            return float("inf")
        return (now.steps - now.step) * (last - begun) / (step - first)

    # -- the moments ---------------------------------------------------------------------------------------------------

    def wait_for_moment(self, fault: Drawn, since: Now) -> bool:
        """False where it does not come any more. since: how the run stood at the fault before."""
        kind = KINDS[fault.kind]
        if fault.moment == "start":
            if not self.wait(lambda: self.has_begun(since.attempt + 1), NEXT_STEP_SECONDS):
                return False
            begun = time.monotonic()
            self.wait(lambda: time.monotonic() - begun >= fault.after, fault.after + 5)
        else:
            self.heads.clear()
            if not self.wait(lambda: self.is_stepping(self.now()), NEXT_STEP_SECONDS):
                return False
            begun = time.monotonic()
            enough = RESERVE_SECONDS[kind.loses]

            def due() -> bool:
                now = self.now()
                return (time.monotonic() - begun >= fault.after and now.training) or self.seconds_left(now) < enough

            if not self.wait(due, NEXT_STEP_SECONDS) or self.seconds_left(self.now()) < enough:
                return False
        if kind.alone and self.heals:
            self.wait(lambda: not self.heals, NEXT_STEP_SECONDS)
        return not self.ended()

    def is_stepping(self, now: Now) -> bool:
        return now.training and now.step > 0

    def has_begun(self, attempt: int) -> bool:
        """Whether the ranks of an attempt have been started on all of its hosts, and may go."""
        now = self.now()
        if now.attempt < attempt or not all(host in now.keepers for host in now.hosts):
            return False
        for host in now.hosts:
            newest = [event for event in self.run.events(host) if event["event"] == "started"]
            held = Path(f"/proc/{self.run.hosts[host]}/root/run/muster/{self.run.id}/hold").exists()
            if held or not newest or newest[-1]["attempt"] < now.attempt:
                return False
        return True

    def wait_for_draft(self, host: str) -> bool:
        """Return in the moment in which a host writes a checkpoint; False where none is seen."""
        folder, deadline = self.run.file(host, "checkpoints"), time.monotonic() + DRAFT_SECONDS
        while time.monotonic() < deadline and not self.ended():
            with contextlib.suppress(OSError):
                if any(name.endswith(".tmp") for name in os.listdir(folder)):
                    return True
            time.sleep(0.001)
        return False

    # -- the faults ----------------------------------------------------------------------------------------------------

    def inject(self, fault: Drawn, targets: Sequence[tuple[str, ...]]) -> str:
        """Do it; returns where."""
        hosts = targets[int(fault.place * len(targets))]
        stack = ExitStack()
        try:
            with self.run.undone_by(stack):
                self.do(fault, hosts)
        except BaseException:
            stack.close()
            raise
        self.heals.append((time.monotonic() + fault.seconds, stack))
        return " and ".join(hosts)

    def ranks_on(self, host: str) -> list[tuple[int, int]]:
        """(rank, its process) of a host, those that are there now; the first one writes its checkpoints."""
        return sorted((rank, pid) for rank, (where, pid) in self.run.living_ranks().items() if where == host)

    def do(self, fault: Drawn, hosts: tuple[str, ...]) -> None:
        run, host = self.run, hosts[0]
        ranks = self.ranks_on(host)
        if fault.moment == "saving" and not self.wait_for_draft(host):
            say("    no checkpoint was being written; it comes now")
        if fault.kind in ("rank_killed", "bit_flipped"):
            kill(ranks[0][1])
            if fault.kind == "bit_flipped":
                self.flip(host, [pid for _, pid in ranks])
        elif fault.kind == "torchrun_killed":
            kill(parent(ranks[0][1]))
        elif fault.kind == "keeper_killed":
            kill(parent(parent(ranks[0][1])))
        elif fault.kind == "rank_stopped":
            os.kill(ranks[-1][1], signal.SIGSTOP)
        elif fault.kind == "rank_held":
            hold(run, host, *ranks[-1])
        elif fault.kind == "out_of_memory":
            exhaust(ranks[-1][1])
        elif fault.kind in ("cut_short", "cut_long"):
            cut(*hosts)(run)
        elif fault.kind in ("link_down_short", "link_down_long"):
            lose_link(host)(run)
        elif fault.kind == "power_loss":
            lose_power(host)(run)
        elif fault.kind == "disk_full":
            self.fill_disk(host)
        elif fault.kind == "slow_host":
            cores = len(os.sched_getaffinity(0))
            run.undo.callback(give_time, run, host, None)
            give_time(run, host, cores / HOSTS / 2)
        elif fault.kind == "control_away":
            for name in filter(lambda name: is_alive(run.hosts[name]), run.hosts):
                for chain, side in (("INPUT", "--dport"), ("OUTPUT", "--sport")):
                    rule = (chain, "-p", "tcp", side, str(SSH_PORT), "-j", "DROP")
                    run.in_network(name, "iptables", "-w", "-A", *rule)
                    run.undo.callback(run.in_network, name, "iptables", "-w", "-D", *rule)
        elif fault.kind == "control_killed":
            run.process.kill()
            run.process.wait()
            time.sleep(fault.seconds)
            run.attach()
            self.outcome.attached += 1
        else:
            raise AssertionError(fault.kind)

    def flip(self, host: str, pids: Sequence[int]) -> None:
        """One bit of the newest checkpoint, when the ranks of its host have ended."""
        deadline = time.monotonic() + ENDED_SECONDS
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        folder = self.run.file(host, "checkpoints")
        if steps := saved_steps(folder):
            with (folder / f"step-{steps[-1]}.pt").open("r+b") as file:
                file.seek(os.fstat(file.fileno()).st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 16]))
            say(f"    a bit of step-{steps[-1]}.pt on {host} is flipped")

    def fill_disk(self, host: str) -> None:
        filler = f"{RUNS_ON_HOST}/filler"
        self.run.undo.callback(self.run.on_host, host, "rm", "-f", filler)
        self.run.on_host(host, "sh", "-c", f"cat /dev/zero >{filler}")

    # -- one after the other -------------------------------------------------------------------------------------------

    def play(self, faults: Sequence[Drawn], number: Callable[[], str]) -> None:
        """Inject what can be, and see the run to its end. number: how the next fault is called."""
        outcome, left = self.outcome, list(faults)
        since, unsaid = Now(), 0.0  # when the last fault came of which nothing was said yet
        while left and self.run.plan and not self.ended():
            fault, kind = left[0], KINDS[left[0].kind]
            is_there = self.wait_for_moment(fault, since)
            if unsaid:
                say(f"    said: {self.said(unsaid)}; no step before the next one")
                unsaid = 0.0
            if not is_there:
                break
            now = self.now()
            targets = bearable(kind, now.hosts)
            if fault.kind in ("disk_full", "power_loss"):
                targets = [one for one in targets if (one == (self.small_disk,)) == (fault.kind == "disk_full")]
            if not targets or (kind.restarts and not all(map(self.ranks_on, now.hosts))):
                break
            at, moment = time.monotonic(), f"in {fault.moment if now.step else 'the start-up'}"
            try:
                where = self.inject(fault, targets)
            except (OSError, IndexError, subprocess.SubprocessError) as error:  # its process has just ended
                say(f"    {fault.kind} could not be injected: {error}")
                break
            outcome.injected.append(left.pop(0))
            lasts = f", for {fault.seconds:.0f} s" if fault.seconds else ""
            say(f"{number()}: {kind.what.format(host=where)}{lasts}; {moment}, attempt {now.attempt} on "
                f"{', '.join(now.hosts)}, step {now.step} of {now.steps}")  # fmt: skip
            if left and left[0].moment == "start" and kind.restarts:
                since, unsaid = now, at  # the next one comes before a step
                continue
            since = self.see(fault, now, at)
        outcome.left = left

    def see(self, fault: Drawn, before: Now, at: float) -> Now:
        """Wait for the first step after a fault and say what came of it; returns how the run stands then."""
        kind, best, mark = KINDS[fault.kind], self.best, self.best

        def goes_on() -> Now | None:
            nonlocal mark
            now = self.now()
            if now.attempt > before.attempt:
                return now if now.training and now.step > best else None
            if kind.restarts:
                return None
            if self.heals:  # what it does while it lasts does not matter
                mark = max(mark, now.step)
                return None
            return now if now.step > mark else None

        now = self.wait(goes_on, NEXT_STEP_SECONDS + fault.seconds)
        said = self.said(at)
        if now is None:
            stuck = "" if self.ended() else f"; no step for {time.monotonic() - at:.0f} s"
            say(f"    said: {said}{stuck}")
            return self.now()
        if now.attempt > before.attempt and not kind.restarts:
            self.outcome.not_needed.append(f"{fault.kind}: {said}")
        say(f"    said: {said}; next step after {time.monotonic() - at:.1f} s, attempt {now.attempt} on "
            f"{', '.join(now.hosts)}")  # fmt: skip
        return now

    def said(self, at: float) -> str:
        """The first that the control machine said of a fault."""
        lines = (verdict_in(line) for when, line in list(self.run.lines) if when >= at)
        return next(filter(None, lines), "nothing")

    def finish(self) -> None:
        """All is made right again, and the run ends by itself; else it is ended."""
        for _, stack in self.heals:
            stack.close()
        self.heals.clear()
        outcome, run = self.outcome, self.run
        if not self.ended():
            self.wait(self.ended, END_SECONDS)
        if not self.ended():
            outcome.hand_fixes.append(f"the run has not ended after {END_SECONDS:.0f} s: make stop")
            command(run, "stop")
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(LIMIT_SECONDS)
        run.end()
        summary = read_summary(run)
        if summary.get("status") != "succeeded" and not outcome.hand_fixes:
            why = summary.get("given_up") or summary.get("reason")
            outcome.hand_fixes.append(f"the run ended as {summary.get('status')}: {why}: make train RESUME={run.id}")
        if not summary or summary["missing_hosts"]:
            outcome.hand_fixes.append(f"not gathered from {summary.get('missing_hosts')}: make gather")
            command(run, "gather")
        outcome.orphans += run.left()
        if outcome.orphans:
            command(run, "stop")
            command(run, "gather")
        outcome.restarts = int(summary.get("restarts") or 0)
        outcome.folder, outcome.accuracy = ROOT / "runs" / run.id, float(summary.get("test_accuracy") or 0.0)
        for host in run.hosts:
            count, wrong = judge.unreadable(run.file(host, "checkpoints"))
            outcome.checkpoints += count
            outcome.unreadable += [f"{host}: {one}" for one in wrong]


def command(run: Run, task: str) -> None:
    """A command that a person would have had to type."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([FAB, task], env=environment(run.lab, RUN=run.id), cwd=ROOT, capture_output=True, check=False,
                       timeout=LIMIT_SECONDS)  # fmt: skip


@contextlib.contextmanager
def small_disk(lab: str, host: str) -> Iterator[None]:
    """The runs of a host lie on a disk of their own, that can be filled."""
    inside = ["podman", "exec", f"muster-{lab}-{host}"]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEBIBYTES}m,mode=755", "tmpfs", RUNS_ON_HOST]
    subprocess.run([*inside, *mount], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", RUNS_ON_HOST], check=False, timeout=60)


def one_run(
    lab: str, settings: dict[str, object], faults: Sequence[Drawn], outcome: Outcome, number: Callable[[], str]
) -> None:
    """A run with these faults, seen to its end, and what came of it; the lab is as before then."""
    stack = ExitStack()
    full = next((fault for fault in faults if fault.kind == "disk_full"), None)
    host = f"h{1 + int(full.place * HOSTS)}" if full else ""
    with stack:
        if host:
            stack.enter_context(small_disk(lab, host))
        drill = Drill(lab, settings, outcome, host)
        try:
            drill.play(faults, number)
        except SystemExit as error:
            outcome.hand_fixes.append(f"the run did not start: {error}")
            outcome.left = list(faults)
        finally:
            drill.finish()
        if outcome.hand_fixes or outcome.not_needed:
            log = outcome.folder / "drill.log"
            log.write_text(drill.run.output)
            say(f"    what was shown: {log.relative_to(ROOT)}")


def judge_run(outcome: Outcome, samples: int, reference: Reference | None) -> None:
    """Note what of a run is not as it must be."""
    planned = judge.planned_steps(samples, BATCH_SIZE, EPOCHS)
    metrics = outcome.folder / "metrics.jsonl"
    outcome.wrong_samples = judge.wrong_samples(read_metrics(metrics) if metrics.is_file() else [], planned)
    if reference is None or outcome.hand_fixes:
        return
    attempts = json.loads((outcome.folder / "summary.json").read_text())["attempts"]
    if not judge.kept_all_hosts(attempts, [f"h{number}" for number in range(1, HOSTS + 1)]):
        outcome.distance = abs(outcome.accuracy - reference.accuracy)
        return
    try:
        outcome.differing = list(judge.differing(reference.weights, judge.weights_of(outcome.folder, planned[-1][0])))
    except CheckpointError as error:
        outcome.differing = [str(error)]


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The JSON of the runs with faults and, first, the one without. Pure."""
    compared = [one for one in outcomes if one.differing is not None]
    shrunk = [one for one in outcomes if one.distance is not None]
    kinds = Counter(fault.kind for one in outcomes for fault in one.injected)
    return {
        "faults": sum(kinds.values()),
        "hand_fixes": sum(len(one.hand_fixes) for one in outcomes),
        "orphans": sum(len(one.orphans) for one in outcomes),
        "unreadable": sum(len(one.unreadable) for one in outcomes),
        "samples_ok": not any(one.wrong_samples for one in outcomes),
        "final_equal": not any(one.differing for one in compared) if compared else None,
        "final_close": all((one.distance or 0.0) <= CLOSE for one in shrunk) if shrunk else None,
        "not_needed": sum(len(one.not_needed) for one in outcomes),
        "restarts": sum(one.restarts for one in outcomes),
        "attached": sum(one.attached for one in outcomes),
        "runs": len(outcomes) - 1,
        "equal_runs": len(compared),
        "shrunk_runs": len(shrunk),
        "checkpoints": sum(one.checkpoints for one in outcomes),
        "accuracy_distance": round(max((one.distance or 0.0 for one in shrunk), default=0.0), 4),
        "by_fault": dict(sorted(kinds.items())),
    }


def is_good(found: dict[str, Any], asked: int) -> bool:
    """Whether the bars hold."""
    none = not (found["hand_fixes"] or found["orphans"] or found["unreadable"] or found["not_needed"])
    kept = found["samples_ok"] and found["final_equal"] is not False and found["final_close"] is not False
    return none and kept and found["faults"] == asked


def drill(asked: int, seed: int) -> int:
    """All of it; returns the exit status."""
    begun, samples = time.monotonic(), len(digits().train)
    again = f"make drill FAULTS={asked} SEED={seed}"
    say(f"{asked} faults, SEED={seed}; again: {again}")
    current, outcomes = Outcome(), list[Outcome]()

    def number() -> str:
        return f"fault {sum(len(one.injected) for one in (*outcomes, current))} of {asked}"

    with deployed_lab() as lab:
        settings = job(seed)
        say("the run without faults")
        one_run(lab, settings, (), current, number)
        judge_run(current, samples, None)
        outcomes.append(current)
        say(f"    {'; '.join(current.problems) or 'as planned'}; test accuracy {current.accuracy:.2%}")
        blocks = [] if current.problems else draw(seed, asked)
        if blocks:
            steps = judge.planned_steps(samples, BATCH_SIZE, EPOCHS)[-1][0]
            reference = Reference(judge.weights_of(current.folder, steps), current.accuracy)
        for block in blocks:
            left: Sequence[Drawn] = block
            for _ in range(TRIES):
                say(f"run {len(outcomes)}: {', '.join(fault.kind for fault in left)}")
                current = Outcome()
                one_run(lab, settings, left, current, number)
                judge_run(current, samples, reference)
                outcomes.append(current)
                how = "equal to the bit" if current.distance is None else "other numbers of ranks"
                say(f"    {'; '.join(current.problems) or how}; test accuracy {current.accuracy:.2%}, "
                    f"{current.restarts} restarts")  # fmt: skip
                left, current = current.left, Outcome()
                if not left:
                    break
    found = figures(outcomes)
    good = is_good(found, asked)
    if not good:
        say(f"again: {again}")
    close({**found, "asked": asked, "seed": seed, "seconds": round(time.monotonic() - begun)})
    return int(not good)


def main() -> int:
    asked = whole_number("FAULTS", os.environ.get("FAULTS", ""), 1)
    if os.environ.get("FAULT"):
        raise SystemExit("drill: FAULT= names one fault, FAULTS= says how many random ones: give one of the two")
    return drill(asked, whole_number("SEED", os.environ.get("SEED") or str(secrets.randbelow(MANY)), 0))


if __name__ == "__main__":
    sys.exit(main())
