"""How the ranks of a run find each other (`--init`): the store in which they leave their addresses.

env://              torchrun's or --spawn's own store, or rank 0's at MASTER_ADDR:MASTER_PORT
tcp://host:port     a store of rank 0, at an address of its host, on that address only
file:///path        files in a folder that all ranks see; what an earlier run left there does no harm

torch's own file:// takes a left-over file for the present run's and then hangs or joins ranks wrongly. Here every run
has a store file of its own: each rank leaves a random word, rank 0 answers with the words it has seen and the store's
name, and an answer counts only for the rank that finds its own word in it. Two runs at once need two paths.
"""

import errno
import json
import os
import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from train.settings import SettingsError
from train.start import one_address
from train.whole_files import write_file

FILE_POLL_SECONDS = 0.05


class RendezvousError(Exception):
    """The ranks did not find each other in time."""


def meet(init: str, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """The store that all ranks of this run share. Raises SettingsError for a bad --init, RendezvousError."""
    url = checked(init)
    if world_size == 1:
        return HashStore()
    try:
        match url.scheme:
            case "env":
                return environment_store(rank, world_size, timeout_seconds)
            case "tcp":
                return tcp_store(str(url.hostname), int(url.port or 0), rank, world_size, timeout_seconds)
        return file_store(Path(url.path), rank, world_size, timeout_seconds)
    except (DistError, TimeoutError) as error:
        raise RendezvousError(
            f"rank {rank} waited {timeout_seconds:.0f} s at --init {init} for the {world_size} ranks to meet: are all "
            f"started, with the same --init and world size, and can they reach it? ({str(error).splitlines()[0]})"
        ) from error


def checked(init: str) -> SplitResult:
    """The parts of an --init. Raises SettingsError that shows the forms that are possible."""
    forms = "env://, tcp://HOST:PORT with an address of rank 0's host, or file:///FOLDER/NAME"
    try:
        url = urlsplit(init)
        complete = {"env": True, "tcp": bool(url.hostname and url.port), "file": len(url.path) > 1 and not url.netloc}
    except ValueError as error:  # a port that is no number
        raise SettingsError(f"--init {init}: {error}; take {forms}") from error
    if "://" not in init or not complete.get(url.scheme, False):
        raise SettingsError(f"--init {init}: take {forms}")
    return url


def environment_store(rank: int, world_size: int, timeout_seconds: float) -> Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise SettingsError(
            f"--init env://: {' and '.join(missing)} not set: start the ranks with torchrun or --spawn, or give --init"
        )
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_seconds)))
    return PrefixStore("default_pg", store)


def tcp_store(host: str, port: int, rank: int, world_size: int, timeout_seconds: float) -> Store:
    """Not torch's handler, which under torchrun expects the agent's store there, and listens on all addresses."""
    listener = listen(host, port) if rank == 0 else None
    return TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=True,
        master_listen_fd=listener.detach() if listener else None,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket listening at this address only. Raises SettingsError where it cannot be."""
    where = f"rank 0 cannot listen at {host}:{port}"
    try:
        return one_address.listen(host, port)
    except OSError as error:
        fix = {
            errno.EADDRINUSE: "something else does: take another port",
            errno.EADDRNOTAVAIL: "that is no address of its host: give one of rank 0's host",
        }.get(error.errno or 0, f"{error.strerror or error}: give an address of rank 0's host and a free port")
        raise SettingsError(f"--init tcp://{host}:{port}: {where}; {fix}") from error


def file_store(path: Path, rank: int, world_size: int, timeout_seconds: float) -> Store:
    word, limit = secrets.token_hex(8), time.monotonic() + timeout_seconds
    try:
        if rank == 0:
            return host_meeting(path, word, world_size, limit)
        write_file(path.with_name(f"{path.name}.rank-{rank}"), word.encode())
        while time.monotonic() < limit:
            answer = json.loads(read(path.with_name(f"{path.name}.meeting")) or "{}")
            if answer.get("words", {}).get(str(rank)) == word:
                store = FileStore(answer["store"], world_size)
                store.set(f"met-{rank}", "")
                return store
            time.sleep(FILE_POLL_SECONDS)
    except TimeoutError:
        raise
    except OSError as error:
        raise SettingsError(
            f"--init file://{path}: {error.strerror or error}: it needs a folder that all ranks can write to"
        ) from error
    raise TimeoutError("rank 0 did not answer")


def host_meeting(path: Path, word: str, world_size: int, limit: float) -> Store:
    """Rank 0's side: answers until all ranks have come, then clears the meeting away."""
    for leftover in path.parent.glob(f"{path.name}.store-*"):
        leftover.unlink(missing_ok=True)
    meeting = path.with_name(f"{path.name}.meeting")
    name = str(path.with_name(f"{path.name}.store-{word}"))
    store = FileStore(name, world_size)
    others = {rank: path.with_name(f"{path.name}.rank-{rank}") for rank in range(1, world_size)}
    answered: dict[int, str] = {}
    absent = list(others)
    while absent and time.monotonic() < limit:
        words = {rank: read(file) for rank, file in others.items()}
        if words != answered:
            write_file(meeting, json.dumps({"store": name, "words": words}).encode())
            answered = words
        absent = [rank for rank in absent if not store.check([f"met-{rank}"])]
        time.sleep(FILE_POLL_SECONDS if absent else 0)
    for file in (meeting, *others.values()):
        file.unlink(missing_ok=True)
    if absent:
        raise TimeoutError(f"absent: rank {', '.join(map(str, absent))}")
    return store


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
