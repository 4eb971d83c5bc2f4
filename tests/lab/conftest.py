"""A deployed lab of three real container hosts, shared by the tests of this room, and removed at the end.

h2 has another container engine than the others, and h3 two ranks and no way out: hosts differ. A test leaves the
lab as it found it: deployed, with no run in progress. MUSTER_TEST_ENGINES=docker,docker,docker: with other engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from containers import lab_plan
from containers.files import locked
from containers.lab import addresses
from keeper import engines
from launch.deploy import playbook
from launch.files import read_json
from launch.hosts import inventory
from tests.conftest import cannot_run
from tests.lab import snapshot
from tests.lab.scenarios import SHAPE
from tests.sweep import lab_name

FAB = Path(sys.executable).parent / "fab"
WORKLOAD = "tests/lab/test_jobs"
HOSTS = ("h1", "h2", "h3")
RATE = "1gbit"  # of their NICs
SMALL = "--model shufflenet_v2_x0_5"  # of our trainer's models the one that takes the least time
#: Where an engine has a folder for each container.
CONTAINERS = {"podman": "/var/lib/containers/storage/overlay-containers", "docker": "/var/lib/docker/containers"}
ENGINES = dict(zip(HOSTS, os.environ.get("MUSTER_TEST_ENGINES", "podman,docker,podman").split(","), strict=True))


@dataclass
class Lab:
    """A lab and the commands that a user would type on it."""

    name: str
    first_deploy: str = ""
    first_sent: int = 0  # bytes that came to the hosts from this machine in that deploy, packages of a mirror included
    first_hosts: dict[str, Any] = field(default_factory=dict)  # what it distributed: hosts of deploy.json
    bare: dict[str, str] = field(default_factory=dict)  # what was on each host before that: `everything`
    clone: Path | None = None  # where commands are typed, if not in this one
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    pids: dict[str, str] = field(default_factory=dict)  # of the hosts' first processes

    @property
    def inventory(self) -> Path:
        return Path("inventory") / self.name

    def runs(self) -> set[Path]:
        """The folders in runs/ of runs on this lab's hosts. Other workers' labs have runs there as well."""
        hosts = self.inventory / "hosts.yml"
        own = set(addresses(hosts.read_text() if hosts.exists() else "").values())
        found = {path.parent: read_json(path).get("hosts", []) for path in Path("runs").glob("*/plan.json")}
        return {folder for folder, hosts in found.items() if any(own.intersection(host["addresses"]) for host in hosts)}

    @property
    def cluster(self) -> dict[str, Any]:
        """The cluster map."""
        loaded: dict[str, Any] = json.loads((Path("build") / self.name / "cluster.json").read_text())
        return loaded

    @property
    def deployed(self) -> dict[str, Any]:
        """What the last deploy distributed to each host."""
        loaded: dict[str, Any] = json.loads((Path("build") / self.name / "deploy.json").read_text())["hosts"]
        return loaded

    def environment(self, **variables: object) -> dict[str, str]:
        given = {"INVENTORY": str(self.inventory)} | {name: str(value) for name, value in variables.items()}
        return os.environ | {"PYTHONUNBUFFERED": "1"} | given

    def fab(self, task: str, timeout: float = 540, **variables: object) -> subprocess.CompletedProcess[str]:
        """A command to its end; stdout and stderr together."""
        process, begun = self.start(task, **variables), time.monotonic()
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"fab {task} took longer than {timeout} s; it printed:\n{_end(process)}")
        except BaseException:  # the test's own time is over: nothing that it started may go on
            print(_end(process))
            raise
        print(f"fab {task}: {time.monotonic() - begun:.0f} s")
        return subprocess.CompletedProcess([task], process.returncode, out)

    def start(self, task: str, **variables: object) -> subprocess.Popen[str]:
        """A command in the background, in its own process group, as a terminal starts it."""
        process = subprocess.Popen(
            [FAB, task],
            cwd=self.clone,
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def end_commands(self) -> None:
        """End what a failed test has left running, so that the next one finds the lab free."""
        for process in self.started:
            if process.poll() is None:
                print(_end(process))
        self.started.clear()

    def play(self, name: str, *options: str) -> subprocess.CompletedProcess[str]:
        """One of Muster's playbooks alone, as a deploy runs it."""
        inv = inventory.read(self.inventory)
        words = [str(FAB.with_name("ansible-playbook")), f"playbooks/{name}.yml", "-i", str(inv.path), *options]
        return subprocess.run(
            words, env=playbook.environment(inv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=900, check=False,
        )  # fmt: skip

    def train(self, script: str, arguments: str = "", **variables: Any) -> subprocess.CompletedProcess[str]:
        """The workload of this room, with one of its scripts."""
        return self.fab("train", WORKLOAD=WORKLOAD, SCRIPT=script, ARGS=arguments, **variables)

    def engine(self, host: str) -> engines.Engine:
        """The container engine of a host."""
        return engines.engine(ENGINES[host])

    def on(self, host: str, command: str, check: bool = True) -> str:
        """Run a shell command as root inside a host, past SSH (the tests' own hand, not Muster's).

        It runs outside the host's control groups, which `podman exec` would enter, as that takes five times as long.
        """
        words = ["nsenter", f"--target={self._pid(host)}", "--all", "sh", "-c", command]
        return _said(words, check, {"PATH": os.defpath + ":/usr/local/sbin:/usr/sbin:/sbin", "HOME": "/root"})

    def in_container(self, host: str, command: str) -> str:
        """The same, as a process of the host's container: for what starts containers."""
        return _said(["podman", "exec", f"muster-{self.name}-{host}", "sh", "-c", command], True, None)

    def path(self, host: str, path: str) -> Path:
        """A host's file or folder, as this machine finds it."""
        return Path(f"/proc/{self._pid(host)}/root{path}")

    def _pid(self, host: str) -> str:
        """The first process of a host."""
        if not Path(f"/proc/{self.pids.get(host, 'none')}/ns").exists():
            words = ["podman", "inspect", "--format={{.State.Pid}}", f"muster-{self.name}-{host}"]
            self.pids[host] = _said(words, True, None)
        return self.pids[host]

    def remove_user(self, host: str, name: str) -> None:
        """With its processes, which may take a moment to end, and its right to sudo."""
        tried = f"pkill -KILL -u {name}; userdel -r {name} 2>/dev/null; id {name} >/dev/null 2>&1 || exit 0; sleep 0.1"
        self.on(host, f"rm -f /etc/sudoers.d/{name}; for again in $(seq 100); do {tried}; done; exit 1")

    def nsenter(self, host: str, *words: str) -> None:
        """Run a program of this machine in a host's network namespace (hosts are bare)."""
        subprocess.run(["nsenter", "-t", self._pid(host), "-n", *words], check=True, timeout=300)

    def sent(self) -> int:
        """Bytes that have gone to the hosts over the management network, but for what they sent one another."""
        words = ["podman", "network", "inspect", "--format={{.NetworkInterface}}", f"muster-{self.name}-management"]
        bridge = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout.strip()
        return int(Path(f"/sys/class/net/{bridge}/statistics/tx_bytes").read_text())

    def shape(self, rate: str = RATE) -> None:
        """Both NICs of every host at one rate, so that a busy test machine does not decide which network is faster, and
        is not busy with measuring how fast they are."""
        for index, host in enumerate(HOSTS):
            for nic in (lab_plan.nics(index).management, lab_plan.nics(index).data):
                self.nsenter(host, *SHAPE.format(nic=nic, rate=rate).split())

    def everything(self, host: str) -> str:
        """All files of a host and their kind, mode, owner and link; packages, users, tables of nftables and mounts.

        Not what any work there changes: caches, logs, temporary files, package lists, and processes.
        """
        left_out = ("/var/cache", "/var/log", "/var/lib/apt/lists", "/var/lib/dpkg", "/tmp", "/var/tmp", "/root")
        pruned = " -o ".join(
            f"-path {path}"
            for path in (*left_out, "/home/muster/.ansible", "/run/sudo", "/run/mount", "/run/motd.dynamic")
        )
        places = "/ /run /var/lib/containers /var/lib/docker /var/lib/muster"
        listed = f"find {places} -xdev \\( {pruned} \\) -prune -o -printf '%p %y %m %u %g %l\\n' | sort -u"
        more = (
            "dpkg --get-selections",
            "cat /etc/passwd /etc/group",
            "nft list tables 2>/dev/null",
            "grep -v ' /sys/fs/cgroup/' /proc/mounts | cut -c-60 | sort",  # a service's script mounts those that lack
        )
        return self.on(host, "; ".join((listed, *more)), check=False)

    def containers(self) -> list[str]:
        """Ids of all containers of runs: after a run there must be none. After a teardown a host may have no engine."""
        # An engine is asked only where it has containers at all: each time costs a third of a second of computing.
        ask = (
            "ls -d {1}/*/ >/dev/null 2>&1 && command -v {0} >/dev/null || exit 0; {0} ps -aq --filter label=muster.run"
        )
        found = (self.on(host, ask.format(ENGINES[host], CONTAINERS[ENGINES[host]])) for host in HOSTS)
        return [line for lines in found for line in lines.split()]

    def keepers(self) -> list[str]:
        """The first processes of the containers of runs, of which each host has one at most."""
        return [line for host in HOSTS for line in self.on(host, "pgrep -f '^python3 -P -m keeper ' || true").split()]


def _said(words: Sequence[str], check: bool, environment: Mapping[str, str] | None) -> str:
    """What a command prints; with `check` it must succeed."""
    # Files instead of pipes: a pipe stays open while a background process of the command still runs.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        status = subprocess.run(words, stdout=out, stderr=errors, timeout=300, check=False, env=environment).returncode
        out.seek(0)
        errors.seek(0)
        said, complaint = out.read().strip(), errors.read().strip()
    if check and status != 0:
        pytest.fail(f"`{words[-1]}` of {words[:3]} ended with {status}: {said} {complaint}")
    return said


def _end(process: subprocess.Popen[str]) -> str:
    """End a command as Ctrl-C does, else by force; returns what it printed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=90)[0]
        except subprocess.TimeoutExpired:
            continue
    return f"(process {process.pid} does not end)"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    """The condition's first true value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    pytest.fail(f"waited {seconds} s in vain for {what}")


def summary_of(output: str) -> tuple[Path, dict[str, Any]]:
    """The run's folder and its summary, from what a train command printed."""
    lines = [line for line in output.splitlines() if line.startswith("muster | run ")]
    folder = Path("runs") / lines[0].split()[3].rstrip(":")
    return folder, json.loads((folder / "summary.json").read_text())


def must(done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, which must have succeeded."""
    assert done.returncode == 0, done.stdout
    return done.stdout


class Labs:
    """The labs of this worker, which are removed when `stack` is closed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._shared: Lab | None = None

    def shared(self) -> Lab:
        """One that is deployed: from the snapshot, or from bare hosts, of which the snapshot is then made."""
        if self._shared is None:
            with locked(snapshot.LOCK):
                self._shared = self._from_snapshot() or self._from_bare_hosts(lab_name())
        return self._shared

    def first(self) -> Lab:
        """One whose hosts were bare before the deploy that it has seen."""
        if self._shared is None:
            with locked(snapshot.LOCK):  # other workers wait for the snapshot
                self._shared = self._from_bare_hosts(lab_name())
        return self._shared if self._shared.first_deploy else self._from_bare_hosts(lab_name("f"))

    def _from_bare_hosts(self, name: str) -> Lab:
        made = self._stack.enter_context(removed_at_the_end(Lab(name)))
        must(made.fab("lab", 900, LAB=name, HOSTS=len(HOSTS)))
        _configure(made)
        made.bare = {host: made.everything(host) for host in HOSTS[1:]}
        before = made.sent()
        made.first_deploy = must(made.fab("deploy", 1800))
        made.first_sent, made.first_hosts = made.sent() - before, made.deployed
        if (key := snapshot.key(ENGINES)) and snapshot.find(key) is None:
            snapshot.take(name, key, {"bare": made.bare})
            _set_links(made)  # which a start of the hosts has made anew
            must(made.fab("deploy"))  # measures them
        return made

    def _from_snapshot(self) -> Lab | None:
        notes = snapshot.find(snapshot.key(ENGINES))
        if notes is None:
            return None
        made = self._stack.enter_context(removed_at_the_end(Lab(lab_name(), bare=notes["bare"])))
        snapshot.start(made.name, len(HOSTS))
        _configure(made)
        must(made.fab("deploy"))
        return made


@contextlib.contextmanager
def removed_at_the_end(lab: Lab) -> Iterator[Lab]:
    try:
        yield lab
    finally:
        lab.end_commands()
        runs = lab.runs()
        lab.fab("lab-down", LAB=lab.name)
        for folder in (Path("build") / lab.name, *runs):
            shutil.rmtree(folder, ignore_errors=True)


def _configure(lab: Lab) -> None:
    """Make the hosts differ, and trust them."""
    hosts = lab.inventory / "hosts.yml"
    text = hosts.read_text()
    assert "    h2:\n" in text
    for host, engine in ENGINES.items():
        more = {"h3": "      airgap: true\n      nproc_per_node: 2\n"}.get(host, "")
        text = text.replace(f"    {host}:\n", f"    {host}:\n      container_engine: {engine}\n{more}")
    hosts.write_text(text)
    _set_links(lab)
    must(lab.fab("trust", YES=1))


def _set_links(lab: Lab) -> None:
    """One rate for all NICs, and no way out for h3."""
    lab.shape()
    lab.nsenter("h3", "ip", "route", "del", "default")


@pytest.fixture(scope="session")
def labs(container_engine: None) -> Iterator[Labs]:
    if os.getuid() != 0:
        cannot_run("container hosts need root")
    with contextlib.ExitStack() as stack:
        yield Labs(stack)


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Lab:
    """Three hosts, trusted and deployed; h3 with two ranks. MUSTER_TEST_LAB=name: one that is up, left as it is."""
    if kept := os.environ.get("MUSTER_TEST_LAB"):
        return Lab(kept)
    labs: Labs = request.getfixturevalue("labs")
    return labs.shared()


@pytest.fixture(scope="session")
def first(labs: Labs) -> Lab:
    """The lab whose hosts were bare before its first deploy."""
    return labs.first()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test of this room no command is under way and no container of a run is left on any host."""
    yield
    if "lab" in request.fixturenames:
        lab: Lab = request.getfixturevalue("lab")
        lab.end_commands()
        left = lab.containers()
        for host in HOSTS if left else ():  # the next test shall find the lab free
            engine = ENGINES[host]
            lab.on(host, f"{engine} rm --force $({engine} ps --all --quiet --filter label=muster.run)", check=False)
        assert left == [], f"containers left on the lab's hosts: {left}"
