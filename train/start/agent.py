"""torchrun, and a document that says which rank failed and why.

    python -m train.start.agent [--fill] <torchrun's arguments>

--fill: placeholders such as {rank} in the arguments of the script are filled in for each rank (keeper/placeholders.py).

Or `--direct RANK WORLD_SIZE MASTER_ADDR MASTER_PORT MODULE [argument ...]`: the only rank of a host, in this process,
without torchrun: for short tasks, which would otherwise wait twice for the import of torch.

torchrun does all the work; this catches its end and writes $MUSTER_RUN_DIR/failure.json (schema below), so that nobody
else need read logs. A script needs nothing of ours: without @record the exception is read from the end of the rank's
stderr log (give torchrun --log-dir and --tee 3). Under a keeper, which has set MUSTER_PIPES and MUSTER_KEEPER, the
output goes to the keeper, which reads the exception there, and learns at once what happens to ranks: hooks.py.

Exit status: torchrun's 0; 1 when a rank failed or the ranks did not find each other; 2 for arguments that
torchrun refuses; 75 when ranks ended with that status, as they do once one of them, maybe on another host, was
asked to stop and all have saved a checkpoint; 128 + the signal's number when this process itself was asked to stop:
its ranks get the signal and TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds (default 30) to finish their step and save.
Stopped is not failed: there is no failure.json then.

failure.json: {"schema": 1, "node_rank", "host", "failures": [{"rank", "local_rank", "pid", "exitcode",
"signal", "exception", "traceback", "time", "consequence"}]}. The first failure is the cause as far as it can
be known: those that only lost the connection to a peer ("consequence": true) come after the others, then the
earlier first. `rank` is null when torchrun itself failed, e.g. in the rendezvous; `signal` is e.g. "SIGKILL"
or null; `time` is in unix seconds.

Run it with python -P where the working directory may hold a train.py of the user's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from pathlib import Path
from types import FrameType

from keeper.causes import EXIT_STOPPED, PEER_LOST, explanation, in_order
from train.start import forked
from train.start.failures import describe, only_stopped, own_failure, report

SHUTDOWN_GRACE_SECONDS = "30"  # that ranks get between SIGTERM and SIGKILL
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MASTER_SECONDS = 20.0
MASTER_POLL_SECONDS = 0.05
HOLD_POLL_SECONDS = 0.02
MONITOR_SECONDS = 0.05  # between two looks at the ranks; torchrun's own is 0.1


def direct(rank: str, world_size: str, address: str, port: str, module: str, *arguments: str) -> int:
    """A rank as torchrun would start it, in this process. Returns its exit status, or 1."""
    leave_while_torch_waits()
    wait_until_let_go()
    error_file = Path(tempfile.mkdtemp()) / "error.json"  # where torch writes the exception of a rank
    os.environ.update(
        RANK=rank, LOCAL_RANK="0", WORLD_SIZE=world_size, LOCAL_WORLD_SIZE="1",
        MASTER_ADDR=address, MASTER_PORT=port, TORCHELASTIC_ERROR_FILE=str(error_file),
    )  # fmt: skip
    sys.argv = [module, *arguments]
    import torch.distributed.rendezvous as rendezvous

    from train.start import one_address

    vars(rendezvous)["TCPStore"] = one_address.store
    trace, status = "", 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace, status = "".join(traceback.format_exception(error)), 1
    if status:
        said = json.loads(error_file.read_text())["message"] if error_file.exists() else ""
        said = said if isinstance(said, str) else said["message"]
        exception, trace = explanation(status, said, trace, trace)
        lost = bool(PEER_LOST.search(exception))
        report([own_failure(RuntimeError()) | {
            "rank": int(rank), "local_rank": 0, "exitcode": status, "exception": exception, "traceback": trace,
            "consequence": lost,
        }], int(rank))  # fmt: skip
    return status and 1


def main(arguments: list[str]) -> int:
    filling = arguments[:1] == ["--fill"]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_GRACE_SECONDS)
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of that time
    from torch.distributed import run as torchrun

    options = torchrun.parse_args(arguments[filling:])
    ranks = forked.fork(forked.wanted(options))
    gc.enable()
    leave_while_torch_waits()  # starts a thread: after the fork
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from train.start import hooks

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the same is reported below, in one line
    hooks.install(len(options.training_script_args), filling, ranks, leave_at_once_without_ranks)
    options.monitor_interval = MONITOR_SECONDS
    # torchrun fills in templates ("$$", "${local_rank}"): arguments shall arrive as they were given.
    options.training_script_args = [word.replace("$", "$$") for word in options.training_script_args]
    since = time.time()
    wait_until_let_go()
    wait_for_master(options)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        if only_stopped(failure.exitcode for failure in error.failures.values()):
            return EXIT_STOPPED
        failures = [describe(rank, f, options.log_dir, since) for rank, f in error.failures.items()]
        report(in_order(failures), options.node_rank)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    except Exception as error:
        report([own_failure(error)], options.node_rank)
        return 1
    return 0


def wait_until_let_go() -> None:
    """Until all hosts of the run have started, and the control machine has no objection; the keeper ends a longer wait.
    Torch is loaded meanwhile."""
    hold = os.environ.get("MUSTER_HOLD", "")
    while hold and os.path.exists(hold):
        time.sleep(HOLD_POLL_SECONDS)


def wait_for_master(options: Namespace) -> None:
    """Until torchrun's store of the first host can be reached, or MASTER_SECONDS: torchrun, which tries again after 1,
    2, 4 ... seconds, would lose the rest of such a pause."""
    limit = time.monotonic() + MASTER_SECONDS
    while options.node_rank and options.master_port and time.monotonic() < limit:
        with contextlib.suppress(OSError), socket.create_connection((options.master_addr, options.master_port), 1):
            return
        time.sleep(MASTER_POLL_SECONDS)


def early(number: int, frame: FrameType | None) -> None:
    """The handler of signals while there is nothing to end in order: before torchrun sets its own, which it does just
    before it starts the ranks, and when all of them have ended."""
    os._exit(128 + number)


def leave_at_once_without_ranks() -> None:
    """In a container this may be process 1, which the kernel shields from signals without a handler."""
    for number in ENDING:
        signal.signal(number, early)


def leave_while_torch_waits() -> None:
    """While this process waits for the other hosts in torch's C++ no Python handler runs: a thread stands in for it, as
    the wakeup descriptor is written all the same."""

    def watch() -> None:
        while number := os.read(reading, 1):
            if signal.getsignal(number[0]) is early:
                os._exit(128 + number[0])

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


def leave(status: int) -> None:
    """Ends the process at once. An orderly end would wait for torchrun's threads that copy the ranks' output, and could
    replace the status by the interpreter's 120 when one of them still writes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    leave_at_once_without_ranks()
    leave(direct(*sys.argv[2:]) if sys.argv[1:2] == ["--direct"] else main(sys.argv[1:]))
