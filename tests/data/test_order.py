import numpy as np
import pytest

from lowprec.data.order import SAMPLES, SHARDS, SampleOrder, permutation, random_words

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


def test_random_words_are_fixed_numbers():
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


@pytest.mark.parametrize("window", [1, 2, 3])
def test_resampled_draws_are_uniform_over_samples(window):
    counts = np.array([1, 2, 9])
    draws = 6000
    drawn = [SampleOrder(counts, seed=s, window=window, resampled=True)[5] for s in range(draws)]
    observed, expected = np.bincount(drawn, minlength=12), draws / 12
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 31.3  # the 0.1 % quantile of 11 degrees of freedom


def test_resampled_window_mixes_at_most_its_number_of_shards():
    order = SampleOrder(np.full(40, 10), seed=0, window=8, resampled=True)
    shards = (order.samples(0, 400) // 10).reshape(-1, 80)
    assert all(4 <= len(set(part)) <= 8 for part in shards)
    assert len(set(shards.ravel())) > 8


def test_first_sample_of_an_epoch_is_uniform():
    counts, draws = np.array([1, 2, 3]), 6000
    first = [SampleOrder(counts, seed=seed)[0] for seed in range(draws)]
    observed, expected = np.bincount(first, minlength=6), draws / 6
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # 0.1 %, 5 degrees of freedom


def correlation(a, b):
    return np.corrcoef(a, b)[0, 1]


@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize("window", [1, 50])
def test_position_in_an_epoch_is_uncorrelated_with_the_position_in_the_shards(window, epoch):
    """With a window of one shard, whole shards are what is placed at random: 50 of them."""
    order = SampleOrder(np.full(50, 100), seed=0, window=window)
    drawn, units = order.samples(5000 * epoch, 5000), 5000 if window == 50 else 50
    assert abs(correlation(np.arange(5000), drawn)) < 4 / units**0.5  # 4 standard deviations


@pytest.mark.parametrize("window", [1, 50])
def test_orders_of_successive_epochs_are_uncorrelated(window):
    order, units = SampleOrder(np.full(50, 100), seed=0, window=window), 5000 if window > 1 else 50
    places = [np.argsort(order.samples(5000 * epoch, 5000)) for epoch in range(4)]
    for before, after in zip(places[:-1], places[1:], strict=True):
        assert abs(correlation(before, after)) < 4 / units**0.5  # 4 standard deviations


@pytest.mark.parametrize("window", [1, 3, 20])
def test_neighbors_in_the_order_are_neighbors_in_a_shard_only_by_chance(window):
    counts = np.full(60, 25)
    order, epochs = SampleOrder(counts, seed=0, window=window), 60
    parts = order.samples(0, epochs * 1500).reshape(-1, 25 * window)  # a row a window
    neighbors = (np.abs(np.diff(parts, axis=1)) == 1) & (parts[:, 1:] // 25 == parts[:, :-1] // 25)
    # A window of n samples has n - 1 pairs in the order, each of two uniform places in a shard.
    expected = len(parts) * window * 24 * 2 / parts.shape[1]
    assert abs(neighbors.sum() - expected) < 4 * expected**0.5  # Poisson


@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_memory_for_one_window_is_enough_to_load_each_shard_once_per_epoch(window):
    counts = np.random.default_rng(0).integers(60, 90, 40)
    order, size = SampleOrder(counts, seed=0, window=window), counts.sum()
    room, held, loads = np.sort(counts)[-window:].sum(), {}, [[], [], []]
    for epoch, loaded in enumerate(loads):
        for sample in order.samples(epoch * size, size):
            shard = int(np.searchsorted(order.starts, sample, side="right")) - 1
            if shard not in held:
                loaded.append(shard)
            held[shard] = held.pop(shard, counts[shard])  # the last one is the most recently used
            while sum(held.values()) > room:
                del held[next(iter(held))]
    assert all(len(loaded) == len(set(loaded)) for loaded in loads)
    assert len(loads[0]) == 40
    # At the seam the first window may find shards of the last one, and only these.
    assert all(40 - window <= len(loaded) <= 40 for loaded in loads[1:])


def test_resampled_draws_are_proportional_to_the_size_of_the_shards():
    counts = np.random.default_rng(0).integers(1, 90, 40)
    order, size = SampleOrder(counts, seed=0, window=8, resampled=True), counts.sum()
    drawn = np.bincount(order.samples(0, 100 * size), minlength=size)
    observed, expected = np.add.reduceat(drawn, order.starts[:-1]), 100 * counts
    # A window draws shards, and from each `clump` samples: a multinomial of clumps.
    clump = size / 40
    chi_square = ((observed - expected) ** 2 / expected).sum() / clump
    assert 39 - 4 * 78**0.5 < chi_square < 39 + 4 * 78**0.5  # 39 degrees of freedom


@pytest.mark.parametrize("window", [1, 16, 400])
def test_resampled_counts_of_samples_have_the_spread_of_independent_draws(window):
    order = SampleOrder(np.full(400, 5), seed=0, window=window, resampled=True)
    counts = np.bincount(order.samples(0, 20000), minlength=2000)
    # Samples of a shard go together, so the variance is known to sqrt(2 / 400), 7 %.
    assert 0.72 < counts.var() / counts.mean() < 1.28  # 4 standard deviations around Poisson's 1


@pytest.mark.parametrize("window", [1, 16, 400])
def test_resampled_epoch_holds_as_many_samples_as_independent_draws(window):
    order = SampleOrder(np.full(400, 5), seed=0, window=window, resampled=True)
    shares = [len(set(part)) / 2000 for part in order.samples(0, 20000).reshape(10, 2000).tolist()]
    # Shards are found or not as a whole: sqrt(0.63 * 0.37 / 400) an epoch, 0.008 over ten.
    assert abs(np.mean(shares) - (1 - np.exp(-1))) < 0.031  # 4 standard deviations
