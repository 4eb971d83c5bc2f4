"""Which ranks each host of an attempt has, and the command and variables with which it starts them. Pure.

The first attempt is placed by whoever makes the plan, a later one by every keeper that takes part in it: the same hosts
and ports give the same places everywhere. Rank order is the order of the hosts given, host by host, GPU by GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Sequence

#: For all hosts of an attempt to start, which takes seconds; torchrun itself would wait for 15 minutes.
RENDEZVOUS_SECONDS = 120

#: Variables of ranks that are another attempt's where it does not set them itself.
OF_AN_ATTEMPT = ("MUSTER_ATTEMPT", "MUSTER_FREE_PORT", "NCCL_IB_HCA", "NCCL_IB_DISABLE")

Words = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """One host's part of an attempt."""

    host: str
    ranks: List[int]
    agent: List[str]  # the command that starts them: train/start/agent.py
    environment: Dict[str, str]  # of the ranks, for this attempt: OF_AN_ATTEMPT


def placed(plan: Words, hosts: Sequence[str], master_port: int, free_port: int, attempt: int = 1) -> List[Place]:
    """The places of these hosts of a plan (plan.json); the first one is the master.

    master_port: of the rendezvous. free_port: another free one of the master, for a script's own store.
    """
    by_name = {str(host["host"]): host for host in plan["hosts"]}
    own = [by_name[name] for name in hosts]
    sizes = [int(host["nproc_per_node"]) for host in own]
    rdma = rdma_environments([host["rdma"] for host in own])
    common = {"MUSTER_ATTEMPT": str(attempt), "MUSTER_FREE_PORT": str(free_port)}
    where = (str(own[0]["address"]), master_port)
    return [
        Place(
            host=name,
            ranks=list(range(sum(sizes[:node_rank]), sum(sizes[: node_rank + 1]))),
            agent=_agent(plan, sizes, node_rank, *where),
            environment={**common, **rdma[node_rank]},
        )
        for node_rank, name in enumerate(hosts)
    ]


def _agent(plan: Words, sizes: Sequence[int], node_rank: int, address: str, port: int) -> List[str]:
    """The command that starts a host's ranks."""
    if plan["direct"]:
        return [*plan["agent"], "--direct", str(node_rank), str(len(sizes)), address, str(port), *plan["ranks_command"]]
    return [
        *plan["agent"],
        *("--nnodes", str(len(sizes)), "--node-rank", str(node_rank)),
        *("--nproc-per-node", str(sizes[node_rank])),
        *("--master-addr", address, "--master-port", str(port)),
        *("--max-restarts", "0", "--rdzv-conf", f"timeout={RENDEZVOUS_SECONDS}"),
        *plan["ranks_command"],
    ]


def rdma_environments(rdma: Sequence[Mapping[str, Sequence[str]]]) -> List[Dict[str, str]]:
    """NCCL's RDMA settings, host by host: ports of one kind, where every host has an active one.

    rdma: of each host its active ports (`device:port`): "infiniband"; "roce", those of its training NIC; and "any",
    which it has at all. InfiniBand ports are a fabric of their own; a RoCE port counts only where it is the training
    NIC, whose reach was tested. Where some hosts have ports and others have none, RDMA is off on all: ranks that see
    different networks do not find each other.
    """
    for kind in ("infiniband", "roce"):
        if len(rdma) > 1 and all(host[kind] for host in rdma):
            return [{"NCCL_IB_HCA": "=" + ",".join(host[kind])} for host in rdma]
    if len(rdma) > 1 and any(host["any"] for host in rdma):
        return [{"NCCL_IB_DISABLE": "1"} for _ in rdma]
    return [{} for _ in rdma]
