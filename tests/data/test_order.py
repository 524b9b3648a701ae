import hashlib

import numpy as np
import pytest

from lowprec.data.order import SAMPLES, SampleOrder, permutation, random_words

UGLY = [[1], [5], [1, 1], [3, 1, 7, 2], [10] * 9, [1, 100, 1]]


@pytest.mark.parametrize("counts", UGLY, ids=str)
@pytest.mark.parametrize("window", [1, 2, 16])
def test_each_epoch_holds_each_sample_once(counts, window):
    order, size = SampleOrder(np.array(counts), seed=0, window=window), sum(counts)
    for epoch in range(3):
        assert sorted(order.samples(epoch * size, size)) == list(range(size))


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("window", [1, 2, 16])
def test_positions_can_be_read_in_any_order(window, resampled):
    keys = {"seed": 3, "window": window, "resampled": resampled}
    counts = np.array([3, 1, 7, 2, 9])
    sequential = SampleOrder(counts, **keys).samples(0, 200).tolist()
    positions = np.random.default_rng(0).permutation(200)
    shared = SampleOrder(counts, **keys)
    assert [shared.samples(p, 1)[0] for p in positions] == [sequential[p] for p in positions]
    assert SampleOrder(counts, **keys).samples(199, 1)[0] == sequential[199]


@pytest.mark.parametrize("resampled", [False, True])
def test_epochs_and_seeds_have_different_orders(resampled):
    counts = np.array([40, 30, 30])
    orders = [SampleOrder(counts, seed=seed, resampled=resampled) for seed in (0, 1)]
    parts = [tuple(o.samples(e * 100, 100)) for o in orders for e in range(3)]
    assert len(set(parts)) == len(parts)


def test_random_words_are_fixed_numbers():
    words = [11908576178598684996, 2564810913301908829, 8379019428831260092]
    assert random_words(1, 2, 3, 4, 3).tolist() == words
    assert permutation(0, SAMPLES, 0, 0, 8).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]


@pytest.mark.parametrize(
    ("resampled", "digest"), [(False, "f635dee63a8d3809"), (True, "2380dccf6681ee48")]
)
def test_the_order_has_not_changed(resampled, digest):
    """Runs resume by it, and its mixing within windows and over shards was measured on it."""
    order = SampleOrder(np.full(60, 25), seed=0, window=3, resampled=resampled)
    assert hashlib.sha256(order.samples(0, 6000).tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_samples_close_in_the_order_come_from_few_shards(window):
    counts = np.full(20, 10)
    order = SampleOrder(counts, seed=0, window=window)
    shards = (order.samples(0, 200) // 10).reshape(-1, window * 10)
    assert all(len(set(part)) == window for part in shards)


@pytest.mark.parametrize("window", [1, 3])
def test_resampled_draws_are_uniform_over_samples(window):
    counts = np.array([1, 2, 9])
    draws = 1500
    orders = (SampleOrder(counts, seed=s, window=window, resampled=True) for s in range(draws))
    drawn = [order.samples(5, 1)[0] for order in orders]
    observed, expected = np.bincount(drawn, minlength=12), draws / 12
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # the 0.1 % quantile of 11 degrees of freedom
