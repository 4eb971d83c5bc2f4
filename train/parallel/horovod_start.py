"""How Horovod's processes find each other: in its own terms where torchrun, --spawn or mpirun started them, and in
torch's terms where horovodrun did.

Horovod reads its environment once, at its start, and needs an HTTP server through which its ranks meet. horovodrun
brings both. For the others rank 0 runs that server, on one address and only until all have met.
"""

import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from train.settings import SettingsError
from train.start.group import Place, first_complaint

SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
BEYOND = "192.0.2.1"  # of RFC 5737: what leads there is the default route
ADDRESS_POLL_SECONDS = 0.05


def start(place: Place, timeout_seconds: float) -> Any:
    """Horovod's module horovod.torch, initialised (collective over torch.distributed, whose group must be there).

    No wait of Horovod for a rank that does not answer is longer than `timeout_seconds`. Raises SettingsError, on all
    ranks, where one of them has no Horovod or no network interface for it.
    """
    complaint, hvd, here = "", None, ("", "")
    try:
        hvd = module()
        here = interface(place)
    except SettingsError as error:
        complaint = str(error)
    if complaint := first_complaint(complaint, place):
        raise SettingsError(complaint)
    assert hvd is not None
    if hvd.is_initialized():
        return hvd
    os.environ.update(limits(timeout_seconds))
    if SERVER[0] in os.environ:  # horovodrun's
        hvd.init()
        return hvd
    local_ranks = [0] * place.world_size
    dist.all_gather_object(local_ranks, place.local_rank)
    with server(place, here[1]) as address:
        os.environ.update(variables(place, local_ranks, here[0], address))
        hvd.init()
        dist.barrier()  # the server is needed until the last rank has met all others
    return hvd


def module() -> Any:
    """horovod.torch. Raises SettingsError where it is not installed or was built for another torch."""
    try:
        import horovod.torch
    except (ImportError, OSError) as error:
        raise SettingsError(
            f"--parallel horovod: Horovod cannot be loaded here ({str(error).splitlines()[0]}): "
            "`make horovod` builds it for this machine, `make deploy HOROVOD=1` for the hosts"
        ) from error
    return horovod.torch


def limits(timeout_seconds: float) -> dict[str, str]:
    """Horovod's settings that bound its waits for ranks that do not answer at all; for those that are merely busy,
    whose Horovod does answer, train.parallel.horovod has a limit of its own.
    """
    return {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, math.ceil(timeout_seconds))),
        "HOROVOD_DISABLE_GROUP_FUSION": "1",  # see train.parallel.horovod
    }


def variables(place: Place, local_ranks: Sequence[int], interface: str, address: tuple[str, int]) -> dict[str, str]:
    """Horovod's environment of one rank.

    Args:
        local_ranks: of all ranks, which are counted up host by host; hosts may have different numbers of them.
        interface: this host's.
        address: of the server through which the ranks meet.
    """
    host = local_ranks[: place.rank + 1].count(0) - 1
    peers = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == place.local_rank]
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.world_size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_world_size),
        "HOROVOD_CROSS_RANK": str(peers.index(place.rank)),
        "HOROVOD_CROSS_SIZE": str(len(peers)),
        "HOROVOD_HOSTNAME": f"host-{host}",  # names what the ranks of one host share; never resolved
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        SERVER[0]: address[0],
        SERVER[1]: str(address[1]),
    }


@contextmanager
def server(place: Place, address: str) -> Iterator[tuple[str, int]]:
    """Address and port of Horovod's rendezvous server, which rank 0 runs inside the context (collective)."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    own = RendezvousHTTPServer((address, 0), RendezvousHandler, 0) if place.rank == 0 else None
    if own:
        threading.Thread(target=own.serve_forever, daemon=True).start()
    try:
        shared: list[Any] = [own.server_address[:2] if own else None]
        dist.broadcast_object_list(shared, src=0)
        yield shared[0]
    finally:
        if own:
            own.shutdown()
            own.server_close()


def interface(place: Place) -> tuple[str, str]:
    """Name and IPv4 address of the interface over which this host's ranks talk to the others.

    HOROVOD_GLOO_IFACE, else the first of GLOO_SOCKET_IFNAME, else the one that leads to MASTER_ADDR. Raises
    SettingsError where there is no such interface.
    """
    addresses = ipv4_addresses()
    names = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    if name := names.split(",")[0].strip():
        if name not in addresses:
            raise SettingsError(
                f"--parallel horovod: this host has no interface {name} with an IPv4 address (HOROVOD_GLOO_IFACE, "
                f"GLOO_SOCKET_IFNAME); it has {', '.join(sorted(addresses))}"
            )
        return name, addresses[name]
    alone = place.local_world_size == place.world_size
    own = own_address_towards(os.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else BEYOND))
    for name, address in addresses.items():
        if address == own:
            return name, address
    raise SettingsError(
        "--parallel horovod: which network interface the ranks share is not plain: set GLOO_SOCKET_IFNAME to its name "
        f"on each host (this one has {', '.join(sorted(addresses))})"
    )


def ipv4_addresses() -> dict[str, str]:
    """Interface name -> its first IPv4 address."""
    import psutil  # comes with Horovod

    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses[0] for name, addresses in found.items() if addresses}


def own_address_towards(host: str) -> str:
    """The address from which this host would talk to `host`; empty if there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def started_by_horovodrun() -> bool:
    return SERVER[0] in os.environ and "MASTER_ADDR" not in os.environ


def horovodrun_store(place: Place, timeout_seconds: float) -> Store:
    """torch's store where horovodrun started the ranks: rank 0 makes one and leaves its address at Horovod's server.

    Raises SettingsError without an interface, TimeoutError where rank 0 does not come.
    """
    name, address = interface(place)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    url = f"http://{os.environ[SERVER[0]]}:{os.environ[SERVER[1]]}/muster/store"
    listener = socket.create_server((address, 0)) if place.rank == 0 else None
    if listener:
        put(url, f"{address}:{listener.getsockname()[1]}", timeout_seconds)
    host, port = wait_for(url, timeout_seconds).split(":")
    return TCPStore(
        host,
        int(port),
        place.world_size,
        is_master=place.rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=True,
        master_listen_fd=listener.detach() if listener else None,
    )


# The ranks talk to each other directly, whatever proxy the environment names.
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def put(url: str, text: str, timeout_seconds: float) -> None:
    WITHOUT_PROXY.open(urllib.request.Request(url, text.encode(), method="PUT"), timeout=timeout_seconds).close()


def wait_for(url: str, timeout_seconds: float) -> str:
    limit = time.monotonic() + timeout_seconds
    while True:
        try:
            with WITHOUT_PROXY.open(url, timeout=timeout_seconds) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:  # 404: not there yet
            error.close()
        if time.monotonic() > limit:
            raise TimeoutError(f"rank 0 left no address at {url} within {timeout_seconds:.0f} s")
        time.sleep(ADDRESS_POLL_SECONDS)
