"""The plan of a run, plan.json in the run's folder: a pure function of the cluster map and the options. No I/O here.

Rank order is inventory order, host by host, GPU by GPU. The same plan reaches every host; only a host's own
interface, node rank and GPUs differ in its command. Every rank finds the plan's SHA-256 and the image's id in its
environment, so that ranks can prove to each other that they belong together (train/start/proof.py).

A host's `command` starts the container, in which the keeper (keeper/) is the first process; the keeper starts `agent`,
which is torchrun with a document of what failed (train/start/agent.py), with the place of its host in the attempt
(keeper/placement.py): this plan is that of the first one, and holds what the keepers need to make others.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
import shlex
from dataclasses import dataclass, is_dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from keeper import (
    LEASE_DIR,
    PRIVATE_DIR,
    RUN_DIR,
    SCRATCH,
    SCRATCH_DIR,
    WORKLOAD_DIR,
    lease,
)
from keeper.engines import ROOTS
from keeper.placement import placed
from launch.cli.refusal import refuse
from launch.hosts.clustermap import AMD, VPN_INTERFACE, ClusterMap, MapHost
from launch.job.container import engine_of, start_words, stop_seconds
from launch.job.project import IN_CONTAINER

SCHEMA = "muster.plan/6"
CONTAINER_RESUME_DIR = "/muster/resume"
CONTAINER_DATA_DIR = "/data"
_HASH = "MUSTER_PLAN_SHA256"  # in every rank's environment

#: GRACE where the user gives none: the time from SIGTERM to SIGKILL that ranks of a stopped run have to finish a step
#: and write a checkpoint.
GRACE_SECONDS = 30

#: MAX_RESTARTS where the user gives none and the ranks can go on where they were.
MAX_RESTARTS = 3
#: A host because of which so many attempts ended is left out.
MAX_HOST_FAILURES = 2

LAUNCHERS = ("torchrun", "horovod")
#: What torchrun starts in the place of a Horovod script. -P: the script may have a train.py beside it.
HOROVOD_SCRIPT = ("python3", "-P", "-m", "train.parallel.horovod_script")


@dataclass(frozen=True)
class Options:
    """What the user asked for with `make train`."""

    nodes: int | None = None  # None: all hosts
    args: tuple[str, ...] = ()  # for the trainer, or for the user's script
    script: str | None = None  # a file of the workload; None: our trainer
    project: bool = False  # the workload is a project: the trainer is given it beside `args`
    image: str | None = None  # image id of a workload; None: the cluster map's training image
    resume: str | None = None  # id of an earlier run to continue
    grace: int = GRACE_SECONDS  # seconds
    launcher: str = "torchrun"  # LAUNCHERS; what a user's script expects to be started by
    module: str = "train"  # what `python -m` runs where there is no script
    direct: bool = False  # without torchrun where every host has one rank: for what is short
    max_restarts: int = 0  # below 0: none, unless the script says that it can go on (muster_run.can_resume)
    min_nodes: int = 1
    max_host_failures: int = MAX_HOST_FAILURES

    @property
    def arguments(self) -> list[str]:
        """What each rank is given."""
        return [*(IN_CONTAINER if self.project else ()), *self.args]


@dataclass(frozen=True)
class Ports:
    """Ports that are free on the hosts."""

    master: int  # for the rendezvous, on the first host
    free: int  # another one there, for a script that opens a store of its own
    keepers: tuple[int, ...]  # where each host's keeper listens to the others


@dataclass(frozen=True)
class HostPlan:
    """One host's part of the plan: its ranks in the first attempt, and the exact command that starts its container."""

    host: str
    node_rank: int
    nproc_per_node: int  # ranks that it has when it takes part
    ranks: list[int]  # none: it is a spare
    address: str
    interface: str
    addresses: list[str]  # from which it may call the others: `address`, and what else its NICs have
    firewall: bool  # what of it listens answers the run's hosts alone (keeper/firewall.py)
    keeper_port: int  # where this host's keeper listens to the others, on `address`
    run_dir: str  # on the host
    resume_dir: str | None  # on the host: the folder of the earlier run, read-only in the container
    container: str
    environment: dict[str, str]  # of the container; more comes with each attempt: keeper/placement.py
    rdma: dict[str, list[str]]  # active ports (device:port): "infiniband"; "roce", on the training NIC; "any" it has
    command: list[str]  # run on the host as root: the container with its keeper


@dataclass(frozen=True)
class Plan:
    """Everything about a run that is known before it starts; hosts in rank order."""

    schema: str
    run: str
    sha256: str  # of this document with "" in its place here and in every host's environment and command
    owner: str
    created: str
    inventory: str
    world_size: int
    master_host: str
    master_addr: str
    master_port: int
    free_port: int  # on the master host, for a script that opens a store of its own: MUSTER_FREE_PORT, {free_port}
    image: str
    script: str | None
    args: list[str]  # of a run with a project, IN_CONTAINER first
    resume: str | None  # id of the earlier run that this one continues
    grace: int  # seconds from SIGTERM to SIGKILL for the ranks
    max_restarts: int  # as in Options, and these two
    min_nodes: int
    max_host_failures: int
    direct: bool  # the ranks start without torchrun
    agent: list[str]  # what a keeper starts in its container: this, its place, and then
    ranks_command: list[str]  # what runs as each rank
    hosts: list[HostPlan]


def chosen_hosts(cluster: ClusterMap, nodes: int | None) -> list[MapHost]:
    """The first `nodes` hosts of the inventory that are no spares. Raises Refusal for less than 1 or more than all."""
    trained = [host for host in cluster.hosts if not host.spare]
    have = len(trained)
    wanted = have if nodes is None else nodes
    if wanted < 1:
        raise refuse("NODES", f"NODES={nodes} leaves no host to run on", f"give a number from 1 to {have}")
    if wanted > have:
        names = ", ".join(host.name for host in trained)
        what = f"NODES={nodes}, but {cluster.inventory} has {have} host{'s' if have > 1 else ''}: {names}"
        raise refuse("NODES", what, f"give a number from 1 to {have}, or add hosts and run `make deploy`")
    return trained[:wanted]


def hosts_of_run(cluster: ClusterMap, options: Options) -> list[MapHost]:
    """The hosts that train, and after them the spares, where they can be of use. Raises as `chosen_hosts`."""
    spares = [host for host in cluster.hosts if host.spare] if options.max_restarts else []
    return chosen_hosts(cluster, options.nodes) + spares


def parse_nodes(text: str) -> int | None:
    """NODES as the user typed it; empty means all hosts. Raises Refusal when it is no whole number."""
    if not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise refuse("NODES", f"NODES={text} is not a whole number", "give one, such as NODES=2") from None


def parse_grace(text: str) -> int:
    """GRACE as typed, in seconds; empty means GRACE_SECONDS. Raises Refusal when it is not a number from 1 to 3600."""
    if not text.strip():
        return GRACE_SECONDS
    return _number("GRACE", text, 1, 3600, 60)


def parse_max_restarts(text: str, script: bool) -> int:
    """MAX_RESTARTS as typed. Empty means MAX_RESTARTS for our trainer, and as many for a script once it has said that
    it can go on (below 0, see Options). Raises Refusal when it is not a number from 0 to 10000."""
    if not text.strip():
        return -MAX_RESTARTS if script else MAX_RESTARTS
    return _number("MAX_RESTARTS", text, 0, 10_000, MAX_RESTARTS)


def parse_min_nodes(text: str, nodes: int) -> int:
    """MIN_NODES as typed; empty means 1. Raises Refusal when it is not a number from 1 to that of the run's hosts."""
    return _number("MIN_NODES", text, 1, nodes, 1) if text.strip() else 1


def parse_max_host_failures(text: str) -> int:
    """MAX_HOST_FAILURES as typed; empty means MAX_HOST_FAILURES. Raises Refusal when it is not from 1 to 10000."""
    return _number("MAX_HOST_FAILURES", text, 1, 10_000, MAX_HOST_FAILURES) if text.strip() else MAX_HOST_FAILURES


def _number(name: str, text: str, least: int, most: int, usual: int) -> int:
    """Raises Refusal when a variable is not a whole number from `least` to `most`."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise refuse(name, f"{name}={text} is not a whole number from {least} to {most}", f"give one: {name}={usual}")
    return int(text)


def new_run_id() -> str:
    """A run id that sorts by time and that no other run has, on whatever machine: 20261121-143005-3fa2."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def run_dir_on_host(host: MapHost, run: str) -> str:
    """Where a host keeps the folder of a run."""
    return f"{host.place.runs}/{run}"


def make_plan(cluster: ClusterMap, options: Options, run: str, ports: Ports, owner: str, created: str) -> Plan:
    """The plan of run `run`."""
    plan = _assemble(cluster, options, run, ports, owner, created)
    sha256 = digest(plan)
    for host_plan in plan.hosts:
        host_plan.environment[_HASH] = sha256
        host_plan.command[host_plan.command.index(f"{_HASH}=")] = f"{_HASH}={sha256}"
    return replace(plan, sha256=sha256)


def from_document(found: dict[str, Any]) -> Plan:
    """The plan that a plan.json holds. Raises ValueError for another version of it, or for something else."""
    if found.get("schema") != SCHEMA:
        raise ValueError(f"the plan is {found.get('schema')}, not {SCHEMA}: another version of Muster made it")
    try:
        return Plan(**{**found, "hosts": [HostPlan(**host) for host in found["hosts"]]})
    except (TypeError, KeyError) as error:
        raise ValueError(f"this is no plan: {error}") from None


def received(found: Any, run: str) -> Plan:
    """The plan of run `run`, from a folder into which the run's script can write as well.

    Raises ValueError as `from_document`, for the plan of another run, and where it is not as `make_plan` made it, as
    far as that shows: a forged one may have the right hash. What becomes a path here is checked, whoever wrote it.
    """
    plan = from_document(found if isinstance(found, dict) else {})
    if not (_fits(plan, Plan) and plan.hosts and plan.hosts[0].ranks):
        raise ValueError("this is no plan: a value is of another kind than in a plan")
    if plan.run != run:
        raise ValueError(f"this is the plan of another run: {plan.run!r}")
    if digest(plan) != plan.sha256:
        raise ValueError("the plan was changed: its SHA-256 is not the one that it names")
    for node_rank, one in enumerate(plan.hosts):
        if one.node_rank != node_rank or not _is_run_dir(one.run_dir, run) or not _is_folder(one.host):
            raise ValueError(f"this is no plan: its host {one.host!r} has a name, number or folder that none can have")
    return plan


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of this kind: one of the annotations in this file."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inside[1]) for one in value.values())
    if origin is UnionType:
        return any(_fits(value, one) for one in inside)
    if is_dataclass(kind):
        return all(_fits(getattr(value, key), hint) for key, hint in get_type_hints(kind).items())
    return type(value) is kind


def _is_run_dir(folder: str, run: str) -> bool:
    """Whether a host can keep this run there. No script can write to a folder of this form: its own are below one."""
    plain = bool(re.fullmatch(r"(?:/\w[\w.@+-]*|/\.local)+", folder))
    return plain and folder.endswith(f"/runs/{run}") and folder.count("/runs/") == 1


def _is_folder(host: str) -> bool:
    """Whether a host's name can be that of one folder. An IPv6 address can, so this allows more than is_name."""
    return host not in ("", ".", "..") and "/" not in host and host.isprintable()


def document(plan: Plan) -> dict[str, Any]:
    """The content of plan.json. It shares the plan's lists: dataclasses.asdict would copy each word."""
    return {**vars(plan), "hosts": [vars(host_plan) for host_plan in plan.hosts]}


def digest(plan: Plan) -> str:
    """SHA-256 of a plan's content, in hexadecimal; that of a finished plan is taken with its own hash left out."""
    text = json.dumps(document(plan), sort_keys=True)
    return hashlib.sha256((text.replace(plan.sha256, "") if plan.sha256 else text).encode()).hexdigest()


def _assemble(cluster: ClusterMap, options: Options, run: str, ports: Ports, owner: str, created: str) -> Plan:
    """The plan with "" in the place of its hash."""
    members = chosen_hosts(cluster, options.nodes)
    hosts = hosts_of_run(cluster, options)
    world_size = sum(host.nproc_per_node for host in members)
    image = options.image or cluster.image.id
    direct = options.direct and all(host.nproc_per_node == 1 for host in members)
    agent, ranks_command = _agent(options, direct)
    host_plans, first_rank = [], 0
    for node_rank, host in enumerate(hosts):
        ranks = list(range(first_rank, first_rank + host.nproc_per_node)) if node_rank < len(members) else []
        first_rank += len(ranks)
        environment = _environment(host, run, options, image)
        container = f"muster-{run}-{node_rank}"
        labels = {"muster.run": run, "muster.node_rank": str(node_rank), "muster.owner": owner}
        engine = start_words(host, container, labels, _mounts(host, run, options), environment, options.grace)
        host_plans.append(
            HostPlan(
                host=host.name,
                node_rank=node_rank,
                nproc_per_node=host.nproc_per_node,
                ranks=ranks,
                address=host.address,
                interface=host.interface,
                addresses=_addresses(host),
                firewall=host.firewall,
                keeper_port=ports.keepers[node_rank],
                run_dir=run_dir_on_host(host, run),
                resume_dir=run_dir_on_host(host, options.resume) if options.resume else None,
                container=container,
                environment=environment,
                rdma=rdma_ports(host),
                command=[*engine, engine_of(host).image(image), "python3", "-P", "-m", "keeper", str(node_rank)],
            )
        )
    return Plan(
        schema=SCHEMA,
        run=run,
        sha256="",
        owner=owner,
        created=created,
        inventory=cluster.inventory,
        world_size=world_size,
        master_host=hosts[0].name,
        master_addr=hosts[0].address,
        master_port=ports.master,
        free_port=ports.free,
        image=image,
        script=options.script,
        args=options.arguments,
        resume=options.resume,
        grace=options.grace,
        max_restarts=options.max_restarts,
        min_nodes=options.min_nodes,
        max_host_failures=options.max_host_failures,
        direct=direct,
        agent=agent,
        ranks_command=ranks_command,
        hosts=host_plans,
    )


def _agent(options: Options, direct: bool) -> tuple[list[str], list[str]]:
    """The command that starts a host's ranks (train/start/agent.py): before its place in an attempt, and after that."""
    agent = ["python3", "-P", "-m", "train.start.agent"]
    if direct:
        return agent, [options.module, *options.arguments]
    return [
        *agent,
        *(["--fill"] if options.script else []),  # a script's arguments may hold {rank} and the like
    ], [
        *(["--no-python"] if options.launcher == "horovod" else [] if options.script else ["-m"]),
        "--",  # or `--log out` of a script would be taken for an abbreviation of torchrun's own --log-dir
        *(HOROVOD_SCRIPT if options.launcher == "horovod" else ()),
        options.script or options.module,
        *options.arguments,
    ]


def _addresses(host: MapHost) -> list[str]:
    """`address`, and all that a connection to another host may come from: the kernel takes one of the NIC's."""
    nics = (nic for nic in host.facts.get("nics") or [] if nic["up"] and not nic["refused"])
    known = [one["address"] for nic in nics for one in nic["addresses"] if one["scope"] == "global"]
    return sorted({host.address, *known})


def rdma_ports(host: MapHost) -> dict[str, list[str]]:
    """A host's active RDMA ports, as keeper/placement.py wants them."""
    return {
        "infiniband": _active_ports(host, "InfiniBand"),
        "roce": _active_ports(host, "Ethernet"),
        "any": [f"{port['device']}:{port['port']}" for port in host.facts.get("rdma") or []],
    }


def _active_ports(host: MapHost, link_layer: str) -> list[str]:
    """device:port of a host's active hardware ports of a kind; none where there is a VPN, as RDMA would pass it by."""
    if host.interface == VPN_INTERFACE:
        return []
    return [
        f"{port['device']}:{port['port']}"
        for port in host.facts.get("rdma") or []
        if port["state"] == "ACTIVE"
        and not port.get("soft")
        and port.get("verbs")
        and port["link_layer"] == link_layer
        and (link_layer == "InfiniBand" or host.interface in port["nics"])
    ]


def _environment(host: MapHost, run: str, options: Options, image: str) -> dict[str, str]:
    """What every rank of a host finds in its environment, beside what an attempt and torchrun set."""
    return {
        "MUSTER_RUN_ID": run,
        "MUSTER_HOST": host.name,
        "MUSTER_RUN_DIR": RUN_DIR,
        _HASH: "",
        "MUSTER_IMAGE": image,
        **({"MUSTER_RESUME_DIR": CONTAINER_RESUME_DIR} if options.resume else {}),
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": f"={host.interface}",
        "NCCL_SOCKET_FAMILY": "AF_INET6" if ":" in host.address else "AF_INET",
        "OMP_NUM_THREADS": str(max(1, host.cpus // host.nproc_per_node)),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # memory in huge pages: train/start/memory.py
        "PYTHONUNBUFFERED": "1",
        "MPLCONFIGDIR": f"{SCRATCH_DIR}/matplotlib",
        "TQDM_MININTERVAL": "5",  # seconds between two refreshes of a bar, each of which is a line in the logs
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(stop_seconds(options.grace)),  # the keeper comes first
        **(_flight_recorder() if host.gpus else {}),
        **(_miopen() if host.gpus and host.gpu_vendor == AMD else {}),
    }


def _flight_recorder() -> dict[str, str]:
    """The last collectives of NCCL (AMD: RCCL), kept in memory and written beside the stacks of a hang: at a timeout,
    or when the keeper asks (keeper/stuck.py). torch calls two of these by an older and a newer name."""
    file = f"{RUN_DIR}/stacks/nccl-rank-"
    return {
        **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), file),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/muster-nccl-",
    }


def _miopen() -> dict[str, str]:
    """Where AMD's library for convolutions keeps what it has compiled and measured: the user has no home."""
    return dict.fromkeys(("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR"), f"{SCRATCH_DIR}/miopen")


def _mounts(host: MapHost, run: str, options: Options) -> list[str]:
    """What a container sees of its host, as `folder of the host:folder of the container`, and `:ro`."""
    folder = run_dir_on_host(host, run)
    return [
        f"{folder}:{RUN_DIR}",
        f"{folder}/{SCRATCH}:{SCRATCH_DIR}",
        f"{lease.file_of(host.place.lease)}:{lease.file_of(LEASE_DIR)}",
        f"{host.place.private}/{run}:{PRIVATE_DIR}:ro",
        *([f"{folder}/workload:{WORKLOAD_DIR}"] if options.script else []),
        *([f"{run_dir_on_host(host, options.resume)}:{CONTAINER_RESUME_DIR}:ro"] if options.resume else []),
        *([f"{host.data_dir}:{CONTAINER_DATA_DIR}:ro"] if host.data_dir else []),
    ]


def describe(plan: Plan) -> str:
    """The plan for a person: each host's exact commands, that of the container and that of the ranks in it."""
    image = plan.image if "/" in plan.image else plan.image[:12]  # a name, or an id
    members = [host_plan.host for host_plan in plan.hosts if host_plan.ranks]
    lines = [
        f"run {plan.run}: {plan.world_size} ranks on {len(members)} hosts, "
        f"master {plan.master_host} at {plan.master_addr}:{plan.master_port}, image {image}"
    ]
    places = {place.host: place for place in placed(document(plan), members, plan.master_port, plan.free_port)}
    for host_plan in plan.hosts:
        place, where = places.get(host_plan.host), f"{host_plan.interface} {host_plan.address}"
        part = f"ranks {', '.join(map(str, place.ranks))}" if place else "a spare"
        lines.append(f"\n{host_plan.host} (node rank {host_plan.node_rank}, {part}, {where})")
        environment = {**host_plan.environment, **(place.environment if place else {})}
        lines += [f"  {key}={value}" for key, value in environment.items()]
        starts = f", starts {shlex.join(place.agent)}" if place else ""
        lines.append(f"  keeper: {host_plan.address}:{host_plan.keeper_port}{starts}")
        lines.append(f"  answers: {'the addresses of these hosts alone' if host_plan.firewall else 'whoever calls'}")
        sudo = "sudo " if host_plan.run_dir.startswith(f"{ROOTS.runs}/") else ""
        lines.append(f"  $ {sudo}{shlex.join(host_plan.command)}")
    return "\n".join(lines)
