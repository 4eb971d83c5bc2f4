"""Promises: a port that is given is free where it is wanted, and who has the others is said."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest

from keeper import ports


@pytest.fixture
def port() -> int:
    """A port of all addresses on which nobody listens."""
    (found,) = ports.free_ports("", 20000, 29000, 1)
    return found


def test_a_port_that_somebody_has_is_not_given(port: int) -> None:
    assert ports.free_ports("127.0.0.1", port, port, 2) == [port]
    with socket.create_server(("127.0.0.1", port)):
        assert ports.free_ports("127.0.0.1", port, port, 1) == []
        assert ports.free_ports("", port, port, 1) == []
        assert ports.free_ports("127.0.0.2", port, port, 1) == [port]


def test_no_more_are_given_than_are_wanted_and_no_two_the_same() -> None:
    found = ports.free_ports("127.0.0.1", 20000, 29000, 3)
    assert len(set(found)) == 3 and all(20000 <= one <= 29000 for one in found)


@pytest.mark.slow
def test_a_host_is_asked_with_the_file_alone(port: int) -> None:
    wanted = [["keeper", "127.0.0.1", port, port, 1], ["master", "", port, port, 1]]
    with open(ports.__file__) as file, socket.create_server(("0.0.0.0", port)):
        command = [sys.executable, "-I", "-c", file.read(), json.dumps(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    if shutil.which("ss") is None:
        assert done.stdout == "keeper=\nmaster=\n"
        return
    keeper, held, master, _ = done.stdout.splitlines()
    assert (keeper, master) == ("keeper=", "master=") and held.endswith(f",pid={os.getpid()}")
