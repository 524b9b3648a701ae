"""Opened shards: the bytes of any sample by its number."""

import os
from functools import lru_cache

import numpy as np

IMAGES = ("jpg", "jpeg", "png", "webp")
MEMBERS = (*IMAGES, "txt", "json", "cls")  # the only kinds of members that are read
LARGEST = 2**31 - 1  # bytes of a member that a table can hold
SAMPLE = np.dtype(
    [
        ("image_offset", "<i8"),
        ("image_bytes", "<i4"),  # -1: no image; the offset is that of another member
        ("text_offset", "<i8"),
        ("text_bytes", "<i4"),  # -1: no caption
        ("label", "<i4"),  # -1: none
    ]
)
OPEN_LIMIT = 128  # tables and files open at a time


class ShardError(RuntimeError):
    """A shard or its index can no longer be read; the message names it."""


class Shards:
    """Indexed shards, read by offset.

    Opening them costs nothing: each table is memory-mapped on first use.

    Args:
        paths: Uncompressed tar files.
        tables: The index of each, an array of `SAMPLE`.
        counts: Number of samples in each.
        digest: Of all members' bytes, whatever their container.
        names: The shards as the user knows them, compressed ones too.
    """

    def __init__(
        self,
        paths: list[str],
        tables: list[str],
        counts: np.ndarray,
        digest: str,
        names: list[str] | None = None,
    ):
        self.paths = paths
        self.names = names or paths
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.digest = digest
        self._table_files = tables
        self.table = lru_cache(OPEN_LIMIT)(self._load_table)
        self._files = _OpenFiles(paths)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def counts(self) -> np.ndarray:
        """Samples in each shard, int64 [shards]."""
        return np.diff(self.starts)

    def _load_table(self, shard: int) -> np.ndarray:
        """The memory-mapped `SAMPLE` array of a shard."""
        try:
            table = np.load(self._table_files[shard], mmap_mode="r")
            if table.dtype != SAMPLE or len(table) != np.diff(self.starts[shard : shard + 2]):
                raise ValueError("it is not the table that was indexed")
        except (OSError, ValueError, EOFError) as error:
            raise ShardError(
                f"{self._table_files[shard]} cannot be read ({error}); remove it and the "
                "catalog-*.npy beside it, so that the index is made again"
            ) from error
        return table

    def locate(self, sample: int) -> tuple[int, np.void]:
        """Shard number and table row of a global sample number."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, self.table(shard)[sample - self.starts[shard]]

    @property
    def labels(self) -> np.ndarray:
        """int64 [samples]; -1 where a sample has no label."""
        # astype copies: a view would keep each table's file open
        labels = [self.table(n)["label"].astype(np.int64) for n in range(len(self.paths))]
        return np.concatenate(labels)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Bytes of a shard's file, or ShardError if the file has shrunk. Safe after a fork."""
        try:
            data = os.pread(self._files[shard], size, offset)
        except OSError as error:
            raise ShardError(f"{self.paths[shard]} cannot be read: {error.strerror}") from error
        if len(data) < size:
            raise ShardError(f"{self.paths[shard]} has become shorter than when it was indexed")
        return data


class _OpenFiles:
    """File descriptors by shard number; beyond `limit` the least recently used is closed."""

    def __init__(self, paths: list[str], limit: int = OPEN_LIMIT):
        self.paths, self.limit = paths, limit
        self.descriptors: dict[int, int] = {}

    def __getitem__(self, shard: int) -> int:
        descriptor = self.descriptors.pop(shard, None)
        if descriptor is None:
            descriptor = os.open(self.paths[shard], os.O_RDONLY)
        self.descriptors[shard] = descriptor
        if len(self.descriptors) > self.limit:
            os.close(self.descriptors.pop(next(iter(self.descriptors))))
        return descriptor

    def __del__(self):
        for descriptor in self.descriptors.values():
            os.close(descriptor)


def parse_label(data: bytes) -> int:
    """The class in a .cls member; -1 unless it is a number with at most nine digits."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 10 else -1
