"""A way to package mirrors for hosts that have none (`airgap: true`): this machine fetches for them.

The host's package manager finds an HTTP proxy on its loopback address; sshd there hands each connection on to this
machine, over the connection that a deploy has to the host anyway. Nothing listens here, and nobody on the host who does
not know a word that is new each time is served.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import secrets
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler
from typing import IO, Any

from containers.base import opener_proxies
from launch.cli import exits
from launch.cli.refusal import Problem, Refusal
from launch.hosts import ssh
from launch.hosts.connection import LINK_ERRORS, Machine

#: What a run of Ansible finds the proxies in: {host: URL} as JSON. playbooks/roles/engine/defaults/main.yml reads it.
VARIABLE = "MUSTER_PACKAGE_PROXIES"
USER = "muster"
ORIGIN_SECONDS = 60.0  # for a mirror to answer, or to go on
UNASKED_SECONDS = 300.0  # for a connection of the host on which nothing is asked
PASSED_ON = ("Accept", "User-Agent", "Range", "If-Range", "If-Modified-Since", "Cache-Control")
PASSED_BACK = ("Content-Type", "Content-Length", "Content-Range", "Last-Modified", "ETag", "Location", "Accept-Ranges")
RELAY_BYTES = 65536


@contextlib.contextmanager
def for_hosts(machines: Sequence[Machine]) -> Iterator[dict[str, str]]:
    """What to add to Ansible's environment, so that these hosts' package managers use this machine.

    Raises Refusal where sshd does not forward.
    """
    with ExitStack() as opened:

        def one(machine: Machine) -> str:
            word = secrets.token_hex(16)
            port = opened.enter_context(machine.listening_there(lambda channel: serve(channel, word)))
            return f"http://{USER}:{word}@127.0.0.1:{port}"

        urls = ssh.in_parallel(one, machines)
        failed = [(machine.name, url) for machine, url in zip(machines, urls, strict=True) if not isinstance(url, str)]
        if failed:
            fix = "allow it (AllowTcpForwarding in sshd_config there), or install by hand what it lacks"
            problems = [
                Problem(f"host {name}", f"its sshd passes nothing on for airgap: {why}", fix) for name, why in failed
            ]
            raise Refusal(problems, exits.DEPLOY_FAILED)
        named = {machine.name: url for machine, url in zip(machines, urls, strict=True)}
        yield {VARIABLE: json.dumps(named)} if named else {}


@contextlib.contextmanager
def environment(machine: Machine, settings: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The proxy of a host for what is fetched there by other programs than its package manager, as variables of their
    environment. settings: of the host. Raises Refusal as for_hosts does."""
    with for_hosts([machine] if settings.get("airgap") else []) as more:
        url = json.loads(more[VARIABLE])[machine.name] if more else settings.get("package_proxy", "")
        yield {"http_proxy": url, "https_proxy": url} if url else {}


def serve(connection: Any, word: str) -> None:
    """Answer one connection as an HTTP proxy, to its end. connection: a socket or what is like one."""

    class Proxy(_Proxy):
        expected = "Basic " + base64.b64encode(f"{USER}:{word}".encode()).decode()

    with contextlib.suppress(*LINK_ERRORS, ValueError), contextlib.closing(connection):
        connection.settimeout(UNASKED_SECONDS)
        Proxy(connection, ("", 0), None)  # type: ignore[arg-type]


class _SameAnswer(urllib.request.HTTPErrorProcessor, urllib.request.HTTPRedirectHandler):
    """Redirects and errors are the host's to see."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class _Proxy(BaseHTTPRequestHandler):
    """GET and HEAD of http://..., and CONNECT for mirrors with TLS."""

    protocol_version = "HTTP/1.1"
    expected = ""

    def do_GET(self) -> None:
        if self._is_known():
            self._fetch()

    do_HEAD = do_GET

    def do_CONNECT(self) -> None:
        if not self._is_known():
            return
        self.close_connection = True
        host, _, port = self.path.rpartition(":")
        try:
            origin = socket.create_connection((host.strip("[]"), int(port)), ORIGIN_SECONDS)
        except (OSError, ValueError) as error:
            self.send_error(502, f"{self.path} cannot be reached from the control machine: {error}")
            return
        with origin:
            self.send_response(200)
            self.end_headers()
            _relay(self.connection, origin)

    def _is_known(self) -> bool:
        if hmac.compare_digest(self.headers.get("Proxy-Authorization", ""), self.expected):
            return True
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="muster"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def _fetch(self) -> None:
        headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        if not self.path.startswith("http://"):
            self.send_error(400, "only http:// here; https:// is asked for with CONNECT")
            return
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler(opener_proxies()), _SameAnswer)
            request = urllib.request.Request(self.path, headers=headers, method=self.command)
            answer = opener.open(request, timeout=ORIGIN_SECONDS)
        except (OSError, ValueError) as error:
            self.send_error(502, f"{self.path} cannot be fetched by the control machine: {error}")
            return
        with answer:
            self.send_response(answer.status)
            for name in PASSED_BACK:
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            if "Content-Length" not in answer.headers:  # its end is that of the connection
                self.close_connection = True
                self.send_header("Connection", "close")
            self.end_headers()
            if self.command == "GET":
                shutil.copyfileobj(answer, self.wfile, RELAY_BYTES)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def _relay(first: Any, second: socket.socket) -> None:
    """Pass bytes on both ways until one side ends."""

    def back() -> None:
        with contextlib.suppress(*LINK_ERRORS):
            while data := second.recv(RELAY_BYTES):
                first.sendall(data)
        with contextlib.suppress(*LINK_ERRORS):
            first.shutdown(socket.SHUT_WR)

    second.settimeout(UNASKED_SECONDS)
    thread = threading.Thread(target=back, daemon=True)
    thread.start()
    with contextlib.suppress(*LINK_ERRORS):
        while data := first.recv(RELAY_BYTES):
            second.sendall(data)
        second.shutdown(socket.SHUT_WR)
    thread.join(UNASKED_SECONDS)
