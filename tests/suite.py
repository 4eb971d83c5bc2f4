"""`make test`, `make test-all`, `make test-fast`: sessions of pytest that run at the same time.

    python -m tests.suite [all | fast]

Lab tests spend most of their time waiting, so their session has two workers, each with its own lab. The unit tests run
next to it. `make test-all` then repeats lab tests with Docker on all hosts. The first session's output appears as it
comes, the other's when it has ended (until then it is in build/tests-*.log). Exit status: 0 if all passed, else 1.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALL_MINUTES = 60  # 46 min 14 s without Docker on all hosts, from a fresh clone, and 14 min 0 s of that; 2026-11-30
ALL_TIMEOUT = 7200  # seconds; pyproject.toml has that of `make test`
#: Where control groups of version 2 and 1 are, the file of a group's share of the processors, and that of one program.
GROUPS = (("/sys/fs/cgroup", "cpu.weight", 100), ("/sys/fs/cgroup/cpu", "cpu.shares", 1024))
GROUP = "muster-tests-"  # and the process id of its maker
#: Where Podman has the hosts of all labs, without systemd and with it: one group, which counts as one program at first.
#: Beside the unit tests' share they would wait so long then that they measure wrong rates of links.
HOSTS = ("libpod_parent", "machine.slice")
UNIT_PROGRAMS, HOST_PROGRAMS = 2, 6  # the workers of the unit tests; the hosts of two labs
#: The fast tests wait half of their time, so they run in four parts that take equally long; the last has the rest. The
#: first imports torch, which takes a process of pytest five seconds.
PARTS = {
    "trainer": ("tests/train", "tests/gpu", "tests/benchmarks"),
    "keeper": ("tests/keeper", "tests/playbooks", "tests/containers"),
    "hosts": ("tests/launch/run", "tests/launch/job", "tests/launch/hosts", "tests/launch/deploy"),
}
#: The lab tests, by file, that depend on the container engine of the hosts, for hosts that all have Docker.
WITH_DOCKER = (
    "deploy", "path", "starting", "endings", "faults", "restarts", "resume", "window", "privileges", "teardown",
)  # fmt: skip


@dataclass(frozen=True)
class Session:
    """One call of pytest."""

    name: str
    words: Sequence[str]
    chosen: str  # pytest's -m
    last: bool = False  # it gives way to the others
    environment: Mapping[str, str] = field(default_factory=dict)  # what it has beside this process's

    def start(self, log: Path | None, group: Path | None) -> subprocess.Popen[bytes]:
        """Start it; it writes into `log`, or to where this process writes. group: for the last one."""

        def give_way() -> None:
            if self.last and group:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        words = [sys.executable, "-m", "pytest", "-m", self.chosen, *self.words]
        output = log.open("wb") if log else None
        errors, environment = subprocess.STDOUT if log else None, {**os.environ, **self.environment}
        return subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=errors, preexec_fn=give_way, env=environment)


@contextlib.contextmanager
def shares() -> Iterator[Path | None]:
    """A control group for the unit tests; None if this user cannot make one. It and that of the hosts have shares of
    the processors as if the kernel counted their programs one by one. Niceness does not do it: the kernel shares the
    processors out among sessions (sched_autogroup), and tests start sessions."""
    root, file, one = next((group for group in GROUPS if Path(group[0], "cgroup.procs").exists()), GROUPS[0])
    made = Path(root, f"{GROUP}{os.getpid()}")
    for old in made.parent.glob(f"{GROUP}*"):
        with contextlib.suppress(OSError):  # a group with processes stays
            old.rmdir()
    group, before = None, {}
    with contextlib.suppress(OSError):
        made.mkdir()
        group = made
        (made / file).write_text(str(UNIT_PROGRAMS * one))
        Path(root, HOSTS[0]).mkdir(exist_ok=True)
        for hosts in (Path(root, name, file) for name in HOSTS if Path(root, name).is_dir()):
            before[hosts] = hosts.read_text()
            hosts.write_text(str(HOST_PROGRAMS * one))
    try:
        yield group
    finally:
        for hosts, share in before.items():
            with contextlib.suppress(OSError):
                hosts.write_text(share)
        with contextlib.suppress(OSError):  # if a process is left in it, the next session removes it
            if group:
                group.rmdir()


def phases(which: str) -> list[list[Session]]:
    """One after the other; the sessions of each run at the same time."""
    if which == "fast":
        chosen = "not lab and not slow and not browser and not long"
        others = [f"--ignore={folder}" for folders in PARTS.values() for folder in folders]
        parts = [*PARTS.items(), ("others", others)]
        return [[Session(name, words, chosen) for name, words in parts]]
    everything = which == "all"
    more = "" if everything else " and not long"
    full = ("--hypothesis-profile=all", f"--session-timeout={ALL_TIMEOUT}") if everything else ()
    two_workers = (*full, "--durations=40", "-n", "2", "--dist")
    two_labs = (*two_workers, "loadgroup", "--no-loadscope-reorder")
    lab = Session("lab", (*two_labs, "tests/lab", "tests/containers"), f"lab{more}")
    unit = Session("unit", (*two_workers, "worksteal"), f"not lab{more}", last=True)
    files = [f"tests/lab/test_{name}.py" for name in WITH_DOCKER]
    all_docker = {"MUSTER_TEST_ENGINES": "docker,docker,docker"}
    docker = Session("docker", (*two_labs, *files), "lab and not long", environment=all_docker)
    return [[lab, unit], [docker]] if everything else [[lab, unit]]


def main(arguments: list[str]) -> int:
    which = arguments[0] if arguments else ""
    if which == "all":
        print(f"make test-all takes about {ALL_MINUTES} minutes on 2 cores", flush=True)
    began, build = time.monotonic(), ROOT / "build"
    build.mkdir(exist_ok=True)
    failed: list[str] = []
    with shares() as group:
        for sessions in phases(which):
            failed += run(sessions, build, group, began)
    return int(bool(failed))


def run(sessions: Sequence[Session], build: Path, group: Path | None, began: float) -> list[str]:
    """The names of those that failed. build: the folder of their logs. began: on the clock time.monotonic()."""
    logs = {session.name: build / f"tests-{session.name}.log" for session in sessions[1:]}
    running = {session.name: session.start(logs.get(session.name), group) for session in sessions}
    failed, interrupted = [], False
    for name, process in running.items():
        try:
            process.wait()
        except KeyboardInterrupt:  # pytest has it, too, and clears away
            interrupted = True
            process.wait()
        if process.returncode != 0:
            failed.append(name)
        if name in logs:
            sys.stdout.write(logs[name].read_text(errors="replace"))
        print(f"{name}: {'failed' if name in failed else 'passed'}; {_time_since(began)}", flush=True)
    if interrupted:
        raise SystemExit(130)  # what a shell reports for a command that Ctrl-C ended
    return failed


def _time_since(began: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    return f"{minutes} min {seconds} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
