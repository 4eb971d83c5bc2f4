"""The verbs of a door that start a host's keeper of a run, start it again, and undo that. What fails leaves nothing."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import time
import zlib
from pathlib import Path
from typing import Callable, Optional

from keeper import HELD_SECONDS, PROMISES, SCRATCH, USER_ID, engines, firewall, lease
from keeper.caller import Caller
from keeper.host import (
    KEEPER_SECONDS,
    POLL_SECONDS,
    Host,
    Refused,
    Run,
    Words,
    call,
    containers_of,
    is_name,
    keepers_of_others,
    make_folder,
    remove_containers,
    remove_folder,
    state_of,
    write_file,
)

LOOK_SECONDS = 1.0  # between two looks at the container


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
    if others := keepers_of_others():
        raise Refused(f"a run of another user's is in progress there, whose keeper is process {others[0]}")
    resumed = Run(host, plan["resume"]).folder if plan.get("resume") else None
    new = [folder for folder in [resumed] if folder and not folder.exists()]
    try:
        _make_folders(run, options, resumed)
        container = call(own["command"], wait=caller.wait).split()[-1]
        _await_lease(run, own["container"], caller, run.has_begun)
        _close_ports(plan, own)  # not before: until then the lease may be another run's
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
    """All that has to exist before the container starts, for its user: the engine mounts nothing that is not there."""
    for parent, mode in ((run.host.runs, 0o755), (run.host.private, 0o700)):
        parent.mkdir(mode=mode, parents=True, exist_ok=True)
    _offer_lease(run.host)
    make_folder(run.folder, USER_ID)
    make_folder(run.folder / SCRATCH)
    _make_private(run, options)
    write_file(run.private / "hold", b"", 0o400)
    write_file(run.folder / "host.json", json.dumps({"node_rank": options["node_rank"]}).encode(), 0o600)
    write_file(run.folder / "plan.json", json.dumps(options["plan"]).encode(), 0o600)
    if options["plan"].get("script"):
        make_folder(run.folder / "workload")
    if resumed:  # the plan is there, which keeps it from being removed
        with contextlib.suppress(FileExistsError):
            make_folder(resumed, USER_ID)
        if os.geteuid() == 0:  # who has gathered it is its owner
            call(["chown", "-R", "-h", f"{USER_ID}:{USER_ID}", str(resumed)])


def _offer_lease(host: Host) -> None:
    """The file of the lease alone is for the containers; the tickets beside it are not."""
    host.lease.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(lease.file_of(str(host.lease)), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.geteuid() == 0:
            os.fchown(file, USER_ID, USER_ID)
    finally:
        os.close(file)


def _make_private(run: Run, options: Words) -> None:
    """The key and the secrets, in this host's memory."""
    make_folder(run.private, USER_ID)
    write_file(run.private / "key", options["key"].encode(), 0o400)
    make_folder(run.private / "secrets")
    for name, content in options.get("secrets", {}).items():
        if not is_name(name):
            raise Refused(f"{name!r} is no name for a secret")
        write_file(run.private / "secrets" / name, base64.b64decode(content), 0o400)


def _close_ports(plan: Words, own: Words) -> None:
    if own["firewall"]:
        firewall.close(address for host in plan["hosts"] for address in host["addresses"])
    else:
        firewall.leave_open()


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
        words = engines.noted().last_line(container)
        printed = call(["sh", "-c", '"$@" 2>&1', "sh", *words]).strip()
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
    _offer_lease(run.host)
    remove_containers(list(containers_of(run.name)), 0)
    remove_folder(run.private)
    _make_private(run, options)
    container = call(own["command"], wait=caller.wait).split()[-1]
    _await_lease(run, own["container"], caller, lambda: (run.host.holder() or {}).get("run") == run.name)
    _close_ports(run.plan, own)
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
