"""Bandwidth between two hosts with iperf3, both directions at once. Standard library alone, Python 3.8 and later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

from ansible.module_utils.muster_host import find_command

MISSING = "iperf3 is missing"
SERVER_SECONDS = 2.0  # a server takes some milliseconds until it listens
#: iperf3 3.9 (Ubuntu 22.04) gives no reason when it cannot connect.
REFUSED_SILENTLY = "refused, or without a reason that can be read"
#: In what iperf3 says of an error: the link's fault, not the program's.
LINK_FAILURES = ("timed out", "timeout", "unreachable", "no route")
#: The same: the fault of the program at the server's end.
SERVER_FAILURES = ("refused", "busy", "closed", "reset", "terminated")


class LinkFails(Exception):
    """The link fails under load, in words for the user."""


class NoIperf(Exception):
    """This host, or its peer if `of_peer`, cannot measure bandwidth: why, in words that "on h3" can follow."""

    def __init__(self, why: str, of_peer: bool = False) -> None:
        super().__init__(why)
        self.of_peer = of_peer


def iperf_path() -> str:
    """Raises NoIperf."""
    path = find_command("iperf3")
    if path is None:
        raise NoIperf(MISSING)
    return path


async def _start(words: list[str], **streams: int) -> asyncio.subprocess.Process:
    try:
        environment = {**os.environ, "LC_ALL": "C"}
        return await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env=environment,
            start_new_session=True, **streams
        )  # fmt: skip
    except OSError as error:
        raise NoIperf(f"iperf3 does not start ({os.strerror(error.errno or 0)})") from None


async def start_iperf(address: str, ports: range, seconds: int) -> tuple[int, asyncio.subprocess.Process]:
    """A server on the highest free port of the range, for as long as a measurement takes. Raises NoIperf."""
    path = iperf_path()
    for port in reversed(ports):
        with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
        words = ["timeout", str(20 + 2 * seconds), path, "-s", "-B", address, "-p", str(port)]
        return port, await _start(words, stdout=asyncio.subprocess.DEVNULL)
    raise NoIperf(f"no port from {ports[0]} to {ports[-1]} is free for iperf3")


async def run_iperf(own: str, theirs: str, port: int, seconds: int) -> tuple[float, float]:
    """Bit/s that arrived (there, here). --bidir: iperf3 3.7 and later.

    Raises LinkFails where the link fails under load, NoIperf where a program does.
    """
    words = [iperf_path(), "-c", theirs, "-B", own, "-p", str(port), "-t", str(seconds), "-i", "0", "-J"]
    words += ["--connect-timeout", "1500", "--bidir"]
    deadline = time.monotonic() + SERVER_SECONDS
    while True:
        process = await _start(words, stdout=asyncio.subprocess.PIPE)
        try:
            out, _ = await asyncio.wait_for(process.communicate(), seconds + 8)
            said: dict[str, Any] = json.loads(out)
            if "error" in said:
                why = str(said["error"])
            elif not said["end"]:
                why = REFUSED_SILENTLY
            else:
                # Not of the sums: up to 3.10 those of both directions have the same names in one JSON object.
                arrived = [stream["receiver"] for stream in said["end"]["streams"]]
                rates = {one["sender"]: float(one["bits_per_second"]) for one in arrived}  # sender: whether we are it
                return rates[True], rates[False]
        except asyncio.TimeoutError:
            raise LinkFails(f"iperf3 from {own} to {theirs} did not end: the link stalls under load") from None
        except (ValueError, KeyError, TypeError):
            raise NoIperf("iperf3 fails without a reason that can be read (it has to be 3.7 or later)") from None
        finally:
            await end(process)
        if not any(reason in why for reason in ("refused", "busy")) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    if any(reason in why.lower() for reason in LINK_FAILURES):
        raise LinkFails(f"iperf3 from {own} to {theirs}: {why}")
    raise NoIperf(f"iperf3 fails ({why})", of_peer=any(reason in why.lower() for reason in SERVER_FAILURES))


async def end(process: asyncio.subprocess.Process) -> None:
    """End a program, which may have ended already, with what it has started: `timeout` that is ended while it starts
    its command may leave that behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), 2)
