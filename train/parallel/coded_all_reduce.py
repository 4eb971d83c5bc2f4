"""An all-reduce over the slow network, which gives the mean of what all members have: each adds up one chunk, for which
the others send it theirs, and hands the result out. So all get the same bytes, and each sends about twice what it has,
however many there are.

What goes over the network is coded (train.parallel.codecs). A message leaves as soon as it is coded, and is used as
soon as it is there, so that a slow link and a slow processor work at the same time.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from train.parallel.codecs import SLICE, Codec, slices
from train.parallel.members import Members

T = TypeVar("T")
MESSAGE_BYTES = 1 << 20  # at most; each has the process group's timeout to arrive
OWN, MEANS = 1, 2  # tags of messages


class Values(Protocol):
    """What this member has, float32 [n]. part: a slice of it. code: the bytes of that slice, uint8."""

    def encode_own(self, part: slice, code: Tensor) -> None:
        """Put what this member has to say there."""

    def encode_mean(self, part: slice, code: Tensor, received: Mapping[int, Tensor]) -> None:
        """Put the mean of all members there. received: the others' codes, by the members' numbers."""

    def take_mean(self, part: slice, code: Tensor) -> None:
        """Another member has made it."""


@dataclass
class CodedAllReduce:
    """Messages of tensors of the CPU. group: gloo's. moved: grows with each slice and message, to show that there is
    progress. inbox: memory for the others' codes, which is used again: the system takes longer for fresh memory than a
    pass over it does."""

    group: Any
    members: Members
    codec: Codec
    moved: int = 0
    inbox: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8), init=False, repr=False)

    def run(self, values: Values, count: int, code: Tensor) -> None:
        """Puts the code of the members' mean into `code`, uint8 [codec.size(count)]. Collective, of the leaders; one at
        a time and in one order on all of them, as messages are told apart by their order alone.

        Where a member has sent its own code, the mean arrives: it cannot be there before that has left.
        """
        mine, leaders = self.members.mine, self.members.leaders
        edges = chunks(count, len(leaders), SLICE)
        spans = [list(message_spans(self.codec, start, end)) for start, end in pairwise(edges)]
        others = [(mine + number) % len(spans) for number in range(1, len(spans))]
        theirs = self.inboxes([place.stop - place.start for _, place in spans[mine]], others)
        arriving = [[self.received(each[number], leaders[number], OWN) for number in others] for each in theirs]
        means = [(span, self.received(code[place], leaders[number], MEANS))
                 for number in others for span, place in spans[number]]  # fmt: skip
        sent = []
        for number, (span, place) in in_turns([(number, spans[number]) for number in others]):
            for part, bytes_ in self.slices(span):
                values.encode_own(part, code[bytes_])
            sent.append(self.sent(code[place], leaders[number], OWN))
        for (span, place), each, works in zip(spans[mine], theirs, arriving, strict=True):
            self.wait(works)
            for part, bytes_ in self.slices(span):
                there = slice(bytes_.start - place.start, bytes_.stop - place.start)
                values.encode_mean(part, code[bytes_], {number: message[there] for number, message in each.items()})
            sent += [self.sent(code[place], leaders[number], MEANS) for number in others]
        for span, work in means:
            self.wait([work])
            for part, bytes_ in self.slices(span):
                values.take_mean(part, code[bytes_])
        self.wait(sent)

    def inboxes(self, sizes: Sequence[int], others: Sequence[int]) -> list[dict[int, Tensor]]:
        """For each message of the chunk that this member adds up, of so many bytes: where each other one's goes."""
        self.inbox = room_for(sum(sizes) * len(others), self.inbox)
        parts = iter(self.inbox[: sum(sizes) * len(others)].split([size for size in sizes for _ in others]))
        return [{number: next(parts) for number in others} for _ in sizes]

    def slices(self, span: slice) -> Iterator[tuple[slice, slice]]:
        """(values, bytes of their code) of each slice of a message."""
        for found in slices(self.codec, span.start, span.stop):
            self.moved += 1
            yield found

    def broadcast_within(self, code: Tensor) -> None:
        """From the member's leader to its other ranks (collective, of a member)."""
        leader, *rest = self.members.here
        if self.members.leads:
            self.wait([self.sent(message, rank, MEANS) for rank in rest for message in messages(code)])
        else:
            self.wait([self.received(message, leader, MEANS) for message in messages(code)])

    def sent(self, message: Tensor, rank: int, tag: int) -> dist.Work | None:
        self.moved += 1
        return dist.isend(message, rank, group=self.group, tag=tag)

    def received(self, message: Tensor, rank: int, tag: int) -> dist.Work | None:
        return dist.irecv(message, rank, group=self.group, tag=tag)

    def wait(self, works: Sequence[dist.Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()
            self.moved += 1


def room_for(size: int, known: Tensor) -> Tensor:
    """uint8, of `size` bytes or more, any values; the known tensor where it is large enough."""
    return known if len(known) >= size else torch.empty(size, dtype=torch.uint8)


def chunks(count: int, parts: int, unit: int) -> list[int]:
    """Places where the parts of `count` values begin, and the end: multiples of `unit`, but for the end."""
    units = -(-count // unit)
    return [min(count, part * units // parts * unit) for part in range(parts + 1)]


def message_spans(codec: Codec, start: int, end: int) -> Iterator[tuple[slice, slice]]:
    """(values, bytes of their code) of each message with the values from start, a multiple of SLICE, to end."""
    step = max(1, MESSAGE_BYTES // codec.size(SLICE)) * SLICE
    for first in range(start, end, step):
        last = min(first + step, end)
        yield slice(first, last), slice(codec.size(first), codec.size(last))


def in_turns(lists: Sequence[tuple[int, Sequence[T]]]) -> Iterator[tuple[int, T]]:
    """(number, item): the first of each list, then the second of each, ..."""
    for row in zip_longest(*(items for _, items in lists)):
        yield from ((number, item) for (number, _), item in zip(lists, row, strict=True) if item is not None)


def messages(code: Tensor) -> Sequence[Tensor]:
    return code.split(MESSAGE_BYTES) if len(code) else ()


def keep_to_one_thread(background: ThreadPoolExecutor) -> None:
    """torch's work there; that of other threads, and of those to come, keeps its number of threads."""
    threads = torch.get_num_threads()
    background.submit(torch.get_num_threads).result()  # a thread takes the common number over when it first needs it
    background.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(threads)
