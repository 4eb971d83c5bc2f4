"""Promises: a host that reaches no mirror gets what its package manager asks for through this machine, unchanged, and
nobody on it who does not know the word gets anything."""

from __future__ import annotations

import base64
import http.client
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from launch.deploy import package_proxy

CONTENT = bytes(range(256)) * 5000


class Mirror(http.server.BaseHTTPRequestHandler):
    """Has /package, sends /moved elsewhere, and has nothing else; knows ranges, as apt asks for them."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/package")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/package":
            begin = int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(CONTENT) - begin))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(CONTENT[begin:])
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CONTENT)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """127.0.0.1:port"""
    monkeypatch.setattr(package_proxy, "opener_proxies", dict)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class Host:
    """One connection of a host's package manager."""

    def __init__(self, word: str = "word") -> None:
        near, far = socket.socketpair()
        threading.Thread(target=package_proxy.serve, args=(far, "word"), daemon=True).start()
        near.settimeout(30)
        self.connection = http.client.HTTPConnection("proxy", timeout=30)
        self.connection.sock = near
        self.known = {"Proxy-Authorization": "Basic " + base64.b64encode(f"muster:{word}".encode()).decode()}

    def ask(self, url: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
        self.connection.request(method, url, headers={**self.known, **headers})
        answer = self.connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def test_what_the_mirror_has_comes_unchanged_one_after_another_over_one_connection(mirror: str) -> None:
    host = Host()
    assert host.ask(f"http://{mirror}/package")[:2] == (200, CONTENT)
    assert host.ask(f"http://{mirror}/package", Range="bytes=1000-")[:2] == (206, CONTENT[1000:])
    status, body, headers = host.ask(f"http://{mirror}/package", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(CONTENT)))
    assert host.ask(f"http://{mirror}/absent")[0] == 404
    status, _, headers = host.ask(f"http://{mirror}/moved")
    assert (status, headers["Location"]) == (302, "/package")  # the host's to follow
    assert host.ask(f"http://{mirror}/endless")[:2] == (200, CONTENT)


def test_a_mirror_with_tls_is_passed_through(mirror: str) -> None:
    host = Host()
    known = host.known["Proxy-Authorization"]
    tunnel = host.connection.sock
    tunnel.sendall(f"CONNECT {mirror} HTTP/1.1\r\nProxy-Authorization: {known}\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        answer += tunnel.recv(1)
    assert answer.startswith(b"HTTP/1.1 200")
    tunnel.sendall(b"GET /package HTTP/1.0\r\n\r\n")
    received = b""
    while data := tunnel.recv(65536):
        received += data
    assert received.endswith(CONTENT)


@pytest.mark.parametrize("word", ["", "other"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "CONNECT"])
def test_who_does_not_know_the_word_gets_nothing(mirror: str, word: str, method: str) -> None:
    status, body, _ = Host(word).ask(mirror if method == "CONNECT" else f"http://{mirror}/package", method)
    assert (status, body) == (407, b"")


@pytest.mark.parametrize(("url", "status"), [("http://127.0.0.1:1/x", 502), ("/package", 400), ("ftp://x/y", 400)])
def test_what_cannot_be_fetched_is_an_answer_too(mirror: str, url: str, status: int) -> None:
    assert Host().ask(url)[0] == status
