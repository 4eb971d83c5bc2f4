"""What a killed test session leaves behind - labs, processes - and how the next session removes it.

A lab's name and a mark in the environment of every process hold the session's pid. Only what belongs to a session that
no longer lives is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from containers import engine, lab
from containers.lab_host import LABEL

SESSION = "MUSTER_TEST_SESSION"
NAME = re.compile(r"pytest-[a-z]?(\d+)")
ENDING_SECONDS = 30.0


def lab_name(letter: str = "") -> str:
    """The name of a lab of this session. Without a letter: of this worker's own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...
    if worker and not letter:
        letter = "klmnopqr"[int(worker.removeprefix("gw")) % 8]
    return f"pytest-{letter}{os.environ[SESSION]}"


def sweep() -> Iterator[str]:
    """Remove what dead sessions have left; yields what that was. Nothing without the rights to do it."""
    try:
        engine.as_root()
        engine.tool("podman")
    except engine.ContainersError:
        return
    yield from _end_processes()
    for name in sorted(filter(_is_orphan, _lab_names())):
        lab.down(name)
        shutil.rmtree(engine.BUILD / name, ignore_errors=True)
        yield f"lab {name}"


def _lab_names() -> set[str]:
    """Names of all labs of which anything is left: a host, a volume, a network, or a folder."""
    names = set(os.listdir(lab.INVENTORIES))
    for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
        entries = json.loads(engine.podman(*kind, f"--filter=label={LABEL}", "--format=json") or "[]")
        names |= {(entry.get("Labels") or entry["labels"])[LABEL] for entry in entries}
    return names


def _is_orphan(name: str) -> bool:
    match = NAME.fullmatch(name)
    return match is not None and not _lives(match.group(1))


def _lives(pid: str) -> bool:
    """Whether a test session runs under this pid; another program may have it by now."""
    return b"pytest" in _read(Path("/proc") / pid / "cmdline")


def _end_processes() -> Iterator[str]:
    """End the processes of dead sessions as Ctrl-C would, so that they clear away; after a while by force.

    conmon is a container's and goes with it.
    """
    orphans = _orphans()
    for pid in orphans:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + ENDING_SECONDS
    while (stubborn := _orphans()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in stubborn:
        _signal(pid, signal.SIGKILL)
    yield from (f"process {pid}: {line}" for pid, line in orphans.items())


def _orphans() -> dict[int, str]:
    """pid -> command line of the processes that sessions which no longer live have started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        mark = re.search(rf"\0{SESSION}=(\d+)\0".encode(), b"\0" + _read(folder / "environ"))
        if mark and not _lives(mark.group(1).decode()) and _read(folder / "comm") != b"conmon\n":
            found[int(folder.name)] = _read(folder / "cmdline").replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
