import numpy as np
import pytest

from lowprec.data.order import SAMPLES, SHARDS, SampleOrder, permutation, random_words

UGLY = [[1], [5], [1, 1], [3, 1, 7, 2], [10] * 9, [1, 100, 1]]


@pytest.mark.parametrize("counts", UGLY, ids=str)
@pytest.mark.parametrize("window", [1, 2, 16])
def test_every_epoch_holds_every_sample_once(counts, window):
    order, size = SampleOrder(np.array(counts), seed=0, window=window), sum(counts)
    for epoch in range(3):
        assert sorted(order.samples(epoch * size, size)) == list(range(size))


@pytest.mark.parametrize("resampled", [False, True])
@pytest.mark.parametrize("window", [1, 2, 16])
def test_any_position_is_found_without_those_before(window, resampled):
    keys = {"seed": 3, "window": window, "resampled": resampled}
    counts = np.array([3, 1, 7, 2, 9])
    sequential = SampleOrder(counts, **keys).samples(0, 200).tolist()
    positions = np.random.default_rng(0).permutation(200)
    shared = SampleOrder(counts, **keys)
    assert [shared[p] for p in positions] == [sequential[p] for p in positions]
    assert [SampleOrder(counts, **keys)[p] for p in (199, 22, 0)] == [
        sequential[p] for p in (199, 22, 0)
    ]


@pytest.mark.parametrize("batch", [1, 7, 16, 22, 50])
def test_batches_straddle_epochs_and_drop_nothing(batch):
    counts = np.array([5, 8, 9])
    order, size = SampleOrder(counts, seed=1), 22
    steps = -(-5 * size // batch)
    drawn = np.concatenate([order.samples(i * batch, batch) for i in range(steps)])[: 5 * size]
    assert np.bincount(drawn, minlength=size).tolist() == [5] * size
    assert drawn.tolist() == order.samples(0, 5 * size).tolist()


@pytest.mark.parametrize("resampled", [False, True])
def test_epochs_and_seeds_have_different_orders(resampled):
    counts = np.array([40, 30, 30])
    orders = [SampleOrder(counts, seed=seed, resampled=resampled) for seed in (0, 1)]
    parts = [tuple(o.samples(e * 100, 100)) for o in orders for e in range(3)]
    assert len(set(parts)) == len(parts)


def test_purposes_epochs_and_windows_share_no_random_words():
    words = [tuple(random_words(0, p, e, w, 8)) for p in range(3) for e in (0, 1) for w in (0, 1)]
    assert len({word for stream in words for word in stream}) == 12 * 8
    assert permutation(0, SHARDS, 0, 0, 50).tolist() != permutation(0, SAMPLES, 0, 0, 50).tolist()


def test_random_words_are_a_fixed_function_over_versions():
    words = [11908576178598684996, 2564810913301908829, 8379019428831260092]
    assert random_words(1, 2, 3, 4, 3).tolist() == words
    assert permutation(0, SAMPLES, 0, 0, 8).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]


def test_more_words_begin_with_the_same_words():
    assert random_words(5, 1, 2, 3, 100)[:7].tolist() == random_words(5, 1, 2, 3, 7).tolist()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_samples_close_in_the_order_come_from_few_shards(window):
    counts = np.full(20, 10)
    order = SampleOrder(counts, seed=0, window=window)
    shards = (order.samples(0, 200) // 10).reshape(-1, window * 10)
    assert all(len(set(part)) == window for part in shards)


def test_samples_of_a_window_are_mixed():
    order = SampleOrder(np.full(20, 50), seed=0, window=10)
    shards = order.samples(0, 500) // 50
    assert (np.diff(shards) == 0).mean() < 0.2


def test_shards_are_read_in_another_order_each_epoch():
    order = SampleOrder(np.full(30, 4), seed=0, window=1)
    first, second = (order.samples(e * 120, 120)[::4] // 4 for e in (0, 1))
    assert first.tolist() != sorted(first) and first.tolist() != second.tolist()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_resampled_draws_are_uniform_over_samples_whatever_the_shard(window):
    counts = np.array([1, 2, 9])
    draws = 6000
    drawn = [SampleOrder(counts, seed=s, window=window, resampled=True)[5] for s in range(draws)]
    observed, expected = np.bincount(drawn, minlength=12), draws / 12
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # the 0.1 % quantile of 11 degrees of freedom


def test_resampled_window_mixes_shards_and_stays_within_its_number():
    order = SampleOrder(np.full(40, 10), seed=0, window=8, resampled=True)
    shards = (order.samples(0, 400) // 10).reshape(-1, 80)
    assert all(4 <= len(set(part)) <= 8 for part in shards)
    assert len(set(shards.ravel())) > 8


def test_resampled_order_repeats_samples_and_goes_on():
    order = SampleOrder(np.array([50, 50]), seed=0, resampled=True)
    drawn = order.samples(0, 1000)
    assert len(set(drawn[:100])) < 100
    assert len({tuple(part) for part in drawn.reshape(10, 100)}) == 10


def test_first_place_of_an_epoch_is_uniform_over_samples():
    counts, draws = np.array([1, 2, 3]), 6000
    first = [SampleOrder(counts, seed=seed)[0] for seed in range(draws)]
    observed, expected = np.bincount(first, minlength=6), draws / 6
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 0.1 %, 5 degrees of freedom
