"""What a control machine asks on a host about its runs, over SSH. Runs there as root, with the host's own Python, from
sources that come on standard input (launch/hosts/door.py): nothing is installed and nothing stays behind.

One call is one verb of VERBS with its options. It answers in frames on standard output: a line `muster:{json}`, and,
where that has "bytes": n, n raw bytes. The last frame of a verb that failed is {"error": one line}, and the exit status
1. The end of standard input means that the caller has gone; what only serves the caller then ends at once.
A start calls several doors of each host, so a door loads quickly: what few verbs need is imported where it is used.

Every verb takes the option "root" (tests): a folder that stands before the folders of the host.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from keeper import HOST_LEASE_DIR, HOST_PRIVATE_DIR, HOST_RUNS_DIR
from keeper.output import Reader, read_file

MARK = "muster:"
CHUNK_BYTES = 262144  # of output in one frame
POLL_SECONDS = 0.1  # between two looks for new output
LOOK_SECONDS = 1.0  # between two looks at the state and the lease
ENGINE_SECONDS = 120  # for a call of Podman
KEEPER_SECONDS = 60  # for the keeper of a started container to take the lease
KILL_SECONDS = 5  # from SIGTERM to SIGKILL, where nothing is left to save
END_SECONDS = 5  # for a container to end after its keeper, and for a killed process to be gone

Words = Dict[str, Any]


class Refused(Exception):
    """A verb cannot do what was asked; `more` goes into the frame beside "error"."""

    def __init__(self, why: str, **more: Any) -> None:
        super().__init__(why)
        self.more = more


class Caller:
    """The control machine: frames to it, and whether it is still there. EOFError: it has gone."""

    def __init__(self, speaks: bool) -> None:
        """speaks: what comes on standard input is for the verb; else only its end means something."""
        self._in, self._out, self._speaks = 0, 1, speaks
        self.sent = time.monotonic()  # when the last frame went
        os.set_blocking(self._out, False)
        self._write(b"\n")  # ends what a shell's profile has printed

    def send(self, words: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame. Waits while the caller reads slowly."""
        header = {**words, "bytes": len(data)} if "stream" in words else words
        self._write(f"{MARK}{json.dumps(header)}\n".encode())
        self._write(data)
        self.sent = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait. Raises EOFError as soon as the caller has gone."""
        deadline = time.monotonic() + seconds
        while select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not os.read(self._in, 4096):
                raise EOFError

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._out, rest) :]
            except BlockingIOError:
                select.select([], [self._out], [], POLL_SECONDS)
                if not self._speaks:
                    self.wait(0)
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError from None


class Host:
    """The folders of this host."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        root = options.get("root", "")
        self.runs = Path(root + HOST_RUNS_DIR)
        self.lease = Path(root + HOST_LEASE_DIR)
        self.private = Path(root + HOST_PRIVATE_DIR)

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
            if _is_name(path.parent.name):
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
        if not _is_name(name):
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

    def status(self) -> str:
        """ "starting", "running", "succeeded", "failed", "stopped", or "died": without a word of its keeper."""
        # In this order: each answer stays right while the next one is looked for.
        starting = not self._has_begun() and self._age() < KEEPER_SECONDS + ENGINE_SECONDS
        if (self.host.holder() or {}).get("run") == self.name:
            return "running"
        end = self.document("exit.json")
        return str(end.get("status")) if end else "starting" if starting else "died"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in it."""
        return self.status() not in ("starting", "running")

    def _has_begun(self) -> bool:
        """Whether its keeper has had the lease."""
        with contextlib.suppress(FileNotFoundError):
            for line in read_file(self.folder / "events.jsonl", 0, CHUNK_BYTES).splitlines():
                with contextlib.suppress(ValueError):
                    if json.loads(line).get("event") == "lease":
                        return True
        return False

    def _age(self) -> float:
        """Seconds since its start."""
        with contextlib.suppress(FileNotFoundError):
            return abs(time.time() - (self.folder / "plan.json").stat().st_mtime)
        return 0.0


def _is_name(name: str) -> bool:
    """Whether this may be the name of a file: of a run, of a secret."""
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) is not None


# Podman


def call(words: Sequence[str], seconds: float = ENGINE_SECONDS, wait: Callable[[float], None] = time.sleep) -> str:
    """What a command prints. Raises Refused with its last words when it fails or takes longer.

    The command is ended when `wait`, which is called all the time, raises something.
    """
    # Files (in memory), not pipes: what Podman leaves running may keep a pipe open.
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
                process.wait()
        out.seek(0)
        said.seek(0)
        printed, problem = out.read().decode(errors="replace"), said.read().decode(errors="replace")
    if process.returncode != 0:
        last = (problem.strip() or printed.strip() or f"exit status {process.returncode}").splitlines()[-1]
        raise Refused(f"`{' '.join(words[:2])}`: {last}")
    return printed


def state_of(container: str) -> Optional[Words]:
    """A container's State as Podman has it; None: there is no such container. Raises Refused."""
    try:
        found = call(["podman", "inspect", "--type", "container", "--format", "{{json .State}}", "--", container])
    except Refused as error:
        if "no such" in str(error).lower():
            return None
        raise
    state: Words = json.loads(found)
    return state


def containers_of(run: str) -> Dict[str, str]:
    """Name -> state ("running", "exited" ...) of the containers with a run's label. Raises Refused."""
    listed = call(["podman", "ps", "--all", "--filter", f"label=muster.run={run}", "--format", "json"])
    return {one["Names"][0]: one["State"] for one in json.loads(listed.strip() or "[]")}


def containers_at_end(run: str) -> Dict[str, str]:
    """The same, once none of them runs; they get END_SECONDS for that."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        found = containers_of(run)
        if "running" not in found.values() or time.monotonic() > deadline:
            return found
        time.sleep(POLL_SECONDS)


def remove_containers(names: Sequence[str], seconds: int = KILL_SECONDS) -> None:
    """Remove containers, if they are there; a running one is killed after `seconds`. Raises Refused."""
    if names:
        with contextlib.suppress(Refused):  # the next command says it
            call(["podman", "stop", "--ignore", "--time", str(seconds), "--", *names])
        call(["podman", "rm", "--force", "--ignore", "--", *names])


# Files


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a new file, to the disk. Raises FileExistsError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
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


# The verbs


def start(options: Words, caller: Caller) -> None:
    """Start this host's container of a run; its keeper has the lease at the end. When that fails nothing is left.

    {plan, node_rank, key: hex, secrets: {name: base64}} -> {"started": container id}. The error has "lease": who has
    it, where that is the reason. Gives up when the caller goes.
    """
    plan, node_rank = options["plan"], options["node_rank"]
    host = Host(options)
    run, own = Run(host, plan["run"]), plan["hosts"][node_rank]
    if run.folder.exists():
        raise Refused(f"run {run.name} is on this host already")
    resumed = Run(host, plan["resume"]).folder if plan.get("resume") else None
    new = [folder for folder in [resumed] if folder and not folder.exists()]
    try:
        _make_folders(run, options, resumed)
        container = call(own["command"], wait=caller.wait).split()[-1]
        _await_lease(run, own["container"], caller)
    except BaseException:
        with contextlib.suppress(Exception):
            remove_containers([own["container"]], 0)
        for folder in [run.folder, run.private, *new]:
            with contextlib.suppress(OSError):
                remove_folder(folder)
        raise
    caller.send({"started": container})


def _make_folders(run: Run, options: Words, resumed: Optional[Path]) -> None:
    """All that has to exist before the container starts: Podman mounts no folder that is not there."""
    for parent, mode in ((run.host.runs, 0o755), (run.host.lease, 0o700), (run.host.private, 0o700)):
        parent.mkdir(mode=mode, parents=True, exist_ok=True)
    run.folder.mkdir(mode=0o700)
    write_file(run.folder / "host.json", json.dumps({"node_rank": options["node_rank"]}).encode(), 0o600)
    write_file(run.folder / "plan.json", json.dumps(options["plan"]).encode(), 0o600)
    if options["plan"].get("script"):
        (run.folder / "workload").mkdir(mode=0o700)
    if resumed:  # the plan is there, which keeps it from being removed
        resumed.mkdir(mode=0o700, exist_ok=True)
    run.private.mkdir(mode=0o700)
    write_file(run.private / "key", options["key"].encode(), 0o400)
    (run.private / "secrets").mkdir(mode=0o700)
    for name, content in options.get("secrets", {}).items():
        if not _is_name(name):
            raise Refused(f"{name!r} is no name for a secret")
        write_file(run.private / "secrets" / name, base64.b64decode(content), 0o400)


def _await_lease(run: Run, container: str, caller: Caller) -> None:
    """Wait until the keeper has the lease. Raises Refused, with the keeper's words."""
    begun = looked = time.monotonic()
    while not run._has_begun():
        end = run.document("exit.json")
        if end and not run._has_begun():
            cause = end.get("cause") or {}
            more = {"lease": run.host.holder()} if cause.get("kind") == "lease" else {}
            raise Refused(cause.get("reason") or f"the keeper ended: {end.get('status')}", **more)
        if time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            state = state_of(container)
            if not (state and state.get("Running")) and not run.document("exit.json"):
                raise Refused(f"the keeper ended without a word of its own: {_last_words(container)}")
        if time.monotonic() - begun > KEEPER_SECONDS:
            raise Refused(f"the keeper has not taken the lease within {KEEPER_SECONDS} s: {_last_words(container)}")
        caller.wait(POLL_SECONDS / 4)


def _last_words(container: str) -> str:
    with contextlib.suppress(Refused):
        printed = call(["sh", "-c", 'podman logs --tail 1 "$1" 2>&1', "sh", container]).strip()
        return printed or "it printed nothing"
    return "there is no container any more"


def drop(options: Words, caller: Caller) -> None:
    """Undo `start`: end a run at once and remove all of it.

    {run, files: names, or absent} -> {"dropped": whether there was something, "documents": {name: content} of these
    files of the run's folder, as far as they were there and JSON}
    """
    run = Run(Host(options), options["run"])
    names = list(containers_of(run.name))
    there = bool(names) or run.folder.exists()
    remove_containers(names, 0)
    found = {name: run.document(name) for name in options.get("files", []) if _is_name(name)}
    for folder in (run.folder, run.private):
        remove_folder(folder)
    caller.send({"dropped": there, "documents": {name: content for name, content in found.items() if content}})


def follow(options: Words, caller: Caller) -> None:
    """Send what a run prints and what happens to it, until its end.

    {run, offsets: {stream: n}, tail: lines or null, streams: "events" or absent}: output from these offsets; of a
    stream without one the last `tail` lines (null: all). "events" (events.jsonl) is a stream too, never tailed.
    Frames: {"stream", "offset", "bytes"} with data, which begins and ends anywhere in a line; no bytes: only where it
    will begin. {"skipped": stream, "offset", "to"}: dropped for the size limit. {"state"}: state.json, when it has
    changed. {"alive": true}: nothing else for LOOK_SECONDS. Last {"end": exit.json, "container": null}; {"end": null,
    "container": Podman's State} where the keeper is gone without one.
    """
    run = Host(options).run(options["run"])
    sender = _Sender(run, options, caller)
    looked = -LOOK_SECONDS
    while True:
        # Looked at before the output is read: what there is then is all there is.
        end = run.document("exit.json")
        over = end is not None
        if time.monotonic() - looked >= LOOK_SECONDS:
            looked = time.monotonic()
            if not sender.send_state() and time.monotonic() - caller.sent >= LOOK_SECONDS:
                caller.send({"alive": True})
            if not over and run.is_over:
                end, over = run.document("exit.json"), True
        sent = sender.send_new()
        if over and not sent:
            break
        caller.wait(0 if over or sent >= CHUNK_BYTES else POLL_SECONDS)
    sender.send_state()
    state = None
    if end is None:
        with contextlib.suppress(Refused):
            state = next(map(state_of, containers_at_end(run.name)), None)
    caller.send({"end": end, "container": state})


class _Sender:
    """What of a run's output and state was sent so far."""

    def __init__(self, run: Run, options: Words, caller: Caller) -> None:
        self._run, self._caller = run, caller
        self._reader = Reader(run.folder / "output")
        self._offsets: Dict[str, int] = dict(options.get("offsets") or {})
        self._events_alone = options.get("streams") == "events"
        self._state: Optional[bytes] = None
        if options.get("tail") is not None and not self._events_alone:
            for stream in self._reader.files():
                if stream not in self._offsets:
                    self._offsets[stream] = self._reader.offset_of_last_lines(stream, options["tail"])
                    # The caller goes on from there after a drop, whether or not there was output before it.
                    caller.send({"stream": stream, "offset": self._offsets[stream]})

    def send_new(self) -> int:
        """Send what is new, CHUNK_BYTES of each stream at most; returns the greatest number of bytes of a stream."""
        most = self._send("events", *self._events(self._offsets.get("events", 0)))
        if not self._events_alone:
            for stream in self._reader.files():
                begin, data = self._reader.read(stream, self._offsets.get(stream, 0), CHUNK_BYTES)
                most = max(most, self._send(stream, begin, data))
        return most

    def _events(self, offset: int) -> "tuple[int, bytes]":
        try:
            return offset, read_file(self._run.folder / "events.jsonl", offset, CHUNK_BYTES)
        except FileNotFoundError:
            return offset, b""

    def _send(self, stream: str, begin: int, data: bytes) -> int:
        known = self._offsets.get(stream, 0)
        if begin > known:
            self._caller.send({"skipped": stream, "offset": known, "to": begin})
        if data:
            self._caller.send({"stream": stream, "offset": begin}, data)
        self._offsets[stream] = begin + len(data)
        return len(data)

    def send_state(self) -> bool:
        """Send the state, if it has changed; whether it has."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            text = read_file(self._run.folder / "state.json", 0, 1 << 24)
            if text != self._state:
                self._caller.send({"state": json.loads(text)})
                self._state = text
                return True
        return False


def stop(options: Words, caller: Caller) -> None:
    """Ask a run's keeper to end it. {run, by, grace: seconds or null} -> {"asked": false where there is none}"""
    run = Run(Host(options), options["run"])
    asked = (run.folder / "plan.json").is_file() and not run.is_over and run.document("exit.json") is None
    if asked:
        words = {"by": options["by"], "grace": options.get("grace"), "time": time.time()}
        write_document(run.folder / "stop.json", words)
    caller.send({"asked": asked})


def runs(options: Words, caller: Caller) -> None:
    """All runs of this host, newest first, who has the lease, and who waits for it.

    {run: id, or absent} -> {"runs": [{"run", "node_rank", "owner", "created", "hosts", "script", "status": as
    Run.status, "state", "exit", "gathered"}], "lease", "queue": as keeper.queue.waiting, "time"}. With `run` that one
    alone, if it is here, with its "plan".
    """
    from keeper import queue as tickets

    host, wanted = Host(options), options.get("run")
    listed = [_described(run) for run in host.all_runs() if wanted is None]
    listed += [{**_described(run), "plan": run.plan} for run in host.all_runs() if run.name == wanted]
    waiting = tickets.waiting(str(host.lease))
    caller.send({"runs": listed, "lease": host.holder(), "queue": waiting, "time": time.time()})


def _described(run: Run) -> Words:
    plan, hosts = run.plan, []
    with contextlib.suppress(KeyError, TypeError):  # a script wrote a plan.json of its own there
        hosts = [host["host"] for host in plan["hosts"]]
    return {
        **{"run": run.name, "node_rank": run.node_rank, "hosts": hosts, "status": run.status()},
        **{key: plan.get(key) for key in ("owner", "created", "script")},
        **{key: run.document(f"{key}.json") for key in ("state", "exit", "gathered")},
    }


def offer(options: Words, caller: Caller) -> None:
    """Make the folder of a run that is over readable for the SSH user, and say what there is to gather.

    {run} -> {"exit", "container": Podman's State or null, "node_rank", "written": paths below workload/ that the script
    has written, without __pycache__, "running": true: nothing was done}
    """
    run = Host(options).run(options["run"])
    running = not run.is_over
    state = next(map(state_of, (containers_of if running else containers_at_end)(run.name)), None)
    written: List[str] = []
    if not running:
        written = _written(run)
        if user := os.environ.get("SUDO_USER"):
            call(["chown", "-R", "-h", user, str(run.folder)])
        call(["chmod", "-R", "u+rX", str(run.folder)])
    said = {"exit": run.document("exit.json"), "container": state, "node_rank": run.node_rank}
    caller.send({**said, "written": written, "running": running})


def _written(run: Run) -> List[str]:
    """Files and links below workload/ that have changed since the keeper copied the project there.

    Written down at the first time: giving the files to the SSH user changes what is looked at.
    """
    known = run.document("written.json")
    if known is None:
        workload, found = run.folder / "workload", []
        with contextlib.suppress(FileNotFoundError):  # the keeper never came to that
            copied = (run.folder / "workload.copied").lstat().st_ctime_ns
            for folder, folders, files in os.walk(workload):
                folders[:] = [name for name in folders if name != "__pycache__"]
                links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
                for path in (os.path.join(folder, name) for name in files + links):
                    if os.lstat(path).st_ctime_ns > copied:
                        found.append(os.path.relpath(path, workload))
        known = {"paths": sorted(found)}
        write_document(run.folder / "written.json", known)
    return [path for path in known["paths"] if ".." not in Path(path).parts and not os.path.isabs(path)]


def seal(options: Words, caller: Caller) -> None:
    """After a control machine has gathered a run that is over: remove what only the run needed, and look for the rest.

    {run, by, keep} -> {"left": {"containers": names, "processes": ["pid command"]}: what was still running, and was
    ended now, "cleared": whether all of it is gone, "removed": ids of the runs whose folders were removed}. These are
    gathered runs beyond the `keep` newest gathered ones, but none from which a run resumes that is not gathered.
    """
    host = Host(options)
    run = host.run(options["run"])
    if not run.is_over:
        raise Refused(f"run {run.name} is not over")
    write_document(run.folder / "gathered.json", {"by": options["by"], "time": time.time()})
    found = containers_at_end(run.name)
    left = sorted(name for name, state in found.items() if state == "running")
    remove_containers(list(found))
    processes = _kill_processes(run.name)
    remove_folder(run.private)
    remove_folder(run.folder / "workload")
    removed = _prune(host, options["keep"], run.name)
    cleared = not containers_of(run.name) and not _processes_of(run.name)
    caller.send({"left": {"containers": left, "processes": processes}, "cleared": cleared, "removed": removed})


def _kill_processes(run: str) -> List[str]:
    """Kill every process of a run outside its containers; returns what they were."""
    found = _processes_of(run)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while found and _processes_of(run) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return [f"{pid} {command}" for pid, command in found.items()]


def _processes_of(run: str) -> Dict[int, str]:
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


def _prune(host: Host, keep: int, sealed: str) -> List[str]:
    """Remove the folders of old runs, as `seal` says, but not of the one just sealed; returns their runs."""
    known = host.all_runs()
    gathered = [run for run in known if run.document("gathered.json") and run.is_over]
    names = {run.name for run in gathered}
    needed = {run.plan.get("resume") for run in known if run.name not in names}
    removed = [run for run in gathered[keep:] if run.name not in needed and run.name != sealed]
    for run in removed:
        remove_folder(run.folder)
        remove_folder(run.private)
    for path in host.runs.iterdir():
        if path.name.startswith(".removed-"):  # by a door that was killed meanwhile
            remove_all(path)
        elif path.name not in needed and time.time() - path.lstat().st_mtime > ENGINE_SECONDS:
            with contextlib.suppress(OSError):  # empty: made for a run that resumed from one that was never here
                path.rmdir()
    return [run.name for run in removed]


def queue(options: Words, caller: Caller) -> None:
    """A place in the queue of starts, for as long as the caller is there: keeper/queue.py."""
    from keeper import queue as tickets

    tickets.queue(options, 0, caller.send)


VERBS: Dict[str, Callable[[Words, Caller], None]] = {
    **{"start": start, "drop": drop, "queue": queue, "follow": follow, "stop": stop},
    **{"runs": runs, "offer": offer, "seal": seal},
}


def main(options: Words) -> int:
    """Do what {"verb": name, ...} asks; returns the exit status."""
    os.umask(0o022)
    caller = Caller(options["verb"] == "queue")
    try:
        VERBS[options["verb"]](options, caller)
        return 0
    except EOFError:
        return 1
    except Refused as error:
        words = {"error": str(error), **error.more}
    except Exception as error:
        import traceback

        traceback.print_exc()
        words = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    with contextlib.suppress(EOFError):
        caller.send(words)
    return 1
