"""One host over one SSH connection. Not for what is done there: see launch.job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import paramiko
from fabric import Connection

from launch.files import ROOT
from launch.hosts import openssh, ssh
from launch.hosts.clustermap import ClusterMap, MapHost, to_target
from launch.hosts.inventory import Target, read

#: What is raised where a connection breaks, or none can be had.
LINK_ERRORS = (OSError, EOFError, paramiko.SSHException, ssh.Unreachable)
ANSWER_SECONDS = 30
LINK_SECONDS = 60  # how long a host whose SSH connection dropped may take to be reached again


def last_words(done: Any) -> str:
    """The last line that a command printed (Fabric's result), or its exit status where it printed none."""
    return ((done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.exited} without a word"])[-1]


class Machine:
    """A host of the inventory over one SSH connection."""

    def __init__(self, target: Target, known_hosts: Path, connection: Connection) -> None:
        self.target = target
        self.name = target.name
        self.known_hosts = known_hosts
        self._connection = connection

    def root(
        self, command: str, timeout: float | None = ANSWER_SECONDS, out: Any = None, stdin: ssh.Input | None = None
    ) -> Any:
        """Run a shell command as root; returns Fabric's result. Raises TimeoutError after `timeout` seconds, if any."""
        return ssh.run(self._connection, command, timeout, root_on=self.target, stdin=stdin, out=out)

    def user(self, command: str, timeout: float, stdin: ssh.Input | None = None) -> Any:
        """The same as the user who logs in."""
        return ssh.run(self._connection, command, timeout, stdin=stdin)

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

    @contextmanager
    def listening_there(self, answer: Callable[[paramiko.Channel], None]) -> Iterator[int]:
        """Have the host's sshd listen on a free port of its loopback address, which is yielded; each connection to it
        is answered here, in a thread of its own. Raises paramiko.SSHException where it may not."""
        transport: paramiko.Transport = self._connection.transport

        def begin(channel: paramiko.Channel, _origin: object, _server: object) -> None:
            threading.Thread(target=answer, args=(channel,), daemon=True).start()

        port = transport.request_port_forward("127.0.0.1", 0, begin)
        try:
            yield port
        finally:
            with suppress(*LINK_ERRORS):
                transport.cancel_port_forward("127.0.0.1", port)

    def reconnect(self) -> None:
        """Take a new connection in the place of one that broke. Raises ssh.Unreachable; the old one stays then."""
        new = ssh.connect(self.target, self.known_hosts)
        self.close()
        self._connection = new

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def revive(machines: Sequence[Machine]) -> None:
    """Connect anew to hosts whose connections have broken while nothing came over them. Raises Refusal, naming all that
    cannot be reached."""

    def one(machine: Machine) -> None:
        try:
            machine.user("true", ANSWER_SECONDS)
        except LINK_ERRORS:
            machine.reconnect()

    ssh.refuse_unreachable(ssh.in_parallel(one, machines))


@contextmanager
def connected(targets: Sequence[Target], known_hosts: Path) -> Iterator[list[Machine]]:
    """Machines over `ssh.connections`."""
    with ssh.connections(targets, known_hosts) as opened:
        made = [Machine(target, known_hosts, c) for target, c in zip(targets, opened, strict=True)]
        try:
            yield made
        finally:
            for machine in made:
                machine.close()


def machines(cluster: ClusterMap, hosts: Sequence[MapHost]) -> AbstractContextManager[list[Machine]]:
    """Connections to the given hosts of a cluster map, as `connected` makes them."""
    return connected(targets_of(cluster, hosts), ROOT / cluster.known_hosts)


def targets_of(cluster: ClusterMap, hosts: Sequence[MapHost]) -> list[Target]:
    """How to reach the hosts. A sudo password is not in the map: it is read from the inventory when one is needed."""
    passwords: dict[str, str | None] = {}
    if any(host.ssh["needs_sudo_password"] for host in hosts):
        passwords = {host.name: host.target.sudo_password for host in read(ROOT / cluster.inventory).hosts}
    return [to_target(host, passwords.get(host.name)) for host in hosts]
