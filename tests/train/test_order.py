"""Promises of train.order: which sample goes where, whatever the number of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train import order

SAMPLES = st.integers(1, 200)
SEEDS = st.integers(0, 2**31)


@given(SAMPLES, SEEDS, st.integers(0, 100))
def test_an_epoch_visits_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert sorted(order.permutation(samples, seed, epoch)) == list(range(samples))


def test_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    first = order.permutation(100, 1, 0)
    assert (first == order.permutation(100, 1, 0)).all()
    assert (first != order.permutation(100, 1, 1)).any()
    assert (first != order.permutation(100, 2, 0)).any()


def test_order_stays_as_it_is() -> None:
    """A checkpoint's position means something only while this does not change."""
    assert order.permutation(8, 0, 0).tolist() == [0, 1, 6, 3, 5, 4, 2, 7]


WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


def by_weight(weights: list[int]) -> order.Cut:
    return lambda samples: [samples * sum(weights[:rank]) // sum(weights) for rank in range(len(weights) + 1)]


@given(SAMPLES, st.integers(1, 50), SEEDS, WEIGHTS, st.integers(0, 9), st.integers(0, 3))
def test_shares_of_all_ranks_make_up_the_same_global_batches(
    samples: int, batch: int, seed: int, weights: list[int], micro_batch: int, done: int
) -> None:
    whole = order.permutation(samples, seed, 3)
    ranks = [
        list(order.steps(samples, batch, seed, 3, by_weight(weights), rank, micro_batch, done=done))
        for rank in range(len(weights))
    ]
    assert {len(steps) for steps in ranks} == {len(range(done * batch, samples, batch))}
    for number, parts in enumerate(zip(*ranks, strict=True)):
        start = (done + number) * batch
        expected = whole[start : start + batch].tolist()
        together = [index for part in parts for piece in part.passes for index in piece.indices[: piece.count]]
        assert together == expected
        assert {part.global_count for part in parts} == {len(expected)}
        assert len({len(part.passes) for part in parts}) == 1  # collectives match
        pieces = [piece for part in parts for piece in part.passes]
        assert all(len(piece.indices) >= 2 for piece in pieces)  # batch normalisation refuses one value
        assert not micro_batch or all(piece.count <= micro_batch for piece in pieces)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 9))
def test_a_partner_is_the_next_sample_of_the_global_batch_for_any_ranks(size: int, world: int, micro: int) -> None:
    batch = np.arange(100, 100 + size, dtype=np.int64)
    for rank in range(world):
        for piece in order.step_of(batch, order.equally(world), rank, micro, partners=True).passes:
            for place in range(piece.count):
                assert piece.indices[place + 1] == batch[(piece.indices[place] - 100 + 1) % size]


@given(st.integers(0, 500), st.integers(1, 9))
def test_equal_shares_differ_by_one_at_most(samples: int, world: int) -> None:
    sizes = np.diff(order.equally(world)(samples))
    assert sizes.sum() == samples and sizes.max() - sizes.min() <= 1


@given(SAMPLES, st.integers(1, 50), WEIGHTS)
def test_evaluation_counts_each_sample_once(samples: int, batch: int, weights: list[int]) -> None:
    ranks = [list(order.evaluation_passes(samples, batch, by_weight(weights), rank)) for rank in range(len(weights))]
    seen = [index for passes in ranks for piece in passes for index in piece.indices[: piece.count]]
    assert sorted(seen) == list(range(samples))
    assert len({len(passes) for passes in ranks}) == 1  # collectives match
    assert all(0 < len(piece.indices) <= batch for passes in ranks for piece in passes)
