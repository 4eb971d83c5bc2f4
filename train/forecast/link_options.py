"""What the options for slow links take on these hosts: one exchange of each kind, of this model, in the same rounds as
the all-reduces of train.forecast.step_times. The document's `communication` gets two entries more, where there are two
hosts or more and --parallel ddp; all times in seconds:

    compress: by --compress, as the all-reduces: {"seconds", "cpu_seconds", "busy_seconds": of each bucket}
    exchange: by --compress of changes: {"seconds", "cpu_seconds", "busy_seconds": of each piece (--stream) on its way,
        "training_seconds": of each piece, for which training waits at its begin and its end}

Its `run` says how long the whole run is, and when it sends more than in its steady state:

    steps: in all
    powersgd: of them at the begin, with whole gradients
    warmup: of them at the begin, in which --sync-every exchanges more often
    exchanges: by --sync-every [exchanges in the warm-up, further ones before evaluations], for which training waits

Measured are the kinds that `launch.health.forecast` compares, and those that the settings ask for. They are left out
where the all-reduces are so short beside a step that none can gain anything, unless asked for.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, nn

from train.forecast.communication import Timed, merged, time_all, wait_for
from train.parallel.compress import Bucket, Compressed, whole_steps
from train.parallel.exchange import (
    Exchange,
    Piece,
    exchanges_before,
    exchanges_in_warmup,
    make_exchange,
    warmup_steps,
)
from train.parallel.members import Members
from train.settings import LINKS_OFF, Settings, compression, slow_links
from train.start.group import Place, from_all_ranks

COMPARED = ("bf16", "powersgd:4")  # of --compress without --sync-every
EXCHANGED = ("int8",)  # with it
SYNC_EVERY = (16, 32)
PIECES = 4
OPTION_REPEATS = 2  # of each, at most
LEAST_WAIT = 0.05  # part of a step; shorter all-reduces leave nothing to gain

Kinds = tuple[list[str], list[str]]  # of --compress: without --sync-every, with it


def kinds_of(settings: Settings, reduced: float, step: float) -> Kinds:
    """What is measured. reduced: seconds of a step's all-reduces by themselves; step: of a step without them."""
    if settings.parallel != "ddp":
        return [], []
    every, rare = list[str](), list[str]()
    if reduced > LEAST_WAIT * step:
        every, rare = list(COMPARED), list(EXCHANGED)
    (rare if settings.sync_every else every).append(settings.compress)
    fits = [kind for kind in rare if not list(slow_links(exchanging(settings, kind)))]
    return [kind for kind in dict.fromkeys(every) if kind != "none"], list(dict.fromkeys(fits))


def whole_run(settings: Settings, steps: int, evaluated: Sequence[int]) -> dict[str, Any]:
    """The document's `run`. steps: of the whole run. evaluated: those after which an evaluation is due."""
    warmup = warmup_steps(settings, steps)

    def exchanges(every: int) -> list[float]:
        return [warmup * exchanges_in_warmup(every), exchanges_before(evaluated, every, warmup, settings.stream)]

    periods = sorted({*SYNC_EVERY, settings.sync_every} - {0})
    return {
        "steps": steps,
        "powersgd": min(steps, whole_steps(steps)),
        "warmup": warmup,
        "exchanges": {str(every): exchanges(every) for every in periods},
    }


def exchanging(settings: Settings, kind: str) -> Settings:
    """The settings with exchanges of this kind, piece by piece."""
    pieces = settings.stream or PIECES
    every = max(settings.sync_every, pieces)
    outer = {name: getattr(settings, name) for name in ("outer_lr", "outer_momentum")}
    off = dataclasses.replace(settings, communication="as-given", allow_approximate=False, **LINKS_OFF)
    return dataclasses.replace(off, compress=kind, sync_every=every, stream=pieces, sync_warmup=0.0, **outer)


def members_of(worlds: Sequence[int], nodes: int, rank: int) -> Members:
    """The first `nodes` hosts; a rank of another one is in none of them. worlds: ranks on the first 1, 2, ... hosts."""
    ranks = tuple(range(first, end) for first, end in zip([0, *worlds], worlds[:nodes], strict=False))
    mine = next((number for number, each in enumerate(ranks) if rank in each), 0)
    return Members(ranks, mine, rank)


def bucket_of(shapes: Sequence[Size], number: int, last: bool, device: torch.device) -> Bucket:
    """A bucket of DDP's, without DDP. shapes: of the parameters whose gradients it has."""
    values = torch.randn(sum(shape.numel() for shape in shapes), device=device)
    parts = values.split([shape.numel() for shape in shapes])
    return Bucket(values, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], number, last)


@dataclass
class Pieces:
    """Exchanges of the pieces of a model whose weights do not change. training: seconds that training waited at the
    begin and the end of each piece's last one."""

    exchange: Exchange
    training: list[float]

    def once(self, number: int, piece: Piece) -> tuple[float, float]:
        begun = time.perf_counter()
        piece.counts = [1] * len(piece.counts)
        self.exchange.send(piece)
        sent, cpu = time.perf_counter(), time.process_time()
        self.exchange.result(piece)
        there, spent = time.perf_counter(), time.process_time() - cpu
        self.exchange.take(piece)
        self.training[number] = sent - begun + time.perf_counter() - there
        return there - sent, spent

    def each(self) -> list[Timed]:
        def of(number: int, piece: Piece) -> Timed:
            return lambda: self.once(number, piece)

        return [of(number, piece) for number, piece in enumerate(self.exchange.pieces)]


@dataclass(frozen=True)
class Options:
    """All that measuring needs. shapes: of the parameters in each DDP bucket. rest: seconds before each repeat."""

    settings: Settings
    kinds: Kinds
    shapes: Sequence[Sequence[Size]]
    network: nn.Module
    place: Place
    device: torch.device
    rest: float

    def added_to(self, communication: list[dict[str, Any]], worlds: Sequence[int]) -> list[dict[str, Any]]:
        """The document's rounds, with the entries of the options (collective, of all ranks).

        worlds: ranks on the first 1, 2, ... hosts.
        """
        if not any(self.kinds):
            return communication
        mine = []
        for nodes in (entry["nodes"] for entry in communication if entry["nodes"] > 1):
            members = members_of(worlds, nodes, self.place.rank)
            group = dist.new_group(list(range(worlds[nodes - 1])))
            dist.barrier()
            found = self.one_round(members, group)
            if self.takes_part(members):
                mine.append({"world_size": worlds[nodes - 1], "nodes": nodes, **found})
        dist.barrier()
        by_nodes = {entry["nodes"]: entry for entry in merged(from_all_ranks(mine, self.place))}
        return [entry | by_nodes.get(entry["nodes"], {}) for entry in communication]

    def takes_part(self, members: Members) -> bool:
        return self.place.rank in members.here

    def one_round(self, members: Members, group: Any) -> dict[str, Any]:
        """Nothing on a rank that does not take part."""
        every, rare = self.kinds
        compress, exchange = dict[str, Any](), dict[str, Any]()
        for kind in every:
            hook = Compressed(compression(kind), members, self.device, self.settings.timeout, 0)
            if self.takes_part(members):
                compress[kind] = self.timed(self.hook_calls(hook), group)
            hook.close()
        for kind in rare:
            made = make_exchange(exchanging(self.settings, kind), self.network, members)
            if self.takes_part(members):
                pieces = Pieces(made, [0.0] * len(made.pieces))
                exchange[kind] = self.timed(pieces.each(), group) | {"training_seconds": pieces.training}
            made.close()
        return {"compress": compress, "exchange": exchange}

    def timed(self, exchanges: Sequence[Timed], group: Any) -> dict[str, list[float]]:
        return time_all(exchanges, group, self.place, self.device, self.rest, OPTION_REPEATS)

    def hook_calls(self, hook: Compressed) -> list[Timed]:
        """Of each bucket, as after the first part of a run, when PowerSGD has begun."""
        if hook.power is not None:
            hook.power.iter = hook.power.start_powerSGD_iter

        def of(bucket: Bucket) -> Timed:
            def once() -> tuple[float, float]:
                begun, cpu = time.perf_counter(), time.process_time()
                hook.start(bucket).wait()
                wait_for(self.device)
                return time.perf_counter() - begun, time.process_time() - cpu

            return once

        last = len(self.shapes) - 1
        return [of(bucket_of(shapes, index, index == last, self.device)) for index, shapes in enumerate(self.shapes)]
