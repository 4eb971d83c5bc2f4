"""This process among the ranks: its rank, its device, and the process group.

Ranks are started by torchrun, by `--spawn` (`train.start.spawn`), by mpirun or horovodrun, or by hand with the four
variables of torchrun; alone, this process is rank 0 of 1.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from train.settings import SettingsError
from train.start.muster_run import leave_process_group, tell
from train.start.rendezvous import meet

SHARED_GPUS = "MUSTER_SHARED_GPUS"  # set by tests, with --backend gloo: ranks of a host may share a GPU
POLL_SECONDS = 0.1  # between two rounds of wait_for_all
# rank, local rank, world size, local world size: as torchrun, Open MPI and horovodrun call them.
VARIABLES = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"),
)


@dataclass(frozen=True)
class Place:
    """The numbers of this rank, counted from 0. A process alone is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "Place":
        """Raises SettingsError where the variables are incomplete or contradict each other."""
        for names in VARIABLES:
            if names[0] in environment:
                return Place._of(names, environment)
        return Place()

    @staticmethod
    def _of(names: tuple[str, ...], environment: Mapping[str, str]) -> "Place":
        missing = [name for name in names if not environment.get(name)]
        if missing:
            raise SettingsError(
                f"{names[0]} is set but not {', '.join(missing)}: start ranks with torchrun or --spawn, or set all of "
                + ", ".join(names)
            )
        found = ", ".join(f"{name}={environment[name]}" for name in names)
        try:
            place = Place(*(int(environment[name]) for name in names))
        except ValueError as error:
            raise SettingsError(f"{found}: whole numbers are needed") from error
        if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size):
            raise SettingsError(f"{found}: ranks count from 0 and are below the size")
        return place


def device_of(place: Place) -> torch.device:
    """One GPU for each local rank, or the CPU where there is no GPU at all.

    Raises SettingsError where there are GPUs but fewer than local ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        return torch.device("cpu")
    if place.local_world_size > gpus and SHARED_GPUS not in os.environ:
        names = [torch.cuda.get_device_name(index) for index in range(gpus)]
        raise SettingsError(too_many_ranks(place.local_world_size, names, os.environ.get("CUDA_VISIBLE_DEVICES")))
    return torch.device("cuda", place.local_rank % gpus)


def too_many_ranks(ranks: int, names: Sequence[str], visible: str | None) -> str:
    """What to say of more ranks on this host than GPUs that a process sees. names: as CUDA gives them, such as "NVIDIA
    A100-SXM4-40GB MIG 1g.5gb" for a slice; visible: CUDA_VISIBLE_DEVICES. A slice can be listed there as MIG-<uuid>."""
    if any(" MIG " in name for name in names) or (visible or "").startswith("MIG-"):
        return (
            f"{ranks} ranks on a host whose GPUs are divided into slices (MIG): CUDA shows a process one slice at "
            f"most, here {names[0]}, however many there are. Start one rank on this host, or turn MIG off "
            "(sudo nvidia-smi -mig 0) and start one rank per GPU"
        )
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible} hides the others)"
    return f"{ranks} ranks on a host with {len(names)} GPU(s){limit}: start at most one rank per GPU"


def backend_for(device: torch.device, backend: str = "auto") -> str:
    """The backend as init_process_group takes it. Raises SettingsError for one that cannot be had here.

    On GPUs a gloo part is added for what lives in the CPU's memory: objects, checkpoints.
    """
    if backend == "mpi" and not dist.is_mpi_available():
        raise SettingsError(
            "--backend mpi: this torch is built without MPI, as all of its wheels are: take --backend gloo (or nccl on "
            "GPUs); mpirun may still start the ranks. With MPI, torch has to be built from source beside MPI"
        )
    if backend == "nccl" and device.type != "cuda":
        raise SettingsError("--backend nccl: it needs a GPU for each rank, and none is visible here: --backend gloo")
    if backend == "nccl" and not dist.is_nccl_available():
        raise SettingsError(
            "--backend nccl: this torch is built without NCCL: --backend gloo, or a CUDA build of torch"
        )
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


@contextmanager
def process_group(
    place: Place, device: torch.device, timeout: float, backend: str = "auto", init: str = "env://"
) -> Iterator[None]:
    """The default process group; no collective waits longer than `timeout` s.

    An exception inside leaves the group as it is: to destroy it would wait for the other ranks, and these wait for this
    one. If nobody catches the exception, the process ends as soon as its traceback is shown.
    Raises SettingsError for a backend or an --init that cannot be, RendezvousError where the ranks do not meet.
    """
    chosen = backend_for(device, backend)
    # Its functions take the group as it is when this is imported for a default. torch imports it in the first
    # collective of objects: they would then hold the group until after the interpreter's end, and gloo's threads abort.
    import torch.distributed.nn.functional

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if chosen == "mpi":  # brings its own rendezvous; rank and size are mpirun's
        dist.init_process_group("mpi", timeout=timedelta(seconds=timeout))
    else:
        dist.init_process_group(
            chosen,
            store=meet(init, place.rank, place.world_size, timeout),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if "nccl" in chosen else None,
        )
    try:
        yield
    except BaseException:
        end_after_traceback()
        raise
    leave_process_group()


def end_after_traceback() -> None:
    """Ends the process when it has shown an exception that nobody caught. The end of the interpreter would destroy the
    process group: with NCCL that waits for kernels that wait for the other ranks, with gloo for its threads, which do.
    """
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        end_at_once(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = show_and_end


def end_at_once(status: int) -> NoReturn:
    """Ends the process without the interpreter's clearing up, which may wait for other ranks."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


T = TypeVar("T")


def from_all_ranks(mine: T, place: Place) -> list[T]:
    """The object of every rank, by rank (collective). Objects are pickled."""
    if place.world_size == 1:
        return [mine]
    theirs: list[T] = [mine] * place.world_size
    dist.all_gather_object(theirs, mine)
    return theirs


def wait_for_all(done: Callable[[], bool], phase: str, limit_seconds: float, place: Place) -> bool:
    """Waits until `done()` holds on every rank; False if that takes longer than `limit_seconds` (collective).

    For what may take longer than --timeout: all ranks ask each other again and again, so that no collective waits long,
    each tells its keeper that it is still in this phase, and the end of one rank is an error of all at once.
    """
    begun, rounds, others = time.monotonic(), 0, torch.zeros(2, dtype=torch.int64)
    while True:
        others[0], others[1] = not done(), time.monotonic() - begun > limit_seconds
        if place.world_size > 1:
            dist.all_reduce(others, dist.ReduceOp.MAX)
        if not others[0]:
            return True
        if others[1]:
            return False
        tell(phase, rounds)
        rounds += 1
        time.sleep(POLL_SECONDS)


def first_complaint(complaint: str, place: Place) -> str:
    """The complaint of the lowest rank that has one, known to all ranks; empty if none has."""
    complaints = enumerate(from_all_ranks(complaint, place))
    named = [f"{text} (rank {rank})" if rank else text for rank, text in complaints if text]
    return named[0] if named else ""
