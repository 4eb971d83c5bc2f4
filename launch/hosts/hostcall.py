"""Runs the hosts' half of Muster (playbooks/module_utils) over SSH, without Ansible: one call per host, all at once.

The sources travel inside the command, so that nothing has to be installed and nothing stays behind. Ansible runs the
same files when hosts are provisioned; a call through it costs seconds, one of these the time of a login.
"""

from __future__ import annotations

import base64
import functools
import json
import shlex
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.files import ROOT
from launch.hosts import ssh
from launch.hosts.machine import Machine

SOURCES = ROOT / "playbooks" / "module_utils"
MARK = "muster-answer:"  # the hosts' shell profiles may print what they like before

#: Finds the modules among the sources in the command, under the names that Ansible gives them.
_LOADER = """
import base64, importlib.abc, importlib.util, json, sys, zlib
sources, options = json.loads(zlib.decompress(base64.b64decode({packed!r})))
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
from ansible.module_utils.muster_check import run
print({mark!r} + json.dumps(run(options)))
"""


@dataclass(frozen=True)
class Answer:
    """What one host said, and how its clock stands."""

    survey: dict[str, Any] | None
    links: list[dict[str, Any]] | None
    clock_offset: float  # seconds by which the host's clock is ahead of this machine's
    clock_error: float  # at most so far off is the offset, in seconds


@functools.cache
def _sources() -> dict[str, str]:
    return {f"ansible.module_utils.{file.stem}": file.read_text() for file in sorted(SOURCES.glob("muster_*.py"))}


def command(python: str, options: Mapping[str, Any]) -> str:
    """The shell command that runs muster_check.run(options) and prints its answer after MARK."""
    packed = base64.b64encode(zlib.compress(json.dumps([_sources(), options]).encode(), 9)).decode()
    return shlex.join([python, "-c", _LOADER.format(packed=packed, mark=MARK)])


def ask(machine: Machine, options: Mapping[str, Any], timeout: float) -> Answer:
    """One host's answer.

    Raises:
        TimeoutError: no answer within `timeout` seconds.
        RuntimeError: the host's Python failed; its last words.
    """
    sent = time.time()
    done = machine.root(command(machine.target.python, options), timeout)
    received = time.time()
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit status {done.exited} without a word")
    found = json.loads(lines[-1][len(MARK) :])
    ahead, error = clock_offset(sent, found["began"], found["ended"], received)
    return Answer(found["survey"], found["links"], ahead, error)


def clock_offset(sent: float, began: float, ended: float, received: float) -> tuple[float, float]:
    """(seconds by which a host's clock is ahead of ours, by how much that may be wrong), by NTP's formula (RFC 5905).

    sent, received: our clock before the question and after the answer; began, ended: the host's in between.
    """
    offset = ((began - sent) + (ended - received)) / 2
    return offset, max(0.0, (received - sent) - (ended - began)) / 2


def ask_all(
    machines: Sequence[Machine], options: Mapping[str, Mapping[str, Any]], timeout: float
) -> dict[str, Answer | BaseException]:
    """All hosts' answers at once, by name; what went wrong stands in the place of an answer."""
    answers = ssh.in_parallel(lambda machine: ask(machine, options[machine.name], timeout), machines)
    return {machine.name: answer for machine, answer in zip(machines, answers, strict=True)}
