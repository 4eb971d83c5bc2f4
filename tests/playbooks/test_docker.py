"""What Docker gets served while it pulls: the pool of blobs, by digest, to whoever knows the name; and complaints."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils import muster_docker
from ansible.module_utils.muster_host import Result

BLOB, MANIFEST = "ab" * 32, "cd" * 32


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    """127.0.0.1:port/repository"""
    (tmp_path / BLOB).write_bytes(b"x" * 3_000_000)
    (tmp_path / MANIFEST).write_text("{}")
    with muster_docker._served(tmp_path) as place:
        yield place


def ask(place: str, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    address, _, name = place.partition("/")
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request(method, path.format(name=name))
    answer = connection.getresponse()
    return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()


def test_blobs_and_manifests_are_served_whole(place: str) -> None:
    assert ask(place, "/v2/")[0] == 200
    status, headers, body = ask(place, f"/v2/{{name}}/blobs/sha256:{BLOB}")
    assert (status, body) == (200, b"x" * 3_000_000) and headers["content-length"] == "3000000"
    status, headers, body = ask(place, f"/v2/{{name}}/manifests/sha256:{MANIFEST}")
    assert (status, body) == (200, b"{}") and headers["content-type"] == muster_docker.MANIFEST_TYPE
    assert headers["docker-content-digest"] == f"sha256:{MANIFEST}"
    status, headers, body = ask(place, f"/v2/{{name}}/blobs/sha256:{BLOB}", "HEAD")
    assert (status, headers["content-length"], body) == (200, "3000000", b"")


@pytest.mark.parametrize(
    "path",
    [
        f"/v2/muster/another/blobs/sha256:{BLOB}",
        f"/v2/{{name}}/blobs/sha256:{'ef' * 32}",
        "/v2/{name}/blobs/sha256:../../../../etc/passwd",
        f"/v2/{{name}}/blobs/{BLOB}",
        "/v2/{name}/tags/list",
        "/",
    ],
)
def test_nothing_else_is_served(place: str, path: str) -> None:
    assert ask(place, path)[0] == 404


@pytest.mark.slow
def test_a_name_is_another_one_each_time(place: str, tmp_path: Path) -> None:
    with muster_docker._served(tmp_path) as other:
        assert other.partition("/")[2] != place.partition("/")[2]


def test_a_caller_that_tries_tls_first_is_answered_in_http(place: str) -> None:
    """Docker with containerd's image store goes on without TLS only after an answer that begins with HTTP/."""
    host, port = place.partition("/")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a hello\n")
        assert connection.recv(5) == b"HTTP/"


@pytest.mark.parametrize(
    ("answer", "said", "fix"),
    [
        (Result(0, json.dumps({"ServerErrors": ["Cannot connect to the daemon"]}), ""), "Cannot connect", "systemctl"),
        (Result(127, "", "docker: not installed"), "not installed", "systemctl"),
        (Result(0, '{"ServerVersion": "19.03.1", "Driver": "a", "DockerRootDir": "/", "DriverStatus": null}', ""),
         "19.03.1, and Muster needs 20.10", "newer Docker"),
    ],
)  # fmt: skip
def test_a_docker_that_cannot_be_used_says_why(
    answer: Result, said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster_docker, "run", lambda words: answer)
    complaint = muster_docker.complaint()
    assert said in complaint and fix in muster_docker.fix(complaint)


#: What `iptables-save -t filter` prints where Docker has been; the rule with eno1 is somebody's own.
FILTER = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
:DOCKER - [0:0]
:DOCKER-ISOLATION-STAGE-1 - [0:0]
:DOCKER-ISOLATION-STAGE-2 - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-ISOLATION-STAGE-1
-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -o docker0 -j DOCKER
-A FORWARD -i docker0 ! -o docker0 -j ACCEPT
-A FORWARD -i docker0 -o docker0 -j ACCEPT
-A FORWARD -i eno1 -o docker0 -j ACCEPT
-A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP
-A DOCKER-ISOLATION-STAGE-2 -j RETURN
-A DOCKER-USER -j RETURN
COMMIT
"""


def test_what_docker_has_left_in_the_firewall_goes_and_nothing_else() -> None:
    words = muster_docker.rules_to_remove(FILTER)
    deleted = [" ".join(one) for one in words if one[0] == "-D"]
    assert len(deleted) == 6 and "-D FORWARD -i eno1 -o docker0 -j ACCEPT" not in deleted
    chains = ["DOCKER", "DOCKER-ISOLATION-STAGE-1", "DOCKER-ISOLATION-STAGE-2", "DOCKER-USER"]
    assert words[6:] == [[word, chain] for word in ("-F", "-X") for chain in chains]


def test_a_chain_with_somebodys_rules_stays_with_the_jump_to_it() -> None:
    words = muster_docker.rules_to_remove(FILTER.replace("-A DOCKER-USER -j", "-A DOCKER-USER -s 10.9.0.0/16 -j"))
    assert not [one for one in words if "DOCKER-USER" in one]
    assert ["-X", "DOCKER"] in words


@pytest.mark.parametrize(
    "saved", ["", "*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i docker0 -o docker0 -j ACCEPT\nCOMMIT\n"]
)
def test_where_docker_has_no_chain_nothing_is_touched(saved: str) -> None:
    assert muster_docker.rules_to_remove(saved) == []
