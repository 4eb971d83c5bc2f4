"""What a rank says of its progress to its host's keeper, and what it hears: for our trainer and for users' scripts.

A script of your own needs none of this. With it, a rank that hangs is found and named, with the line where it stands
(`progress`), and `make stop` and Ctrl-C leave you a checkpoint (`stopping`):

    import muster_run

    for step, batch in enumerate(loader):
        ...
        muster_run.progress(step)
        if muster_run.stopping():
            save()
            sys.exit(muster_run.EXIT_STOPPED)

A run that failed goes on by itself once a rank has said that it can (`can_resume`): the script is started again,
maybe on fewer hosts, and goes on from what it has saved.

Outside of a run of Muster all of it does nothing. To use the same script there, put a copy of this file beside it.
It imports the standard library alone, and torch where it is loaded already; nothing else of Muster.

In the training image it is the top-level module `muster_run`; the trainer imports it as train.start.muster_run. Whoever
does so lets `kill -USR1` write the stacks of all its threads to $MUSTER_RUN_DIR/stacks/rank-<rank>.txt.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, TextIO

EXIT_STOPPED = 75  # of a rank that has saved because it was asked to stop
TELL_SECONDS = 0.1  # between two messages of the same phase, at least
SCRIPT_PATIENCE_SECONDS = 120.0  # of a script's silence: it may evaluate and save without a word
LAST_TENSORS_SECONDS = 0.1  # to drop them takes far less
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")


class Teller:
    """Datagrams to the socket that MUSTER_KEEPER names; without that, nothing happens.

    Nothing can hold up the caller: a message that cannot be sent at once is dropped, and the next one is tried at once.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.keeper = environment.get("MUSTER_KEEPER", "")
        self.rank = next((int(environment[name]) for name in RANK_VARIABLES if environment.get(name)), 0)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self.keeper else None
        self.phase = ""
        self.last: Mapping[str, Any] | None = None
        self.quiet_until = 0.0  # time.monotonic(), for messages of the same phase

    def tell(self, phase: str, figures: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self.socket is None or (phase == self.phase and now < self.quiet_until):
            return
        self.last = {"phase": phase, **{name: value for name, value in figures.items() if value is not None}}
        if self.send(self.last):
            self.phase, self.quiet_until = phase, now + TELL_SECONDS

    def send(self, words: Mapping[str, Any]) -> bool:
        """Whether the keeper will read it."""
        if self.socket is None:
            return False
        try:
            data = json.dumps({"rank": self.rank, "pid": os.getpid(), **words}, default=float).encode()
            self.socket.sendto(data, socket.MSG_DONTWAIT, self.keeper)
        except Exception:  # whatever it is, it shall not end a training
            return False
        return True


class StopFlag:
    """Set by SIGTERM, from when this is made. A handler that was there before is called as well."""

    def __init__(self) -> None:
        self.is_set = False
        self.group: Any = None  # for agreeing: a process group that takes tensors of the CPU
        self.before = signal.signal(signal.SIGTERM, self.set)

    def set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        if callable(self.before):
            self.before(number, frame)

    def agreed(self) -> bool:
        """Whether it is set on any rank; on this one alone where there is no process group."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return self.is_set
        dist = torch.distributed
        if self.group is None:
            takes_cpu = any(name in dist.get_backend() for name in ("gloo", "mpi"))
            self.group = dist.group.WORLD if takes_cpu else dist.new_group(backend="gloo")
        anywhere = torch.tensor(int(self.is_set))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
        if anywhere:
            atexit.register(leave_process_group)  # or the exit status may be SIGABRT's
        return bool(anywhere)


def leave_process_group() -> None:
    """In place of destroy_process_group, with which a rank may hang for ever after its last step.

    There DDP's reducer can be the group's last holder. It then waits for gloo's threads without letting go of the
    interpreter's lock, which such a thread needs to drop its last tensor. Python's own reference lets go of the lock.
    """
    dist = sys.modules["torch"].distributed
    if dist.is_initialized():
        _left.add(dist.group.WORLD)
        dist.destroy_process_group()


@atexit.register
def let_go() -> None:
    """While the interpreter still lives: gloo's threads need it to drop their last tensors, or abort the process
    ("terminate called without an active exception")."""
    if _flag is not None and _flag.group is not None:  # a script that has destroyed its group does not know of this one
        _left.add(_flag.group)
        _flag.group = None
    if not _left:
        return
    gc.collect()  # DDP's cycles hold the group
    kept = any(sys.getrefcount(group) > 3 for group in _left)  # the set's, the variable's and the argument's
    _left.clear()
    if kept:  # by torch (FSDP's meshes are) or a script's model: its threads cannot be joined, but they get the lock
        time.sleep(LAST_TENSORS_SECONDS)


# Made when they are first needed: a process that forks ranks has not their variables yet.
_teller: Teller | None = None
_flag: StopFlag | None = None
_stacks: TextIO | None = None
_left: set[Any] = set()  # process groups that are destroyed and not dropped yet


def tell(phase: str, step: int | None = None, steps: int | None = None, **figures: Any) -> None:
    """phase: starting, compiling, fetching, training, evaluating or saving. step: in that phase; steps: of all.
    figures: epoch, epochs, loss, rate (images/s), work (what the rank has done so far, as a list: keeper/slow.py);
    `patience` as in `progress`.

    10 messages a second at most, a change of the phase at once. Costs a microsecond, 20 where a message is sent.
    """
    _known_teller().tell(phase, {"step": step, "steps": steps, **figures})


def still_alive() -> None:
    """Says again what was said last: this rank works, but has come no further."""
    teller = _known_teller()
    if teller.last:
        teller.send(teller.last)


def _known_teller() -> Teller:
    global _teller
    if _teller is None:
        _teller = Teller(os.environ)
    return _teller


def progress(
    step: int | None = None,
    steps: int | None = None,
    phase: str = "training",
    loss: float | None = None,
    patience: float = SCRIPT_PATIENCE_SECONDS,
) -> None:
    """Says that this rank goes on. Call it after each step; the first call switches hang detection on for this rank.

    steps: of the whole run. phase: "training", or "evaluating" in an evaluation's loop (a step of its own then), or,
    before something long that says nothing, "saving" (10 minutes) or "fetching" (an hour). patience: seconds of silence
    in training and evaluation that are always allowed; beyond, the run ends as hung when all ranks that report are
    silent for several times their longest steps, and none of their stacks moves.
    """
    tell(phase, step, steps, loss=loss, patience=patience)


def can_resume() -> int:
    """Says that this script, started again, goes on from what it has saved; returns which attempt this is, from 1.

    Without it a script is not started again when a rank or a host fails (nor with MAX_RESTARTS=0). Ranks and hosts of
    another attempt may be others: save on each host (LOCAL_RANK 0), in $MUSTER_RUN_DIR, which is a host's own, and load
    the newest that any host has.
    """
    _known_teller().send({"resumable": True})
    return int(os.environ.get("MUSTER_ATTEMPT", "1"))


def stopping() -> bool:
    """Whether the run is asked to end (SIGTERM): save, and sys.exit(EXIT_STOPPED). The same answer on all ranks.

    With a process group it is an all-reduce of one number over it: every rank calls it at the same places, for example
    after each step or each tenth one. It costs about 0.2 ms between two ranks, on a network a few round trips.
    From the first call SIGTERM no longer ends the process by itself.
    """
    global _flag
    if not os.environ.get("MUSTER_KEEPER"):
        return False
    if _flag is None:
        _flag = StopFlag()
    return _flag.agreed()


def keep_stacks() -> None:
    """From now on SIGUSR1 appends the stacks of all threads to $MUSTER_RUN_DIR/stacks/rank-<rank>.txt, also while the
    main thread waits in C++. Only for a rank under a keeper; importing this module does it."""
    global _stacks
    folder, rank = os.environ.get("MUSTER_RUN_DIR"), os.environ.get("RANK")
    if _stacks is not None or not (os.environ.get("MUSTER_KEEPER") and folder and rank):
        return
    try:
        os.makedirs(f"{folder}/stacks", exist_ok=True)
        _stacks = open(f"{folder}/stacks/rank-{rank}.txt", "a")  # noqa: SIM115  # open as long as the process lives
    except OSError:  # a full disk: then without
        return
    faulthandler.register(signal.SIGUSR1, _stacks, all_threads=True)


keep_stacks()
