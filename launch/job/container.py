"""The command that starts a host's container of a run: what it may do there, and how much of the host it may take.

Pure: what the host is, its facts in the cluster map say. What runs in the container, and what it sees of the host's
folders, is plan.py's to say.

A container has the host's network (ranks bind to the NIC itself) and nothing else of the host that it does not need: no
capability, no way to get one, a user that the host does not have, an image that it cannot write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keeper import USER_ID, engines
from launch.hosts.clustermap import MapHost

#: What torchrun gets beyond the grace of its ranks, to end after them.
TORCHRUN_MARGIN_SECONDS = 10
#: The options that say how much of its host a container may take.
LIMITS = ("--memory", "--shm-size", "--pids-limit")
#: What a run leaves to the rest of its host: a part of the memory, within these bounds (bytes).
REST_OF_MEMORY, LEAST_REST, MOST_REST = 1 / 20, 256 << 20, 4 << 30
#: The part of the memory that /dev/shm may take: data workers and NCCL need room. It is the kernel's own default.
SHM_OF_MEMORY = 1 / 2
#: The part of the threads that the kernel has for all processes of the host.
PART_OF_THREADS = 1 / 2


def start_words(
    host: MapHost,
    name: str,
    labels: Mapping[str, str],
    mounts: Sequence[str],
    environment: Mapping[str, str],
    grace: int,
) -> list[str]:
    """The command up to the image. mounts: as Podman and Docker write them. grace: in seconds, of the ranks."""
    engine = engine_of(host)
    return [
        *(engine.name, "run", "--detach", "--name", name),
        *(word for key, value in labels.items() for word in ("--label", f"{key}={value}")),
        *("--network", "host"),
        *("--user", f"{USER_ID}:{USER_ID}", "--cap-drop", "all", "--security-opt", "no-new-privileges", "--read-only"),
        *_limits(host),
        *("--stop-timeout", str(stop_seconds(grace))),
        *engine.run_words(host.gpus),
        *(_rdma(host) if host.gpus else ()),
        *(word for mount in mounts for word in ("--volume", mount)),
        *(word for key, value in environment.items() for word in ("--env", f"{key}={value}")),
    ]


def engine_of(host: MapHost) -> engines.Engine:
    """The container engine of a host."""
    return engines.engine((host.facts.get("engine") or {}).get("name"))


def stop_seconds(grace: int) -> int:
    """The time from SIGTERM to SIGKILL for the torchrun, or the container, whose ranks get `grace` seconds."""
    return grace + TORCHRUN_MARGIN_SECONDS


def _rdma(host: MapHost) -> list[str]:
    """What NCCL needs for RDMA: the devices of active hardware ports, and memory that stays where it is."""
    ports = (port for port in host.facts.get("rdma") or [] if port["state"] == "ACTIVE" and not port.get("soft"))
    devices = sorted({f"/dev/infiniband/{port['verbs']}" for port in ports if port.get("verbs")})
    return [
        *(word for one in devices for word in ("--device", one)),
        *(("--ulimit", "memlock=-1:-1") if devices else ()),
    ]


def _limits(host: MapHost) -> list[str]:
    """How much of the host the container may take. What was not found out, is limited as the engine does it; what a
    user's own Podman was not given to limit, is not."""
    memory = shm = threads = ""
    memory_bytes, threads_max = host.facts.get("memory_bytes"), host.facts.get("threads_max")
    if memory_bytes:
        rest = int(min(max(memory_bytes * REST_OF_MEMORY, LEAST_REST), MOST_REST, memory_bytes / 4))
        memory, shm = f"{memory_bytes - rest}b", f"{int(memory_bytes * SHM_OF_MEMORY)}b"
    if threads_max:
        threads = str(int(threads_max * PART_OF_THREADS))
    controllers = (host.facts.get("engine") or {}).get("controllers")
    if controllers is not None:
        memory, threads = memory * ("memory" in controllers), threads * ("pids" in controllers)
    pairs = zip(LIMITS, (memory, shm, threads), strict=True)
    return [word for option, value in pairs if value for word in (option, value)]
