"""An SSH server on loopback for tests: runs commands, and passes connections on as a jump host does. Needs no root."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    MSG_CHANNEL_SUCCESS,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
)


class Sshd:
    """A server with a host key of its own, at 127.0.0.1:port.

    open_to_all: log everybody in without a key; else any key will do.
    most_logins: how many logins were under way at once, at most. drops: on so many connections it hangs up first, as
    OpenSSH's does past MaxStartups.
    """

    def __init__(self, open_to_all: bool = False, drops: int = 0) -> None:
        self.key = paramiko.ECDSAKey.generate()
        self.open_to_all = open_to_all
        self.most_logins = 0
        self.drops = drops
        self._logins = 0
        self._lock = threading.Lock()
        self._transports: list[paramiko.Transport] = []
        self.programs: list[subprocess.Popen[bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()

    @property
    def known_hosts_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {self.key.get_name()} {self.key.get_base64()}\n"

    def close(self) -> None:
        # It has to leave accept() first: the number of a closed socket may be the next server's.
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._server.join()
        self._listener.close()
        for transport in self._transports:
            transport.close()
        for program in self.programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)

    def count_login(self, change: int) -> None:
        with self._lock:
            self._logins += change
            self.most_logins = max(self._logins, self.most_logins)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.drops:
                self.drops -= 1
                client.sendall(b"Exceeded MaxStartups\r\n")
                client.close()
                continue
            self.count_login(1)
            transport = paramiko.Transport(client)
            self._transports.append(transport)
            transport.add_server_key(self.key)
            session = _Session(self)
            session.answer_after_replies(transport)
            transport.start_server(threading.Event(), session)
            threading.Thread(target=session.pass_on, args=(transport,), daemon=True).start()


class _Session(paramiko.ServerInterface):
    def __init__(self, server: Sshd) -> None:
        self.server = server
        self.onward: dict[int, socket.socket] = {}
        self.waiting: list[threading.Thread] = []  # for the reply to the request that they answer

    def answer_after_replies(self, transport: paramiko.Transport) -> None:
        """Start what waits once a request was replied to: a client takes a channel that closes before for refused."""
        send = transport._send_user_message  # type: ignore[attr-defined]

        def send_and_start(message: paramiko.Message) -> None:
            send(message)
            if message.asbytes()[0] == MSG_CHANNEL_SUCCESS:
                while self.waiting:
                    self.waiting.pop(0).start()

        transport._send_user_message = send_and_start  # type: ignore[attr-defined]

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_none(self, username: str) -> int:
        if not self.server.open_to_all:
            return AUTH_FAILED
        self.server.count_login(-1)
        return AUTH_SUCCESSFUL

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        program = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.server.programs.append(program)
        self.waiting += [
            threading.Thread(target=_copy, args=(channel.recv, program.stdin), daemon=True),
            threading.Thread(target=_answer, args=(program, channel), daemon=True),
        ]
        return True

    def check_channel_direct_tcpip_request(self, chanid: int, origin: Any, destination: Any) -> int:
        try:
            self.onward[chanid] = socket.create_connection(destination, timeout=10)
        except OSError:
            return OPEN_FAILED_CONNECT_FAILED
        self.onward[chanid].settimeout(None)
        return OPEN_SUCCEEDED

    def pass_on(self, transport: paramiko.Transport) -> None:
        """Connect every channel that a client opens to another server with that server."""
        while transport.is_active():
            channel = transport.accept(1)
            if channel is not None and channel.get_id() in self.onward:
                onward = self.onward[channel.get_id()]
                threading.Thread(target=_copy, args=(channel.recv, onward.makefile("wb", 0)), daemon=True).start()
                threading.Thread(target=_copy, args=(onward.recv, channel.makefile("wb", 0)), daemon=True).start()


def _copy(receive: Any, into: Any) -> None:
    with contextlib.suppress(OSError):  # the other end has gone
        while data := receive(65536):
            into.write(data)
        into.close()


def _answer(program: subprocess.Popen[bytes], channel: paramiko.Channel) -> None:
    assert program.stdout is not None
    with contextlib.suppress(OSError, EOFError):  # the client has gone
        while data := program.stdout.read(65536):
            channel.sendall(data)
        channel.send_exit_status(program.wait() % 256)
        channel.close()


def user_key(folder: Path) -> Path:
    """A fresh key to log in with."""
    path = folder / "id_test"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=300)
    return path
