"""Which sample goes where, as pure functions: shuffling, global batches, the shares of ranks, random numbers.

All of it is a function of (seed, epoch, global sample index), never of the number of ranks, so that a run on
another number of hosts sees the same samples in the same batches with the same augmentation. NumPy only; no
torch, no state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def mix(words: Words) -> Words:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit words that looks random."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_words(*coordinates: int | Ints) -> Words:
    """One random 64-bit word for each coordinate tuple, e.g. (seed, epoch, indices); arrays are broadcast.

    Coordinates are >= 0. Equal coordinates give equal words on every machine.
    """
    words = np.zeros(1, dtype=np.uint64)
    for coordinate in coordinates:
        words = mix(words ^ np.atleast_1d(np.asarray(coordinate)).astype(np.uint64))
    return words


def word(*coordinates: int) -> int:
    """One random 64-bit word, e.g. as the seed of torch's generator."""
    return int(random_words(*coordinates)[0])


def uniform(*coordinates: int | Ints) -> npt.NDArray[np.float64]:
    """Random numbers in [0, 1), one for each coordinate tuple."""
    return (random_words(*coordinates) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(samples: int, seed: int, epoch: int) -> Ints:
    """The order in which an epoch visits the samples 0 .. samples-1."""
    words = random_words(seed, epoch, np.arange(samples, dtype=np.int64))
    return np.argsort(words, kind="stable").astype(np.int64)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    return -(-samples // batch_size)


LEAST = 2  # samples in a pass: batch normalisation refuses a single value per channel
Cut = Callable[[int], Sequence[int]]  # samples of a global batch -> places where the ranks' shares begin, and its end


def equally(world_size: int) -> Cut:
    """Shares of ranks that differ by one sample at most."""
    return lambda samples: [rank * samples // world_size for rank in range(world_size + 1)]


@dataclass(frozen=True)
class Pass:
    """What a rank puts through the model at once.

    `indices[:count]` are this rank's samples. What follows is padding that must have weight 0: where a short
    last batch leaves a rank with fewer than LEAST samples, or none, it still takes part in the collectives.
    With partners, one more sample is at the end: that of place p + 1 is the partner of place p.
    """

    indices: Ints
    count: int


@dataclass(frozen=True)
class Step:
    """One rank's part of one global batch; all ranks make the same number of passes."""

    passes: tuple[Pass, ...]
    count: int
    global_count: int
    update_count: int  # samples whose mean loss this rank's update is of: all, but where groups of ranks train alone


def step_of(
    batch: Ints, cut: Cut, rank: int, micro_batch: int = 0, partners: bool = False, group: range | None = None
) -> Step:
    """The rank's contiguous share of the global batch `batch`, in passes of at most `micro_batch` samples (0: one).

    Padding and partners are the samples at the next places of the batch, cyclically: the same for any cut.
    group: the ranks that make this update together; None: all.
    """
    edges = cut(len(batch))
    largest = max(end - start for start, end in pairwise(edges))
    number = -(-largest // micro_batch) if micro_batch else 1
    start, count = edges[rank], edges[rank + 1] - edges[rank]
    passes = []
    for index in range(number):
        first, last = start + index * count // number, start + (index + 1) * count // number
        places = first + np.arange(max(last - first, LEAST) + partners, dtype=np.int64)
        passes.append(Pass(batch[places % len(batch)], last - first))
    together = edges[group.stop] - edges[group.start] if group else len(batch)
    return Step(tuple(passes), count, len(batch), together)


def steps(
    samples: int,
    batch_size: int,
    seed: int,
    epoch: int,
    cut: Cut,
    rank: int,
    micro_batch: int = 0,
    partners: bool = False,
    done: int = 0,
    group: range | None = None,
) -> Iterator[Step]:
    """This rank's steps of one epoch without the first `done`. Every sample is in one share of one rank.

    The last batch is short where `samples` is no multiple of `batch_size`.
    """
    order = permutation(samples, seed, epoch)
    for start in range(done * batch_size, samples, batch_size):
        yield step_of(order[start : start + batch_size], cut, rank, micro_batch, partners, group)


def evaluation_passes(samples: int, batch_size: int, cut: Cut, rank: int) -> Iterator[Pass]:
    """The held-out samples that this rank counts: over all ranks each sample exactly once.

    All ranks make the same number of passes (a sharded model's layers are collectives): one that has no more
    samples repeats the first with count 0.
    """
    edges = cut(samples)
    largest = max(end - start for start, end in pairwise(edges))
    for offset in range(0, largest, batch_size):
        start, end = edges[rank] + offset, min(edges[rank] + offset + batch_size, edges[rank + 1])
        count = max(0, end - start)
        yield Pass(np.arange(start, end, dtype=np.int64) if count else np.zeros(1, dtype=np.int64), count)
