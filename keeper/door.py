"""What a control machine asks on a host about its runs, over SSH. Runs there as root, with the host's own Python, from
sources that come on standard input (launch/hosts/door.py): nothing is installed and nothing stays behind.

One call is one verb of VERBS with its options. It answers in frames on standard output: a line `muster:{json}`, and,
where that has "bytes": n, n raw bytes. The last frame of a verb that failed is {"error": one line}, and the exit status
1. The end of standard input means that the caller has gone; what only serves the caller then ends at once.
A start calls several doors of each host, so a door loads quickly: what few verbs need is imported where it is used.

Every verb takes the option "root" (tests): a folder that stands before the folders of the host.
What a host has of runs, and how it is looked at and removed: keeper/host.py. The verbs that start: keeper/starting.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional

from keeper import OWN_NAMES, SCRATCH, WITNESSES, engines, starting
from keeper.caller import Caller
from keeper.host import (
    ENGINE_SECONDS,
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
    make_folder,
    processes_of,
    remove_all,
    remove_containers,
    remove_folder,
    state_of,
    write_document,
)
from keeper.output import Reader, read_file

CHUNK_BYTES = 262144  # of output in one frame
LOOK_SECONDS = 1.0  # between two looks at the state and the lease
DEPLOY_SILENT_SECONDS = 60.0  # after which a deploy that has said nothing is over


def follow(options: Words, caller: Caller) -> None:
    """Send what a run prints and what happens to it, until its end.

    {run, offsets: {stream: n}, tail: lines or null, streams: "events" or absent, witness: id or absent}: output from
    these offsets; of a stream without one the last `tail` lines (null: all). "events" (events.jsonl) is a stream too,
    never tailed. What the caller says meanwhile (one JSON object a line) is for the keeper: its `witnesses/<id>.json`.
    Frames: {"stream", "offset", "bytes"} with data, which begins and ends anywhere in a line; no bytes: only where it
    will begin. {"skipped": stream, "offset", "to"}: dropped for the size limit. {"state"}: state.json, when it has
    changed. {"alive": true}: nothing else for LOOK_SECONDS. Last {"end": exit.json, "container": null}; {"end": null,
    "container": its State} where the keeper is gone without one.
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
            with contextlib.suppress(FileExistsError):
                make_folder(run.private / WITNESSES)
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
    """Make the folder of a run that is over readable for the SSH user, and say what there is to gather. The same for
    the folder of the run that it went on from, which was closed to that user when this one started.

    {run} -> {"exit", "container": its State or null, "node_rank", "written": paths below workload/ that the script
    has written, without __pycache__, "more": names in the run's folder that are not Muster's, "checkpoints": the steps
    of our trainer's that are there, ascending, "running": true: nothing was done}
    """
    host = Host(options)
    run = host.run(options["run"])
    running = not run.is_over
    state = next(map(state_of, (containers_of if running else containers_at_end)(run.name)), None)
    written: List[str] = []
    more: List[str] = []
    if not running:
        remove_folder(run.folder / SCRATCH)
        written = _written(run)
        more = sorted(name for name in os.listdir(run.folder) if name not in OWN_NAMES and not name.startswith("."))
        folders = [str(folder) for folder in (run.folder, *_resumed(host, run))]
        if user := "0" if engines.is_rootless() else os.environ.get("SUDO_USER"):
            call(["chown", "-R", "-h", user, *folders])
        call(["chmod", "-R", "u+rX", *folders])
    said = {"exit": run.document("exit.json"), "container": state, "node_rank": run.node_rank}
    caller.send({**said, "written": written, "more": more, "checkpoints": _checkpoints(run), "running": running})


def _resumed(host: Host, run: Run) -> List[Path]:
    """The folder of the run that this one went on from; none while a run is in progress that needs it."""
    name = run.plan.get("resume")
    known = host.all_runs() if name else []
    if any(each.plan.get("resume") == name and not each.is_over for each in known):
        return []
    return [each.folder for each in known if each.name == name and each.is_over]


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


def deploy(options: Words, caller: Caller) -> None:
    """Let nobody else deploy to this host, for as long as the caller is there and says so now and then.

    {by, what: "deploy", "data transfer" or "teardown"} -> {"held": true}
    """
    from keeper import lease

    # In memory: a teardown removes what is on the disk.
    folder = str(Host(options).private / ".deploy")
    try:
        held = lease.take(folder, {"run": options["what"], "owner": options["by"]})
    except lease.Busy as busy:
        first = busy.holder
        since = f"{first['seconds']:.0f} s ago"
        raise Refused(f"a {first['run']} of {first['owner']}, begun {since}, is in progress there") from None
    with held:
        caller.send({"held": True})
        with contextlib.suppress(TimeoutError):
            while True:
                caller.hear(DEPLOY_SILENT_SECONDS)


VERBS: Dict[str, Callable[[Words, Caller], None]] = {
    **{"start": starting.start, "private": starting.private, "rejoin": starting.rejoin, "drop": starting.drop},
    **{"queue": queue, "follow": follow, "stop": stop, "deploy": deploy},
    **{"runs": runs, "offer": offer, "seal": seal},
}


def main(options: Words) -> int:
    """Do what {"verb": name, ...} asks; returns the exit status."""
    os.umask(0o022)
    caller = Caller(options["verb"] in ("queue", "start", "deploy"))
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
