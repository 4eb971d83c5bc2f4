#!/usr/bin/python3
"""Finds out on which addresses this host reaches every other host, by trying; all hosts run it at the same time.

Every host listens on each of its own candidate addresses and tries each candidate address of every other host until
the host that was meant answers. An address that another machine answers on (172.17.0.1, which every host has) counts
as not reached. Nothing stays behind: all sockets close and the module returns, at the latest at its deadline.

The protocol, over TCP on a port of a documented range: the caller sends one line of JSON
    {"muster": 1, "host": caller, "token": token of this deploy, "listening": {address: port}, "done": false}
and the host that listens answers with one line of the same form. As soon as one line arrived from a host, by either
way, it is known to be up and where it listens; an address of it that still does not answer is given up after
KNOWN_ATTEMPTS. So a good cluster takes as long as its hosts' starts differ, an address that does not work costs
about three seconds, and only a host that never shows up costs the deadline.

The end: a caller that is finished with all addresses of a host says so ("done": true), and the answer to that is held
back until the other is finished too. A host leaves when it is finished with every host and each has said so or
answered; a connection that breaks off then means that the other has left, which it does only when finished.

Not for bandwidth. Standard library alone, Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: muster_reach
short_description: Which addresses of the other hosts this host reaches; runs on all hosts at the same time
options:
  name:
    description: This host's name in the inventory.
    type: str
    required: true
  hosts:
    description: Candidate addresses by host name, this host's own among them.
    type: dict
    required: true
  token:
    description: A word that is the same on all hosts of this deploy, and another in every other deploy.
    type: str
    required: true
  ports:
    description: First and last port of the range that must be open between the hosts.
    type: list
    elements: int
    default: [29400, 29415]
  seconds:
    description: How long to wait for a host that does not show up.
    type: float
    default: 20
author: [Muster]
"""

RETURN = r"""
results:
  description: For each address of every other host peer, address, ok, milliseconds (TCP handshake), error.
  returned: always
  type: list
listening:
  description: The port on which this host listened, by address.
  returned: always
  type: dict
problems:
  description: Own addresses on which it could not listen, in words.
  returned: always
  type: list
"""

ATTEMPT_SECONDS = 1.5  # one retransmitted SYN (after 1 s) still fits
KNOWN_ATTEMPTS = 2  # for an address of a host that is known to listen
LONGEST_PAUSE = 0.8  # between attempts at a host that has not shown up yet
LINE_BYTES = 65536


class NoAnswer(Exception):
    """An attempt that failed, in words for the user. final: another port of the range will not do better."""

    def __init__(self, words: str, final: bool = False) -> None:
        super().__init__(words)
        self.final = final


class Reach:
    """One host's part in the test. Run `run()` once; then `results`, `listening` and `problems` hold the outcome."""

    def __init__(
        self, name: str, hosts: dict[str, list[str]], token: str, ports: tuple[int, int], seconds: float
    ) -> None:
        self.name = name
        self.own = hosts[name]
        self.peers = {peer: addresses for peer, addresses in hosts.items() if peer != name}
        self.token = token
        self.ports = range(ports[0], ports[1] + 1)
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.listening: dict[str, int] = {}
        self.problems: list[str] = []
        self.outcome: dict[tuple[str, str], dict[str, Any]] = {
            (peer, address): {
                "peer": peer,
                "address": address,
                "ok": False,
                "milliseconds": None,
                "error": f"{peer} did not show up",
            }
            for peer, addresses in self.peers.items()
            for address in addresses
        }
        self.where: dict[str, dict[str, int]] = {}  # peer: where it listens, once known

    @property
    def results(self) -> list[dict[str, Any]]:
        """What came of each address of every other host, in the order given."""
        return list(self.outcome.values())

    async def run(self) -> None:
        """The whole test; returns when every host is finished with this one, or at the deadline."""
        self.known = {peer: asyncio.Event() for peer in self.peers}
        self.finished_with = {peer: asyncio.Event() for peer in self.peers}
        self.peer_finished = {peer: asyncio.Event() for peer in self.peers}
        self.ready = asyncio.Event()  # nobody is answered before it is clear where this host listens
        self.answering: set[asyncio.Task[None]] = set()
        own = dict.fromkeys(self.own)
        servers = [server for server in [await self._listen(address) for address in own] if server]
        self.ready.set()
        tasks = [asyncio.ensure_future(self._deal_with(peer)) for peer in self.peers]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._left())
            await _cancel(late)
            for task in tasks:
                if not task.cancelled():
                    task.result()
        for server in servers:
            server.close()
        if self.answering:
            _, late_answers = await asyncio.wait(self.answering, timeout=1.0)
            await _cancel(late_answers)

    def _left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    # Answering

    async def _listen(self, address: str) -> asyncio.AbstractServer | None:
        """Listens on the first free port of the range, on this address alone."""
        error: OSError | None = None
        for port in self.ports:
            try:
                server = await asyncio.start_server(self._accept, address, port, limit=LINE_BYTES, backlog=512)
            except OSError as caught:
                error = caught
                if caught.errno == errno.EADDRINUSE:
                    continue
                break
            self.listening[address] = port
            return server
        words = (error.strerror if error else None) or "no port in the range"
        self.problems.append(f"cannot listen on {address} ports {self.ports[0]}-{self.ports[-1]}: {words}")
        return None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.answering.add(task)
        try:
            await self.ready.wait()
            caller = self._read_line(await asyncio.wait_for(reader.readline(), ATTEMPT_SECONDS))
            if caller.get("done") and self._learn(caller):
                self.peer_finished[caller["host"]].set()
                await asyncio.wait_for(self.finished_with[caller["host"]].wait(), self._left())
            else:
                self._learn(caller)
            writer.write(self._line())
            await asyncio.wait_for(writer.drain(), ATTEMPT_SECONDS)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # a port scanner, or a caller that has left: its loss
        finally:
            self.answering.discard(task)
            writer.close()

    def _line(self, done: bool = False) -> bytes:
        message = {"muster": 1, "host": self.name, "token": self.token, "listening": self.listening, "done": done}
        return json.dumps(message).encode() + b"\n"

    def _read_line(self, line: bytes) -> dict[str, Any]:
        """A line as a message; an empty dict for anything that does not speak this protocol."""
        try:
            message = json.loads(line)
        except ValueError:
            return {}
        return message if isinstance(message, dict) and message.get("muster") == 1 else {}

    def _learn(self, message: dict[str, Any]) -> bool:
        """Notes where a host listens. False if the message is not of a host of this deploy."""
        peer = message.get("host")
        if message.get("token") != self.token or peer not in self.peers:
            return False
        self.where[peer] = dict(message.get("listening") or {})
        self.known[peer].set()
        return True

    # Calling

    async def _deal_with(self, peer: str) -> None:
        """Tries all addresses of a host at once, then tells it so and waits until it is finished with this host."""
        await asyncio.gather(*(self._try(peer, address) for address in self.peers[peer]))
        self.finished_with[peer].set()
        for address in self.peers[peer]:
            if not self.outcome[peer, address]["ok"]:
                continue
            with contextlib.suppress(NoAnswer):  # it has left, which it does only when finished with every host
                await self._ask(address, self.where[peer][address], self._left(), done=True)
            return
        await self.peer_finished[peer].wait()

    async def _try(self, peer: str, address: str) -> None:
        """Tries one address until the host that was meant answers, or it is clear that it will not."""
        outcome = self.outcome[peer, address]
        attempts_when_known, pause, told = 0, 0.05, ""
        while self._left() > 0:
            known = self.known[peer].is_set()
            listens = self.where.get(peer, {}).get(address)
            ports = [listens] if listens else list(self.ports)
            milliseconds, error = await self._sweep(peer, address, ports)
            if error is None:
                outcome.update(ok=True, milliseconds=milliseconds, error=None)
                return
            if "refused" not in error:
                told = error  # who answered wrongly may have left by now: it says more than a port that is closed
            error = told or error
            deaf = known and listens is None  # another host may answer there, as soon as it has started
            if deaf:
                outcome["error"] = f"{peer} could not listen on it ({error})"
            else:
                outcome["error"] = error if known else f"{peer} did not show up within {self.seconds:.0f} s ({error})"
            attempts_when_known += known
            if attempts_when_known >= KNOWN_ATTEMPTS or (deaf and "refused" not in error):
                return
            if known:
                await asyncio.sleep(0.2)
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.known[peer].wait(), pause)
                pause = min(LONGEST_PAUSE, pause * 2)

    async def _sweep(self, peer: str, address: str, ports: list[int]) -> tuple[float | None, str | None]:
        """(milliseconds, None) if the host answers on one of the ports, else (None, what happened instead)."""
        errors = []
        for port in ports:
            try:
                milliseconds, message = await self._ask(address, port, ATTEMPT_SECONDS)
                self._check(peer, address, port, message)
            except NoAnswer as error:
                errors.append(str(error))
                if error.final:
                    break
                continue
            self.where[peer].setdefault(address, port)
            return milliseconds, None
        told = [error for error in errors if "refused" not in error]
        return None, (told or errors)[-1]

    def _check(self, peer: str, address: str, port: int, message: dict[str, Any]) -> None:
        """Raises NoAnswer unless it was the host that was meant."""
        host = message.get("host")
        if not message:
            raise NoAnswer(f"another program answers on {address} port {port}")
        if message.get("token") != self.token:
            raise NoAnswer(f"another deploy, on {host}, answers on {address} port {port}: try again when it has ended")
        if host == self.name:
            raise NoAnswer(f"{self.name} itself answers on {address}: {peer} and {self.name} have the same address")
        if host != peer:
            raise NoAnswer(f"{host} answers on {address}, not {peer}: two hosts have the same address")
        self._learn(message)

    async def _ask(self, address: str, port: int, seconds: float, done: bool = False) -> tuple[float, dict[str, Any]]:
        """Sends one line and waits for one: (milliseconds of the TCP handshake, the answer). Raises NoAnswer."""
        begun = time.monotonic()
        try:
            opening = asyncio.open_connection(address, port, limit=LINE_BYTES)
            reader, writer = await asyncio.wait_for(opening, min(seconds, ATTEMPT_SECONDS))
        except asyncio.TimeoutError:
            words = f"no answer on port {port} within {ATTEMPT_SECONDS} s: dropped by a firewall, or no such host"
            raise NoAnswer(words, final=True) from None
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                raise NoAnswer(f"port {port} refused: a firewall rejects it, or nothing listens there") from None
            raise NoAnswer(f"port {port}: {error.strerror or error}", final=True) from None
        milliseconds = round(1000 * (time.monotonic() - begun), 3)
        try:
            writer.write(self._line(done))
            line = await asyncio.wait_for(reader.readline(), seconds)
        except asyncio.TimeoutError:
            raise NoAnswer(f"port {port} accepts, but says nothing within {seconds:.1f} s") from None
        except (OSError, ValueError) as error:
            raise NoAnswer(f"port {port}: the connection broke off ({error})") from None
        finally:
            writer.close()
        if not line:
            raise NoAnswer(f"port {port}: the connection was closed without an answer")
        return milliseconds, self._read_line(line)


async def _cancel(tasks: set[Any]) -> None:
    """Again until they end: wait_for may swallow a cancellation that comes as its wait ends (Python before 3.12)."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.2)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "hosts": {"type": "dict", "required": True},
            "token": {"type": "str", "required": True, "no_log": False},
            "ports": {"type": "list", "elements": "int", "default": [29400, 29415]},
            "seconds": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    options = module.params
    if options["name"] not in options["hosts"]:
        module.fail_json(msg=f"hosts must hold the addresses of {options['name']} itself")
    first, last = options["ports"]
    reach = Reach(options["name"], options["hosts"], options["token"], (first, last), options["seconds"])
    asyncio.run(reach.run())
    module.exit_json(changed=False, results=reach.results, listening=reach.listening, problems=reach.problems)


if __name__ == "__main__":
    main()
