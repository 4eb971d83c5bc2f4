"""What the hosts of a run can do, measured by its own ranks, which torchrun starts as for a training.

    python -m train.forecast.probe [--seconds 4]                    a short all-reduce with checked values
    python -m train.forecast.probe --forecast -- --model resnet50   what a forecast of this training needs

Rank 0 writes probe.json into MUSTER_RUN_DIR (default: here). Its schema is `muster.probe/1`:

    schema, torch, backend, device ("cpu" or "cuda"),
    ranks: [{"rank", "host", "local_rank", "threads", "torch", "cuda", "nccl", "code" (hash)}], in the order of ranks
    all_reduce: {"sizes": [{"bytes", "seconds", "bus_bytes_per_second", "repeats"}], "notes": [text]}, or null
    forecast: see train/forecast/step_times.py, or null

`seconds` is the median of the repeats; the bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md there): bytes /
seconds * 2 (n - 1) / n, comparable with the speed of a link for any number n of ranks. Nothing is trained or kept.
Exit status: 0 measured; 1 failed; 2 wrong settings.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from train import own_parts
from train.forecast.communication import wait_for
from train.model import torchvision_cpu
from train.settings import Settings, SettingsError, problems, refuse
from train.settings import parse as parse_settings
from train.start import group, memory
from train.start.group import Place, from_all_ranks
from train.start.proof import code_hash
from train.whole_files import write_json

PROBE_SCHEMA = "muster.probe/1"
PROBE_FILE = "probe.json"
MIB = 1 << 20
SUM_BYTES = (1 * MIB, 16 * MIB, 128 * MIB)  # bytes
REPEATS = 5  # timed ones of each size, where there is time
LONGEST_SECONDS = 10.0  # of one sum; a size that is expected to take longer is left out
PERIOD = 251  # of the pattern; a prime, so that a piece in the wrong place shows


class WrongValue(Exception):
    """An all-reduce returned a wrong sum; the message names rank and host."""


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes/s of an all-reduce of `size` bytes as nccl-tests define it; 0 for one rank, which sends nothing."""
    return size / seconds * 2 * (ranks - 1) / ranks


def pattern(size: int, device: torch.device) -> Tensor:
    """float32 of `size` bytes: 0, 1, ..., PERIOD - 1, 0, ...; times rank + 1 it is what a rank gives.

    Sums are whole numbers below 2^24 for up to 364 ranks, so exact in any order.
    """
    count = size // 4
    return torch.arange(PERIOD, dtype=torch.float32, device=device).repeat(-(-count // PERIOD))[:count]


def sum_once(values: Tensor, given: Tensor, place: Place) -> float:
    """Seconds of one checked all-reduce of this rank's `values` times its number; `given` is room for it.

    Raises WrongValue.
    """
    torch.mul(values, place.rank + 1, out=given)
    wait_for(given.device)
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(given)
    wait_for(given.device)
    seconds = time.perf_counter() - begun
    given -= values * (place.world_size * (place.world_size + 1) // 2)
    wrong = int(torch.count_nonzero(given))
    if wrong:
        raise WrongValue(
            f"rank {place.rank} on {host_name()}: {wrong} of {given.numel()} sums of an all-reduce are wrong: this "
            "host's memory, GPU or network corrupts data; take it out of the inventory and test it"
        )
    return seconds


def together(value: float, place: Place, device: torch.device) -> float:
    """Rank 0's value on all ranks: clocks differ, and a decision has to be the same on all (collective)."""
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared.item())


def all_reduce(place: Place, device: torch.device, limit: float, sizes: tuple[int, ...] = SUM_BYTES) -> dict[str, Any]:
    """The document's all_reduce (collective). Repeats of a size end when `limit` seconds are over.

    Each size is summed at least once, except those whose sum would take more than LONGEST_SECONDS: they get a note.
    """
    begun = time.perf_counter()
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for size in sizes:
        last = found[-1] if found else None
        expected = together(last["seconds"] * size / last["bytes"] if last else 0.0, place, device)
        if expected > LONGEST_SECONDS:
            notes.append(f"{size // MIB} MiB left out: one sum would take about {expected:.0f} s")
            continue
        values = pattern(size, device)
        given = torch.empty_like(values)
        first = sum_once(values, given, place)  # connections and buffers are made in it
        times: list[float] = []
        while len(times) < REPEATS:
            left = limit - (time.perf_counter() - begun)
            if together(left - (times[-1] if times else first), place, device) <= 0:
                break
            times.append(sum_once(values, given, place))
        seconds = statistics.median(times or [first])
        seconds = together(seconds, place, device)
        found.append(
            {
                "bytes": size,
                "seconds": seconds,
                "bus_bytes_per_second": bus_bandwidth(size, seconds, place.world_size),
                "repeats": max(1, len(times)),
            }
        )
    return {"sizes": found, "notes": notes}


def host_name() -> str:
    return os.environ.get("MUSTER_HOST") or socket.gethostname()


def versions() -> dict[str, str]:
    """What the ranks' images have to agree in; train.start.proof compares the same, and more, before a training."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "code": code_hash(Path(__file__).parents[1]),
    }


def run(settings: Settings | None, arguments: list[str], complaint: str, seconds: float, of_all: bool = False) -> int:
    """Measure and write. `settings`: of the training to forecast, None: the all-reduce alone. of_all: see step_times.

    Raises WrongValue, and what a training raises.
    """
    memory.keep_freed_memory()
    try:
        place = Place.from_environment()
        device = group.device_of(place)
        backend = settings.backend if settings else "auto"
        chosen = group.backend_for(device, backend)
    except SettingsError as error:  # every host finds the same, or torchrun ends the others
        return refuse(str(error))
    with group.process_group(place, device, settings.timeout if settings else Settings.timeout, backend):
        if complaint := group.first_complaint(complaint, place):
            return refuse(complaint, shown=place.rank == 0)
        mine = {
            "rank": place.rank,
            "host": host_name(),
            "local_rank": place.local_rank,
            "threads": torch.get_num_threads(),
            **versions(),
        }
        document: dict[str, Any] = {
            "schema": PROBE_SCHEMA,
            "torch": torch.__version__,
            "backend": "nccl" if "nccl" in chosen else chosen,
            "device": device.type,
            "ranks": from_all_ranks(mine, place),
            "all_reduce": None,
            "forecast": None,
        }
        if settings is None:
            document["all_reduce"] = all_reduce(place, device, seconds)
        else:
            from train.forecast import (
                step_times,  # brings torchvision and the datasets, which the all-reduce does not need
            )

            try:
                document["forecast"] = step_times.measure(settings, arguments, place, device, of_all)
            except step_times.Wrong as error:  # the same on all ranks
                return refuse(str(error), shown=place.rank == 0)
        if place.rank == 0:
            write(document)
    return 0


def write(document: dict[str, Any]) -> None:
    """probe.json, whole or not at all."""
    write_json(Path(os.environ.get("MUSTER_RUN_DIR", ".")) / PROBE_FILE, document)


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting: under torchrun all ranks must end together."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"train.forecast.probe: {message}")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str] | None]:
    """(options, the trainer's arguments: those after --forecast; None without it). Raises SettingsError.

    A `--` between the two is for readers, and may be missing: some argparse between here and the user drops it.
    """
    cut = arguments.index("--forecast") if "--forecast" in arguments else len(arguments)
    rest = arguments[cut + 1 :] if cut < len(arguments) else None
    parser = Parser(prog="python -m train.forecast.probe", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="limit of the all-reduce's repeats (default: 4)")
    parser.add_argument("--of-all", action="store_true", help="a forecast for one host and for all of them alone")
    parser.epilog = "--forecast [--] ARGS: measure what a forecast of the training with ARGS needs, instead"
    options = parser.parse_args(arguments[:cut])
    return options, rest[1:] if rest and rest[0] == "--" else rest


def main(arguments: list[str]) -> int:
    torchvision_cpu.watch()
    settings, complaint, rest, seconds, of_all = None, "", None, 0.0, False
    try:
        options, rest = parse(arguments)
        seconds, of_all = options.seconds, options.of_all
        if rest is not None:
            settings = parse_settings(rest)
            found = [*problems(settings, Place.from_environment().world_size), *own_parts.problems(settings)]
            complaint = "; ".join(found)
    except SettingsError as error:
        complaint = str(error)
    return run(settings, rest or [], complaint, seconds, of_all)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(main)(sys.argv[1:]))
