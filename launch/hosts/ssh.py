"""SSH to the hosts through Fabric, with host keys checked against the inventory's own known_hosts.

Fabric accepts any host key unless it is given a policy; here an unknown or changed key is refused before any command
runs. Not for what uses OpenSSH (Ansible, rsync, jump hosts): openssh.py.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import getpass
import hashlib
import io
import logging
import os
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import paramiko
from fabric import Config, Connection
from fabric.runners import Remote
from invoke.exceptions import CommandTimedOut, ThreadException
from paramiko.hostkeys import InvalidHostKey

from keeper import engines
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import openssh
from launch.hosts.inventory import Target

DEAD_LINK_SECONDS = 15  # a host that has not answered for so long is gone
LOOK_SECONDS, LOOK_SECONDS_PER_THREAD = 0.01, 1e-4  # between two looks of a thread that waits for a command
ASK_SECONDS = 5  # between two questions whether it is still there

# Paramiko's threads log their tracebacks, which Python prints where nobody listens. What they say is raised as well.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

T = TypeVar("T")
U = TypeVar("U")


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        raise UnknownHostKey(fingerprint(key))


class UnknownHostKey(paramiko.SSHException):
    """The host's key is not in known_hosts; args[0] is its fingerprint."""


class Unreachable(Exception):
    """A host that cannot be used over SSH; carries the problem to show."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class Dropped(Unreachable):
    """An sshd that hung up before anybody could log in: it may let the next one in."""


def fingerprint(key: paramiko.PKey) -> str:
    """The SHA-256 fingerprint of a key, as ssh-keygen prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def patiently(login: Callable[[], T]) -> T:
    """login(), again where the host's sshd has dropped it, for about openssh.CONNECT_SECONDS at most."""
    latest = time.monotonic() + openssh.CONNECT_SECONDS
    for pause in openssh.pauses():
        try:
            return login()
        except Dropped:
            if time.monotonic() + pause > latest:
                raise
            time.sleep(pause)
    return login()


def connect(target: Target, known_hosts: Path) -> Connection:
    """An open connection to a host. Raises Unreachable, saying what to do, for each way in which a login can fail."""
    return patiently(lambda: _connect(target, known_hosts))


def _connect(target: Target, known_hosts: Path) -> Connection:
    # The user's ~/.ssh/config is loaded by Fabric, so host aliases work as they do for ssh and Ansible.
    connection = Connection(
        target.address,
        user=target.user,
        port=target.port,
        gateway=False,  # jump hosts are OpenSSH's work: Fabric would accept any key that one of them shows
        config=Config(overrides={"load_ssh_configs": True, "runners": {"remote": _Runner}}),
        connect_timeout=openssh.CONNECT_SECONDS,
        connect_kwargs={
            "banner_timeout": openssh.CONNECT_SECONDS,
            "auth_timeout": openssh.CONNECT_SECONDS,
            "channel_timeout": openssh.CONNECT_SECONDS,  # Paramiko's hour comes before a command's own limit
            "look_for_keys": target.key_file is None,
            **({"key_filename": target.key_file} if target.key_file else {}),
        },
    )
    client = connection.client
    client.set_missing_host_key_policy(_RefuseUnknown())
    where = f"host {target.name} ({connection.user}@{target.address}:{connection.port})"
    proxy, begun = None, time.monotonic()
    try:
        if known_hosts.exists():
            client.load_host_keys(str(known_hosts))
        with openssh.login_slot(target):
            if words := openssh.proxy_words(target, connection.host, known_hosts):
                connection.connect_kwargs["sock"] = proxy = _ProxySocket(words)
            begun = time.monotonic()
            connection.open()
    except Exception as error:
        transport, in_time = client.get_transport(), time.monotonic() - begun < openssh.CONNECT_SECONDS
        hung_up = in_time and transport is not None and not transport.remote_version
        connection.close()
        proxy_said = proxy.last_words() if proxy else ""
        if openssh.dropped(proxy_said) or (hung_up and not proxy_said):
            raise Dropped(_dropped(where, proxy_said)) from error
        problem = _why_not(where, error, known_hosts, proxy_said)
        if problem is None:
            raise
        raise Unreachable(problem) from error
    _notice_dead_link(connection.transport)
    return connection


class _Runner(Remote):
    """Fabric's, whose threads look around less often the more there are: at 100 times a second those of 256 commands
    keep a processor busy."""

    @property
    def input_sleep(self) -> float:
        """Seconds between two looks of a thread."""
        return max(LOOK_SECONDS, LOOK_SECONDS_PER_THREAD * threading.active_count())

    @input_sleep.setter
    def input_sleep(self, seconds: float) -> None:
        """Fabric sets what it would be."""


class _ProxySocket(socket.socket):
    """A socket to a program that passes everything on to a host's sshd; the program ends when the socket is closed.

    Paramiko's own ProxyCommand does not notice the end of its program, and Ctrl-C at the terminal ends the program.
    """

    def __init__(self, words: Sequence[str]) -> None:
        ours, programs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115
        with programs:
            self._process = subprocess.Popen(
                words, stdin=programs.fileno(), stdout=programs.fileno(), stderr=self._messages, start_new_session=True
            )

    def close(self) -> None:
        super().close()
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """What the program printed until its end, which is awaited for a second; closes the socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self.close()
        self._messages.seek(0)
        return openssh.reason(self._messages.read().decode(errors="replace"))


def _notice_dead_link(transport: paramiko.Transport) -> None:
    """Close a connection whose host has not answered for DEAD_LINK_SECONDS.

    Without it a host that lost power shows after TCP's quarter of an hour, and behind a jump host not even then.
    """
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):  # the connection ended just now
            while transport.is_active():
                transport.global_request("keepalive@openssh.com")  # returns with the answer, or at the connection's end
                answered.set()
                time.sleep(ASK_SECONDS)

    def wait() -> None:
        # In short waits, so that a process that was stopped (Ctrl-Z) still reads the answer that has come meanwhile.
        while any(answered.wait(1) for _ in range(DEAD_LINK_SECONDS)) and transport.is_active():
            answered.clear()
        transport.close()

    for work in (ask, wait):
        threading.Thread(target=work, daemon=True, name=f"muster-{work.__name__}").start()


def _why_not(where: str, error: Exception, known_hosts: Path, proxy_said: str) -> Problem | None:
    if isinstance(error, UnknownHostKey):
        what = f"its host key {error.args[0]} is not in {known_hosts}"
        return Problem(where, what, "run `make trust`, and compare the fingerprint with the host's own")
    if isinstance(error, paramiko.BadHostKeyException):
        old, new = fingerprint(error.expected_key), fingerprint(error.key)
        what = f"its host key has CHANGED: {known_hosts} has {old}, the host shows {new}"
        return Problem(where, what, "if the host was reinstalled, run `make trust`; if not, find out who answers")
    if isinstance(error, InvalidHostKey):
        what = f"no host key: `{error.line.strip()[:60]}`"
        return Problem(str(known_hosts), what, "remove that line, then `make trust`")
    if isinstance(error, paramiko.PasswordRequiredException):
        return Problem(where, "its SSH key has a passphrase", "load it into ssh-agent with `ssh-add`")
    if isinstance(error, paramiko.AuthenticationException):
        fix = "check ansible_user and ansible_ssh_private_key_file, or `ssh-copy-id` the key to the host"
        return Problem(where, f"login refused: {error}", fix)
    if proxy_said:
        return jump_problem(where, proxy_said)
    if isinstance(error, (OSError, EOFError, paramiko.SSHException)):
        reason = str(error).removeprefix("[Errno None] ") or type(error).__name__
        fix = "check that the host is up, its address and port, and that sshd runs"
        return Problem(where, f"no SSH connection: {reason}", fix)
    return None


def _dropped(where: str, said: str) -> Problem:
    way = f" on the way through its jump host: {said}" if said else ""
    return Problem(where, f"no SSH connection: sshd hung up before the login, each time{way}", openssh.DROPPED_FIX)


def jump_problem(where: str, said: str) -> Problem:
    """A connection that failed on its way through jump hosts; `said`: ssh's own words, which name the jump host."""
    what = f"no SSH connection through its jump host: {said}"
    if "Host key verification failed" in said:
        return Problem(where, what, "run `make trust`, which shows the jump host's key too")
    fix = "check that `ssh` logs in to the jump host without a question (its key in ssh-agent or ~/.ssh/config), "
    return Problem(where, what, fix + "and that the host is up and its address and port are right")


#: sshd sets XDG_RUNTIME_DIR only where systemd's PAM module is in use.
_UNSHARE = f'export XDG_RUNTIME_DIR="/run/user/$(id -u)" {engines.ROOTLESS}=yes; exec podman unshare "$@"'


def sudo_prefix(target: Target) -> str:
    """What to put before a command that needs root. Never asks: with no password a refusal comes at once.

    Without root that is the user namespace of the user's Podman: there that user is root, as far as what the user's
    containers have, and are, is concerned. See `is_rootless` of keeper/engines.py.
    """
    if target.rootless:
        return f"sh -c {shlex.quote(_UNSHARE)} sh "
    if target.user == "root":
        return ""
    return "sudo -S -p '' " if target.sudo_password else "sudo -n "


class Input:
    """What a command reads from its standard input. Fabric polls `read`.

    ends: after these pieces; else more may be sent while the command runs, until `end`.
    """

    def __init__(self, *pieces: str, ends: bool = True) -> None:
        self._pieces = collections.deque([*pieces, ""] if ends else pieces)

    def send(self, text: str) -> None:
        """Send another piece."""
        self._pieces.append(text)

    def end(self) -> None:
        """Let the command's standard input end."""
        self._pieces.append("")

    def first(self, text: str) -> None:
        """Send a piece before all others."""
        self._pieces.appendleft(text)

    def read(self, _: int) -> str | None:
        """The next piece; None where there is none yet, "" at the end."""
        return self._pieces.popleft() if self._pieces else None


class LineSink(io.TextIOBase):
    """Where a command's output goes: hands on whole lines."""

    def __init__(self, hand_on: Callable[[str], None]) -> None:
        self._hand_on = hand_on
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._hand_on(line.rstrip("\r"))
        return len(text)


def run(
    connection: Connection,
    command: str,
    timeout: float | None,
    root_on: Target | None = None,
    stdin: Input | None = None,
    out: Any = None,
) -> Any:
    """Run a command and return Fabric's result (exited, stdout, stderr); as root when `root_on` says how.

    Where sudo needs a password, that is the first line of standard input; sudo leaves it to the command if it turns out
    not to ask. Raises TimeoutError after `timeout` seconds (None: there is no limit).
    """
    if root_on is not None:
        command = f"{sudo_prefix(root_on)}sh -c {shlex.quote(command)}"
        if root_on.sudo_password:
            stdin = stdin or Input()
            stdin.first(f"{root_on.sudo_password}\n")
    options: dict[str, Any] = {"hide": True} if out is None else {"out_stream": out}
    try:
        return connection.run(command, warn=True, timeout=timeout, in_stream=stdin or False, **options)
    except CommandTimedOut:
        raise TimeoutError(f"{connection.host}: no answer within {timeout:g} s from `{command[:100]}`") from None
    except ThreadException as error:  # the connection dropped while standard input was sent
        raise error.exceptions[0].value from None


def in_parallel(work: Callable[[T], U], items: Iterable[T]) -> list[U | BaseException]:
    """work(item) for all items at once; a raised exception stands in the result's place."""
    listed = list(items)

    def attempt(item: T) -> U | BaseException:
        try:
            return work(item)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max_workers=max(1, len(listed))) as pool:
        return list(pool.map(attempt, listed))


def refuse_unreachable(results: Sequence[Any]) -> None:
    """Raises one Refusal (UNREACHABLE) for all hosts that could not be reached; other exceptions as they are."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Unreachable):
            raise result
    problems = [result.problem for result in results if isinstance(result, Unreachable)]
    if problems:
        raise Refusal(problems, exits.UNREACHABLE)


@contextlib.contextmanager
def connections(targets: Sequence[Target], known_hosts: Path) -> Iterator[list[Connection]]:
    """Open connections to all targets, closed at the end. Raises Refusal, naming every host that cannot be reached."""
    results = in_parallel(lambda target: connect(target, known_hosts), targets)
    opened = [result for result in results if isinstance(result, Connection)]
    try:
        refuse_unreachable(results)
        yield opened
    finally:
        for connection in opened:
            connection.close()


def local_user() -> str:
    """user@machine, for labels: who started a run."""
    return f"{os.environ.get('SUDO_USER') or getpass.getuser()}@{socket.gethostname()}"
