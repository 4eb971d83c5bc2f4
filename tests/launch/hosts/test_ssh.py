"""Promise: all that uses SSH agrees on port, jump hosts and host keys, and a host that is gone is noticed.

Real clients (OpenSSH, rsync, Fabric) against servers on loopback.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import paramiko
import pytest
from fabric import Connection

from launch.cli import exits
from launch.cli.refusal import Refusal
from launch.hosts import inventory, openssh, preflight, ssh, trust
from launch.hosts.inventory import Target
from tests.launch.hosts.sshd import Sshd, user_key

TRIES = len(openssh.PAUSES_SECONDS) + 1  # to log in where sshd hangs up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a space in its path, as an inventory's may be."""
    made = tmp_path / "my cluster"
    made.mkdir()
    return made


@pytest.fixture
def servers() -> Iterator[tuple[Sshd, Sshd]]:
    """A jump host and a host."""
    made = Sshd(open_to_all=True), Sshd()
    yield made
    for server in made:
        server.close()


def target(folder: Path, server: Sshd, jump: str | None = None, proxy_command: str | None = None) -> Target:
    key = str(user_key(folder))
    return Target("h1", "127.0.0.1", server.port, "me", key, jump=jump, proxy_command=proxy_command)


def trusted(folder: Path, *servers: Sshd) -> Path:
    path = folder / "known_hosts"
    path.write_text("".join(server.known_hosts_line for server in servers))
    return path


RELAY = """
import socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def back():
    while data := there.recv(65536):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
threading.Thread(target=back, daemon=True).start()
while data := sys.stdin.buffer.raw.read(65536):
    there.sendall(data)
"""


@pytest.fixture
def relay(tmp_path: Path) -> str:
    """A ProxyCommand."""
    (tmp_path / "relay.py").write_text(RELAY)
    return f"{sys.executable} {tmp_path}/relay.py %p"


def status_of_one_that_begins(connection: Connection, act: Callable[[], None]) -> int:
    """Runs a command that says that it has begun and then nothing more; acts at its word. Returns its exit status."""
    out = ssh.LineSink(lambda _begun: act())
    return int(ssh.run(connection, "echo begun; sleep 500", None, out=out).exited)


@pytest.mark.slow
def test_a_host_that_is_gone_behind_a_proxy_is_noticed(
    folder: Path, servers: tuple[Sshd, Sshd], relay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough, stopped, answers = folder / "enough", threading.Event(), list[bool]()

    class Answered(threading.Event):
        """An answer to the question whether the host is there; it may take its time until the relay is stopped."""

        def wait(self, timeout: float | None = None) -> bool:
            while not (came := super().wait(timeout)) and not stopped.is_set():
                pass
            if came:
                answers.append(came)
            if len(answers) > 2 * ssh.DEAD_LINK_SECONDS:
                enough.touch()
            return came

    monkeypatch.setattr(ssh, "threading", SimpleNamespace(**vars(threading) | {"Event": Answered}))
    monkeypatch.setattr(ssh, "DEAD_LINK_SECONDS", 3)
    monkeypatch.setattr(ssh, "ASK_SECONDS", 0.1)
    host = servers[1]
    connection = ssh.connect(target(folder, host, proxy_command=relay), trusted(folder, host))
    process = connection.transport.sock._process

    def stop_relay() -> None:
        process.send_signal(signal.SIGSTOP)
        stopped.set()

    try:
        # A silent host is not a dead one.
        silent = f"while [ ! -e '{enough}' ]; do sleep 0.05; done; echo alive"
        assert ssh.run(connection, silent, 300).stdout == "alive\n"
        # A stopped relay is what a host without power looks like: the connection stands, and nothing comes.
        assert status_of_one_that_begins(connection, stop_relay) == -1
        assert process.wait(300) == -signal.SIGKILL
        with pytest.raises(paramiko.SSHException):
            connection.transport.open_session()
    finally:
        connection.close()


def test_a_session_that_a_host_does_not_open_is_not_waited_for_without_end(
    folder: Path, servers: tuple[Sshd, Sshd]
) -> None:
    connection = ssh.connect(target(folder, servers[1]), trusted(folder, servers[1]))
    assert connection.transport.channel_timeout == openssh.CONNECT_SECONDS
    connection.close()


def test_a_proxy_that_ends_takes_its_connection_along(folder: Path, servers: tuple[Sshd, Sshd], relay: str) -> None:
    connection = ssh.connect(target(folder, servers[1], proxy_command=relay), trusted(folder, servers[1]))
    kill = connection.transport.sock._process.kill
    assert status_of_one_that_begins(connection, kill) == -1
    connection.close()


def test_a_host_that_dies_while_it_answers_is_unreachable_and_does_not_lack_python(
    folder: Path, servers: tuple[Sshd, Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = servers[1]
    begun = folder / "begun"
    monkeypatch.setattr(preflight, "_SCRIPT", f"touch '{begun}'; sleep 500")

    def close_host() -> None:
        while not begun.exists():
            time.sleep(0.01)
        host.close()

    threading.Thread(target=close_host, daemon=True).start()
    lost = pytest.raises(Refusal, match="the SSH connection was lost")
    with lost as caught, preflight.checked([target(folder, host)], trusted(folder, host)):
        pytest.fail("it was let in")
    assert caught.value.status == exits.UNREACHABLE


@pytest.mark.slow
def test_through_a_jump_host_every_client_checks_both_keys(
    folder: Path, servers: tuple[Sshd, Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssh, "PAUSES_SECONDS", ())
    jump, host = servers
    behind = target(folder, host, jump=f"anyone@127.0.0.1:{jump.port}")
    lines = trust.collect_keys(behind)
    assert [f"{line}\n" for line in lines] == [jump.known_hosts_line, host.known_hosts_line]
    known_hosts = folder / "known_hosts"

    def fabric() -> str:
        connection = ssh.connect(behind, known_hosts)
        try:
            return str(ssh.run(connection, "echo hello", 30).stdout)
        finally:
            connection.close()

    def rsync() -> subprocess.CompletedProcess[str]:
        (folder / "sent").write_text("hello\n")
        words = ["rsync", "-e", openssh.rsync_shell(behind, known_hosts)]
        words += [openssh.rsync_source(behind, f"{folder}/sent"), str(folder / "came")]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)

    known_hosts.write_text("".join(f"{line}\n" for line in lines))
    assert fabric() == "hello\n"
    done = rsync()
    assert done.returncode == 0, done.stderr
    assert (folder / "came").read_text() == "hello\n"
    for only, missing in ((host, jump), (jump, host)):
        trusted(folder, only)
        with pytest.raises(ssh.Unreachable) as refused:
            fabric()
        assert "make trust" in refused.value.problem.fix
        assert missing is host or f"[127.0.0.1]:{jump.port}" in refused.value.problem.what
        assert "Host key verification failed" in rsync().stderr


def test_several_jump_hosts_are_passed_in_their_order(folder: Path, servers: tuple[Sshd, Sshd]) -> None:
    first, host = servers
    second = Sshd(open_to_all=True)
    hops = f"a@127.0.0.1:{first.port},b@127.0.0.1:{second.port}"
    behind = target(folder, host, jump=hops)
    lines = trust.collect_keys(behind)
    assert [f"{line}\n" for line in lines] == [server.known_hosts_line for server in (first, second, host)]
    connection = ssh.connect(behind, trusted(folder, first, second, host))
    assert ssh.run(connection, "echo hello", 30).stdout == "hello\n"
    connection.close()
    second.close()


def test_a_jump_host_that_refuses_is_the_one_that_is_blamed(folder: Path, servers: tuple[Sshd, Sshd]) -> None:
    _, host = servers
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    behind = target(folder, host, jump=f"127.0.0.1:{free}")
    for attempt in (lambda: trust.collect_keys(behind), lambda: ssh.connect(behind, folder / "known_hosts")):
        with pytest.raises(ssh.Unreachable, match=rf"jump host: .*port {free}: Connection refused"):
            attempt()


@pytest.mark.slow
@pytest.mark.parametrize("through", [False, True])
def test_a_login_that_sshd_drops_is_tried_again_and_then_explained(
    folder: Path, servers: tuple[Sshd, Sshd], through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openssh, "PAUSES_SECONDS", (0.01,) * (TRIES - 1))
    jump, host = servers
    wanted = target(folder, host, jump=f"anyone@127.0.0.1:{jump.port}" if through else None)
    known_hosts = trusted(folder, *servers)
    dropping = jump if through else host

    def both() -> Iterator[Callable[[], object]]:
        yield lambda: ssh.connect(wanted, known_hosts).close()
        yield lambda: ssh.patiently(lambda: trust.collect_keys(wanted))

    for attempt in both():
        dropping.drops = TRIES - 1
        attempt()
        assert dropping.drops == 0
        dropping.drops = TRIES
        with pytest.raises(ssh.Unreachable, match="sshd hung up before") as refused:
            attempt()
        assert dropping.drops == 0 and "MaxStartups" in refused.value.problem.fix


def test_a_host_whose_sshd_says_nothing_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssh, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0)
        silent_host = Target("h1", "127.0.0.1", silent.getsockname()[1], "me", str(user_key(folder)))
        with pytest.raises(ssh.Unreachable, match="no SSH connection") as refused:
            ssh.connect(silent_host, folder / "known_hosts")
        assert "MaxStartups" not in refused.value.problem.fix
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_few_logins_at_once_pass_through_a_jump_host(folder: Path, servers: tuple[Sshd, Sshd]) -> None:
    jump, host = servers
    behind = target(folder, host, jump=f"anyone@127.0.0.1:{jump.port}")
    with ssh.connections([behind] * 12, trusted(folder, jump, host)) as opened:
        assert len(opened) == 12
    assert 0 < jump.most_logins <= openssh.LOGINS_AT_ONCE


def test_jump_hosts_have_their_own_rows_and_a_host_of_the_inventory_keeps_its_name() -> None:
    bastion, other, one, two = (f"10.0.0.{n} ssh-ed25519 AAAA{n}" for n in range(4))
    offered = trust.name_keys({"h1": [bastion, one], "h2": [bastion, one, two], "h3": [other]})
    assert offered == {"10.0.0.0 (jump host)": bastion, "h1": one, "h2": two, "h3": other}


@pytest.mark.parametrize(
    ("arguments", "jump", "proxy_command"),
    [
        ("", None, None),
        ("-o ForwardAgent=yes", None, None),
        ("-J user@bastion", "user@bastion", None),
        ("-Jbastion", "bastion", None),
        ("-J user@bastion:2222", "user@bastion:2222", None),
        ("-J user@10.0.0.1:2222", "user@[10.0.0.1]:2222", None),
        ("-J a@one:22,two", "a@one:22,two", None),
        ("-o ProxyJump=bastion", "bastion", None),
        ("-oProxyJump=bastion", "bastion", None),
        ("-o 'ProxyJump bastion'", "bastion", None),
        ("-o ProxyCommand='nc %h %p'", None, "nc %h %p"),
    ],
)
def test_jump_hosts_are_what_openssh_takes_them_for(
    arguments: str, jump: str | None, proxy_command: str | None
) -> None:
    found = inventory.openssh_settings("192.0.2.1", None, None, arguments)
    assert (found.get("proxyjump"), found.get("proxycommand")) == (jump, proxy_command)


@pytest.mark.slow
def test_the_port_of_the_users_ssh_configuration_is_everybodys(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host 192.0.2.1\n  Port 2222\n  User somebody\n  ProxyJump bastion\n")
    text = "all: {{hosts: {{a: {{ansible_host: 192.0.2.1, ansible_ssh_common_args: -F {}/config{}}}}}}}\n"
    path = tmp_path / "hosts.yml"
    path.write_text(text.format(tmp_path, ""))
    found = inventory.read(path).hosts[0].target
    assert (found.port, found.user, found.jump) == (2222, "somebody", "bastion")
    assert " -p 2222 " in openssh.rsync_shell(found, tmp_path / "known_hosts")
    path.write_text(text.format(tmp_path, ", ansible_port: 22, ansible_user: me"))
    found = inventory.read(path).hosts[0].target
    assert (found.port, found.user) == (22, "me")


def test_no_option_holds_the_path_of_the_inventory(folder: Path) -> None:
    options = openssh.options(folder / "known_hosts")
    assert not [word for word in options if re.search(r"\s", word)]
    for given in (options, options[:2]):  # with the file alone too: a jump host's ssh gets no more
        said = subprocess.run(
            ["ssh", *given, "-o", "UserKnownHostsFile=/elsewhere", "-G", "h1"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if given is options:
            named = re.findall(r"^userknownhostsfile (.+)$", said, re.MULTILINE)
            assert [os.path.realpath(path) for path in named] == [str(folder / "known_hosts")]
        assert "\nstricthostkeychecking true\n" in said and "\nbatchmode yes\n" in said


@pytest.mark.slow
def test_paramiko_prints_no_traceback_of_its_own(tmp_path: Path) -> None:
    script = """
import socket, threading, sys
from pathlib import Path
from launch.hosts import openssh, ssh
from launch.hosts.inventory import Target
openssh.PAUSES_SECONDS = ()
server = socket.create_server(("127.0.0.1", 0))
def hang_up():
    while True:
        server.accept()[0].close()
threading.Thread(target=hang_up, daemon=True).start()
try:
    ssh.connect(Target("h1", "127.0.0.1", server.getsockname()[1], "me"), Path("known_hosts"))
except ssh.Unreachable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith("  host h1 ") and done.stderr == ""
