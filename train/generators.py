"""The global random generators that a user's code draws from: torch's of the CPU, Python's and NumPy's.

A generator that such code makes for itself (numpy.random.default_rng()) cannot be reached from outside.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed(word: int) -> None:
    """All three, by a word of 64 bits. torch.manual_seed would reach for the GPUs as well, for each sample again."""
    torch.default_generator.manual_seed(word)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn or seeded inside, afterwards the three go on as if nothing had happened."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
