"""Runs the hosts' half of Muster (playbooks/module_utils) over SSH, without Ansible: one call per host, all at once.

The sources travel on standard input, so that nothing has to be installed and nothing stays behind. In a call in which
the hosts connect to each other this machine brings them together: it waits until every host has said where it listens,
gives all of them the list, and lets them go when every host has answered (see muster_meeting).
"""

from __future__ import annotations

import base64
import functools
import json
import secrets
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launch.cli.units import some
from launch.files import ROOT
from launch.hosts import clustermap, ssh
from launch.hosts.connection import Machine, last_words

SOURCES = ROOT / "playbooks" / "module_utils"
MARK = "muster:"  # begins each line of ours; the hosts' shell profiles may print what they like before
MEET_SECONDS = 20  # how long the hosts wait for one that has not started yet
END_SECONDS = 5  # how much longer than it is given a host may take to end
PROGRESS_SECONDS = 10  # how often to say what is waited for

#: Reads sources and options from standard input, where sudo's password may stand before, and finds the modules among
#: the sources under the names that Ansible gives them. A line is written at once: another process may write, too.
_LOADER = """
import base64, importlib.abc, importlib.util, json, sys, zlib
line = next(line for line in sys.stdin if line.startswith({mark!r}))
packed, options = line[len({mark!r}):].split(" ", 1)
sources, options = json.loads(zlib.decompress(base64.b64decode(packed))), json.loads(options)
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name in ("ansible", "ansible.module_utils") or name in sources:
            return importlib.util.spec_from_loader(name, self, is_package=name not in sources)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        if module.__name__ in sources:
            exec(compile(sources[module.__name__], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
from ansible.module_utils.{module} import run
run(options, lambda words: print({mark!r} + json.dumps(words) + "\\n", end="", flush=True))
"""


@dataclass(frozen=True)
class Answer:
    """What one host said, and how its clock stands."""

    survey: dict[str, Any] | None
    reach: list[dict[str, Any]] | None
    links: list[dict[str, Any]] | None
    busy: float | None  # share of the processor time in use while links were measured, 0 to 1
    clock_offset: float  # seconds by which the host's clock is ahead of this machine's
    clock_error: float  # at most so far off is the offset, in seconds


@functools.cache
def _packed_sources() -> str:
    sources = {f"ansible.module_utils.{file.stem}": file.read_text() for file in sorted(SOURCES.glob("muster_*.py"))}
    return base64.b64encode(zlib.compress(json.dumps(sources).encode(), 9)).decode()


def command(python: str, module: str = "muster_answer") -> str:
    """The shell command that runs a module's `run` on what `program` gives it."""
    return shlex.join([python, "-c", _LOADER.format(mark=MARK, module=module)])


def program(options: Mapping[str, Any]) -> str:
    """The first line of that command's standard input: the sources, and what the host is asked."""
    return f"{MARK}{_packed_sources()} {json.dumps(options)}\n"


def say_to(
    machine: Machine, module: str, options: Mapping[str, Any], timeout: float, root: bool = True
) -> dict[str, Any]:
    """The one thing that a module's `run` says on a host, as root or as the SSH user.

    Raises RuntimeError with the words of {"error": why}.
    """
    act = machine.root if root else machine.user
    done = act(command(machine.target.python, module), timeout, stdin=ssh.Input(program(options)))
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    said: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK)) if lines else {"error": last_words(done)}
    if "error" in said:
        raise RuntimeError(said["error"])
    return said


def meetings(addresses: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
    """The option `meeting` of each host, from its own addresses; all share a new secret word."""
    token, ports = secrets.token_hex(16), list(clustermap.REACH_PORTS)
    return {
        name: {"name": name, "token": token, "addresses": list(own), "ports": ports} for name, own in addresses.items()
    }


class _Call:
    """What the hosts of one call have said so far. Each host has a thread, which waits for the SSH command."""

    def __init__(self, names: Iterable[str], asked_pairs: int = 0) -> None:
        self.inputs = {name: ssh.Input(ends=False) for name in names}
        self.listening: dict[str, dict[str, Any]] = {}
        self.answers: dict[str, Answer | BaseException] = {}
        self.pairs, self.asked_pairs = 0, asked_pairs  # that were measured, and are to be
        self.changed = threading.Condition()

    def ask(self, machine: Machine, options: Mapping[str, Any], timeout: float) -> None:
        """One host's answer within `timeout` seconds, or why there is none."""
        lines = ssh.LineSink(functools.partial(self.note, machine.name, time.time()))
        stdin = self.inputs[machine.name]
        nothing = dict.fromkeys(("survey", "meeting", "reach", "links"))
        stdin.send(program({**nothing, **options, "seconds": timeout}))
        failure: Exception
        try:
            done = machine.root(command(machine.target.python), timeout + END_SECONDS, lines, stdin)
            failure = RuntimeError(last_words(done))
        except TimeoutError:
            failure = TimeoutError(f"no answer within {timeout:.0f} s")
        except Exception as error:
            failure = error
        with self.changed:
            self.answers.setdefault(machine.name, failure)
            self.changed.notify()

    def note(self, name: str, sent: float, line: str) -> None:
        """A line that a host said: one of ours is JSON after the mark."""
        if not line.startswith(MARK):
            return
        received, words = time.time(), json.loads(line.removeprefix(MARK))
        with self.changed:
            if "listening" in words:
                self.listening[name] = words["listening"]
            elif "pairs" in words:
                self.pairs += words["pairs"]
                return  # nobody waits for that
            else:
                ahead, error = clock_offset(sent, words["began"], words["ended"], received)
                said = {key: words[key] for key in ("survey", "reach", "links", "busy")}
                self.answers[name] = Answer(**said, clock_offset=ahead, clock_error=error)
            self.changed.notify()

    def wait(self, for_answers: bool, timeout_seconds: float, say: Callable[[str], None]) -> None:
        """Wait until every host has answered or failed, or at least said where it listens; `say` gets the progress."""
        begun = said = time.monotonic()
        with self.changed:
            while True:
                done = self.answers.keys() if for_answers else self.answers.keys() | self.listening.keys()
                missing = [name for name in self.inputs if name not in done]
                now = time.monotonic()
                if not missing or now - begun > timeout_seconds:
                    return
                if now - said >= PROGRESS_SECONDS:
                    said = now
                    measured = f"{self.pairs} of {self.asked_pairs} pairs measured; " if self.pairs else ""
                    say(f"{measured}waiting for {some(missing)} ({now - begun:.0f} s)")
                self.changed.wait(1.0)


def clock_offset(sent: float, began: float, ended: float, received: float) -> tuple[float, float]:
    """(seconds by which a host's clock is ahead of ours, by how much that may be wrong), by NTP's formula (RFC 5905).

    sent, received: our clock before the question and after the answer; began, ended: the host's in between.
    """
    offset = ((began - sent) + (ended - received)) / 2
    return offset, max(0.0, (received - sent) - (ended - began)) / 2


def call_hosts(
    machines: Sequence[Machine],
    options: Mapping[str, Mapping[str, Any]],
    timeout: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Answer | BaseException]:
    """All hosts' answers at once, by name; what went wrong stands in the place of an answer.

    options: by host those of muster_answer.run but `seconds`; what is missing is not asked. timeout: in seconds, for
    each host's whole answer. say: for progress.
    """
    asked = (one["links"]["pairs"] for one in options.values() if one.get("links"))
    call = _Call((machine.name for machine in machines), sum(pair["calls"] for pairs in asked for pair in pairs))
    with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
        try:
            for machine in machines:
                pool.submit(call.ask, machine, options[machine.name], timeout)
            call.wait(False, MEET_SECONDS, say)
            directory = json.dumps(call.listening) + "\n"
            for name, stdin in call.inputs.items():
                if name in call.listening and name not in call.answers:
                    stdin.send(directory)
                elif name not in call.listening:  # it takes no part, or sudo waits for another password
                    stdin.end()
            call.wait(True, timeout + END_SECONDS, say)
        finally:
            for stdin in call.inputs.values():
                stdin.end()
    return {machine.name: call.answers[machine.name] for machine in machines}
