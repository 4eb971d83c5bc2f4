"""Who talks over the slow network: the hosts, each through its first rank.

Where --compress or --sync-every is asked for, the ranks of a host are one member. Within a host gradients are averaged
whole, in every step; between members goes what is compressed or rare. Ranks of one host alone are each a member of
their own, so that one machine can try out what a cluster would do to the accuracy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from train.start.group import Place, from_all_ranks

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Members:
    """ranks: of each member, its leader first. mine: the number of this rank's member. rank: this one's."""

    ranks: tuple[range, ...]
    mine: int
    rank: int

    @property
    def here(self) -> range:
        """The ranks of this rank's member."""
        return self.ranks[self.mine]

    @property
    def leaders(self) -> list[int]:
        return [ranks.start for ranks in self.ranks]

    @property
    def leads(self) -> bool:
        return self.rank == self.here.start

    def sizes(self) -> list[int]:
        return [len(ranks) for ranks in self.ranks]

    def sums(self, edges: Sequence[int]) -> list[int]:
        """Samples of each member. edges: where the ranks' shares begin, and the end (train.order.Cut)."""
        return [edges[ranks.stop] - edges[ranks.start] for ranks in self.ranks]


def find_members(place: Place) -> Members:
    """Collective."""
    firsts = [rank for rank, local in enumerate(from_all_ranks(place.local_rank, place)) if local == 0]
    if len(firsts) == 1:
        firsts = list(range(place.world_size))
    ends = [*firsts[1:], place.world_size]
    ranks = tuple(range(first, end) for first, end in zip(firsts, ends, strict=True))
    mine = next(number for number, each in enumerate(ranks) if place.rank in each)
    return Members(ranks, mine, place.rank)


def group_within(members: Members, device: torch.device, timeout: float) -> Group:
    """Of the ranks of this rank's member; None where it has one rank (collective)."""
    found: Group = None
    for ranks in members.ranks:
        if len(ranks) > 1:
            group = new_group(list(ranks), device, timeout)
            found = group if members.rank in ranks else found
    return found


def group_between(members: Members, device: torch.device, timeout: float) -> Group:
    """Of the leaders, on all ranks, also those that are not in it (collective)."""
    return new_group(members.leaders, device, timeout)


def new_group(ranks: list[int], device: torch.device, timeout: float) -> Group:
    """A group for tensors of this device. Of some ranks and with two backends, as the default group of GPUs has, it
    would hang: see train.checkpoints.transfer."""
    known = dist.get_backend_config()
    backend = next(
        (name for name in ("nccl", "gloo") if name in known and (name == "gloo" or device.type == "cuda")), None
    )
    made: Group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)
    return made
