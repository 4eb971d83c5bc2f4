"""The keeper's end of the socket to which ranks report: keeps all messages."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes import GUARD_SECONDS

Message = dict[str, Any]


class FakeKeeper:
    """messages: (time.monotonic(), what a rank said), in the order of arrival."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "keeper"
        self.messages: list[tuple[float, Message]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.arrived = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while data := self.socket.recv(4096):
            words = json.loads(data)
            with self.arrived:
                self.messages += [] if "agent" in words else [(time.monotonic(), words)]
                self.arrived.notify_all()

    def close(self) -> None:
        """After it, nobody listens any more."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self.path.unlink()

    def of(self, rank: int, **wanted: Any) -> list[Message]:
        """This rank's messages that have these values."""
        found = [message for _, message in list(self.messages) if message["rank"] == rank]
        return [message for message in found if all(message.get(name) == value for name, value in wanted.items())]

    def wait(self, enough: Callable[[], bool]) -> None:
        with self.arrived:
            assert self.arrived.wait_for(enough, GUARD_SECONDS), self.messages[-5:]

    def environment(self, run_dir: Path) -> dict[str, str]:
        """For ranks on loopback that report here."""
        ours = {"MUSTER_KEEPER": str(self.path), "MUSTER_RUN_DIR": str(run_dir)}
        return {**os.environ, **ours, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
