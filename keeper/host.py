"""What a host has of runs: folders and documents, containers, processes outside of them. For keeper/door.py.

Loaded at every call of a door, so what few of its functions need is imported where it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from keeper import USER_ID, engines
from keeper.output import read_file

POLL_SECONDS = 0.1  # between two looks
ENGINE_SECONDS = 120  # for a call of the container engine
KEEPER_SECONDS = 60  # for the keeper of a started container to take the lease
KILL_SECONDS = 5  # from SIGTERM to SIGKILL, where nothing is left to save
END_SECONDS = 5  # for a container to end after its keeper, and for a killed process to be gone
GPU_SECONDS = 30  # for nvidia-smi
EVENTS_BYTES = 262144  # of events.jsonl, among which the first ones are
ALL_PROCESSES = "pid:[4026531836]"  # the PID namespace in which all processes are seen: PROC_PID_INIT_INO of the kernel

Words = Dict[str, Any]


class Refused(Exception):
    """A verb cannot do what was asked; `more` goes into the frame beside "error"."""

    def __init__(self, why: str, **more: Any) -> None:
        super().__init__(why)
        self.more = more


class Host:
    """The folders of this host."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        root, place = options.get("root", ""), engines.place()
        self.runs = Path(root + place.runs)
        self.lease = Path(root + place.lease)
        self.private = Path(root + place.private)

    def run(self, name: str) -> Run:
        """A run that has a folder here. Raises Refused."""
        found = Run(self, name)
        if not (found.folder / "plan.json").is_file():
            raise Refused(f"there is no run {name} on this host")
        return found

    def all_runs(self) -> List[Run]:
        """All runs that have a folder here, newest first by the time of their start."""
        found = []
        for path in self.runs.glob("*/plan.json"):
            if is_name(path.parent.name):
                with contextlib.suppress(FileNotFoundError):  # removed just now
                    found.append((path.lstat().st_mtime, path.parent.name))
        return [Run(self, name) for _, name in sorted(found, reverse=True)]

    def holder(self) -> Optional[Words]:
        """Who has the lease."""
        from keeper import lease

        return lease.holder(str(self.lease))


class Run:
    """One run's folders on this host, and its documents (keeper/__init__.py)."""

    def __init__(self, host: Host, name: str) -> None:
        """Raises Refused for what is no name of a run."""
        if not is_name(name):
            raise Refused(f"{name!r} is no id of a run")
        self.host, self.name = host, name
        self.folder = host.runs / name
        self.private = host.private / name

    def document(self, name: str) -> Optional[Words]:
        """A document of the run's folder; None where it is not there or no JSON object."""
        try:
            found = json.loads(read_file(self.folder / name, 0, 1 << 30))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def plan(self) -> Words:
        """The plan; empty where it cannot be read."""
        return self.document("plan.json") or {}

    @property
    def node_rank(self) -> Optional[int]:
        """This host's place in the run."""
        return (self.document("host.json") or {}).get("node_rank")

    @property
    def has_gpus(self) -> bool:
        """Whether this host's container was given NVIDIA GPUs."""
        with contextlib.suppress(KeyError, TypeError, IndexError, ValueError):  # a script wrote a plan.json of its own
            command = self.plan["hosts"][self.node_rank]["command"]
            return engines.engine(command[0]).has_gpus(command)
        return False

    def status(self) -> str:
        """ "starting", "running", "succeeded", "failed", "stopped", or "died": without a word of its keeper."""
        # In this order: each answer stays right while the next one is looked for.
        starting = not self.has_begun() and self._age() < KEEPER_SECONDS + ENGINE_SECONDS
        if (self.host.holder() or {}).get("run") == self.name:
            return "running"
        end = self.document("exit.json")
        return str(end.get("status")) if end else "starting" if starting else "died"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in it."""
        return self.status() not in ("starting", "running")

    def has_begun(self) -> bool:
        """Whether its keeper has had the lease."""
        with contextlib.suppress(FileNotFoundError):
            for line in read_file(self.folder / "events.jsonl", 0, EVENTS_BYTES).splitlines():
                with contextlib.suppress(ValueError):
                    if json.loads(line).get("event") == "lease":
                        return True
        return False

    def _age(self) -> float:
        """Seconds since its start."""
        with contextlib.suppress(FileNotFoundError):
            return abs(time.time() - (self.folder / "plan.json").stat().st_mtime)
        return 0.0


def is_name(name: str) -> bool:
    """Whether this may be the name of a file: of a run, of a secret."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


# The container engine


def call(words: Sequence[str], seconds: float = ENGINE_SECONDS, wait: Callable[[float], None] = time.sleep) -> str:
    """What a command prints. Raises Refused with its last words when it fails or takes longer.

    The command is ended when `wait`, which is called all the time, raises something.
    """
    # Files (in memory), not pipes: what an engine leaves running may keep a pipe open.
    with os.fdopen(os.memfd_create("out"), "w+b") as out, os.fdopen(os.memfd_create("said"), "w+b") as said:
        process = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=out, stderr=said, start_new_session=True
        )
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise Refused(f"`{' '.join(words[:2])}` did not end within {seconds:.0f} s")
                wait(0.02)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # no signal ends one that waits for a driver
                    process.wait(END_SECONDS)
        out.seek(0)
        said.seek(0)
        printed, problem = out.read().decode(errors="replace"), said.read().decode(errors="replace")
    if process.returncode != 0:
        last = (problem.strip() or printed.strip() or f"exit status {process.returncode}").splitlines()[-1]
        raise Refused(f"`{' '.join(words[:2])}`: {last}")
    return printed


def state_of(container: str) -> Optional[Words]:
    """A container's State as the engine has it; None: there is no such container. Raises Refused."""
    engine = engines.noted()
    try:
        found = call(engine.state(container))
    except Refused as error:
        if engine.is_absent(str(error)):
            return None
        raise
    state: Words = json.loads(found)
    return state


def containers_of(run: str) -> Dict[str, str]:
    """Name -> state ("running", "exited" ...) of the containers with a run's label. Raises Refused."""
    engine = engines.noted()
    listed = call(engine.containers(f"{engines.RUN_LABEL}={run}"))
    return {one.name: one.state for one in engine.read_containers(listed)}


def containers_at_end(run: str) -> Dict[str, str]:
    """The same, once none of them runs; they get END_SECONDS for that."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        found = containers_of(run)
        if "running" not in found.values() or time.monotonic() > deadline:
            return found
        time.sleep(POLL_SECONDS)


def kill_containers(run: str) -> List[str]:
    """Kill what lives of a run's containers, frozen ones too; returns their names. Raises Refused.

    They stay, so that it can be said how they ended; but one that does not end by that is removed.
    """
    names, engine = _living_containers(run), engines.noted()
    if not names:
        return []
    with contextlib.suppress(Refused):  # an older Podman kills no frozen one; then the next command says why it fails
        call(engine.kill(names))
    deadline = time.monotonic() + END_SECONDS
    while (left := _living_containers(run)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if left:
        remove_containers(left, None)
    return names


def _living_containers(run: str) -> List[str]:
    return [name for name, state in containers_of(run).items() if state in engines.LIVING]


def remove_containers(names: Sequence[str], seconds: Optional[int] = KILL_SECONDS) -> None:
    """Remove containers, if they are there; a running one is asked to end and killed after `seconds`, with None at
    once. Raises Refused."""
    engine = engines.noted()
    if names and seconds is not None:
        with contextlib.suppress(Refused):  # the next command says it
            call(engine.stop(names, seconds))
    for name in names:
        try:
            call(engine.remove([name]))
        except Refused as error:
            if not engine.is_absent(str(error)):
                raise


def keepers_of_others() -> List[int]:
    """Processes that are keepers of runs which this door knows nothing of: of another user's Podman, or, for one
    without root, of root's. Their user is none of ours here; where /proc hides them, none is found."""
    found, here = [], os.readlink("/proc/self/ns/net")
    for folder in (Path("/proc", name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it has ended
            if b"\0-m\0keeper\0" in (folder / "cmdline").read_bytes() and folder.stat().st_uid != USER_ID:
                there = here
                with contextlib.suppress(PermissionError):
                    there = os.readlink(folder / "ns" / "net")
                if there == here:  # else a neighbour's: this host is a container itself, or it runs in one
                    found.append(int(folder.name))
    return found


# Files


def make_folder(path: Path, owner: int = -1) -> None:
    """Make a folder that its owner alone may enter: this user, or whose the folder is in which it is. Raises
    FileExistsError."""
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, *((owner, owner) if owner >= 0 else _owner_of(path.parent)))


def _owner_of(folder: Path) -> Tuple[int, int]:
    found = folder.stat()
    return found.st_uid, found.st_gid


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a new file, to the disk, for whoever owns its folder. Raises FileExistsError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        if os.geteuid() == 0:  # the door; the keeper of a run, which reads it, is not
            os.fchown(file, *_owner_of(path.parent))
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def write_document(path: Path, words: Any) -> None:
    """Write a document of a run's folder whole, in the place of an older one."""
    # A script can write into the folder: a name that it cannot know, so that nothing is written through a link of it.
    new = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        write_file(new, json.dumps(words).encode(), 0o600)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there, in such a way that no half of it is ever seen under its name."""
    with contextlib.suppress(FileNotFoundError):
        going = path.with_name(f".removed-{os.urandom(8).hex()}")
        path.rename(going)
        remove_all(going)


def remove_all(path: Path) -> None:
    """Remove a folder, or a link in its place; another door may be removing the same one."""
    import shutil

    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            path.unlink() if path.is_symlink() else shutil.rmtree(path)


# Processes


def end_processes(run: Run) -> Tuple[List[str], List[str]]:
    """Kill every process of a run outside its containers.

    Returns what they were, with the GPU memory that they held, and the GPU memory that nothing holds any more.
    """
    held, _ = _gpu_memory(run)
    found = processes_of(run.name)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while found and processes_of(run.name) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    ended = [f"{pid} {command}" + (f" ({held[pid]})" if pid in held else "") for pid, command in found.items()]
    return ended, _lost_gpu_memory(run)


def processes_of(run: str) -> Dict[int, str]:
    """Process -> command, of all that have this run's id in their environment."""
    wanted, found = f"MUSTER_RUN_ID={run}".encode(), {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended
                folder = Path("/proc", name)
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found[int(name)] = command[:200]
    return found


def _gpu_memory(run: Run) -> Tuple[Dict[int, str], str]:
    """(process -> the memory that it holds on this host's GPUs, why that is not known) for a run that had some."""
    if not run.has_gpus:
        return {}, ""
    query = "--query-compute-apps=gpu_uuid,pid,used_memory"
    try:
        lines = call(["nvidia-smi", query, "--format=csv,noheader"], GPU_SECONDS).splitlines()
    except (Refused, OSError) as error:
        return {}, str(error)
    found: Dict[int, List[str]] = {}
    for fields in ([field.strip() for field in line.split(",")] for line in lines):
        if len(fields) == 3 and fields[1].isdigit():
            found.setdefault(int(fields[1]), []).append(f"{fields[2]} of {fields[0]}")
    return {pid: ", ".join(held) for pid, held in found.items()}, ""


def _lost_gpu_memory(run: Run) -> List[str]:
    """GPU memory that the driver still counts for processes that have ended, after END_SECONDS in which it may free it.

    Nothing on a host that is a container itself: a process of which nothing is seen may be a neighbour's there.
    """
    deadline = time.monotonic() + END_SECONDS
    while True:
        held, unknown = _gpu_memory(run)
        if unknown:
            return [f"not known: {unknown}"]
        lost = {pid: text for pid, text in held.items() if not os.path.exists(f"/proc/{pid}")}
        if not lost or os.readlink("/proc/self/ns/pid") != ALL_PROCESSES:
            return []
        if time.monotonic() > deadline:
            return [f"{text}, of process {pid}, which has ended" for pid, text in lost.items()]
        time.sleep(POLL_SECONDS)
