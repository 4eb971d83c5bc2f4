"""Promises of train.order, train.data and train.batches: which sample goes where, whatever the number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train import data, order
from train.batches import affine_maps

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


@given(SAMPLES, st.integers(1, 50), SEEDS, st.integers(1, 9))
def test_shares_of_all_ranks_make_up_the_same_global_batches(samples: int, batch: int, seed: int, world: int) -> None:
    alone = list(order.shares(samples, batch, seed, 3, 0, 1))
    ranks = [list(order.shares(samples, batch, seed, 3, rank, world)) for rank in range(world)]
    for step, whole in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        together = np.concatenate([part.indices[: part.count] for part in parts])
        assert together.tolist() == whole.indices[: whole.count].tolist()
        counts = [part.count for part in parts]
        assert max(counts) - min(counts) <= 1
        assert {part.global_count for part in parts} == {whole.count}
        assert all(len(part.indices) >= 2 for part in parts)  # batch normalisation refuses one value
    seen = [index for part in alone for index in part.indices[: part.count]]
    assert sorted(seen) == list(range(samples))


@given(SAMPLES, st.integers(1, 20))
def test_evaluation_counts_each_sample_once(samples: int, world: int) -> None:
    seen = np.concatenate([order.evaluation_indices(samples, rank, world) for rank in range(world)])
    assert sorted(seen) == list(range(samples))


@settings(max_examples=30)
@given(SEEDS, st.integers(0, 50), st.lists(st.integers(0, 10**6), min_size=2, max_size=20))
def test_augmentation_of_a_sample_does_not_depend_on_its_company(seed: int, epoch: int, indices: list[int]) -> None:
    augmentation = data.Augmentation(degrees=10, scale=0.1, shift=0.1, mirror=True)
    together = affine_maps(augmentation, seed, epoch, np.array(indices, dtype=np.int64))
    for row, index in enumerate(indices):
        alone = affine_maps(augmentation, seed, epoch, np.array([index], dtype=np.int64))
        assert together[row].equal(alone[0])


@given(st.integers(1, 2000))
def test_split_is_disjoint_and_whole(samples: int) -> None:
    train, test = data.split(samples)
    assert sorted([*train, *test]) == list(range(samples))


@pytest.mark.parametrize(("name", "train", "test"), [("digits", 1438, 359), ("fake", 515, 128)])
def test_datasets_have_what_they_say(name: str, train: int, test: int) -> None:
    dataset = data.DATASETS[name]()
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    assert set(dataset.train.labels) == set(dataset.test.labels) == set(range(dataset.classes))
    assert dataset.train.images.std() > 20


def test_digits_are_those_of_scikit_learn() -> None:
    table = data.digits()
    assert table.train.images.max() == 240  # 16 * 15
    assert abs(float(table.train.images.mean()) / 255 - table.mean) < 0.01
