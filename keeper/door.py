"""What a control machine asks on a host about its runs, over SSH. Runs there as root, with the host's own Python, from
sources that come on standard input (launch/hosts/door.py): nothing is installed and nothing stays behind.

One call is one verb of VERBS with its options. It answers in frames on standard output: a line `muster:{json}`, and,
where that has "bytes": n, n raw bytes. The last frame of a verb that failed is {"error": one line}, and the exit status
1. The end of standard input means that the caller has gone; what only serves the caller then ends at once.
A start calls several doors of each host, so a door loads quickly: what few verbs need is imported where it is used.

Every verb takes the option "root" (tests): a folder that stands before the folders of the host.
What a host has of runs, and how it is looked at and removed: keeper/host.py.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from keeper import HELD_SECONDS, OWN_NAMES, PROMISES, WITNESSES
from keeper.host import (
    ENGINE_SECONDS,
    KEEPER_SECONDS,
    POLL_SECONDS,
    Host,
    Refused,
    Run,
    Words,
    call,
    containers_at_end,
    containers_of,
    end_processes,
    is_name,
    kill_containers,
    processes_of,
    remove_all,
    remove_containers,
    remove_folder,
    state_of,
    write_document,
    write_file,
)
from keeper.output import Reader, read_file

MARK = "muster:"
CHUNK_BYTES = 262144  # of output in one frame
LOOK_SECONDS = 1.0  # between two looks at the state and the lease


class Caller:
    """The control machine: frames to it, and whether it is still there. EOFError: it has gone."""

    def __init__(self, speaks: bool) -> None:
        """speaks: what comes on standard input is for the verb; else only its end means something."""
        self._in, self._out, self._speaks = 0, 1, speaks
        self._said = b""  # while nothing was asked
        self.sent = time.monotonic()  # when the last frame went
        os.set_blocking(self._out, False)
        self._write(b"\n")  # ends what a shell's profile has printed

    def send(self, words: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame. Waits while the caller reads slowly."""
        header = {**words, "bytes": len(data)} if "stream" in words else words
        self._write(f"{MARK}{json.dumps(header)}\n".encode())
        self._write(data)
        self.sent = time.monotonic()

    def hear(self, seconds: float) -> Words:
        """The next request. Raises TimeoutError where none comes, and EOFError as soon as the caller has gone."""
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):  # nothing comes after a request before it is answered
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"the control machine has said nothing for {seconds:.0f} s")
            if not (more := os.read(self._in, 1 << 16)):
                raise EOFError
            line += more
        heard: Words = json.loads(line)
        return heard

    def wait(self, seconds: float) -> None:
        """Wait. Raises EOFError as soon as the caller has gone."""
        deadline = time.monotonic() + seconds
        while select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (more := os.read(self._in, 1 << 16)):
                raise EOFError
            self._said += more

    def last_said(self) -> Optional[Words]:
        """The last message that came whole while this waited, once; None: there is no new one."""
        whole, _, self._said = self._said.rpartition(b"\n")
        last: Optional[Words] = json.loads(whole.rpartition(b"\n")[2]) if whole else None
        return last

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


def start(options: Words, caller: Caller) -> None:
    """Start this host's container of a run, whose keeper takes the lease, and let its ranks start when told to.

    Two requests are read, so that this process is there when the first one is known: {node_rank, packed: {plan, key:
    hex, secrets: {name: base64}} as JSON, zlib and base64} -> {"started": container id}; {"go": true} -> {"went":
    true}. The error has "lease": who has it, where that is the reason. When something fails, or the caller goes before
    {"go"}, nothing is left.
    """
    asked = caller.hear(HELD_SECONDS)
    common = json.loads(zlib.decompress(base64.b64decode(asked["packed"])))
    options = {**options, **common, "node_rank": asked["node_rank"]}
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
        _await_lease(run, own["container"], caller, run.has_begun)
        caller.send({"started": container})
        if not caller.hear(HELD_SECONDS).get("go"):
            raise Refused("the control machine took it back")
        (run.private / "hold").unlink()
    except BaseException:
        with contextlib.suppress(Exception):
            remove_containers([own["container"]], 0)
        for folder in [run.folder, run.private, *new]:
            with contextlib.suppress(OSError):
                remove_folder(folder)
        raise
    caller.send({"went": True})


def _make_folders(run: Run, options: Words, resumed: Optional[Path]) -> None:
    """All that has to exist before the container starts: Podman mounts no folder that is not there."""
    for parent, mode in ((run.host.runs, 0o755), (run.host.lease, 0o700), (run.host.private, 0o700)):
        parent.mkdir(mode=mode, parents=True, exist_ok=True)
    run.folder.mkdir(mode=0o700)
    _make_private(run, options)
    write_file(run.private / "hold", b"", 0o400)
    write_file(run.folder / "host.json", json.dumps({"node_rank": options["node_rank"]}).encode(), 0o600)
    write_file(run.folder / "plan.json", json.dumps(options["plan"]).encode(), 0o600)
    if options["plan"].get("script"):
        (run.folder / "workload").mkdir(mode=0o700)
    if resumed:  # the plan is there, which keeps it from being removed
        resumed.mkdir(mode=0o700, exist_ok=True)


def _make_private(run: Run, options: Words) -> None:
    """The key and the secrets, in this host's memory."""
    run.private.mkdir(mode=0o700)
    write_file(run.private / "key", options["key"].encode(), 0o400)
    (run.private / "secrets").mkdir(mode=0o700)
    for name, content in options.get("secrets", {}).items():
        if not is_name(name):
            raise Refused(f"{name!r} is no name for a secret")
        write_file(run.private / "secrets" / name, base64.b64decode(content), 0o400)


def _await_lease(run: Run, container: str, caller: Caller, has_it: Callable[[], bool]) -> None:
    """Wait until the keeper has the lease. Raises Refused, with the keeper's words."""
    begun = looked = time.monotonic()
    while not has_it():
        end = run.document("exit.json")
        if end and not has_it():
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


def private(options: Words, caller: Caller) -> None:
    """What the hosts of a run that goes on here have in their memory, for one that has lost it.

    {run} -> {"key": hex, "secrets": {name: base64}}
    """
    run = Host(options).run(options["run"])
    if run.is_over or (run.private / "stop.json").exists():
        raise Refused("the run ends here")
    files = sorted((run.private / "secrets").iterdir())
    secrets = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}
    caller.send({"key": (run.private / "key").read_text().strip(), "secrets": secrets})


def rejoin(options: Words, caller: Caller) -> None:
    """Start this host's keeper of a run again, after its container or the host has ended while the run goes on.

    {run, key, secrets: as `private` gives them} -> {"rejoined": container id}, when it has the lease. It knows what it
    had agreed to (promises.json), and waits for the next attempt.
    """
    run = Host(options).run(options["run"])
    holder = run.host.holder()
    if holder:
        raise Refused(f"run {holder['run']} of {holder['owner']} is in progress there")
    ended = run.document("exit.json") or run.document("gathered.json")
    if ended or (run.private / "stop.json").exists():
        raise Refused("the run has ended there")
    if not run.document(PROMISES):
        raise Refused("its keeper has not kept what it had agreed to: the disk was full, or nothing may be restarted")
    own = run.plan["hosts"][run.node_rank]
    run.host.private.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_containers(list(containers_of(run.name)), 0)
    remove_folder(run.private)
    _make_private(run, options)
    container = call(own["command"], wait=caller.wait).split()[-1]
    _await_lease(run, own["container"], caller, lambda: (run.host.holder() or {}).get("run") == run.name)
    caller.send({"rejoined": container})


def drop(options: Words, caller: Caller) -> None:
    """Undo `start`: end a run at once and remove all of it.

    {run, files: names, or absent} -> {"dropped": whether there was something, "documents": {name: content} of these
    files of the run's folder, as far as they were there and JSON}
    """
    run = Run(Host(options), options["run"])
    names = list(containers_of(run.name))
    there = bool(names) or run.folder.exists()
    remove_containers(names, 0)
    found = {name: run.document(name) for name in options.get("files", []) if is_name(name)}
    for folder in (run.folder, run.private):
        remove_folder(folder)
    caller.send({"dropped": there, "documents": {name: content for name, content in found.items() if content}})


def follow(options: Words, caller: Caller) -> None:
    """Send what a run prints and what happens to it, until its end.

    {run, offsets: {stream: n}, tail: lines or null, streams: "events" or absent, witness: id or absent}: output from
    these offsets; of a stream without one the last `tail` lines (null: all). "events" (events.jsonl) is a stream too,
    never tailed. What the caller says meanwhile (one JSON object a line) is for the keeper: its `witnesses/<id>.json`.
    Frames: {"stream", "offset", "bytes"} with data, which begins and ends anywhere in a line; no bytes: only where it
    will begin. {"skipped": stream, "offset", "to"}: dropped for the size limit. {"state"}: state.json, when it has
    changed. {"alive": true}: nothing else for LOOK_SECONDS. Last {"end": exit.json, "container": null}; {"end": null,
    "container": Podman's State} where the keeper is gone without one.
    """
    run = Host(options).run(options["run"])
    sender = _Sender(run, options, caller)
    witness = options.get("witness")
    if witness is not None and not is_name(witness):
        raise Refused(f"{witness!r} is no name for a witness")
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
        if witness and (said := caller.last_said()) and run.private.is_dir():
            (run.private / WITNESSES).mkdir(mode=0o700, exist_ok=True)
            write_document(run.private / WITNESSES / f"{witness}.json", said)
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
    """Ask a run's keeper to end it; or, where that one does not answer any more, end it without.

    {run, by, grace: seconds or null, kill: true, or absent} -> {"asked": false where there is no keeper, "killed": with
    `kill`, the names of the run's containers that were killed}. The run's folder stays as it is.
    """
    run = Run(Host(options), options["run"])
    asked = (run.folder / "plan.json").is_file() and not run.is_over and run.document("exit.json") is None
    if asked:
        words = {"by": options["by"], "grace": options.get("grace"), "time": time.time()}
        write_document(run.private / "stop.json", words)  # in memory: also where the disk is full
    killed = {"killed": kill_containers(run.name) if asked else []} if options.get("kill") else {}
    caller.send({"asked": asked, **killed})


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
    has written, without __pycache__, "more": names in the run's folder that are not Muster's, "checkpoints": the steps
    of our trainer's that are there, ascending, "running": true: nothing was done}
    """
    run = Host(options).run(options["run"])
    running = not run.is_over
    state = next(map(state_of, (containers_of if running else containers_at_end)(run.name)), None)
    written: List[str] = []
    more: List[str] = []
    if not running:
        written = _written(run)
        more = sorted(name for name in os.listdir(run.folder) if name not in OWN_NAMES and not name.startswith("."))
        if user := os.environ.get("SUDO_USER"):
            call(["chown", "-R", "-h", user, str(run.folder)])
        call(["chmod", "-R", "u+rX", str(run.folder)])
    said = {"exit": run.document("exit.json"), "container": state, "node_rank": run.node_rank}
    caller.send({**said, "written": written, "more": more, "checkpoints": _checkpoints(run), "running": running})


def _checkpoints(run: Run) -> List[int]:
    """The steps of the checkpoints that are there with their manifests (train/checkpoints/files.py)."""
    folder = run.folder / "checkpoints"
    found = [re.fullmatch(r"step-([0-9]{1,18})\.json", path.name) for path in folder.glob("step-*.json")]
    steps = sorted(int(match.group(1)) for match in found if match)
    return [step for step in steps if (folder / f"step-{step}.pt").is_file()]


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

    {run, by, keep} -> {"left": {"containers": names, "processes": ["pid command"], "GPU memory": texts}: what was still
    running, and was ended now, and GPU memory that no process holds any more, "cleared": whether all of it is gone,
    "removed": ids of the runs whose folders were removed}. These are gathered runs beyond the `keep` newest gathered
    ones, but none from which a run resumes that is not gathered.
    """
    host = Host(options)
    run = host.run(options["run"])
    if not run.is_over:
        raise Refused(f"run {run.name} is not over")
    write_document(run.folder / "gathered.json", {"by": options["by"], "time": time.time()})
    found = containers_at_end(run.name)
    left = sorted(name for name, state in found.items() if state == "running")
    remove_containers(list(found))
    processes, lost = end_processes(run)
    remove_folder(run.private)
    remove_folder(run.folder / "workload")
    removed = _prune(host, options["keep"], run.name)
    cleared = not containers_of(run.name) and not processes_of(run.name) and not lost
    named = {"containers": left, "processes": processes, "GPU memory": lost}
    caller.send({"left": named, "cleared": cleared, "removed": removed})


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
    **{"start": start, "private": private, "rejoin": rejoin, "drop": drop},
    **{"queue": queue, "follow": follow, "stop": stop},
    **{"runs": runs, "offer": offer, "seal": seal},
}


def main(options: Words) -> int:
    """Do what {"verb": name, ...} asks; returns the exit status."""
    os.umask(0o022)
    caller = Caller(options["verb"] in ("queue", "start"))
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
