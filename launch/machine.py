"""One host of a run: its connection, made again when it drops, and the commands that run its container.

Everything goes by the run's label or by the container's name, never by a process name.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from fabric import Connection

from launch import ssh
from launch.inventory import Target
from launch.plan import Part, folders, run_dir_on_host

ANSWER_SECONDS = 30
START_SECONDS = 120
STOP_SECONDS = 5  # from SIGTERM to SIGKILL, where nothing is left to save
LONGEST_STOP_SECONDS = 3700  # what GRACE may ask for, and then some
LINK_SECONDS = 60  # how long a dropped SSH connection may take to come back

_LINK_ERRORS = (OSError, EOFError, paramiko.SSHException, ssh.Unreachable)

#: Tries the ports of a range on all addresses (torch's TCPStore listens on all) and prints the first free one.
_FREE_PORT = """
import random, socket
ports = list(range({first}, {last} + 1))
random.shuffle(ports)
both = socket.has_dualstack_ipv6()
for port in ports:
    try:
        if both:
            socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            socket.create_server(("0.0.0.0", port)).close()
    except OSError:
        continue
    print("port=%d" % port)
    break
"""


class HostLost(Exception):
    """A host did not come back within LINK_SECONDS."""


@dataclass(frozen=True)
class Standing:
    """What a host looks like before a start."""

    has_image: bool
    has_data_dir: bool
    runs: list[dict[str, str]]  # running containers of Muster: {"run", "owner", "age"}
    port: int | None  # a free rendezvous port; only asked of the master
    has_resume: bool = False  # something to continue from; only asked with RESUME


class Machine:
    """A host of the inventory over one SSH connection."""

    def __init__(
        self,
        target: Target,
        known_hosts: Path,
        connection: Connection,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.target = target
        self.name = target.name
        self.known_hosts = known_hosts
        self._connection = connection
        self._reconnecting = threading.Lock()
        self._lost: HostLost | None = None
        self._say = say

    def root(
        self,
        command: str,
        timeout: float | None = ANSWER_SECONDS,
        out: Any = None,
        stdin: ssh.Input | None = None,
    ) -> Any:
        """Run a shell command as root; returns Fabric's result."""
        return ssh.run(self._connection, command, timeout, root_on=self.target, stdin=stdin, out=out)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def through_drops(self, work: Callable[[], Any]) -> Any:
        """Do `work`, again from its start after each time that the connection drops.

        Raises:
            HostLost: when the host stays away for LINK_SECONDS.
        """
        while True:
            used = self._connection
            try:
                result = work()
                if result.exited >= 0:  # -1: the channel closed without an exit status
                    return result
            except _LINK_ERRORS:
                pass
            self._replace(used)

    def _replace(self, dropped: Connection) -> None:
        """Make the connection anew, once for all threads that found it dropped."""
        with self._reconnecting:
            if self._lost:  # another thread has waited in vain
                raise self._lost
            if self._connection is not dropped:
                return
            self._say(f"{self.name}: SSH connection lost; trying again for up to {LINK_SECONDS} s, the run goes on")
            dropped.close()
            deadline = time.monotonic() + LINK_SECONDS
            while True:
                try:
                    self._connection = ssh.connect(self.target, self.known_hosts)
                    self._say(f"{self.name}: connected again")
                    return
                except ssh.Unreachable as error:
                    if time.monotonic() > deadline:
                        self._lost = HostLost(f"{self.name} has not answered for {LINK_SECONDS} s")
                        raise self._lost from error
                    time.sleep(2)

    # -- before a start --------------------------------------------------------------------------------------------

    def stand(
        self, image: str, data_dir: str | None, ports: tuple[int, int] | None, resume: str | None = None
    ) -> Standing:
        """Look, in one go, at what a start needs: the image, the data, other runs, and a free port if asked.

        `resume`: a command that succeeds where there is something to continue from.
        """
        script = [
            f"podman image exists {image} && echo image=yes",
            "podman ps --filter label=muster.run --format json | tr -d '\\n' | sed 's/^/ps=/'; echo",
            f"test -d {shlex.quote(data_dir)} && echo data=yes" if data_dir else "echo data=yes",
        ]
        if resume:
            script.append(f"{resume} && echo resume=yes")
        if ports:
            code = _FREE_PORT.format(first=ports[0], last=ports[1])
            script.append(f"{shlex.quote(self.target.python)} -c {shlex.quote(code)}")
        return parse_standing(self.root("; ".join(script)).stdout)

    # -- a run -----------------------------------------------------------------------------------------------------

    def start(self, part: Part) -> None:
        """Start this host's container, detached.

        Raises:
            RuntimeError: with Podman's own words when it does not start.
        """
        done = self.root(f"mkdir -p {shlex.join(folders(part))} && {shlex.join(part.command)}", START_SECONDS)
        if done.exited != 0:
            raise RuntimeError((done.stderr or done.stdout).strip() or f"podman ended with {done.exited}")

    def stream_output(self, part: Part, out: Any) -> Any:
        """The container's output from its first line, until it ends; `out` is a file-like object."""
        return self.root(f"podman logs --follow {part.container} 2>&1", None, out)

    def wait(self, part: Part) -> int:
        """The container's exit status, once it has ended; survives dropped connections.

        Raises:
            HostLost: when the host stays away.
        """
        done = self.through_drops(lambda: self.root(f"podman wait {part.container}", None))
        status = done.stdout.strip()
        return int(status) if done.exited == 0 and status.isdigit() else -1

    def stop(self, run: str, why: str, seconds: int | None = None) -> None:
        """Stop every container of a run on this host: SIGTERM, then SIGKILL. Leaves a note of who and why.

        `seconds`: between the two; None: what the plan gave the container, so that ranks can write a checkpoint.
        """
        folder = run_dir_on_host(run)
        note = f"test -d {folder} && printf '%s\\n' {shlex.quote(why)} > {folder}/stopped"
        patience = "" if seconds is None else f"--time {seconds} "
        stop = f'ids=$({_ids(run)}); test -z "$ids" || podman stop {patience}$ids >/dev/null'
        longest = LONGEST_STOP_SECONDS if seconds is None else seconds
        self.root(f"{note}; {stop}", longest + ANSWER_SECONDS)

    def finish(self, part: Part) -> dict[str, Any]:
        """After the end: keep what the script wrote beside itself, make everything readable, remove the container.

        Returns {"state": podman's State or {}, "left": ids of containers of this run that are still there}.
        """
        container, run_dir = part.container, part.run_dir
        script = f"""
state=$(podman inspect --format '{{{{json .State}}}}' {container} 2>/dev/null || echo '{{}}')
upper=$(podman inspect --format '{{{{.GraphDriver.Data.UpperDir}}}}' {container} 2>/dev/null)
if [ -n "$upper" ] && [ -d "$upper/workload" ]; then cp -a "$upper/workload" {run_dir}/; fi
chmod -R a+rX {run_dir}
podman rm --force --time {STOP_SECONDS} {container} >/dev/null 2>&1
echo "state=$state"
echo "left=$({_ids(run_of(part))} | tr '\\n' ' ')"
"""
        return parse_finish(self.root(script, START_SECONDS).stdout)


def run_of(part: Part) -> str:
    """The run id that a part belongs to."""
    return part.environment["MUSTER_RUN_ID"]


def _ids(run: str) -> str:
    return f"podman ps --all --quiet --filter label=muster.run={run}"


def parse_standing(answer: str) -> Standing:
    """The answer of Machine.stand's script. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    runs = [
        {
            "run": entry["Labels"].get("muster.run", "?"),
            "owner": entry["Labels"].get("muster.owner", "?"),
            "age": entry.get("Status") or entry.get("CreatedAt", "?"),
        }
        for entry in json.loads(found.get("ps") or "[]")
    ]
    port = found.get("port")
    return Standing("image" in found, "data" in found, runs, int(port) if port else None, "resume" in found)


def parse_finish(answer: str) -> dict[str, Any]:
    """The answer of Machine.finish's script. Pure."""
    found = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    return {"state": json.loads(found.get("state") or "{}"), "left": found.get("left", "").split()}
