"""Weights averaged now and then (`--sync-every`) instead of gradients in every step.

Each member (train.parallel.members: a host) trains alone, from common weights, its anchor. In an exchange the members'
changes since then are averaged, each weighted by the samples that it learned from, and the common weights follow that
mean: by exactly it (post-local SGD, Lin et al. 2020, arXiv 1808.07217), or by an outer step with Nesterov momentum
(DiLoCo, Douillard et al. 2023, arXiv 2311.08105). After it all members have the common weights. With --sync-every 1,
plain SGD and no outer momentum that is data parallelism, but for rounding. So begins every run, and the period doubles
in equal parts of its first PART (--sync-warmup): weights that are still far from any good ones have little to do with
each other after some steps alone, nor their average with them; this is the "post" of post-local SGD.

With --stream (Douillard et al. 2025, arXiv 2501.18512) the model goes in pieces, one after the other within the period,
while training goes on: a piece leaves, and the mean takes effect when the next piece leaves. What a member learned
meanwhile is kept: it is added to the new common weights, and is part of its next change.

Changes may be sent in fewer bits (train.parallel.codecs). What a member's change lost in that is added to its next
(error feedback, Karimireddy et al. 2019, arXiv 1901.09847).

After an exchange SGD goes on with the mean's momentum (train.parallel.momentum).

When what is sent and when it takes effect follows from the number of the step alone, never from the clock or the
network, so that equal runs are equal to the bit. Frozen parameters do not take part. Batch statistics take part, as
they are, with the first piece.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from itertools import accumulate
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.model.plain_names import plain
from train.model.running_statistics import buffers_of, flat, put, unflat
from train.parallel.codecs import SLICE, Codec, codec_of, decode, encode, slices
from train.parallel.coded_all_reduce import CodedAllReduce, keep_to_one_thread
from train.parallel.members import Members
from train.parallel.momentum import Leg, MeanMomentum, mean_momentum
from train.settings import Settings, compression
from train.start.muster_run import still_alive

T = TypeVar("T")
WHOLE = codec_of("none")
ALIVE_SECONDS = 1.0  # between two words to the keeper while training waits: a slow link is no hang


@dataclass(frozen=True)
class Mean:
    """Of the members: of a piece, how far they went since the last exchange (`Piece.gradient`), in a code, uint8 [n];
    of all ranks the floating-point buffers, float64 [n]."""

    codec: Codec
    code: Tensor
    buffers: Tensor


@dataclass
class Piece:
    """Some of the parameters, on this rank. All tensors are flat, float32, on the CPU."""

    names: list[str]
    parameters: list[nn.Parameter]
    starts: list[int]  # of each parameter, in the piece
    anchor: Tensor  # the common weights
    error: Tensor | None  # what this member's changes have lost so far; of leaders, where the code loses anything
    outer: torch.optim.SGD  # of the anchor
    counts: list[int]  # samples that each member has learned from since the piece left last
    leg: Leg = field(default_factory=Leg)  # since the piece left last
    left: Leg = field(default_factory=Leg)  # the one that ended then
    due: int = 0  # the step after which a mean that is under way takes effect
    started: Tensor | None = None  # this member's weights when the piece left; None: training waits for the mean
    started_buffers: Tensor | None = None
    mean: "Future[Mean] | None" = None  # under way

    @property
    def is_behind(self) -> bool:
        """Whether the members' weights may differ from the common ones."""
        return any(self.counts)

    def weights(self, out: Tensor) -> Tensor:
        """This member's, in `out`."""
        for parameter, part in zip(self.parameters, self.parts(out), strict=True):
            part.copy_(parameter.detach())
        return out

    def gradient(self, part: slice, room: Tensor) -> Tensor:
        """What this member has to say of these values: from its weights to the anchor, as a gradient points, and what
        it could not say before. When the piece has left. room: [SLICE], where the result is put."""
        found, anchor = room[: part.stop - part.start], self.anchor[part]
        if self.started is not None:
            torch.sub(anchor, self.started[part], out=found)
        else:
            for values, place in self.live(part):
                torch.sub(anchor[place], values, out=found[place])
        return found if self.error is None else found.add_(self.error[part])

    def error_of(self, part: slice) -> Tensor | None:
        return None if self.error is None else self.error[part]

    @property
    def is_flat(self) -> bool:
        """Whether the weights can be read where they are."""
        return all(p.device.type == "cpu" and p.is_contiguous() for p in self.parameters)

    def live(self, part: slice) -> Iterator[tuple[Tensor, slice]]:
        """This member's weights where they are, of a part of a piece that is flat, and their places in the part."""
        for parameter, values, place in self.spans(part):
            yield parameter.detach().view(-1)[values], place

    def spans(self, part: slice) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """(a parameter, which of its values are in a part of the piece, their places in the part)."""
        at, number = part.start, bisect_right(self.starts, part.start) - 1
        while at < part.stop:
            first, parameter = self.starts[number], self.parameters[number]
            end = min(part.stop, first + parameter.numel())
            yield parameter, slice(at - first, end - first), slice(at - part.start, end - part.start)
            at, number = end, number + 1

    def parts(self, values: Tensor) -> list[Tensor]:
        """values, [n], as views of the parameters' shapes."""
        pieces = values.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


@dataclass(frozen=True)
class Change:
    """How far this member went since the piece left before, with what it could not say then, for the all-reduce.

    parts: of each member in the mean. mine: this one's number. What a code loses becomes the piece's error.
    """

    piece: Piece
    codec: Codec
    parts: Sequence[float]
    mine: int
    room: Tensor = field(default_factory=lambda: torch.empty(SLICE))
    theirs: Tensor = field(default_factory=lambda: torch.empty(SLICE))

    def encode_own(self, part: slice, code: Tensor) -> None:
        self.codec.encode_slice(self.piece.gradient(part, self.room), code, self.piece.error_of(part))

    def encode_mean(self, part: slice, code: Tensor, received: Mapping[int, Tensor]) -> None:
        total = self.piece.gradient(part, self.room).mul_(self.parts[self.mine])
        theirs = self.theirs[: len(total)]
        for number, code_of_it in received.items():
            self.codec.decode_slice(code_of_it, theirs)
            total.add_(theirs, alpha=self.parts[number])
        error = self.piece.error_of(part)
        self.codec.encode_slice(total, code, error)
        if error is not None:
            error.div_(self.parts[self.mine] or math.inf)  # a member without a part in the mean has no error

    def take_mean(self, part: slice, code: Tensor) -> None:
        """When all of it is there: see `Exchange.take`."""


@dataclass
class Exchange:
    """The exchanges of a run. Methods marked "collective" are called by all ranks, after the same steps."""

    network: nn.Module
    every: int
    warmup: int  # steps at the beginning of the run in which exchanges are of all pieces, and the period grows
    stream: int
    pieces: list[Piece]
    all_reduce: CodedAllReduce  # between all members' ranks: between the hosts go tensors of the CPU
    momentum: MeanMomentum | None = None  # None: members keep their own
    waited: float = 0.0  # seconds that training has waited here
    spare: list[Tensor] = field(default_factory=list)  # see `room`
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "exchange"))

    @property
    def members(self) -> Members:
        return self.all_reduce.members

    # -- when ----------------------------------------------------------------------------------------------------------

    def after_step(self, step: int, counts: Sequence[int]) -> None:
        """After the optimizer step of this number, counted from 1 over the whole run. counts: samples of each member
        in it. Collective."""
        for piece in self.pieces:
            piece.counts = [before + now for before, now in zip(piece.counts, counts, strict=True)]
            piece.leg = piece.leg.after_step(self.momentum.rate() if self.momentum else None)
        if step <= self.warmup or not self.stream:
            if all_is_due(step, self.every, self.warmup, self.stream):
                self.settle(with_outer=step > self.warmup)
            return
        for piece in self.pieces:
            if piece.mean is not None and step >= piece.due:
                self.take(piece)
        for number, piece in enumerate(self.pieces):
            if step % self.every == (number + 1) * self.every // self.stream % self.every:
                self.send(piece)
                piece.due = step + max(1, self.every // self.stream)

    def settle(self, with_outer: bool = True) -> None:
        """All members have the common weights when this returns; no-op where they have them already. Collective.

        with_outer: as the outer optimizer has it, which is for changes of many steps; else they are the mean.
        """
        for piece in self.pieces:
            if piece.mean is not None:
                self.take(piece)
        behind = [piece for piece in self.pieces if piece.is_behind]
        for piece in behind:
            self.send(piece, waits=True)
        for piece in behind:
            self.take(piece, with_outer)

    def send(self, piece: Piece, waits: bool = False) -> None:
        """waits: the weights do not change until the mean is taken."""
        parts = torch.tensor(piece.counts, dtype=torch.float64)
        parts /= parts.sum()
        piece.counts = [0] * len(piece.counts)
        piece.leg, piece.left = Leg(), piece.leg.ended(piece.left)
        piece.started = None if waits and piece.is_flat else piece.weights(self.room(len(piece.anchor)))
        piece.started_buffers = self.buffers() if piece is self.pieces[0] else torch.zeros(0)
        # Taken in this thread, whose freed memory train.start.memory keeps: the step's is there to use again.
        code = torch.empty(self.all_reduce.codec.size(len(piece.anchor)), dtype=torch.uint8)
        piece.mean = self.background.submit(self.averaged, piece, parts.tolist(), code)

    @torch.no_grad()
    def take(self, piece: Piece, with_outer: bool = True) -> None:
        """The common weights follow the mean, when it is there; so do this rank's."""
        mean = self.result(piece)
        if piece.started is None and not (with_outer and piece.outer.param_groups[0]["momentum"]):
            self.follow(piece, mean, piece.outer.param_groups[0]["lr"] if with_outer else 1.0)
        else:
            self.take_whole(piece, mean, with_outer)
        assert piece.started_buffers is not None
        buffers = mean.buffers
        if len(buffers):
            self.put_buffers(self.buffers() + buffers - piece.started_buffers if piece.is_behind else buffers)
        piece.mean = piece.started = piece.started_buffers = None

    def follow(self, piece: Piece, mean: Mean, lr: float) -> None:
        """Where training waits and there is no outer momentum: all in one pass over the memory."""
        decoded = torch.empty(SLICE)
        for part, place in slices(mean.codec, 0, len(piece.anchor)):
            gradient, anchor = decoded[: part.stop - part.start], piece.anchor[part]
            mean.codec.decode_slice(mean.code[place], gradient)
            anchor.sub_(gradient, alpha=lr)
            for parameter, values, there in piece.spans(part):
                parameter.view(-1)[values].copy_(anchor[there])
                if self.momentum is not None:
                    self.momentum.follow(parameter, gradient[there], piece.left, values)

    def take_whole(self, piece: Piece, mean: Mean, with_outer: bool) -> None:
        gradient = self.room(len(piece.anchor))
        decode(mean.codec, mean.code, gradient)
        if self.momentum is not None:
            for parameter, way in zip(piece.parameters, piece.parts(gradient), strict=True):
                self.momentum.follow(parameter, way, piece.left)
        if with_outer:
            piece.anchor.grad = gradient
            piece.outer.step()
            piece.anchor.grad = None
        else:
            piece.anchor.sub_(gradient)
        if piece.is_behind:
            assert piece.started is not None
            torch.sub(piece.anchor, piece.started, out=gradient)
        for parameter, value in zip(
            piece.parameters, piece.parts(gradient if piece.is_behind else piece.anchor), strict=True
        ):
            parameter.add_(value.to(parameter.device)) if piece.is_behind else parameter.copy_(value)
        self.spare += [gradient] if piece.started is None else [gradient, piece.started]

    def room(self, count: int) -> Tensor:
        """float32 [count], of any values, in memory that is used again: the system takes longer for fresh memory than a
        pass over it does."""
        whole = self.spare.pop() if self.spare else torch.empty(max(len(piece.anchor) for piece in self.pieces))
        return whole.as_strided((count,), (1,))

    def result(self, piece: Piece) -> Mean:
        assert piece.mean is not None
        begun, known = time.monotonic(), self.all_reduce.moved
        while not wait_for([piece.mean], ALIVE_SECONDS).done:  # each message of it has the process group's timeout
            if self.all_reduce.moved != known:
                known = self.all_reduce.moved
                still_alive()
        found = piece.mean.result()
        self.waited += time.monotonic() - begun
        return found

    def buffers(self) -> Tensor:
        """float64 [n], on the CPU: those that are no counts."""
        return flat(self._floats()).cpu()

    def put_buffers(self, row: Tensor) -> None:
        put(self.network, {**buffers_of(self.network), **unflat(self._floats(), row)})

    def _floats(self) -> dict[str, Tensor]:
        return {name: each for name, each in buffers_of(self.network).items() if each.is_floating_point()}

    # -- what goes over the network, in the background -----------------------------------------------------------------

    @torch.no_grad()
    def averaged(self, piece: Piece, parts: list[float], code: Tensor) -> Mean:
        """The members' mean, in `code`. parts: of each member in it."""
        codec, members = self.all_reduce.codec, self.members
        if members.leads:
            self.all_reduce.run(Change(piece, codec, parts, members.mine), len(piece.anchor), code)
        self.all_reduce.broadcast_within(code)
        assert piece.started_buffers is not None
        buffers = piece.started_buffers.clone()
        if len(buffers):
            dist.all_reduce(buffers, group=self.all_reduce.group)
            buffers /= dist.get_world_size(self.all_reduce.group)
        return Mean(codec, code, buffers)

    # -- what a checkpoint holds ---------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, Tensor]:
        """The common weights by their plain names, in the parameters' shapes; the live ones."""
        return {
            name: value
            for piece in self.pieces
            for name, value in zip(piece.names, piece.parts(piece.anchor), strict=True)
        }

    def layout(self) -> list[int]:
        """Values of each piece: what another run must have alike to go on to the bit."""
        return [len(piece.anchor) for piece in self.pieces]

    def state(self) -> dict[str, Any]:
        """Of all ranks alike, without the common weights themselves. Waits for what is under way."""
        return {
            "layout": self.layout(),
            "names": [name for piece in self.pieces for name in piece.names],
            "counts": [list(piece.counts) for piece in self.pieces],
            "due": [piece.due for piece in self.pieces],
            "legs": [[astuple(piece.leg), astuple(piece.left)] for piece in self.pieces],
            "means": [self.under_way(piece) for piece in self.pieces],
            "momentum": [piece.outer.state[piece.anchor].get("momentum_buffer") for piece in self.pieces],
        }

    def under_way(self, piece: Piece) -> tuple[Tensor, Tensor] | None:
        """A mean without its code, which another run may not have; None: there is none."""
        if piece.mean is None:
            return None
        mean = self.result(piece)
        return decode(mean.codec, mean.code, torch.empty(len(piece.anchor))), mean.buffers

    def own_state(self) -> dict[str, Any]:
        """Of this member, beside its weights. After `state`."""
        return {
            "errors": [piece.error for piece in self.pieces],
            "started": [piece.started for piece in self.pieces],
            "started_buffers": [piece.started_buffers for piece in self.pieces],
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any], own: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """The reverse of the two, of the same layout, when the network has the common weights. weights: the member's
        own, by name, which it gets."""
        self.begin()
        for number, piece in enumerate(self.pieces):
            piece.counts, piece.due = list(state["counts"][number]), state["due"][number]
            legs = state["legs"][number] if "legs" in state else [(None,), (None,)]  # older checkpoints have none
            piece.leg, piece.left = (Leg(*values) for values in legs)
            if state["means"][number] is not None:
                gradient, buffers = state["means"][number]
                piece.mean = Future()
                piece.mean.set_result(Mean(WHOLE, encode(WHOLE, gradient), buffers))
            self.load_momentum(piece, state["momentum"][number])
            if piece.error is not None and own["errors"][number] is not None:
                piece.error.copy_(own["errors"][number])
            started, piece.started_buffers = own["started"][number], own["started_buffers"][number]
            piece.started = None if started is None else self.room(len(started)).copy_(started)
            for name, parameter in zip(piece.names, piece.parameters, strict=True):
                parameter.copy_(weights[name])

    def load_momentum(self, piece: Piece, value: Tensor | None) -> None:
        if value is not None and piece.outer.param_groups[0]["momentum"]:
            piece.outer.state[piece.anchor]["momentum_buffer"] = value.clone()

    @torch.no_grad()
    def begin(self, state: dict[str, Any] | None = None) -> None:
        """The common weights are those of the network, which all ranks have alike. state: of an exchange with other
        members or pieces: its outer momentum goes on."""
        momentum = state["momentum"] if state else []
        known = torch.cat(momentum) if momentum and all(each is not None for each in momentum) else None
        first = 0
        for piece in self.pieces:
            piece.weights(piece.anchor)
            piece.counts = [0] * len(piece.counts)
            piece.leg = piece.left = Leg()
            if known is not None and len(known) == sum(len(each.anchor) for each in self.pieces):
                self.load_momentum(piece, known[first : first + len(piece.anchor)])
            first += len(piece.anchor)

    def close(self) -> None:
        self.background.shutdown()


def make_exchange(
    settings: Settings,
    network: nn.Module,
    members: Members,
    steps: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Exchange:
    """All ranks have equal weights now (collective). steps: of the whole run. optimizer: of the members' own steps;
    None: there is none."""
    codec = codec_of(compression(settings.compress).kind)
    named = [(plain(name), p) for name, p in network.named_parameters() if p.requires_grad]
    momentum = settings.outer_momentum
    made = []
    for part in divided(named, max(1, settings.stream), lambda pair: pair[1].numel()):
        anchor = torch.zeros(sum(p.numel() for _, p in part))
        error = torch.zeros_like(anchor) if members.leads and not codec.is_exact else None
        outer = torch.optim.SGD([anchor], settings.outer_lr, momentum, nesterov=momentum > 0)
        counts = [0] * len(members.ranks)
        starts = list(accumulate((p.numel() for _, p in part[:-1]), initial=0))
        made.append(Piece([name for name, _ in part], [p for _, p in part], starts, anchor, error, outer, counts))
    ranks = [rank for member in members.ranks for rank in member]
    group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=settings.timeout))
    warmup = warmup_steps(settings, steps)
    exchange = Exchange(
        network, settings.sync_every, warmup, settings.stream, made,
        CodedAllReduce(group, members, codec), mean_momentum(optimizer, settings),
    )  # fmt: skip
    keep_to_one_thread(exchange.background)  # training has the others
    exchange.begin()
    return exchange


def warmup_steps(settings: Settings, steps: int) -> int:
    """Of a run of so many steps: those at its begin in which exchanges are more frequent."""
    return round(settings.sync_warmup * steps)


def periods_in_warmup(every: int) -> list[int]:
    """Steps from one exchange to the next, in equal parts of the warm-up: 1, 2, 4, ..., always less than `every`; 1
    where that is 1."""
    return [1 << number for number in range((every - 1).bit_length())] or [1]


def period_in_warmup(step: int, every: int, warmup: int) -> int:
    """At this step, counted from 1 and no later than the warm-up's last."""
    periods = periods_in_warmup(every)
    return periods[(step - 1) * len(periods) // warmup]


def exchanges_in_warmup(every: int) -> float:
    """How many there are for each step, while training waits for them."""
    return fmean(1 / period for period in periods_in_warmup(every))


def all_is_due(step: int, every: int, warmup: int, stream: int) -> bool:
    """Whether all pieces are exchanged after this step, counted from 1, while training waits for them."""
    if step <= warmup:
        return step == warmup or step % period_in_warmup(step, every, warmup) == 0
    return not stream and step % every == 0


def exchanges_before(evaluated: Iterable[int], every: int, warmup: int, stream: int) -> int:
    """How many more there are before evaluations, which are of common weights. evaluated: the steps after which they
    come, counted from 1."""
    return sum(not all_is_due(step, every, warmup, stream) for step in evaluated)


def divided(items: list[T], parts: int, size: Callable[[T], int]) -> list[list[T]]:
    """The items, in their order, in at most so many parts of about equal size; none is empty."""
    total, before = sum(map(size, items)), 0
    found: list[list[T]] = [[] for _ in range(parts)]
    for item in items:
        found[min(parts - 1, (before + size(item) // 2) * parts // max(1, total))].append(item)
        before += size(item)
    return [part for part in found if part]
