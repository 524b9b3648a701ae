"""The order of samples: a pure function of (seed, position), with no state to save or replay.

Shards are permuted, and samples are permuted within a window of shards to keep reading local.
Randomness is counter-based (Philox), so any position is computed without visiting earlier ones.
"""

from functools import lru_cache

import numpy as np

SHARDS, SAMPLES, REPLACEMENT, AUGMENTATION, STREAM = range(5)  # purposes of random streams


def random_words(seed: int, purpose: int, epoch: int, window: int, count: int) -> np.ndarray:
    """uint64 [count], a pure function of the arguments (raw Philox words, stable over versions)."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, 0, window, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, purpose: int, epoch: int, window: int, size: int) -> np.ndarray:
    """A random permutation of range(size), int64."""
    return np.argsort(random_words(seed, purpose, epoch, window, size), kind="stable")


class SampleOrder:
    """Sample numbers by position, counted from 0 over all epochs.

    Without replacement each sample comes once per epoch; a batch may straddle two epochs. With
    `resampled`, a window consists of shards drawn in proportion to their size and of samples drawn
    from these, so that each position is uniform over all samples. `counts`: samples in each shard;
    `window`: shards shuffled together.
    """

    def __init__(self, counts: np.ndarray, *, seed: int, window: int = 16, resampled: bool = False):
        self.counts = np.asarray(counts, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.num_samples = int(self.starts[-1])
        self.seed = seed
        self.window = min(window, len(self.counts))
        self.resampled = resampled
        make_window = self._drawn_window if resampled else self._permuted_window
        self._window_samples = lru_cache(maxsize=4)(make_window)
        self._epoch_windows = lru_cache(maxsize=2)(self._find_windows)

    def samples(self, first: int, count: int) -> np.ndarray:
        """Sample numbers of positions first .. first + count - 1, int64 [count]."""
        parts, end = [], first + count
        while first < end:
            window, offset = self._window_of(first)
            parts.append(window[offset : offset + end - first])
            first += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _window_of(self, position: int) -> tuple[np.ndarray, int]:
        """Samples of the window that contains a position, and the offset of the position in it."""
        if self.resampled:
            window, offset = divmod(position, self._drawn_length())
            return self._window_samples(0, window), offset
        epoch, offset = divmod(position, self.num_samples)
        starts = self._epoch_windows(epoch)[0]
        window = int(np.searchsorted(starts, offset, side="right")) - 1
        return self._window_samples(epoch, window), offset - int(starts[window])

    def _find_windows(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """First position of each window of an epoch, and the shards of each."""
        shards = permutation(self.seed, SHARDS, epoch, 0, len(self.counts))
        windows = [shards[i : i + self.window] for i in range(0, len(shards), self.window)]
        sizes = [self.counts[window].sum() for window in windows]
        return np.concatenate([[0], np.cumsum(sizes)])[:-1], windows

    def _permuted_window(self, epoch: int, window: int) -> np.ndarray:
        shards = self._epoch_windows(epoch)[1][window]
        samples = np.concatenate([np.arange(*self.starts[s : s + 2]) for s in shards])
        return samples[permutation(self.seed, SAMPLES, epoch, window, len(samples))]

    def _drawn_length(self) -> int:
        return max(1, self.num_samples * self.window // len(self.counts))

    def _drawn_window(self, epoch: int, window: int) -> np.ndarray:
        """Draws shards in proportion to their size, and equally many samples from each.

        Samples of a shard are drawn without replacement until the shard is used up, so a drawn
        shard is read once as a whole if sizes are equal. Counts vary as in independent draws.
        """
        length = self._drawn_length()
        draws = random_words(self.seed, REPLACEMENT, epoch, window, self.window)
        drawn = (draws % np.uint64(self.num_samples)).astype(np.int64)
        shards = np.searchsorted(self.starts, drawn, side="right") - 1
        parts = np.diff(np.arange(self.window + 1) * length // self.window)
        sizes = np.repeat(self.counts[shards], -(-parts // self.counts[shards]))
        count = self.window + int(sizes.sum()) + length
        words = random_words(self.seed, REPLACEMENT, epoch, window, count)
        passes = iter(np.split(words[self.window :], np.cumsum(sizes)))
        samples = []
        for shard, part in zip(shards, parts, strict=True):
            inside = [np.argsort(next(passes)) for _ in range(-(-part // self.counts[shard]))]
            samples.append(self.starts[shard] + np.concatenate(inside)[:part])
        return np.concatenate(samples)[np.argsort(next(passes), kind="stable")]
