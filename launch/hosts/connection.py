"""One host over one SSH connection, which is opened again when it drops. Not for what is done there: see launch.job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import paramiko
from fabric import Connection

from launch.files import ROOT
from launch.hosts import openssh, ssh
from launch.hosts.clustermap import ClusterMap, MapHost, to_target
from launch.hosts.inventory import Target, read

ANSWER_SECONDS = 30
LINK_SECONDS = 60  # how long a host whose SSH connection dropped may take to be reached again

_LINK_ERRORS = (OSError, EOFError, paramiko.SSHException, ssh.Unreachable)


class HostLost(Exception):
    """A host did not come back within LINK_SECONDS."""


def last_words(done: Any) -> str:
    """The last line that a command printed (Fabric's result), or its exit status where it printed none."""
    return ((done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.exited} without a word"])[-1]


class Machine:
    """A host of the inventory over one SSH connection."""

    def __init__(
        self, target: Target, known_hosts: Path, connection: Connection, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.target = target
        self.name = target.name
        self.known_hosts = known_hosts
        self._connection = connection
        self._reconnecting = threading.Lock()
        self._lost: HostLost | None = None
        self._say = say

    def root(
        self, command: str, timeout: float | None = ANSWER_SECONDS, out: Any = None, stdin: ssh.Input | None = None
    ) -> Any:
        """Run a shell command as root; returns Fabric's result. Raises TimeoutError after `timeout` seconds, if any."""
        return ssh.run(self._connection, command, timeout, root_on=self.target, stdin=stdin, out=out)

    def answer(self, command: str, timeout: float = ANSWER_SECONDS) -> str:
        """The standard output of a shell command that succeeds as root.

        Raises RuntimeError with the host's own last words when it fails (silence is never taken for an answer), and
        TimeoutError after `timeout` seconds.
        """
        done = self.root(command, timeout)
        if done.exited != 0:
            raise RuntimeError(last_words(done))
        return str(done.stdout)

    def open_session(self) -> paramiko.Channel:
        """A new channel of the connection. Raises paramiko.SSHException, EOFError or OSError where it cannot be had."""
        channel: paramiko.Channel = self._connection.transport.open_session(timeout=openssh.CONNECT_SECONDS)
        return channel

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def through_drops(self, work: Callable[[], Any]) -> Any:
        """Do `work`, and again each time that the connection drops. Raises HostLost after LINK_SECONDS without one."""
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
        """Open the connection again, once for all threads that found it dropped."""
        with self._reconnecting:
            if self._lost:  # another thread has waited for LINK_SECONDS already
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


@contextmanager
def connected(
    targets: Sequence[Target], known_hosts: Path, say: Callable[[str], None] = lambda text: None
) -> Iterator[list[Machine]]:
    """Machines over `ssh.connections`; they connect again after a drop, which `say` announces."""
    with ssh.connections(targets, known_hosts) as opened:
        made = [Machine(target, known_hosts, c, say) for target, c in zip(targets, opened, strict=True)]
        try:
            yield made
        finally:
            for machine in made:
                machine.close()


def machines(
    cluster: ClusterMap, hosts: Sequence[MapHost], say: Callable[[str], None] = lambda text: None
) -> AbstractContextManager[list[Machine]]:
    """Connections to the given hosts of a cluster map, as `connected` makes them."""
    return connected(targets_of(cluster, hosts), ROOT / cluster.known_hosts, say)


def targets_of(cluster: ClusterMap, hosts: Sequence[MapHost]) -> list[Target]:
    """How to reach the hosts. A sudo password is not in the map: it is read from the inventory when one is needed."""
    passwords: dict[str, str | None] = {}
    if any(host.ssh["needs_sudo_password"] for host in hosts):
        passwords = {host.name: host.target.sudo_password for host in read(ROOT / cluster.inventory).hosts}
    return [to_target(host, passwords.get(host.name)) for host in hosts]
